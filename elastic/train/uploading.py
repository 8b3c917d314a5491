"""Translates the checkpoint arguments of `train.report` into the worker's upload request."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from functools import partial

from elastic.errors import UsageError
from elastic.train.checkpoint import Checkpoint
from elastic.worker.checkpoint.delivery import CheckpointUploadMode, DeliveredParts

UploadFunction = Callable[[Checkpoint, str], Checkpoint]


def bring(
    checkpoint: Checkpoint,
    mode: CheckpointUploadMode,
    *,
    delete_local: bool | None,
    upload: UploadFunction | None,
    validation: str = "",
) -> DeliveredParts:
    """Return this rank's part of a checkpoint.

    Args:
        checkpoint: with this rank's files.
        mode: see `train.report`.
        delete_local: whether its directory is deleted afterwards; None: only with ASYNC.
        upload: the user's upload function, None for ours.
        validation: the validation request, "" for none.

    Raises:
        UsageError: an argument is of another type, or two arguments contradict each other.
        StorageError: a checkpoint in other storage cannot be copied to this machine.
    """
    if not isinstance(checkpoint, Checkpoint):
        raise UsageError(
            f"train.report: checkpoint is a {type(checkpoint).__name__}, expected a Checkpoint; "
            f"use Checkpoint.from_directory(path)"
        )
    if not isinstance(mode, CheckpointUploadMode):
        raise UsageError(
            f"train.report: checkpoint_upload_mode={mode!r}: expected "
            f"{', '.join(f'CheckpointUploadMode.{m.name}' for m in CheckpointUploadMode)}"
        )
    if mode is CheckpointUploadMode.NO_UPLOAD:
        if upload is not None:
            raise UsageError(
                "train.report: checkpoint_upload_fn with checkpoint_upload_mode=NO_UPLOAD: nothing "
                "is uploaded, what the checkpoint points at is all there is; leave it out"
            )
        return DeliveredParts(checkpoint.url, mode, validation=validation)
    goes = mode is CheckpointUploadMode.ASYNC if delete_local is None else delete_local
    if upload is not None:
        return DeliveredParts(
            checkpoint.url,
            mode,
            upload=lambda name: _uploaded(upload, checkpoint, name),
            release=partial(
                _let_go, checkpoint, checkpoint.path if goes and checkpoint.is_local else ""
            ),
            validation=validation,
        )
    if not checkpoint.is_local:
        checkpoint, goes = Checkpoint.temporary(checkpoint.to_directory()), False
    path = checkpoint.path
    release = partial(_let_go, checkpoint, path if goes else "")
    return DeliveredParts(path, mode, release=release, validation=validation)


def _uploaded(upload: UploadFunction, checkpoint: Checkpoint, name: str) -> str:
    found = upload(checkpoint, name)
    if not isinstance(found, Checkpoint):
        raise UsageError(
            f"it returned a {type(found).__name__}, expected the Checkpoint as it lies in the run "
            f"directory"
        )
    return found.url


def _let_go(checkpoint: Checkpoint, path: str) -> None:
    """Delete a local directory, "" for none; a partial of it keeps the checkpoint alive."""
    del checkpoint
    if path:
        with contextlib.suppress(OSError):
            shutil.rmtree(path)
