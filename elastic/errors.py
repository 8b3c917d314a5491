"""The exception tree of the project, and `check`, the assertion that `python -O` keeps.

    ElasticError
    ├── UsageError            you called us in a way that cannot work: fix the call
    │   ├── ConfigError       a configuration value, or two of them together, are refused
    │   └── StorageNotShared  the nodes of a run write to different places: trying again is no use
    ├── Unavailable           a part is not there now: it may be later
    │   ├── Busy              too much was asked of it at once
    │   ├── CoordinatorUnreachable
    │   │   └── CoordinatorUntrusted   somebody is there; TLS cannot be agreed with them
    │   ├── NotLeading        this coordinator is a standby; names the leader
    │   └── StoreUnavailable
    ├── Refused               a peer answered, and declined
    │   ├── NotAuthorized     wrong or missing token or certificate
    │   │   └── NotPermitted  the caller is known, and may not do this
    │   ├── VersionMismatch   the peer speaks another version of the protocol
    │   ├── NameTaken         a job or node of this name exists already
    │   ├── NotFound          no job, node or worker of this name
    │   └── Fenced            the sender's generation, incarnation or term is over
    ├── PeerError             another process sent what the protocol does not allow
    ├── StoreError            the membership store answered what it must not
    │   └── CorruptRecord     a stored record does not decode
    ├── StorageError          a run directory or checkpoint cannot be written or read
    │   └── DamagedCheckpoint a file of it is missing, torn or changed
    ├── TrainingFailed        the job ended without success; carries the first failure
    │   ├── WorkerGroupError  a worker's code failed; names the rank and its error
    │   ├── ControllerError   it was ended for another reason: lost workers, a budget, a user
    │   │   └── PreemptionError   more nodes were taken from it than `max_preemptions`
    │   └── TuneError         trials of a study failed; the others have their results
    ├── ProgramFailed         a worker's program failed, and wrote down why
    ├── GroupError            a torch.distributed group could not form or was broken
    └── InvariantViolation    a bug of ours; carries the story that led to it

Messages state who did what with which values, what was expected, and what to do.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from typing import Any

FOR_NOW = frozenset({
    errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN,
    errno.EBUSY, errno.EMFILE, errno.ENFILE, errno.ENOMEM,
})  # fmt: skip
"""What a machine refuses that it may grant to a daemon that is started again later."""


class ElasticError(Exception):
    """Every error that this package raises on purpose."""


class UsageError(ElasticError):
    """The caller asked for something that cannot work; the message says what to change."""


class ConfigError(UsageError, ValueError):
    """A configuration value is outside its range, or contradicts another one."""


class StorageNotShared(UsageError):
    """The run directory is another place on one node than on another."""


class Unavailable(ElasticError):
    """Something is not there at the moment; trying again later may succeed."""


class Busy(Unavailable):
    """A limit of the peer is reached for now; the message names it."""


class CoordinatorUnreachable(Unavailable):
    """No coordinator answers at the address given."""

    def __init__(self, address: str, detail: str = "") -> None:
        self.address = address
        self.detail = detail
        because = f" ({detail})" if detail else ""
        if "deadline exceeded" in detail.lower():
            # Somebody may well be there: another one could not even listen at the address.
            advice = "is it stopped or overloaded, or a firewall between? Else"
        else:
            starts = f"'elastic start --head' or 'elastic-coord serve --listen {address}'"
            advice = f"start one with {starts}, or"
        super().__init__(
            f"no coordinator answers at {address}{because}; {advice} pass the right address"
        )


class CoordinatorUntrusted(CoordinatorUnreachable):
    """Somebody answers at the address, and one side does not accept the other's certificate."""

    def __init__(self, address: str, detail: str) -> None:
        super().__init__(address, detail)
        self.args = (f"no safe connection to {address}: {detail}",)


class NotLeading(Unavailable):
    """This coordinator does not lead at the moment; another one may.

    Attributes:
        leader: "host:port" of the one that leads, "" if none is known.
        term: of that leadership, 0 if none is known.
    """

    def __init__(self, text: str, *, leader: str = "", term: int = 0) -> None:
        """Keep where to ask instead beside the text."""
        self.leader = leader
        self.term = term
        super().__init__(text)


class StoreUnavailable(Unavailable):
    """The membership store did not answer in time; nothing is known of the request's outcome."""


class Refused(ElasticError):
    """A peer understood the request and declined it."""


class NotAuthorized(Refused):
    """The token or certificate is missing, wrong, or over."""


class NotPermitted(NotAuthorized):
    """The caller's token or certificate is good, and not for this."""


class VersionMismatch(Refused):
    """The peer speaks another version of the protocol."""

    def __init__(self, who: str, *, theirs: str, ours: str) -> None:
        self.theirs = theirs
        self.ours = ours
        super().__init__(
            f"{who} speaks protocol {theirs}, this process speaks {ours}: install the same version "
            f"of elastic-torch on both sides"
        )


