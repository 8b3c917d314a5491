"""API of a running train function: context, reports, checkpoints."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic.core.policy.cursor import Cursor
from elastic.core.policy.streams import Data
from elastic.errors import UsageError
from elastic.storage.files import Files
from elastic.storage.marker import CheckpointMarker
from elastic.storage.run_directory import RunDirectory
from elastic.train.checkpoint import (
    Checkpoint,
    ReportedCheckpoint,
    ReportedCheckpointStatus,
)
from elastic.train.metrics import checked, from_json, to_json
from elastic.train.uploading import UploadFunction, bring
from elastic.worker.base.mailboxes import WAIT_SLICE_S
from elastic.worker.checkpoint.delivery import NO_PART, CheckpointUploadMode
from elastic.worker.engine import train_call
from elastic.worker.engine.context import WorkerContext
from elastic.worker.engine.train_call import current_engine

if TYPE_CHECKING:
    from elastic.train.config import ScalingConfig
    from elastic.train.validation import ValidationTaskConfig
    from elastic.worker.engine.step_engine import StepEngine

log = logging.getLogger(__name__)

TRIAL = "trial"
"""Folder in the run directory for the script's own files."""
VALIDATION_POLL_S = 0.5
"""How often, in seconds, a rank that waits for validations polls storage."""


def require_context(what: str) -> WorkerContext:
    """Return the worker's context.

    Args:
        what: the call that needs it, for the error.

    Raises:
        UsageError: this process does not run a train function.
    """
    context = train_call.current()
    if context is None:
        raise UsageError(
            f"{what} was called outside a train function: pass the function to "
            f"TorchTrainer(...).fit(), or run the script with 'elastic submit'"
        )
    context.show_group()  # Who uses this library counts on the group.
    return context


def require_place(what: str) -> WorkerContext:
    """Return the worker's context in a group; a worker that is ahead of its group joins it first.

    Args:
        what: the call that needs it, for the error.

    Raises:
        UsageError: this process does not run a train function.
    """
    context = require_context(what)
    return context.join() if context.join is not None else context


def require_engine(what: str) -> StepEngine:
    """Return the step engine of the train function that runs.

    Args:
        what: the call that needs it, for the error.

    Raises:
        UsageError: this process does not run a train function, or runs it without one.
    """
    require_context(what)
    engine = current_engine()
    if engine is None:
        raise UsageError(f"{what}: this train function runs without a step engine")
    return engine


def working(what: str) -> contextlib.AbstractContextManager[None]:
    """Name work of one rank that the others wait for, such as an evaluation on rank 0.

        with train.working("evaluation"):
            score = external_evaluation(model)

    Work in Python is recognized without it. Work without visible progress, such as one long call
    into native code or waiting for another program, would count as a hang after
    `FailureConfig(hang_timeout_s=...)`; inside this block it never does, and `elastic status` shows
    the name.

    Args:
        what: a human-readable name.
    """
    context = train_call.current()
    return _working(context, what) if context is not None else contextlib.nullcontext()


@contextlib.contextmanager
def _working(context: WorkerContext, what: str) -> Iterator[None]:
    """Report it to the agent before and after: native code may block reports in between."""
    try:
        with context.activity.working(what):
            context.link.report_work()
            yield
    finally:
        context.link.report_work()


def is_driver() -> bool:
    """Return whether this process watches a run, rather than being one of its workers.

    A script that `elastic submit` or torchrun runs is executed by every worker; guard what should
    happen once, such as printing the result, with this function. Under torchrun rank 0's process
    is the driver.
    """
    if train_call.current() is not None:
        return False
    from elastic.worker.process.local import torchrun_rank

    return torchrun_rank() in (None, 0)


@dataclass
class TrialSize:
    """The size of the job of the trial that this process runs, if it follows the trainer's.

    Attributes:
        known: what the job was submitted with, None if the user has chosen that.
        asked: what a trainer has asked for instead.
    """

    known: ScalingConfig | None = None
    asked: ScalingConfig | None = None


size_of_trial = TrialSize()

UNSAID: Any = object()
"""Default of a report's `checkpoint`, to distinguish a missing argument from None."""


