"""Which saved state a group continues from when no member has one: memory of a node, or storage.

Rule: which one is read is the same for all members: it follows from rows that everyone has sent to
everyone.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from elastic.core.policy.cursor import Cursor
from elastic.errors import StorageError, check
from elastic.storage.marker import CheckpointMarker
from elastic.storage.run_directory import RunDirectory
from elastic.worker.checkpoint.checkpoint_reader import read_checkpoint
from elastic.worker.checkpoint.snapshotter import Snapshotter
from elastic.worker.engine.context import WorkerContext
from elastic.worker.engine.peer_copies import PeerCopies
from elastic.worker.engine.sharded_restore import ShardedRestorer
from elastic.worker.reduce.step_metadata import send_metadata
from elastic.worker.state.sharded_state import with_expected
from elastic.worker.state.train_state import State, TrainState

log = logging.getLogger(__name__)

T = TypeVar("T")

UNKNOWN = -2
"""Stands for the steps of the newest checkpoint where storage cannot be asked."""
Candidate = tuple[int, str, CheckpointMarker]
"""Steps of the run, name, marker."""
Found = tuple[str, State]
"""What distinguishes a saved state from others of as many steps, and the state."""


class StateRestorer:
    """Reads saved states, and keeps what it has read until a step has followed.

    A group may break while its members read, and they must not begin again: reading may take longer
    than the time between kills.
    """

    def __init__(self, objects: TrainState) -> None:
        self._objects = objects
        self._read: Found | None = None
        self._read_shards: dict[tuple[str, int, int], State] = {}

    def forget(self) -> None:
        """A step has followed what was read."""
        self._read = None
        self._read_shards.clear()

    def restore(
        self, group: Any, begin: Cursor, context: WorkerContext, snapshotter: Snapshotter
    ) -> State | None:
        """Return the newest state that this node's memory or storage has.

        Every member of a group in which none has the state of the run calls this. A member that
        finds nothing, or less than others, receives the state from them afterwards.

        Args:
            group: the process group that is formed.
            begin: where the train function begins by itself; an earlier state is passed over.
            context: of this worker in the group.
            snapshotter: has what is in this node's memory.

        Returns:
            What was saved, None if there is none for us.

        Raises:
            RuntimeError: the group broke.
            StorageError: there are checkpoints, and no member can read any of them.
        """
        if self._objects.is_sharded:
            return self._restore_shards(group, begin, context, snapshotter)
        working = context.activity.working
        run = RunDirectory(context.run_path) if context.run_path else None
        problems: list[str] = []

        def listed() -> list[Candidate] | None:
            with working(f"lists the checkpoints in {context.run_path}"):
                return (
                    _attempt(lambda: _candidates(run, context.saved), context.run_path, problems)
                    if run
                    else []
                )

        known = listed() if context.world_rank == 0 else []
        # Whatever fails on one member alone is no reason to keep the others waiting in a row.
        mine = UNKNOWN if known is None else max((steps for steps, _, _ in known), default=-1)
        held = snapshotter.held()
        copies = PeerCopies.of(context)
        kept = int(self._read[1]["steps"]) if self._read is not None else UNKNOWN
        rows = send_metadata(group, [float(mine), float(held), float(copies.newest()), float(kept)])
        newest, best_held = int(rows[0][0]), int(max(row[1] for row in rows))
        best_copy, best_kept = (int(max(row[i] for row in rows)) for i in (2, 3))
        fetches = [int(row[2]) for row in rows].index(best_copy) == context.world_rank

        def from_memory() -> Found | None:
            if held < best_held:
                return None
            with working("reads a snapshot in this node's memory"):
                return _attempt(lambda: snapshotter.read_held(held), "this node's memory", problems)

        def from_copy() -> Found | None:
            with working("reads a snapshot in another node's memory"):
                return _attempt(copies.read, "another node's memory", problems) if fetches else None

        def from_storage(above: int, most: int) -> Found | None:
            wanted = [one for one in known or listed() or () if above < one[0] <= most]
            with working(f"reads a checkpoint of {context.run_path}"):
                self._read = _read_newest(run, wanted, problems) if run else None
            return self._read

        # What is newest first; if they are equal, what is nearest.
        levels = [(best_held, from_memory), (best_copy, from_copy)]
        levels.sort(key=lambda level: -level[0])
        is_kept = best_kept >= max(newest, best_held, best_copy, 0)
        sources: list[tuple[bool, Callable[[], Found | None]]] = []
        sources.append((is_kept, lambda: self._read if kept == best_kept else None))
        most = newest
        for steps, read in levels:
            sources.append((newest > steps, partial(from_storage, steps, most)))
            sources.append((steps >= 0, read))
            most = min(most, steps)
        sources.append((newest >= 0, partial(from_storage, UNKNOWN, most)))
        for _, read in [source for source in sources if source[0]]:
            is_over, state = _agreed(group, read())
            if is_over:
                return _unless_before(state, begin)
        if max(newest, best_held, best_copy) >= 0 or newest == UNKNOWN:
            raise _none_readable(context.run_path, problems)
        return None

    def _restore_shards(
        self, group: Any, begin: Cursor, context: WorkerContext, snapshotter: Snapshotter
    ) -> State | None:
        """Do the same for a model of which every member has rows; all come to them, or none."""
        path, rank, working = context.run_path, context.world_rank, context.activity.working
        run = RunDirectory(path) if path else None
        objects = self._objects
        ours = {"objects": with_expected(objects.take(), objects.optimizers)}

        def listed() -> Sequence[Candidate] | None:
            if run is None:
                return []
            with working(f"lists the checkpoints in {path}"):
                return _attempt(lambda: _candidates(run, context.saved), path, restorer.problems)

        def read(name: str, marker: CheckpointMarker | None) -> State:
            check(run is not None, "a checkpoint without a run directory")
            there = cast("RunDirectory", run)
            if marker is None and (marker := there.marker(name)) is None:
                raise ValueError("others list it, and it is not there for this worker")
            ours_of_it = name, rank, group.size()
            if ours_of_it not in self._read_shards:
                with working(f"reads its part of checkpoint {name} of {path}"):
                    state = read_checkpoint(there, name, marker, ours=ours, rank=rank)
                self._read_shards = {ours_of_it: state}
            return self._read_shards[ours_of_it]

        copies = PeerCopies.of(context)
        restorer = ShardedRestorer(
            group, snapshotter, ours, listed=listed, read=read, copies=copies
        )
        state, is_any = restorer.restore()
        if state is None and is_any:
            raise _none_readable(path, restorer.problems)
        return _unless_before(state, begin)


def _none_readable(path: str, problems: Sequence[str]) -> StorageError:
    return StorageError(
        f"{path}: the checkpoints of this run cannot be read: "
        f"{'; '.join(problems) or 'see the other workers'}; let this storage be reached, "
        f"or move them away to begin anew"
    )


def _agreed(group: Any, found: Found | None) -> tuple[bool, State | None]:
    """Return whether any member has found a state, and ours, if all continue from that.

    Members may find different things, if one of them cannot read the newest. Those of as many steps
    need not be the same: after a loss, steps are done again. Others receive it.
    """
    steps, name = (found[1]["steps"], zlib.crc32(found[0].encode())) if found else (-1, 0)
    rows = [(row[0], row[1]) for row in send_metadata(group, [float(steps), float(name)])]
    best = max(rows, key=lambda row: row[0])  # Of equal ones the lowest rank's.
    is_it = found is not None and best == (steps, name)
    return best[0] >= 0, found[1] if found is not None and is_it else None


def _unless_before(state: State | None, begin: Cursor) -> State | None:
    if state is not None and Cursor(*state["cursor"]) < begin:
        log.info("restore_skipped: the train function begins at epoch %d itself", begin.epoch)
        return None
    return state


def _candidates(run: RunDirectory, recorded: str = "") -> list[Candidate]:
    """Return the automatic checkpoints that count, newest first.

    Args:
        run: the run directory.
        recorded: path of the newest one, as the coordinator knows it: the one that had it recorded
            may have been killed before its marker was written.
    """
    unmarked = []
    if name := run.name_of(recorded):
        try:
            run.finish(name)
        except StorageError as error:
            # Storage that refuses writes can be read all the same.
            log.warning("marker_missing name=%s error=%r", name, str(error))
            if (prepared := run.prepared(name)) is not None:
                unmarked.append((name, prepared))
    found = [*unmarked, *reversed(run.automatic())]
    return [(int(marker.about("steps", 0)), name, marker) for name, marker in found]


def _read_newest(
    run: RunDirectory, candidates: Sequence[Candidate], problems: list[str]
) -> Found | None:
    """Return the newest state that is whole, None if none is; problems are added."""
    for _, name, marker in candidates:
        path = run.checkpoint_path(name)
        state = _attempt(lambda n=name, m=marker: read_checkpoint(run, n, m), path, problems)  # type: ignore[misc]
        if state is not None:
            epoch, step = state["cursor"]
            log.info("restored path=%s epoch=%d step=%d", path, epoch, step)
            return name, state
    return None


def _attempt(read: Callable[[], T], where: str, problems: list[str]) -> T | None:
    try:
        return read()
    except Exception as error:  # Bytes that are no state raise whatever their reader meets.
        problems.append(f"{where}: {error}")
        log.warning("checkpoint_refused path=%s reason=%r: it is not used", where, str(error))
        return None
