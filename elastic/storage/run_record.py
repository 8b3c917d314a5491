"""`run.json`: the state of a run, stored beside its checkpoints for later processes.

Rule: written atomically. It is written before a job is submitted, and again by the process that
sees its end; if none did, `running` stays, and means only "not known to have ended".
"""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path

from elastic.errors import StorageError
from elastic.storage.files import Files
from elastic.storage.summed import from_summed_json, to_summed_json

RUN_FILE = "run.json"
RUN_FORMAT = 2


class RunPhase(Enum):
    """Known state of a run."""

    RUNNING = "running"
    """Started, and not known to have ended."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True)
class RunOwner:
    """The process without which a run ends.

    Attributes:
        host: its host name.
        pid: its process id there.
        began: its start in clock ticks since boot; distinguishes it from a later process that
            reuses the pid.
    """

    host: str
    pid: int
    began: int

    @classmethod
    def this_process(cls) -> RunOwner:
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> RunOwner:
        """Return a process of this machine."""
        return cls(socket.gethostname(), pid, _began(pid))

    def is_other_and_alive(self) -> bool:
        """Return whether it is known to be running; False for this process, and on other hosts."""
        if self.host != socket.gethostname() or self.pid == os.getpid():
            return False
        return _began(self.pid) == self.began != 0


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Content of `run.json`.

    Attributes:
        name: of the run.
        jobs: ids of its attempts, in order; the last one is the present one.
        phase: of the last attempt.
        started_unix_ns: when the first attempt was submitted.
        ended_unix_ns: when the last one ended, 0 if unknown.
        reason: why it failed or was stopped, in one line.
        resume_from: path of another run's checkpoint that it started from, "" for none.
        owner: the process without which it cannot run, None for a job on a permanent cluster.
    """

    name: str
    jobs: tuple[str, ...] = ()
    phase: RunPhase = RunPhase.RUNNING
    started_unix_ns: int = 0
    ended_unix_ns: int = 0
    reason: str = ""
    resume_from: str = ""
    owner: RunOwner | None = None

    def ended(self, phase: RunPhase, unix_ns: int, reason: str = "") -> RunRecord:
        return replace(self, phase=phase, ended_unix_ns=unix_ns, reason=reason)

    def to_json(self) -> str:
        return to_summed_json({**asdict(self), "phase": self.phase.value}, RUN_FORMAT)

    @classmethod
    def from_json(cls, text: str) -> RunRecord:
        """Parse the text of the file; fields of a later version are ignored.

        Raises:
            ValueError: it is invalid, changed, or of another format.
        """
        body = from_summed_json(text, RUN_FORMAT)
        try:
            known = {key: body[key] for key in cls.__dataclass_fields__ if key in body}
            owner = known.pop("owner", None)
            return cls(
                **{
                    **known,
                    "jobs": tuple(known["jobs"]),
                    "phase": RunPhase(known["phase"]),
                    "owner": RunOwner(**owner) if owner else None,
                }
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None


def read_run(files: Files) -> RunRecord | None:
    """Read a run directory's `run.json`; None if it has none."""
    data = files.read_if_there(RUN_FILE)
    if data is None:
        return None
    try:
        return RunRecord.from_json(data.decode())
    except ValueError as error:
        raise StorageError(
            f"{files.path}/{RUN_FILE} is not what a run writes ({error}): remove the directory, "
            f"or choose another name or storage path"
        ) from None


def create_run(files: Files, record: RunRecord) -> bool:
    """Write `run.json` unless there is one; return whether it was written."""
    return files.create(RUN_FILE, record.to_json().encode())


def write_run(files: Files, record: RunRecord) -> None:
    files.write(RUN_FILE, record.to_json().encode())


def _began(pid: int) -> int:
    """Return when a process was started, in ticks since boot, 0 if it does not run."""
    try:
        # The second field is the name of the program, which may hold spaces and brackets.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    # A zombie does not count as running.
    return 0 if fields[0] in "ZX" else int(fields[19])
