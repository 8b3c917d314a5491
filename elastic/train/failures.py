"""Failures of workers, as exceptions that scripts can match by class."""

from __future__ import annotations

import builtins
import re

from elastic.core.facts import Failure
from elastic.core.policy.preemption import judge_budget
from elastic.core.records import JobRecord
from elastic.errors import ControllerError, PreemptionError, TrainingFailed, WorkerGroupError

TrainingFailedError = TrainingFailed
"""Ray's name."""


class UserExceptionWithTraceback(Exception):
    """An exception of user code on a worker, whose class may be unknown in this process.

    Attributes:
        error_type: name of the class.
        traceback: as the worker formatted it.
    """

    error_type = ""
    traceback = ""


def as_exception(failure: Failure) -> Exception:
    """Return a failure as an exception: of its original class if that is a Python builtin."""
    kind = getattr(builtins, failure.error_type, None)
    error: Exception | None = None
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            error = kind(failure.message)
        except TypeError:  # Such as UnicodeDecodeError, which takes more than a message.
            error = None
    if error is None:
        error = UserExceptionWithTraceback(f"{failure.error_type}: {failure.message}")
    error.error_type = failure.error_type  # type: ignore[attr-defined]
    error.traceback = failure.traceback  # type: ignore[attr-defined]
    return error


def failures_of(record: JobRecord) -> dict[int, Exception]:
    """Return what workers of a job's last attempt raised, by rank, the first failure first.

    Ranks that were stopped before they raised anything, because another one had, are missing.
    """
    if record.failure is None:
        return {}
    rank = re.search(r"\(rank (\d+)\)", record.failed_worker)
    found = {int(rank[1]) if rank else 0: as_exception(record.failure)}
    for one in record.rank_failures:
        found.setdefault(one.rank, as_exception(one.failure))
    return found


def failed_on_cluster(record: JobRecord) -> TrainingFailed:
    """Return the error of a run whose job ended without success."""
    reason = f"run {record.spec.name} {record.phase.value}: {record.reason}"
    failures = failures_of(record)
    if not failures or record.failure is None:
        taken = judge_budget(record.spec, record.preemptions)
        return PreemptionError(reason) if taken.value else ControllerError(reason)
    traceback = record.failure.traceback
    return WorkerGroupError(reason, failures, worker=record.failed_worker, traceback=traceback)
