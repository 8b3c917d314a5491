"""The consequence of a lost worker: none, a back-off, or the end of the job.

Rule: failures of user code (it raises, exits with a code, crashes natively) are charged to
`max_failures`, and retried as long as that allows: at once, or after a back-off if it is the same
error at the same place again. A kill or a stop from outside and a lost node cost nothing, however
many there are: they are replaced at once. What may repeat by itself (a hang, a worker that cannot
be started, one that the kernel killed for its memory, a group that breaks, a damaged checkpoint,
instead of which the next group begins with the one before) is a loss: losses in a row without a
committed step back off, and end the job instead of occupying the cluster for ever. Exits on a node
that was about to leave are neither, however the node ends: they have a separate budget
(`policy.preemption`).

A hang is charged as a loss although user code may be its cause: a deadlock cannot be distinguished
from a dead link or a stuck driver, and a run with `max_failures=0` should survive those. One that
repeats in every group is ended by the limit on losses in a row, because a stalled group commits no
step and does not count as healthy either.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from elastic.core.config import CoordinatorConfig, JobSpec, ns
from elastic.core.facts import ExitCause, ExitKind, Failure
from elastic.core.policy.decision import Decision
from elastic.errors import StorageNotShared

CRASH_SIGNALS = (
    signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS,
)  # fmt: skip
OUT_OF_MEMORY = "out of memory"
"""In the detail of an exit: this SIGKILL came from the kernel's OOM killer."""
STOPPED = "stopped (SIGSTOP)"
"""In the detail of a hang: the process was stopped from outside, and given up."""
TERMINATED = 128 + int(signal.SIGTERM)
"""Exit code of a process that was asked to end; from a script that was not, it is a failure."""
FREE_LOSSES = 2
"""Losses in a row that are replaced without delay."""
FIRST_DELAY_S = 0.5
FINAL_ERRORS = (f"{StorageNotShared.__module__}.{StorageNotShared.__qualname__}",)
"""Exceptions of user code that a retry cannot repair."""
LINE_MAX = 200
"""Characters of an error in a line about a lost worker; its record has all."""
DOUBLINGS_MAX = 64
"""Enough to reach any bound; more would leave the range of floating point."""


@dataclass(frozen=True)
class FailureHistory:
    """The job's failures and losses so far.

    Attributes:
        failures: failures of user code in the whole run.
        losses: losses in a row since the last progress.
        last: the failure before this one; its position shows whether the job made progress.
    """

    failures: int = 0
    losses: int = 0
    last: Failure | None = None


@dataclass(frozen=True)
class FailureDecision:
    """The outcome: the job ends, or the worker is replaced after `delay_ns`."""

    job_fails: bool
    history: FailureHistory
    delay_ns: int = 0


def judge_exit(
    spec: JobSpec,
    history: FailureHistory,
    cause: ExitCause,
    failure: Failure | None,
    config: CoordinatorConfig,
    *,
    announced: str = "",
) -> Decision[FailureDecision]:
    """Decide what a worker's exit means for its job.

    Args:
        spec: max_failures is its budget.
        history: before this exit.
        cause: how the process ended; an exit that we ordered costs nothing.
        failure: what user code raised, None if the process just ended.
        config: back-off and crash-loop limit.
        announced: why its node was about to leave, "" if it was not. A machine's shutdown cannot
            be distinguished from a crash of the worker; an exception of user code can.
    """
    if cause.kind is ExitKind.STOPPED:
        return Decision(FailureDecision(False, history), "stopped by order")
    if announced and failure is None:
        what = f"{describe(cause)} on a node that was to leave ({announced})"
        return Decision(FailureDecision(False, history), what)
    damaged = failure.damaged if failure is not None else ""
    if not damaged and (failure is not None or is_users_fault(cause)):
        return _judge_failure(spec, history, cause, failure, config)
    what = f"ended by damaged checkpoint {damaged}" if damaged else describe(cause)
    if is_kill(cause):
        return Decision(FailureDecision(False, history), what)
    losses = history.losses + 1
    after = FailureHistory(history.failures, losses, history.last)
    if losses > config.crash_loop_limit:
        return Decision(
            FailureDecision(True, after),
            f"{losses} workers lost in a row without progress, the last one {what}: "
            f"check its log; the limit is crash_loop_limit={config.crash_loop_limit}",
        )
    return Decision(FailureDecision(False, after, _delay_ns(losses - FREE_LOSSES, config)), what)


def _delay_ns(number: int, config: CoordinatorConfig) -> int:
    """Return the back-off before attempt `number`, counted from 1; 0 for less."""
    doubled = FIRST_DELAY_S * 2 ** min(number - 1, DOUBLINGS_MAX)
    return ns(min(config.restart_delay_s_max, doubled)) if number > 0 else 0