def report(
    metrics: Mapping[str, Any],
    checkpoint: Checkpoint | None = UNSAID,
    checkpoint_dir_name: str | None = None,
    checkpoint_upload_mode: CheckpointUploadMode = CheckpointUploadMode.SYNC,
    delete_local_checkpoint_after_upload: bool | None = None,
    checkpoint_upload_fn: UploadFunction | None = None,
    validation: bool | ValidationTaskConfig = False,
) -> None:
    """Report metrics, and a checkpoint if one is given.

    Without `checkpoint=` this is no barrier and costs microseconds: the metrics of every report
    are stored in the run directory. With `checkpoint=`, even None, all ranks must call it and wait
    for each other: their files are merged into one directory, which is committed once all of them
    are written; then all ranks continue, and see the same checkpoints. It is a boundary at which
    the group may change (the train function is then called again and `get_checkpoint` returns
    this one).

    Args:
        metrics: names to numbers, strings, or any JSON value; 0-dimensional tensors and NumPy
            scalars become numbers. NaN and infinite numbers are kept; the files in the run
            directory store them as text, such as "nan".
        checkpoint: this rank's files; None if this rank has none, and others may. With SYNC they
            are copied: the directory may be deleted afterwards.
        checkpoint_dir_name: name of its directory; by default one that is never used twice.
        checkpoint_upload_mode: SYNC returns when the checkpoint is committed; while the
            coordinator is down, after a second, and it is committed once the coordinator is back.
            ASYNC returns when all ranks have called and copies in the background, one checkpoint
            at a time: a second one waits for the first. Errors are raised by the next report, or
            at the end of the train function, which waits for the last upload; an upload in
            progress when the group changes is dropped, with a line in the log. Do not change the
            directory meanwhile. NO_UPLOAD takes a checkpoint that is in RUN/checkpoints already.
            The mode must be the same on all ranks.
        delete_local_checkpoint_after_upload: by default with ASYNC only.
        checkpoint_upload_fn: a custom upload: called with the checkpoint and the name of its
            directory, returns the uploaded checkpoint, in RUN/checkpoints.
        validation: True, or a `ValidationTaskConfig`: the function in the trainer's
            `validation_config` is called with the checkpoint, in a process beside training. What
            it returns is added to the checkpoint's metrics; until then retention keeps the
            checkpoint. If it raises, dies or times out, that is logged and recorded, and training
            continues. The train function ends once all validations have; resuming a run resumes
            its pending ones.

    Raises:
        UsageError: outside a train function, metrics that are not JSON-serializable, or a
            checkpoint that is none, is not where NO_UPLOAD expects it, or has different upload
            modes on the ranks; a validation without a checkpoint, or without a validation function.
        StorageError: the checkpoint could not be stored; the run directory keeps the last one.
    """
    context = require_place("train.report")
    if size_of_trial.asked is not None:
        return  # This is code that cleans up after a trainer that is not to train here.
    engine, send = current_engine(), context.report
    if engine is not None and engine.has_begun:
        if not engine.step_is_done():
            return
        send = engine.report
        logged = engine.run.logbook.take_averages().items()
        metrics = {name: x for name, x in logged if name[:1] != "_"} | dict(checked(metrics))
    text = to_json(metrics)
    requested = _requested(context, checkpoint, validation)
    if checkpoint is None or checkpoint is UNSAID:
        send(text, NO_PART if checkpoint is None else None, name=checkpoint_dir_name)
        return
    delivered = bring(
        checkpoint,
        checkpoint_upload_mode,
        delete_local=delete_local_checkpoint_after_upload,
        upload=checkpoint_upload_fn,
        validation=requested,
    )
    send(text, delivered, name=checkpoint_dir_name)


def _requested(
    context: WorkerContext,
    checkpoint: Checkpoint | None,
    validation: bool | ValidationTaskConfig,
) -> str:
    """Return the request to validate a checkpoint, "" for none.

    Raises:
        UsageError: there is no checkpoint, or no validation function.
    """
    if validation is False:
        return ""
    from elastic.train.validation import request_of

    if checkpoint is None or checkpoint is UNSAID:
        raise UsageError(
            "train.report: validation without a checkpoint: there is nothing to validate; pass "
            "checkpoint=..., or leave validation out"
        )
    if context.validator is not None and not context.validator.is_on:
        raise UsageError(
            "train.report: validation without a validation function: give the trainer one, "
            "TorchTrainer(..., validation_config=train.ValidationConfig(fn=...))"
        )
    return request_of(validation)


_begins_from: Checkpoint | None = None


