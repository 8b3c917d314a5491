"""Which checkpoint can be relied on: refusing one whose files are not what its marker says.

Rule: what does not fit is refused by the file's name; nothing is guessed, and nothing repaired.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence

from elastic.core.events.coordinator import JobRecord
from elastic.core.world import CheckpointRecord
from elastic.errors import DamagedCheckpoint
from elastic.storage.files import Files
from elastic.storage.marker import DAMAGED, MARKER, CheckpointMarker
from elastic.storage.run_directory import RunDirectory
from elastic.storage.verify import damage_of


def read_marker(checkpoint: Files) -> CheckpointMarker | None:
    """Return the marker of a checkpoint, None if it has none (it was never committed).

    Raises:
        DamagedCheckpoint: there is one, and it is torn or changed, or there was one, which was
            found to be damaged.
        StorageError: storage cannot be read.
    """
    if not checkpoint.exists(MARKER):
        if checkpoint.exists(DAMAGED):
            reason = checkpoint.read(DAMAGED).decode(errors="replace")
            raise DamagedCheckpoint(
                f"checkpoint {checkpoint.path} was found damaged before: {reason}"
            )
        return None
    try:
        return CheckpointMarker.from_json(checkpoint.read(MARKER).decode())
    except ValueError as error:
        raise DamagedCheckpoint(
            f"checkpoint {checkpoint.path} is damaged: its marker {MARKER} cannot be read "
            f"({error}); use an older checkpoint"
        ) from None


def verify(checkpoint: Files, marker: CheckpointMarker) -> None:
    """Read every file that a marker names, and compare size and checksum.

    Args:
        checkpoint: the files; it may be a copy of what was committed.
        marker: what they should be.

    Raises:
        DamagedCheckpoint: naming the first file that is missing, torn or changed.
        StorageError: storage cannot be read.
    """
    for file in marker.files:
        how = damage_of(checkpoint, file)
        if how:
            raise _damaged(checkpoint, f"file {file.path} is {how}")


def _damaged(checkpoint: Files, what: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(
        f"checkpoint {checkpoint.path} is damaged: {what}; use an older checkpoint"
    )


def newest_valid(
    run: RunDirectory, say: Callable[[str], None], job: JobRecord | None = None
) -> tuple[str, CheckpointMarker] | None:
    """Return the newest reported checkpoint of a run that is not damaged, None if there is none.

    A damaged one is set aside, so that it is not looked at again and its name is free. Where the
    coordinator knows the last attempt, its records say what counts of it: whoever had one recorded
    may have been killed before its marker was written. A marker that no record stands behind is
    passed over.

    Args:
        run: whose attempts are over.
        say: told of each that is passed over, and why.
        job: the last attempt, None if the coordinator does not know it.

    Raises:
        StorageError: storage cannot be read or written.
    """
    records = job.checkpoints if job is not None else ()
    recorded = {_name(record) for record in records}
    for record in _newest(records):
        run.finish(_name(record))
    for name, marker in reversed(run.reported()):
        if job is not None and marker.job_id == job.spec.job_id and name not in recorded:
            say(
                f"checkpoint {run.checkpoint_path(name)} is not among the coordinator's records: "
                f"it is passed over"
            )
            continue
        try:
            verify(run.checkpoint(name), marker)
        except DamagedCheckpoint as error:
            run.set_aside(name, str(error))
            say(f"{error}: it is passed over")
            continue
        return name, marker
    return None


def _name(record: CheckpointRecord) -> str:
    return record.path.rpartition("/")[2]


def _newest(records: Sequence[CheckpointRecord]) -> Iterator[CheckpointRecord]:
    """Yield the newest of each kind."""
    for is_automatic in (False, True):
        yield from [record for record in records if record.automatic is is_automatic][-1:]


def place_of(marker: CheckpointMarker) -> str:
    """Return where in the run a checkpoint was made, for people: "epoch 3, step 120"."""
    metrics = json.loads(marker.metrics)
    told = [f"{name} {metrics[name]}" for name in ("epoch", "step") if name in metrics]
    return ", ".join(told) or f"generation {marker.generation}, report {marker.index}"
