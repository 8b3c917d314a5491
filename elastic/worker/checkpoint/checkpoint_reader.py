"""Reads one automatic checkpoint: all of it, or of a sharded model what is ours.

Rule: a byte that is not what was written is an error, by the name of its file, before anything of
the run's state has changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic.storage.marker import CheckpointMarker
from elastic.storage.run_directory import RunDirectory
from elastic.worker.checkpoint import checkpoint_files
from elastic.worker.state.packing import read_skeleton, tensors_of, unpack
from elastic.worker.state.sharded_state import like, places_of, rows_of
from elastic.worker.state.train_state import State


def read_checkpoint(
    run: RunDirectory,
    name: str,
    marker: CheckpointMarker,
    *,
    ours: Mapping[str, Any] | None = None,
    rank: int = 0,
) -> State:
    """Return the state in a checkpoint, after every byte of it was checked; unpickles nothing.

    Of tensors that are sharded in `ours`, our state, only our rows are read, and placed as ours
    are; parts that have none of them are left to those who need them. StorageError if a file cannot
    be read; ValueError, by name, if it is not what was written.
    """
    files = run.checkpoint(name)
    by_path = {file.path: file for file in marker.files}
    text = checkpoint_files.read_checked(files, by_path[checkpoint_files.MANIFEST])
    manifest = checkpoint_files.Manifest.from_json(text)
    skeleton = read_skeleton(
        checkpoint_files.read_checked(files, by_path[checkpoint_files.SKELETON])
    )
    if tuple(tensors_of(skeleton)) != manifest.specs:
        raise ValueError(f"{checkpoint_files.MANIFEST} is of another state")
    places = places_of(skeleton, ours) if ours is not None else {}
    held = {number: rows_of(one, rank) for number, one in places.items()}
    wanted = {number: rows for number, rows in held.items() if rows is not None}
    tensors = checkpoint_files.read_tensors(files, manifest, wanted)
    for number, one in places.items():
        tensors[number] = like(one, tensors[number])
    state: State = unpack(skeleton, tensors)
    # Also what only others read: storage that has lost a bit there is not to be relied on.
    used = {checkpoint_files.MANIFEST, checkpoint_files.SKELETON}
    used |= {part.file.path for part in manifest.parts}
    for path in by_path.keys() - used:
        checkpoint_files.read_checked(files, by_path[path])
    return state