@contextlib.contextmanager
def beginning_from(checkpoint: Checkpoint | None) -> Iterator[None]:
    """Make `get_checkpoint` return this one, in this process, until the run has one of its own."""
    global _begins_from
    _begins_from = checkpoint
    try:
        yield
    finally:
        _begins_from = None


def get_checkpoint() -> Checkpoint | None:
    """Return the newest reported checkpoint of this run that is recorded, None if there is none.

    Until a newer one is recorded, a resumed run returns that of an earlier attempt, and a run
    with `resume_from_checkpoint` returns that one. Reading it verifies it; see
    `Checkpoint.as_directory`.

    Raises:
        UsageError: outside a train function.
    """
    path = require_place("train.get_checkpoint").the_reporter().newest_checkpoint
    _note_read()
    return Checkpoint(path) if path else _begins_from


def _note_read() -> None:
    engine = train_call.current_engine()
    if engine is not None:
        engine.is_checkpoint_read = True


class CheckpointConsistencyMode(Enum):
    """What `get_all_reported_checkpoints` waits for."""

    COMMITTED = "COMMITTED"
    """Until this rank's reports are committed, those uploaded in the background included."""
    VALIDATED = "VALIDATED"
    """Until validations have ended, too."""


def get_all_reported_checkpoints(
    consistency_mode: CheckpointConsistencyMode = CheckpointConsistencyMode.VALIDATED,
    timeout_s: float | None = None,
) -> list[ReportedCheckpoint]:
    """Return all committed and retained checkpoints of this run that were reported, oldest first.

    This includes those of earlier attempts in the same run directory, but not one that was written
    after its group had ended and that the coordinator has not recorded. Read from storage, without
    waiting for other ranks: a rank sees its own reports at once.

    Args:
        consistency_mode: what to wait for; without validations that rarely takes time.
        timeout_s: after so many seconds the list is returned as it is, with a line in the log;
            each one's status shows whether it was validated. None: wait without a limit.

    Raises:
        UsageError: outside a train function, or consistency_mode is something else.
        StorageError: the run directory cannot be read.
    """
    context = require_place("train.get_all_reported_checkpoints")
    if not isinstance(consistency_mode, CheckpointConsistencyMode):
        raise UsageError(
            f"train.get_all_reported_checkpoints: consistency_mode={consistency_mode!r}: expected "
            f"CheckpointConsistencyMode.COMMITTED or CheckpointConsistencyMode.VALIDATED"
        )
    _note_read()
    if not context.run_path:
        return []
    run = RunDirectory(context.run_path)
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while context.the_reporter().is_uploading() and time.monotonic() < deadline:
        _pass_time(context, WAIT_SLICE_S)
    waits = context.validator is not None and context.validator.is_on
    while True:
        found = [
            ReportedCheckpoint(
                Checkpoint(run.checkpoint_path(name)), from_json(marker.metrics), marker.status
            )
            for name, marker in _counting(context, run)
        ]
        pending = [c for c in found if c.status is ReportedCheckpointStatus.PENDING_VALIDATION]
        if not pending or not waits or consistency_mode is CheckpointConsistencyMode.COMMITTED:
            return found
        if time.monotonic() >= deadline:
            log.warning("validations_awaited pending=%d seconds=%g", len(pending), timeout_s)
            return found
        _pass_time(context, VALIDATION_POLL_S)


def _counting(context: WorkerContext, run: RunDirectory) -> list[tuple[str, CheckpointMarker]]:
    """Return the reported checkpoints that are committed and retained."""
    reporter = context.the_reporter()
    _ = reporter.newest_checkpoint  # It is committed, with or without a marker.
    return reporter.kept(run.reported())


def wait_a_moment(context: WorkerContext) -> None:
    """Wait one slice for another rank, without being taken for hung."""
    _pass_time(context, WAIT_SLICE_S)


