"""Attempts of a run: which submission may start or resume a run in a run directory.

Rule: a directory belongs to one run, and a run to one attempt at a time. Storage does not show
whether the last attempt still runs: the coordinator is asked, and if it does not know the job, the
process is checked that the job could not outlive. If neither is known, the attempt is over.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from elastic.core.facts import ENDED, JobPhase
from elastic.core.records import JobRecord
from elastic.errors import ConfigError, NameTaken, StorageError
from elastic.runtime.clock import SystemClock
from elastic.storage.faults import reason_of
from elastic.storage.files import Files
from elastic.storage.integrity import newest_valid, place_of
from elastic.storage.options import options_of
from elastic.storage.outputs import make_folder
from elastic.storage.run_directory import RunDirectory
from elastic.storage.run_record import (
    RunOwner,
    RunPhase,
    RunRecord,
    create_run,
    read_run,
    write_run,
)

log = logging.getLogger(__name__)

TRAINER_FILE = "trainer.pkl"
LOCK_S, LOCK_POLL_S = 5.0, 0.05
LEFT_BY_A_KILL = re.compile(rf"{re.escape(TRAINER_FILE)}(\.\w+\.partial)?|run\.json\.\w+\.partial")
"""Files in a directory whose run was killed before it had begun."""

JobOf = Callable[[str], JobRecord | None]
"""Returns the coordinator's record of a job, None if it does not know it."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A run to start or resume.

    Attributes:
        run_path: the run directory.
        name: of the run.
        job_id: of this attempt.
        resume_from: path of a checkpoint of another run, from which a new one starts.
        owner: the process without which it cannot run, None on a shared cluster.
        trainer: pickled; stored for `TorchTrainer.restore`, b"" for nothing.
        may_resume: the name was chosen explicitly, so an existing run of that name is resumed.
        may_repeat: also one that has succeeded, where it has nothing left to do.
    """

    run_path: str
    name: str
    job_id: str
    resume_from: str = ""
    owner: RunOwner | None = None
    trainer: bytes = b""
    may_resume: bool = True
    may_repeat: bool = False


@dataclass(frozen=True)
class RunAttempt:
    """An attempt that may start.

    Attributes:
        resume_from: path of the reported checkpoint to start from, "" for none.
        resumes: there is a state to continue from, perhaps an automatic checkpoint.
        lines: texts for users before it starts; () for a new run.
    """

    resume_from: str = ""
    resumes: bool = False
    lines: tuple[str, ...] = ()


@contextlib.contextmanager
def attempt(plan: RunPlan, *, job_of: JobOf = lambda job_id: None) -> Iterator[RunAttempt]:
    """Claim a run directory for the submission in the `with` block; undo that if it fails.

    Raises:
        NameTaken: the run has succeeded and may not be repeated, or is still running, or the
            directory is not a run's.
        StorageError: the directory cannot be read or written.
        ConfigError: there is no such kind of storage.
    """
    was_there = _make_directory(plan.run_path)
    files = Files(plan.run_path)
    before = read_run(files)
    if before is not None:
        if not plan.may_resume:
            raise NameTaken(f"{plan.run_path} is another run's directory: choose another name")
        job = job_of(before.jobs[-1]) if before.jobs else None
        before = _check_over(files, before, job, may_repeat=plan.may_repeat)
        begun = _resumed(plan, before, job)
    else:
        begun = RunAttempt(plan.resume_from, bool(plan.resume_from))
    replaced: bytes | None = None
    try:
        _claim(files, plan, before)
        if plan.trainer:
            replaced = files.read_if_there(TRAINER_FILE) or b""
            files.write(TRAINER_FILE, plan.trainer)
        yield begun
    except BaseException:
        with contextlib.suppress(StorageError, OSError), _alone(files):
            _take_back(files, plan, before, replaced)
            if not was_there:
                files.fs.rmdir(files.root)  # It is empty only if no other attempt has begun.
        raise


def _claim(files: Files, plan: RunPlan, before: RunRecord | None) -> None:
    """Record that this attempt owns the run, unless another one has claimed it meanwhile.

    Raises:
        NameTaken: another one has.
        StorageError: the record cannot be written.
    """
    record = _record(plan, before)
    with _alone(files):
        if before is None:
            create_run(files, record)
        elif read_run(files) == before:  # Unchanged since the slow check of its checkpoints.
            write_run(files, record)
        # Detects a lost reply of the store, or a write of another host at the same time.
        is_ours = read_run(files) == record
    if not is_ours:
        raise NameTaken(
            f"run {plan.name} in {plan.run_path} was begun by another process just now: choose "
            f"another name, or wait until that has ended"
        )


@contextlib.contextmanager
def _alone(files: Files) -> Iterator[None]:
    """Lock out other processes of this host from writing a run's record, if possible.

    The lock may be held for long, as by `flock RUN python train.py`: to continue without it is
    better than to wait.
    """
    fd = -1
    with contextlib.suppress(OSError):
        if files.is_local:
            fd = os.open(files.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            _lock(fd)
    try:
        yield
    finally:
        if fd >= 0:
            with contextlib.suppress(OSError):  # A process forked meanwhile shares the lock.
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)


def _lock(fd: int) -> None:
    """Lock a folder, or give up after a while.

    Raises:
        OSError: some network file systems have no locks.
    """
    until = time.monotonic() + LOCK_S
    while time.monotonic() < until:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(LOCK_POLL_S)


def _record(plan: RunPlan, before: RunRecord | None) -> RunRecord:
    now_ns = SystemClock().unix_ns()
    record = before or RunRecord(
        name=plan.name, started_unix_ns=now_ns, resume_from=plan.resume_from
    )
    return replace(
        record,
        jobs=(*record.jobs, plan.job_id),
        phase=RunPhase.RUNNING,
        ended_unix_ns=0,
        reason="",
        owner=plan.owner,
    )


def _take_back(
    files: Files, plan: RunPlan, before: RunRecord | None, replaced: bytes | None
) -> None:
    """Restore the previous record and trainer.

    Args:
        files: of the run.
        plan: of the attempt that failed.
        before: the previous record, None for none.
        replaced: the previous trainer, b"" for none, None if it was not replaced.
    """
    record = read_run(files)
    if record is None or record.jobs[-1:] != (plan.job_id,):
        return  # It was never ours, or belongs to another attempt by now.
    # The record last: once it is gone, another attempt may begin.
    if replaced:
        files.write(TRAINER_FILE, replaced)
    elif replaced is not None:
        files.delete_if_there(TRAINER_FILE)
    if before is not None:
        write_run(files, before)
    else:
        files.delete("run.json")


def _make_directory(run_path: str) -> bool:
    """Create the directory if it is missing; return whether it existed."""
    try:
        fs, root = url_to_fs(run_path, **options_of(run_path))
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"storage path {run_path}: {error}; expected a directory or a URL that fsspec knows"
        ) from error
    try:
        is_there = bool(fs.exists(root))
        if is_there and not (fs.isdir(root) and _is_a_runs(fs, root)):
            raise NameTaken(
                f"run directory {run_path} exists already, is not empty, and has no run.json to go "
                f"on from: choose another name (--name, RunConfig(name=...)) or storage path, or "
                f"remove it"
            )
        if isinstance(fs, LocalFileSystem):
            make_folder(root)
        else:
            fs.makedirs(root, exist_ok=True)
    except NameTaken:
        raise
    except Exception as error:  # Clients of object stores have classes of their own.
        raise StorageError(
            f"run directory {run_path} cannot be made ({reason_of(error)}): choose a storage path "
            f"with room that this machine reaches and you may write to"
        ) from None  # Its reason is in the text; the frames of a client fill screens.
    return is_there


def _is_a_runs(fs: Any, root: str) -> bool:
    """Return whether a directory is a run's, or has only leftovers of a killed run."""
    names = {name.rstrip("/").rpartition("/")[2] for name in fs.ls(root, detail=False)}
    return "run.json" in names or all(map(LEFT_BY_A_KILL.fullmatch, names))