def judge_break(history: FailureHistory, config: CoordinatorConfig) -> Decision[FailureDecision]:
    """Decide the consequence of a group that broke without a lost member.

    Once that may be chance. If every group breaks, the cause is one that the next group does not
    remove, such as a collective called with tensors of different shapes.
    """
    losses = history.losses + 1
    after = FailureHistory(history.failures, losses, history.last)
    if losses <= config.crash_loop_limit:
        return Decision(FailureDecision(False, after), "the group broke, no member is lost")
    return Decision(
        FailureDecision(True, after),
        f"{losses} groups in a row broke without progress, and no member was lost in the last "
        f"one: look for the first error in the logs of its workers; the limit is "
        f"crash_loop_limit={config.crash_loop_limit}",
    )


def judge_left(
    spec: JobSpec, history: FailureHistory, failure: Failure, config: CoordinatorConfig
) -> Decision[FailureDecision]:
    """Decide the consequence of a member that finished while others waited for it.

    It is a failure of user code, as if it had raised; after the second one in a row at the same
    place there is no retry.
    """
    if _same(failure, history.last):
        after = FailureHistory(history.failures + 1, history.losses, failure)
        what = f"{failure.error_type}: {failure.message}"
        return Decision(
            FailureDecision(True, after),
            f"{what} (as the time before: trying again would not help)",
        )
    return _judge_failure(spec, history, ExitCause(ExitKind.CODE), failure, config)


def is_users_fault(cause: ExitCause) -> bool:
    """Return whether an exit is charged to user code: any code but one, or a native crash."""
    if cause.kind is ExitKind.CODE:
        return cause.code != TERMINATED
    return cause.kind is ExitKind.SIGNAL and cause.code in [int(s) for s in CRASH_SIGNALS]


def is_kill(cause: ExitCause) -> bool:
    """Return whether the process was ended from outside, which is not a fault of its code."""
    if cause.kind is ExitKind.SIGNAL:
        return not is_users_fault(cause) and OUT_OF_MEMORY not in cause.detail
    return cause.kind is ExitKind.LOST or (cause.kind is ExitKind.HUNG and STOPPED in cause.detail)


def describe(cause: ExitCause) -> str:
    """Return the exit as a phrase: "exited with code 3", "killed by SIGKILL", ..."""
    more = f" ({cause.detail})" if cause.detail else ""
    if cause.kind is ExitKind.CODE:
        return f"exited with code {cause.code}{more}"
    if cause.kind is ExitKind.SIGNAL:
        names = {int(s): s.name for s in signal.Signals}
        return f"killed by {names.get(cause.code, f'signal {cause.code}')}{more}"
    if cause.kind is ExitKind.HUNG:
        return f"killed because it hung{more}"
    if cause.kind is ExitKind.LOST:
        return f"lost with its node{more}"
    if cause.kind is ExitKind.SPAWN_FAILED:
        return f"could not be started{more}"
    return f"stopped{more}"


def with_error(how: str, failure: Failure | None) -> str:
    """Return how a process ended with the error behind it: "exited with code 1 (ValueError: x)"."""
    if failure is None:
        return how
    line = f"{failure.error_type}: {failure.message}".partition("\n")[0]
    return f"{how} ({line if len(line) <= LINE_MAX else line[: LINE_MAX - 3] + '...'})"


def _judge_failure(
    spec: JobSpec,
    history: FailureHistory,
    cause: ExitCause,
    failure: Failure | None,
    config: CoordinatorConfig,
) -> Decision[FailureDecision]:
    failures = history.failures + 1
    after = FailureHistory(failures, history.losses, failure)
    what = f"{failure.error_type}: {failure.message}" if failure else describe(cause)
    if spec.max_failures != -1 and failures > spec.max_failures:
        budget = f"failure {failures}, max_failures={spec.max_failures}"
        return Decision(FailureDecision(True, after), f"{what} ({budget})")
    if failure is not None and failure.error_type in FINAL_ERRORS:
        return Decision(FailureDecision(True, after), what)
    if failure is not None and _same(failure, history.last):
        # A service that is down for a minute looks like this, and so does a bug.
        delay_ns = _delay_ns(failures - 1, config)
        where = failure.position or "the same place"
        return Decision(
            FailureDecision(False, after, delay_ns), f"{what} (as the time before, at {where})"
        )
    return Decision(FailureDecision(False, after), what)


def _same(failure: Failure, last: Failure | None) -> bool:
    if last is None:
        return False
    return (failure.error_type, failure.message, failure.position) == (
        last.error_type,
        last.message,
        last.position,
    )