def _pass_time(context: WorkerContext, seconds: float) -> None:
    """Wait in slices that an interrupt can end; beats, so that the wait is not taken for a hang."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if context.activity.beats:  # At 0 its silence is not judged.
            context.activity.beats += 1
        time.sleep(WAIT_SLICE_S)


@dataclass(frozen=True)
class TrainContext:
    """This worker's place in the run, under Ray Train's names; always up to date."""

    @property
    def worker(self) -> WorkerContext:
        """Return the worker's own context."""
        return require_place("train.get_context")

    def get_experiment_name(self) -> str:
        """Return the run's name."""
        return self.worker.job_name

    def get_world_size(self) -> int:
        """Return the number of workers in the group."""
        return self.worker.world_size

    def get_world_rank(self) -> int:
        """Return this worker's rank, from 0."""
        return self.worker.world_rank

    def get_local_rank(self) -> int:
        """Return this worker's rank among those on its node."""
        return self.worker.local_rank

    def get_local_world_size(self) -> int:
        """Return the number of the group's workers on this node."""
        return self.worker.local_world_size

    def get_node_rank(self) -> int:
        """Return this node's rank among the group's nodes."""
        return self.worker.node_rank

    def get_num_nodes(self) -> int:
        """Return the number of nodes in the group."""
        return self.worker.num_nodes

    def get_generation(self) -> int:
        """Return the number of the group; it increases whenever the membership changes."""
        return self.worker.generation

    def get_global_batch_size(self) -> int:
        """Return the number of samples per step, B; the same at every world size.

        With a batch sampler of the script's own it is the number of batches.

        Raises:
            UsageError: no prepared loader has been read in a loop over `train.epochs()` yet.
        """
        return self._data().global_batch

    def get_micro_batch_size(self) -> int:
        """Return the number of samples per micro-batch; raises as `get_global_batch_size`.

        With a batch sampler of the script's own it is 1, the batch.
        """
        return self._data().micro_batch_size

    def get_num_micro_batches(self) -> int:
        """Return the number of micro-batches per step, V; raises as `get_global_batch_size`."""
        return self._data().num_micro_batches

    def get_epoch(self) -> int:
        """Return the number of complete passes over the data in this run."""
        return self._cursor().epoch

    def get_step(self) -> int:
        """Return the number of committed steps in this epoch."""
        if (engine := current_engine()) is not None:
            engine.note_asked()
        return self._cursor().step

    def _data(self) -> Data:
        require_context("train.get_context")
        engine = current_engine()
        if engine is None or engine.data is None:
            raise UsageError(
                "train.get_context: how a step is cut is known once a prepared loader is read in a "
                "loop over train.epochs()"
            )
        return engine.data

    def _cursor(self) -> Cursor:
        require_context("train.get_context")
        engine = current_engine()
        return engine.cursor if engine is not None else Cursor()

    def get_trial_dir(self) -> str:
        """Create and return a directory on this machine for the script's own files.

        It is RUN/trial where the run directory is on a file system, and otherwise a temporary one.
        Only files that are reported as a checkpoint become part of the run.
        """
        files = Files(self.worker.run_path) if self.worker.run_path else None
        if files is not None and files.is_local:
            path = Path(files.root) / TRIAL
        else:
            path = Path(tempfile.gettempdir()) / f"elastic-trial-{os.getuid()}" / self.worker.job_id
        path.mkdir(parents=True, exist_ok=True)
        return str(path)

    def get_storage(self) -> Storage:
        """Return the run directory: an fsspec path that knows where checkpoints are."""
        return Storage(self.worker.run_path)

    def get_metadata(self) -> dict[str, Any]:
        """Return the trainer's `metadata`."""
        return dict(require_engine("train.get_context").options.metadata)

    def get_trial_name(self) -> str:
        """Return the run's name: a run is Ray's trial."""
        return self.worker.job_name

    def get_trial_id(self) -> str:
        """Return the id of this attempt: that of its job."""
        return self.worker.job_id

    def get_trial_resources(self) -> dict[str, float]:
        """Return this worker's CPUs and GPUs, as far as it knows."""
        return {"CPU": 1.0, "GPU": float(len(self.worker.devices))}


class Storage(str):
    """The run directory as an fsspec path, with Ray's names for its parts.

    Those are paths in `storage_filesystem`: without the "s3://" of a URL, as in Ray.
    """

    __slots__ = ()

    @property
    def experiment_fs_path(self) -> str:
        """Return the path of the run directory."""
        return Files(str(self)).root

    @property
    def storage_filesystem(self) -> Any:
        """Return the fsspec file system that the run directory is in."""
        return Files(str(self)).fs

    def build_checkpoint_path_from_name(self, checkpoint_name: str) -> str:
        """Return the path of a checkpoint of this name, for example to write it for NO_UPLOAD."""
        return Files(RunDirectory(str(self)).checkpoint_path(checkpoint_name)).root


def get_context() -> TrainContext:
    """Return this worker's place in the run.

    Raises:
        UsageError: outside a train function.
    """
    require_context("train.get_context")
    return TrainContext()
