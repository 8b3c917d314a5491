"""Validation beside training: rank 0's thread that validates each reported checkpoint.

A validation is a separate process (`validation_process`) on the node of rank 0. Its failures do not
affect training, and it ends with the worker that started it. Requests and results are stored beside
each checkpoint, so the next rank 0, in this attempt or a later one, resumes unfinished validations.

Rule: the training loop uses nothing of this but a flag that something new is there. A result is
written once, before it is reported.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic.core.config import JobSpec
from elastic.core.events.worker import Validated
from elastic.core.facts import CheckpointStatus, Generation, RefusalCode, ReportKind
from elastic.errors import StorageError
from elastic.storage.marker import CheckpointMarker
from elastic.storage.run_directory import RunDirectory
from elastic.storage.validation import ValidationFinding, ValidationRequest, write_finding
from elastic.worker.base.mailboxes import WAIT_SLICE_S, ReportAnswer
from elastic.worker.checkpoint.committer import CoordinatorLink
from elastic.worker.checkpoint.pruning import prune
from elastic.worker.checkpoint.validation_child import ValidationChild

log = logging.getLogger(__name__)

FINISH_S = 600.0
"""How long the end of a train function waits for storage, or the coordinator, to take what was
found out; for a validation that runs it waits as long as that takes."""
RETRY_S = 5.0
"""Until storage is asked again that has failed."""
ANSWER_POLL_S = 0.1
REPORT_AGAIN_S = 0.5
TRIES = 3
"""A process that dies without a result may have been killed together with us, or for its memory."""


@dataclass(frozen=True)
class ValidationPlan:
    """What the user chose.

    Attributes:
        call: takes the checkpoint's path and keywords, and returns metrics as JSON.
        fn_kwargs: keywords, where a report has none of its own.
        timeout_s: of one validation, None for as long as it takes.
        at_most: how many run at once.
    """

    call: Callable[[str, dict[str, Any]], str]
    fn_kwargs: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None
    at_most: int = 1


@dataclass
class RunningValidation:
    """One validation at work."""

    marker: CheckpointMarker
    child: ValidationChild


@dataclass
class ValidationReport:
    """A result to be reported to the coordinator, until it is acknowledged.

    Attributes:
        answer: to the newest attempt, None before the first.
        not_before: of the next one, on the monotonic clock.
    """

    path: str
    metrics: str
    status: CheckpointStatus
    answer: ReportAnswer | None = None
    not_before: float = 0.0


class _Requests:
    """Requests of any thread to look for something new, and the wait until nothing is left to do.

    Attributes:
        seen: how many were there when the thread last looked through storage.
    """

    def __init__(self) -> None:
        self.made, self.seen = 0, 0
        self.is_idle = threading.Event()
        self._lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # The thread holds us as long as it runs, also while the interpreter ends.
        weakref.finalize(self, os.close, self._wake_fd).atexit = False

    @property
    def is_pending(self) -> bool:
        return self.seen != self.made

    def make(self) -> None:
        """Have the thread look when it comes round."""
        with self._lock:
            self.is_idle.clear()
            self.made += 1

    def wake(self) -> None:
        """Have it come round at once."""
        os.eventfd_write(self._wake_fd, 1)

    def nothing_left(self, seen: int) -> None:
        with self._lock:
            if self.made == seen:
                self.is_idle.set()

    def wait(self, others: Iterable[int], timeout_s: float | None) -> None:
        """Wait until woken, or until one of these descriptors can be read."""
        poll = select.poll()  # `select` refuses descriptors from 1024 on.
        for source in (self._wake_fd, *others):
            poll.register(source, select.POLLIN)
        poll.poll(None if timeout_s is None else math.ceil(timeout_s * 1e3))
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)


class _UnansweredReports:
    """Results on their way to the coordinator, until it has taken them."""

    def __init__(self, link: CoordinatorLink) -> None:
        self._link = link
        self._reports: list[ValidationReport] = []
        self._num_sent = 0

    def __len__(self) -> int:
        return len(self._reports)

    def add(self, path: str, marker: CheckpointMarker) -> None:
        self._reports.append(ValidationReport(path, marker.metrics, marker.status))

    def clear(self) -> None:
        self._reports.clear()

    def send(self, generation: Generation) -> None:
        """Send what is new, and again in each group what was not taken."""
        for report in list(self._reports):
            self._send(report, generation)

    def _send(self, report: ValidationReport, generation: Generation) -> None:
        answer = report.answer
        if answer is not None and answer.ready.is_set():
            over = answer.code in (RefusalCode.JOB_ENDED, RefusalCode.JOB_UNKNOWN)
            if answer.accepted or over:
                self._reports.remove(report)
                return
            report.answer, report.not_before = None, time.monotonic() + REPORT_AGAIN_S
        if report.answer is None and time.monotonic() >= report.not_before:
            self._num_sent += 1
            report.answer = self._link.expect_answer(
                generation, ReportKind.VALIDATION, self._num_sent
            )
            self._link.post(
                Validated(generation, self._num_sent, report.metrics, report.path, report.status)
            )


class Validator:
    """The validations of one process, over all its groups."""

    def __init__(self, run: RunDirectory, spec: JobSpec, link: CoordinatorLink) -> None:
        self._run, self._spec = run, spec
        self._plan: ValidationPlan | None = None
        self._generation, self._leads, self._is_closed = 0, False, False
        self._thread: threading.Thread | None = None
        self._requests = _Requests()
        self._stuck_since = 0.0
        # Of the thread alone.
        self._running: dict[str, RunningValidation] = {}
        self._tries: dict[str, int] = {}
        self._unwritten: dict[str, tuple[CheckpointMarker, ValidationFinding]] = {}
        self._done: set[str] = set()
        self._retry_at = 0.0
        self._reports = _UnansweredReports(link)

    # ------------------------------------------------------------------- any thread

    @property
    def is_on(self) -> bool:
        """Return whether the user has given a validation function."""
        return self._plan is not None

    def configure(self, plan: ValidationPlan | None) -> None:
        self._plan = plan
        if plan is not None and self._leads:
            self.notify()

    def enter(self, generation: Generation, rank: int) -> None:
        """Be in this group from here on; rank 0 takes up what is not done."""
        self._generation, self._leads = generation, rank == 0
        self.notify()

    def notify(self) -> None:
        """There may be something new; returns at once."""
        if self._plan is None or self._is_closed:
            return
        if self._thread is None and self._leads:
            self._thread = threading.Thread(
                target=self._work, name="elastic-validator", daemon=True
            )
            self._thread.start()
        self._requests.make()
        self._requests.wake()

    def finish(self, is_over: Callable[[], bool]) -> None:
        """Wait until every validation is over and reported; `is_over` also shows that we run."""
        if self._plan is None or not self._leads:
            return
        self.notify()  # Also finds what others have committed.
        while not self._requests.is_idle.wait(WAIT_SLICE_S) and not is_over():
            since = self._stuck_since
            if since and time.monotonic() - since > FINISH_S:
                log.warning(
                    "validation_left: storage or the coordinator has not taken in %.0f s what was "
                    "found out; a continuation of this run takes it up",
                    FINISH_S,
                )
                return

    def close(self) -> None:
        """Stop: the running validation is killed, and the next rank 0 runs it again."""
        self._leads, self._is_closed = False, True
        self._requests.wake()

    # ------------------------------------------------------------------- the thread

    def _work(self) -> None:
        while not self._is_closed:
            try:
                self._turn()
            except Exception:
                # Storage that answers nonsense: the loop must live on.
                log.exception("validation_failed")
                self._retry_at = time.monotonic() + RETRY_S
            self._wait()
        self._kill_all("this worker ends")

    def _turn(self) -> None:
        if not self._leads:
            self._kill_all("another worker is rank 0")
            self._reports.clear()
            self._done.clear()
            self._unwritten.clear()
            self._requests.seen = self._requests.made  # There is nothing to come back for.
            return
        for name in list(self._running):
            self._reap(name)
        seen = self._requests.made
        waiting: list[tuple[str, CheckpointMarker]] = []
        try:
            for name in list(self._unwritten):
                self._write(name)
            if time.monotonic() >= self._retry_at:
                waiting = self._start_waiting()
                self._requests.seen = seen
        except StorageError as error:
            self._retry_at = time.monotonic() + RETRY_S
            log.warning("validation_waits path=%s error=%r", self._run.path, str(error))
        self._reports.send(self._generation)
        is_behind = bool(self._reports or self._unwritten or self._requests.is_pending)
        if is_behind and not self._running:
            self._stuck_since = self._stuck_since or time.monotonic()
        else:
            self._stuck_since = 0.0
        if not (is_behind or self._running or waiting):
            self._requests.nothing_left(seen)

    def _wait(self) -> None:
        now = time.monotonic()
        moments = [now + ANSWER_POLL_S] if self._reports else []
        moments += [run.child.deadline for run in self._running.values() if run.child.deadline]
        if self._unwritten or self._requests.is_pending:
            moments.append(max(self._retry_at, now + WAIT_SLICE_S))
        timeout_s = max(0.0, min(moments) - now) if moments else None
        self._requests.wait((run.child.pidfd for run in self._running.values()), timeout_s)

    def _start_waiting(self) -> list[tuple[str, CheckpointMarker]]:
        """Start as many validations as may run at once; returns those that still wait.

        Raises:
            StorageError: storage cannot be read.
        """
        plan, waiting = self._plan, self._scan()
        if plan is None:
            return []
        while waiting and len(self._running) < plan.at_most:
            name, marker = waiting.pop(0)
            path = self._run.checkpoint_path(name)
            try:
                request = ValidationRequest.from_json(marker.validation)
                timeout_s = request.timeout_s if request.timeout_s is not None else plan.timeout_s
                child = ValidationChild(
                    plan.call, path, {**plan.fn_kwargs, **request.fn_kwargs}, timeout_s
                )
            except Exception as error:  # From unpickling, or a bad request.
                finding = ValidationFinding(
                    CheckpointStatus.VALIDATION_FAILED,
                    reason=f"it cannot be started: {type(error).__name__}: {error}",
                )
                self._unwritten[name] = marker, finding
                self._write(name)
                continue
            self._tries[name] = self._tries.get(name, 0) + 1
            self._running[name] = RunningValidation(marker, child)
            log.info("validation_started checkpoint=%s pid=%d", path, child.pid)
        return waiting

    def _scan(self) -> list[tuple[str, CheckpointMarker]]:
        """Return what is to be validated and is not under way, oldest first.

        Results of an earlier rank 0 are reported: it may have ended before it could.
        """
        busy = self._done | self._running.keys() | self._unwritten.keys()
        found = []
        for name in self._run.names():
            marker = None if name in busy else self._run.marker(name)
            if marker is None:
                continue
            if marker.status is CheckpointStatus.PENDING_VALIDATION:
                found.append((name, marker))
                continue
            self._done.add(name)
            if marker.validation:
                self._will_report(name, marker)
        ours = self._spec.job_id
        return sorted(
            found, key=lambda one: (one[1].job_id == ours, one[1].generation, one[1].index)
        )

    def _reap(self, name: str) -> None:
        """Take what a validation found out, if it is over, or takes too long."""
        running = self._running[name]
        ended = running.child.ended()
        if ended is None:
            return
        del self._running[name]
        self._requests.make()  # There is room for another one.
        if not ended.is_final and self._tries[name] < TRIES:
            log.warning("validation_again checkpoint=%s reason=%r", name, ended.finding.reason)
            return
        self._unwritten[name] = running.marker, ended.finding

    def _write(self, name: str) -> None:
        """Store the result, and report it.

        Raises:
            StorageError: storage does not take it; the next turn tries again.
        """
        marker, finding = self._unwritten[name]
        files = self._run.checkpoint(name)
        finding = write_finding(files, finding)
        del self._unwritten[name]
        self._done.add(name)
        if finding.reason:
            log.warning(
                "validation_failed checkpoint=%s reason=%r: training goes on", name, finding.reason
            )
        else:
            log.info("validated checkpoint=%s metrics=%s", name, json.dumps(finding.metrics))
        known = self._run.marker(name)
        self._will_report(name, known if known is not None else marker)
        prune(self._run, self._spec, marker)

    def _will_report(self, name: str, marker: CheckpointMarker) -> None:
        if marker.job_id == self._spec.job_id:
            self._reports.add(self._run.checkpoint_path(name), marker)

    def _kill_all(self, why: str) -> None:
        for name, running in self._running.items():
            log.info("validation_left checkpoint=%s reason=%r", name, why)
            running.child.kill()
        self._running.clear()
