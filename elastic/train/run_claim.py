"""How a trainer claims a run directory: new, resumed, or restarted by torchrun.

Rule: resuming an existing run is reported on stderr, with the checkpoint it resumes from.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from elastic.client.attempts import JobOf, RunAttempt, RunPlan, attempt, note_end
from elastic.core.facts import JobPhase
from elastic.errors import UsageError
from elastic.storage.files import Files
from elastic.storage.integrity import newest_valid, read_marker, verify
from elastic.storage.run_directory import RunDirectory
from elastic.storage.run_record import RUN_FILE, RunPhase, read_run, write_run
from elastic.train.checkpoint import Checkpoint

if TYPE_CHECKING:
    from elastic.worker.process.local import LocalRun


def print_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def announced(plan: RunPlan, *, job_of: JobOf) -> Iterator[RunAttempt]:
    """Do as `attempt`, and print on stderr if the run is resumed."""
    with attempt(plan, job_of=job_of) as begun:
        for line in begun.lines:
            print_stderr(line)
        yield begun


def path_to_begin_from(checkpoint: Checkpoint | None) -> str:
    """Return the path of the checkpoint that a new run starts from, "" for none.

    UsageError if it does not exist or is a run directory; DamagedCheckpoint if it is not what was
    committed.
    """
    if checkpoint is None:
        return ""
    files = Files(checkpoint.path, checkpoint.filesystem)
    if not files.exists(""):
        raise UsageError(
            f"TorchTrainer: resume_from_checkpoint={checkpoint}: no such directory; expected a "
            f"checkpoint that every node can read"
        )
    marker = read_marker(files)
    if marker is not None:
        verify(files, marker)
    else:
        _check_no_run(checkpoint)
    return checkpoint.url


def _check_no_run(checkpoint: Checkpoint) -> None:
    """Refuse a run directory, and the folder of all checkpoints in one, with a UsageError."""
    path = checkpoint.path.rstrip("/")
    run_path = path.removesuffix("/checkpoints")
    if Files(run_path, checkpoint.filesystem).exists(RUN_FILE):
        what = "a run directory" if run_path == path else "the folder of all checkpoints of a run"
        raise UsageError(
            f"TorchTrainer: resume_from_checkpoint={checkpoint}: this is {what}; expected one of "
            f"its checkpoints, {run_path}/checkpoints/NAME"
        )


def begin_here(plan: RunPlan) -> dict[str, str]:
    """Claim the directory of a run in this process; return the fields of `LocalRun` that it sets.

    Raises:
        NameTaken: the directory exists, and is not to be resumed.
        StorageError: it cannot be created.
    """
    with announced(plan, job_of=lambda job_id: None) as begun:
        return _fields(plan, plan.job_id, begun.resume_from)


def begin_again(plan: RunPlan) -> dict[str, str]:
    """Continue in the directory of a run whose processes torchrun has restarted.

    Raises:
        StorageError: it cannot be read.
    """
    run = RunDirectory(plan.run_path)
    record = read_run(run.files)
    found = newest_valid(run, print_stderr)
    if record is not None:  # The failed attempt may have recorded its end.
        write_run(run.files, replace(record, phase=RunPhase.RUNNING, ended_unix_ns=0, reason=""))
    job_id = record.jobs[-1] if record is not None and record.jobs else plan.job_id
    return _fields(plan, job_id, run.checkpoint_path(found[0]) if found else plan.resume_from)


def _fields(plan: RunPlan, job_id: str, resume_from: str) -> dict[str, str]:
    return {
        "job_name": plan.name,
        "run_path": plan.run_path,
        "job_id": job_id,
        "resume_from": resume_from,
    }


@contextlib.contextmanager
def end_noted(run: LocalRun) -> Iterator[None]:
    """Record how a run in this process ends; under torchrun only rank 0 does."""
    from elastic.worker.process.local import torchrun_rank

    phase, reason = JobPhase.STOPPED, "interrupted"
    try:
        yield
        phase = JobPhase.SUCCEEDED
    except (Exception, SystemExit) as error:
        phase, reason = JobPhase.FAILED, f"{type(error).__name__}: {error}"
        raise
    finally:
        if torchrun_rank() in (None, 0):
            note_end(run.run_path, run.job_id, phase, reason)