def _check_over(
    files: Files, record: RunRecord, job: JobRecord | None, *, may_repeat: bool
) -> RunRecord:
    """Refuse a run that still runs, or has nothing left to do; return its updated record."""
    if record.phase is RunPhase.RUNNING and record.jobs:
        job_id = record.jobs[-1]
        phase = job.phase if job is not None else None
        if phase is JobPhase.SUCCEEDED:  # Its end was not recorded in the directory.
            record = record.ended(RunPhase.SUCCEEDED, SystemClock().unix_ns())
            write_run(files, record)
        elif phase is not None and phase not in ENDED:
            raise NameTaken(
                f"run {record.name} is {phase.value} as job {job_id} in {files.path}: follow it "
                f"(elastic logs -f {job_id}) or stop it (elastic stop {job_id}) first, or choose "
                f"another name"
            )
        elif phase is None and record.owner is not None and record.owner.is_other_and_alive():
            raise NameTaken(
                f"run {record.name} is running in {files.path}: process {record.owner.pid} on this "
                f"machine ({record.owner.host}) trains it; end that first, or choose another name"
            )
    if record.phase is RunPhase.SUCCEEDED and not may_repeat:
        raise NameTaken(
            f"run {record.name} has succeeded: run directory {files.path} exists already, and "
            f"train.Result.from_path reads it; choose another name (--name, RunConfig(name=...)) "
            f"or storage path, or remove it"
        )
    return record


def _resumed(plan: RunPlan, record: RunRecord, job: JobRecord | None) -> RunAttempt:
    """Return the next attempt of a run: its starting point, and the lines that describe it."""
    run = RunDirectory(plan.run_path)
    lines: list[str] = []
    found = newest_valid(run, lines.append, job)
    another = "use another name to begin anew"
    run_name = record.name
    if record.phase is RunPhase.SUCCEEDED:
        run_name += ", which has succeeded,"
    if found is not None:
        name, marker = found
        lines.append(f"resumes run {run_name} from {name} ({place_of(marker)}); {another}")
        return RunAttempt(run.checkpoint_path(name), True, tuple(lines))
    automatic = [name for name, _ in run.automatic()]
    begins = record.resume_from or plan.resume_from
    if automatic:
        lines.append(
            f"resumes run {record.name}, whose newest checkpoint is {automatic[-1]}; {another}"
        )
    elif begins:
        lines.append(f"resumes run {run_name} from {begins}, as it began; {another}")
    else:
        lines.append(f"resumes run {run_name} at its beginning: it has no checkpoint; {another}")
    return RunAttempt(begins, bool(automatic or begins), tuple(lines))


def note_end(run_path: str, job_id: str, phase: JobPhase, reason: str = "") -> None:
    """Record how an attempt ended; do nothing if it is not known to have ended.

    An error of storage is only logged: the run is over anyway.
    """
    if not run_path or phase not in ENDED:
        return
    try:
        files = Files(run_path)
        with _alone(files):
            record = read_run(files)
            if record is None or record.jobs[-1:] != (job_id,):
                return
            now_ns = SystemClock().unix_ns()
            kept = "" if phase is JobPhase.SUCCEEDED else reason
            write_run(files, record.ended(RunPhase(phase.value), now_ns, kept))
    except StorageError as error:
        log.warning("end_not_noted run=%s phase=%s error=%r", run_path, phase.value, str(error))