class NameTaken(Refused):
    """A job, run directory or node of this name exists already."""


class NotFound(Refused):
    """Nothing of this name is known."""


class Fenced(Refused):
    """The sender belongs to a generation, an incarnation or a leadership that is over."""


class PeerError(ElasticError):
    """Another process sent something that the protocol does not allow."""


class StoreError(ElasticError):
    """The membership store answered something that it must not answer."""


class CorruptRecord(StoreError):
    """A stored record does not decode; it is refused by name, never guessed at."""


class StorageError(ElasticError):
    """A run directory or a checkpoint cannot be written or read."""


class DamagedCheckpoint(StorageError):
    """A committed checkpoint differs from its marker; the message names the file."""


class TrainingFailed(ElasticError):
    """The job ended without success.

    Attributes:
        reason: one line, what ended the job.
        worker: the worker that failed first, as "node/serial (rank r)", or "" if none did.
        traceback: the traceback of that first failure, or "".
        result: what the run left behind all the same (an `elastic.train.Result`), if known.
    """

    result: Any = None

    def __init__(self, reason: str, *, worker: str = "", traceback: str = "") -> None:
        """Keep the parts apart, so that callers can show the traceback once and last."""
        self.reason = reason
        self.worker = worker
        self.traceback = traceback
        where = f"; first failure in worker {worker}" if worker else ""
        story = f"\n\n{traceback.rstrip()}" if traceback else ""
        super().__init__(f"{reason}{where}{story}")


class WorkerGroupError(TrainingFailed):
    """The code of workers failed, and was not to be tried again.

    Attributes:
        worker_failures: what they raised, by rank, the first one first; of the attempt that ended
            the run. Workers stopped before they raised anything are not among them.
    """

    def __init__(
        self,
        reason: str,
        worker_failures: Mapping[int, BaseException],
        *,
        worker: str = "",
        traceback: str = "",
    ) -> None:
        super().__init__(reason, worker=worker, traceback=traceback)
        self.worker_failures = dict(worker_failures)

    def __reduce__(self) -> Any:
        """Be pickled as what it was made of."""
        parts = {"worker": self.worker, "traceback": self.traceback}
        return _made_again, (type(self), (self.reason, self.worker_failures), parts)


class ControllerError(TrainingFailed):
    """The job was ended for a reason that no worker's code gave.

    Attributes:
        controller_failure: the reason, as an exception.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.controller_failure = RuntimeError(reason)


class PreemptionError(ControllerError):
    """Announced drains took more nodes from the job than `FailureConfig(max_preemptions)` lets."""


class TuneError(TrainingFailed):
    """Trials of a study failed; `result` is the study's `elastic.tune.ExperimentAnalysis`."""


def _made_again(kind: Any, args: tuple[Any, ...], parts: dict[str, Any]) -> Any:
    return kind(*args, **parts)


class ProgramFailed(ElasticError):
    """A program that a worker ran failed, and left an error file with the reason.

    Attributes:
        error_type: class of what it raised, "ProgramFailed" if it is unknown.
        message: what it was raised with.
        traceback: formatted; the message if there is none.
    """

    def __init__(self, text: str, traceback: str, code: int) -> None:
        """Take the text of the file, such as "ValueError: bad batch", and the exit code."""
        name, colon, message = text.partition(": ")
        is_named = bool(colon) and name.replace(".", "").isidentifier()
        self.error_type = name if is_named else type(self).__name__
        self.message = message if is_named else text
        self.traceback = traceback or text
        super().__init__(f"the program exited with code {code}: {text}")


class GroupError(ElasticError):
    """A torch.distributed group could not be formed, or was broken while in use."""


class GroupBroken(GroupError, RuntimeError):
    """A member of the group cannot be reached any more: a RuntimeError, as torch's own is."""


class InvariantViolation(ElasticError):
    """What must hold did not hold: a bug in this package, never the user's fault.

    Attributes:
        story: the events that led here, oldest first, one line each.
    """

    def __init__(self, message: str, story: Sequence[str] = ()) -> None:
        """Print the story under the message, so that a report carries what is needed."""
        self.story = tuple(story)
        lines = "".join(f"\n  {line}" for line in self.story)
        super().__init__(message + (f"\n  story:{lines}" if lines else ""))


def is_for_now(error: BaseException) -> bool:
    """Return whether the machine refused what it may grant later, such as space on a full disk."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in FOR_NOW


def check(condition: object, message: str) -> None:
    """Raise `InvariantViolation` unless `condition` holds; unlike `assert` it survives -O."""
    if not condition:
        raise InvariantViolation(message)
