"""Copies a checkpoint for a trial that continues from another one, which keeps training.

STUDY/taken/RUN/NAME/    the checkpoint NAME from which the run RUN starts
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic.core.study import Trial
from elastic.storage.files import Files
from elastic.storage.marker import MARKER, OURS
from elastic.storage.outputs import CHUNK_BYTES
from elastic.storage.run_directory import RunDirectory

TAKEN = "taken"


@dataclass(frozen=True)
class Taken:
    """A copy of a checkpoint.

    Attributes:
        name: the checkpoint's name.
        path: the copy's path.
    """

    name: str
    path: str


def next_run(trial: Trial) -> str:
    """Return the name of the run in which a trial continues from another one's checkpoint."""
    return f"{trial.name}-{len(trial.attempts) + 1}"


def take_newest(run_path: str, target: str) -> Taken | None:
    """Copy the newest reported checkpoint of a run.

    Args:
        run_path: the run directory.
        target: directory in which the copy is created, with the checkpoint's name.

    Returns:
        The copy, None if the run has reported no checkpoint.

    Raises:
        StorageError: a file cannot be read or written.
    """
    found = RunDirectory(run_path).reported()
    if not found:
        return None
    name = found[-1][0]
    source, copy = Files(f"{run_path}/checkpoints/{name}"), Files(f"{target}/{name}")
    # The marker is copied last: without it an incomplete copy does not count as a checkpoint.
    files = sorted((file.path for file in source.tree()), key=lambda path: path == MARKER)
    for path in files:
        if path in OURS and path != MARKER:
            continue
        with source.reading(path) as opened, copy.writing(path) as output:
            while chunk := opened.read(CHUNK_BYTES):
                output.write(chunk)
    return Taken(name, copy.path)
