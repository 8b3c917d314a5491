"""Finds the newest valid checkpoint: refuses one whose files differ from its marker.

Rule: a mismatch is refused with the file's name; nothing is guessed, and nothing repaired.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence

from elastic.core.facts import CheckpointRecord
from elastic.core.records import JobRecord
from elastic.errors import DamagedCheckpoint, StorageError
from elastic.storage.files import Files
from elastic.storage.marker import DAMAGED, MARKER, CheckpointMarker
from elastic.storage.run_directory import RunDirectory
from elastic.storage.verify import damage_of

log = logging.getLogger(__name__)


def read_marker(checkpoint: Files) -> CheckpointMarker | None:
    """Return the marker of a checkpoint, None if it has none (it was never committed).

    Raises:
        DamagedCheckpoint: the marker is torn or changed, or the checkpoint was found damaged
            before.
    """
    return _marker_of(checkpoint, checkpoint.read_if_there(MARKER))


def _marker_of(checkpoint: Files, text: bytes | None) -> CheckpointMarker | None:
    """Return the marker with this text; see `read_marker`."""
    if text is None:
        if checkpoint.exists(DAMAGED):
            reason = checkpoint.read(DAMAGED).decode(errors="replace")
            raise DamagedCheckpoint(
                f"checkpoint {checkpoint.path} was found damaged before: {reason}"
            )
        return None
    try:
        return CheckpointMarker.from_json(text.decode())
    except ValueError as error:
        raise DamagedCheckpoint(
            f"checkpoint {checkpoint.path} is damaged: its marker {MARKER} cannot be read "
            f"({error}); use an older checkpoint"
        ) from None


def verify(checkpoint: Files, marker: CheckpointMarker) -> None:
    """Read every file that a marker names, and compare size and checksum.

    Args:
        checkpoint: the files; may be a copy of the committed checkpoint.
        marker: their expected sizes and checksums.

    Raises:
        DamagedCheckpoint: naming the first file that is missing, torn or changed.
    """
    for file in marker.files:
        how = damage_of(checkpoint, file)
        if how:
            raise _damaged(checkpoint, f"file {file.path} is {how}")


def find_damage(run: RunDirectory, name: str) -> str:
    """Return how a recorded checkpoint of a run is damaged, "" if it is whole.

    A damaged one is set aside, so that it is not checked again and its name is free.

    Raises:
        StorageError: it cannot be read now, or is not there, which storage that is away looks like,
            or another one has its name since.
    """
    checkpoint = run.checkpoint(name)
    text = checkpoint.read_if_there(MARKER)
    try:
        marker = _marker_of(checkpoint, text)
        if marker is None:
            raise StorageError(f"checkpoint {checkpoint.path} has no marker {MARKER}")
        verify(checkpoint, marker)
    except DamagedCheckpoint as error:
        now = checkpoint.read_if_there(MARKER)
        if now is not None and now == text:
            try:
                run.set_aside(name, str(error))
            except StorageError as refused:  # By a full disk, say: it is damaged all the same.
                log.warning("set_aside_failed path=%s error=%r", checkpoint.path, str(refused))
        elif now is not None or not checkpoint.exists(DAMAGED):
            raise StorageError(f"checkpoint {checkpoint.path} is gone, or another one") from error
        return str(error)
    return ""


def _damaged(checkpoint: Files, what: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(
        f"checkpoint {checkpoint.path} is damaged: {what}; use an older checkpoint"
    )


def newest_valid(
    run: RunDirectory, report: Callable[[str], None], job: JobRecord | None = None
) -> tuple[str, CheckpointMarker] | None:
    """Return the newest reported checkpoint of a run that is not damaged, None if there is none.

    A damaged one is set aside. If the coordinator knows the last attempt, its records decide which
    of its checkpoints are committed: a worker may have been killed between the record and the
    marker, and a marker without a record is skipped.

    Args:
        run: a run whose attempts have ended.
        report: receives a text for each that is skipped, with the reason.
        job: the last attempt, None if the coordinator does not know it.
    """
    records = job.checkpoints if job is not None else ()
    recorded = {_name(record) for record in records}
    for record in _newest(records):
        run.finish(_name(record))
    for name, marker in reversed(run.reported()):
        if job is not None and marker.job_id == job.spec.job_id and name not in recorded:
            report(
                f"checkpoint {run.checkpoint_path(name)} is not among the coordinator's records: "
                f"it is passed over"
            )
            continue
        damage = find_damage(run, name)
        if damage:
            report(f"{damage}: it is passed over")
            continue
        return name, marker
    return None


def _name(record: CheckpointRecord) -> str:
    return record.path.rpartition("/")[2]


def _newest(records: Sequence[CheckpointRecord]) -> Iterator[CheckpointRecord]:
    """Yield the newest reported and the newest automatic checkpoint."""
    for is_automatic in (False, True):
        yield from [record for record in records if record.automatic is is_automatic][-1:]


def place_of(marker: CheckpointMarker) -> str:
    """Return the place in the run of a checkpoint, as text: "epoch 3, step 120"."""
    metrics = json.loads(marker.metrics)
    parts = [f"{name} {metrics[name]}" for name in ("epoch", "step") if name in metrics]
    return ", ".join(parts) or f"generation {marker.generation}, report {marker.index}"
