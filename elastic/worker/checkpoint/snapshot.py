"""A state of the run in memory, on its way to storage."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from elastic.core.facts import JobId
from elastic.core.policy.cursor import Cursor
from elastic.core.policy.recovery import SavedPosition
from elastic.core.policy.shares import TensorRows
from elastic.runtime.snapshot_memory import SnapshotMark
from elastic.storage.run_directory import AUTOMATIC
from elastic.worker.state.arena import SnapshotSlot, StateLayout

POLL_S_MIN, POLL_S_MAX = 0.01, 0.5


@dataclass(frozen=True)
class RankInfo:
    """Where this worker is in its group, as far as copies and parts are concerned.

    Attributes:
        local_rank, local_world_size: among the group's workers on this node.
    """

    generation: int = 0
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


class SnapshotId(NamedTuple):
    """Which snapshot of a run one is; these numbers, in this order, are part of the run's state.

    Attributes:
        number: of it in the run, >= 1; 0 for none.
        steps: committed in the run when it was taken.
        generation: of the group that took it.
    """

    number: int = 0
    steps: int = 0
    generation: int = 0

    @property
    def name(self) -> str:
        """Return its name, the same on all members and never used twice in a job."""
        return f"s{self.steps:09d}-g{self.generation:06d}-{self.number:06d}"


@dataclass(frozen=True)
class StateSnapshot:
    """A state of the run in this node's memory, and what is to be done with it.

    Attributes:
        pieces: what this rank writes of it.
        skeleton: what is no tensor.
        aliases: other names of shared parameters, by model.
        done: set once it is durable, or given up.
        request: number of the newest checkpoint request that it serves.
        prints: checksums of what must be alike on all ranks; see `replica_checksums`.
    """

    generation: int
    rank: int
    world_size: int
    mark: SnapshotMark
    slot: SnapshotSlot
    layout: StateLayout
    pieces: tuple[TensorRows, ...]
    skeleton: bytes
    cursor: Cursor
    about: Mapping[str, Any]
    aliases: tuple[Mapping[str, str], ...]
    done: threading.Event
    request: int = 0
    prints: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return SnapshotId(self.mark.number, self.mark.steps, self.generation).name


def position_in(name: str) -> SavedPosition | None:
    """Return what the name of a checkpoint says of it, None if it is of another kind."""
    match = re.search(r"-s(\d+)-g(\d+)-\d+$", name)
    return SavedPosition(int(match[2]), int(match[1])) if match else None


def position_of(path: str, job_id: JobId) -> SavedPosition:
    """Return the position of an automatic checkpoint of this job; for other paths that of none."""
    name = path.rpartition("/")[2]
    known = position_in(name) if name.startswith(f"{AUTOMATIC}{job_id}-s") else None
    return known or SavedPosition()


class CheckpointAbandoned(Exception):
    """A checkpoint comes to nothing, and training goes on."""


def polls(timeout_s: float) -> Iterator[None]:
    """Yield until the time is over, less and less often."""
    deadline, pause_s = time.monotonic() + timeout_s, POLL_S_MIN
    while True:
        yield
        if time.monotonic() >= deadline:
            return
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, POLL_S_MAX)
