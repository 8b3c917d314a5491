"""The step engine's side of automatic checkpoints: when one is taken, and how one is read again.

Rule: whether a snapshot is taken, and which one is read, is the same for all members: both follow
from rows that everyone has sent to everyone.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from enum import Enum
from functools import partial
from typing import Any, TypeVar, cast

from elastic.core.events.worker import CopiesRequested, MicroBatchesDeclared, RequestLeave
from elastic.core.policy.cursor import Cursor
from elastic.core.policy.recovery import SavedPosition
from elastic.core.policy.streams import Data
from elastic.errors import StorageError, UsageError, check
from elastic.storage.marker import CheckpointMarker
from elastic.storage.run_directory import AUTOMATIC, RunDirectory
from elastic.worker.base.mailboxes import WAIT_SLICE_S
from elastic.worker.checkpoint.checkpoint_reader import read_checkpoint
from elastic.worker.checkpoint.snapshot import RankInfo, position_in
from elastic.worker.checkpoint.snapshotter import FINISH_S, LEAVING_S, Snapshotter
from elastic.worker.data.stream_book import StreamBook
from elastic.worker.engine.context import WorkerContext
from elastic.worker.engine.logbook import Logbook
from elastic.worker.engine.peer_copies import PeerCopies
from elastic.worker.engine.recovery_modes import ResumeState
from elastic.worker.engine.sharded_restore import ShardedRestorer
from elastic.worker.reduce.step_metadata import StepMetadata, send_metadata
from elastic.worker.state.replica_checksums import PerRankState
from elastic.worker.state.sharded_state import with_expected
from elastic.worker.state.train_state import State, TrainState

log = logging.getLogger(__name__)

T = TypeVar("T")

WARM_UP_AT = 2
"""Steps of this process after which memory for snapshots is found: a recovery is over by then."""
FIRST_COPY_AT = WARM_UP_AT + 1
"""Steps of a group after which the rows of a sharded model, dealt anew, are copied at first."""


class CheckpointScheduler:
    """Automatic checkpoints of one call of the train function.

    Attributes:
        steps: committed in the run.
        begun: the last epoch whose code before the pass has run, -1 if none.
        is_due: a snapshot is to be taken at this boundary.
        releases: all members leave at this boundary, and none continues soon.
    """

    def __init__(self, objects: TrainState, logbook: Logbook, streams: StreamBook) -> None:
        """Begin before the first step.

        Args:
            objects: what the train function has prepared and registered.
            logbook: what it has logged.
            streams: what is known of a dataset that is read as streams.
        """
        self.steps, self.begun = 0, -1
        self.is_due = False
        self._is_stored = False
        self.releases = False
        self._boundaries, self._steps_here, self._requested_in, self._is_sharded = 0, 0, 0, False
        self._logbook, self._streams = logbook, streams
        self._objects = objects
        self._snapshotter: Snapshotter | None = None
        self._context: WorkerContext | None = None
        # What was read last and no step has followed yet. A group may break while its members
        # read, and they must not begin again: reading may take longer than the time between kills.
        self._read: Found | None = None
        self._read_shards: dict[tuple[str, int, int], State] = {}
        self._options: Mapping[str, Any] = {}
        self._data: Mapping[str, Any] = {}

    @property
    def is_sharded(self) -> bool:
        """Return whether every member has rows of the model, and none all of it."""
        return self._objects.is_sharded

    def go_on(self, left: ResumeState) -> None:
        """Continue from where an earlier call of the train function stood."""
        self._logbook = left.logbook
        self.steps = left.steps
        self.begun = left.begun
        self._data = _plain(left.data) if left.data is not None else {}

    def configure(self, options: Mapping[str, Any]) -> None:
        """Take what the user chose."""
        self._options = options
        if self._snapshotter is not None:
            self._snapshotter.configure(options)

    def enter(self, context: WorkerContext) -> None:
        self._context = context
        self._snapshotter = context.snapshotter
        self._steps_here = 0
        if self._snapshotter is not None:
            self._snapshotter.configure(self._options)
            self._snapshotter.enter(
                RankInfo(
                    context.generation,
                    context.world_rank,
                    context.world_size,
                    context.local_rank,
                    context.local_world_size,
                )
            )

    # ------------------------------------------------------------------- saving

    def flags(self, leave_request: RequestLeave | None) -> tuple[bool, bool, bool]:
        """Return what we send with a step, after which we know of this request to leave.

        These are `saves`, `busy` and `releases` of its row.
        """
        snapshotter = self._snapshotter
        if snapshotter is None or self._context is None:
            return False, True, False
        releases = leave_request is not None and leave_request.saves
        return snapshotter.wants(self.steps + 1, self._request()), snapshotter.is_busy(), releases

    def committed(self, rows: Sequence[StepMetadata]) -> None:
        """Count a step, and decide from everyone's rows whether it is saved."""
        self.steps += 1
        self._steps_here += 1
        self._read = None
        self._read_shards.clear()
        self.releases = any(row.releases for row in rows)
        self._is_stored = self.releases or any(row.saves for row in rows)
        has_room = self.releases or not any(row.busy for row in rows)  # A pause waits for room.
        self.is_due = (self._is_stored or self._is_copied()) and has_room

    def _is_copied(self) -> bool:
        """Decide whether the state is for another node; notify the coordinator that we want it."""
        snapshotter, context = self._snapshotter, self._context
        if snapshotter is None or context is None or not snapshotter.copies.is_on:
            return False
        if self._requested_in != context.generation:
            self._requested_in, self._is_sharded = context.generation, self.is_sharded
            if self._is_sharded:
                snapshotter.await_copies()
            context.link.post(CopiesRequested(snapshotter.copies.every_n_steps, self._is_sharded))
        is_first = snapshotter.last_generation != context.generation
        if self._is_sharded and is_first and self._steps_here >= FIRST_COPY_AT:
            return True  # Until then a loss would be the second of what the group has gone on from.
        return snapshotter.wants_copy(self.steps)

    def at_boundary(
        self,
        cursor: Cursor,
        data: Data | None,
        is_over: Callable[[], bool],
        *,
        goes_on: bool = False,
    ) -> None:
        """Take a snapshot if one is due: the user's code for the step is through.

        Args:
            cursor: the next step.
            data: how the data is cut.
            is_over: whether the group is; then storage is not waited for.
            goes_on: the caller calls `settle` before the state changes, or the script continues
                elsewhere than with the next step.
        """
        snapshotter = self._snapshotter
        if snapshotter is None:
            return
        if not self.is_due:
            self._boundaries += 1
            if self._boundaries == WARM_UP_AT:
                self._try(lambda: snapshotter.warm_up(lambda: self.take(cursor, data)))
            return
        self.is_due, request = False, self._request()
        goes_on = goes_on and snapshotter.is_async and not self.releases
        if self.releases:
            snapshotter.wait_for_room(lambda: self._goes_on(is_over), LEAVING_S)

        def take() -> None:
            done = snapshotter.take(
                lambda: self.take(cursor, data),
                cursor,
                self.steps,
                request=request,
                durable=self._is_stored,  # Not by our own plan or request: it may reach some later.
                about=self._logbook.latest,
                aliases=self._objects.aliases(),
                own=PerRankState(self._objects.caches(), self._objects.own),
                still=self._objects.still_between_steps() if goes_on else None,
            )
            while not snapshotter.is_async and not done.wait(WAIT_SLICE_S) and not is_over():
                self._show_progress()

        self._try(take)

    def _show_progress(self) -> None:
        """Count a wait for storage as progress, while the others wait for it in the next step."""
        activity = self._context.activity if self._context is not None else None
        if activity is not None and activity.beats:  # At 0 it is not judged.
            activity.beats += 1

    def at_end(
        self, cursor: Cursor, data: Data | None, is_over: Callable[[], bool], *, holds: bool
    ) -> None:
        """The last epoch is over: save it, unless this group has done that.

        What an earlier one began may have come to nothing, and nothing comes after this.

        Args:
            cursor: the end of the run.
            data: how the data is cut.
            is_over: whether the group is; then storage is not waited for.
            holds: have it in memory also if nothing is saved: code that follows may change it.
        """
        snapshotter = self._snapshotter
        if (
            snapshotter is not None
            and (snapshotter.plan.is_on or holds)
            and not snapshotter.has_taken(self.steps)
        ):
            snapshotter.wait_for_room(is_over)
            self.is_due, self._is_stored = True, snapshotter.plan.is_on
            self.at_boundary(cursor, data, is_over)

    def settle(self) -> None:
        """Let the state change: see `Snapshotter.settle`."""
        if self._snapshotter is not None:
            self._snapshotter.settle()

    def before_leaving(
        self, cursor: Cursor, data: Data | None, is_over: Callable[[], bool]
    ) -> None:
        """Save the state that only the members have, because all of them leave here by plan.

        Those of a paused job end. Of a sharded model none could continue with its rows alone, and
        some may not come back. So they wait until it is durable.

        Args:
            cursor: the next step.
            data: how the data is cut.
            is_over: whether the group is, so that there is no member to wait for.
        """
        snapshotter = self._snapshotter
        if snapshotter is None or not (self.releases or self.is_sharded):
            return
        if not snapshotter.has_taken(self.steps):
            snapshotter.wait_for_room(is_over, LEAVING_S)
            self.is_due = self._is_stored = True
            self.at_boundary(cursor, data, is_over)
        if self.releases:  # It has time, until the coordinator calls it off.
            snapshotter.wait_durable(lambda: self._goes_on(is_over), self._show_progress, FINISH_S)
        if self.is_sharded:  # Those that continue wait for it, too.
            snapshotter.wait_durable(is_over, self._show_progress, LEAVING_S)

    def _goes_on(self, is_over: Callable[[], bool]) -> bool:
        """Return whether a job that was to pause need not: its group is over, or it was called off.

        Others may have reported the pause to us before the coordinator does. Waiting is no hang.
        """
        self._show_progress()
        context = self._context
        return is_over() or (context is not None and context.link.is_called_off(context.generation))

    def take(self, cursor: Cursor, data: Data | None) -> State:
        """Return the state of the run; its tensors are the live ones.

        Args:
            cursor: the next step.
            data: how the data is cut, None while that is not known.
        """
        snapshotter = self._snapshotter
        return {
            "objects": self._objects.take(),
            "cursor": [cursor.epoch, cursor.step],
            "logged": self._logbook.state(),
            "streams": self._streams.sent(cursor, all_of_it=True),
            "steps": self.steps,
            "begun": self.begun,
            "saved": snapshotter.last() if snapshotter is not None else [0, 0, 0],
            "data": _plain(data) if data is not None else dict(self._data),
        }

    def put(self, state: State) -> Cursor:
        """Make this the state of the run, as far as this member is concerned.

        Returns:
            Where it stands.

        Raises:
            UsageError: it is the state of other objects; nothing was changed then.
        """
        self.settle()
        with self._working("moves the state that it received to its device"):
            self._objects.put(state["objects"])
        self._logbook.load_state(state["logged"])
        self._streams.receive([state["streams"]])
        self.steps, self.begun, self._data = state["steps"], state["begun"], state["data"]
        if self._snapshotter is not None:
            self._snapshotter.go_on(state["saved"])
        return Cursor(*state["cursor"])

    def agree_on_number(self, group: Any) -> None:
        """Know the newest snapshot that any member knows of; all members call this.

        One that is behind the last epoch may have taken one, and others that are before its gate
        have the same state without having received it.

        Raises:
            RuntimeError: the group broke.
        """
        snapshotter = self._snapshotter
        rows = send_metadata(
            group, [float(one) for one in snapshotter.last()] if snapshotter else [0.0]
        )
        if snapshotter is not None:
            snapshotter.go_on([int(one) for one in max(rows)[:3]])

    def newest_saved(self) -> SavedPosition:
        """Return the newest state that this job has in this node's memory, or recorded."""
        snapshotter, context = self._snapshotter, self._context
        if snapshotter is None or context is None:
            return SavedPosition()
        held = snapshotter.held_snapshots()
        found = [SavedPosition(mark.generation, mark.steps) for _, mark in held]
        name = context.saved.rpartition("/")[2]
        recorded = position_in(name) if name.startswith(f"{AUTOMATIC}{context.job_id}-s") else None
        return max([*found, recorded or SavedPosition()])

    def memory(self) -> int:
        """Return which memory of this node we have for snapshots, 0 for none."""
        return self._snapshotter.memory() if self._snapshotter is not None else 0

    def agree_on_memory(self, memories: Sequence[int]) -> None:
        """Have memory for snapshots as all workers of this node have it, or each its own."""
        if self._snapshotter is not None:
            self._snapshotter.agree_on_memory(memories)

    def known_streams(self, cursor: Cursor) -> bytes:
        """Return what we have read of streams, for the others."""
        return self._streams.sent(cursor)

    def learn_streams(self, shared: Sequence[bytes]) -> None:
        """Take what the others have read of streams."""
        self._streams.receive(shared)

    def check_data(self, data: Data, cursor: Cursor) -> None:
        """Refuse to continue in the middle of an epoch with data that is cut in another way.

        The coordinator is informed how many members can share a step.

        Raises:
            UsageError: naming what differs.
        """
        if self._context is not None:
            self._context.link.post(MicroBatchesDeclared(data.num_micro_batches))
        known, self._data = self._data, {}
        mine = _plain(data)
        wrong = [name for name, value in known.items() if mine.get(name) != value]
        if cursor.step and wrong:
            was, now = (
                ", ".join(f"{n}={known[n]}" for n in wrong),
                ", ".join(f"{n}={mine.get(n)}" for n in wrong),
            )
            raise UsageError(
                f"this run stands at step {cursor.step} of epoch {cursor.epoch}, with {was}; the "
                f"loader has {now}: continue with the same data, batch_size, seed, sampler (let "
                f"train.register know one that changes) and "
                f"prepare_data_loader(global_batch_size=...), or begin a new run"
            )

    def _working(self, what: str) -> AbstractContextManager[None]:
        """Enter what takes this member's own time, although others wait for it meanwhile."""
        return self._context.activity.working(what) if self._context is not None else nullcontext()

    def _request(self) -> int:
        context = self._context
        return context.link.save_request(context.generation) if context is not None else 0

    def _try(self, take: Callable[[], None]) -> None:
        """Continue training without a checkpoint that cannot be taken."""
        try:
            take()
        except (UsageError, OSError, MemoryError, RuntimeError) as error:
            log.warning("snapshot_failed steps=%d reason=%r", self.steps, str(error))
        except Exception:
            # State_dict is the user's own, and may raise anything.
            log.exception("snapshot_failed steps=%d", self.steps)

    # ------------------------------------------------------------------- reading

    def restore(self, group: Any, begin: Cursor) -> State | None:
        """Return the newest state that this node's memory or storage has.

        Every member of a group in which none has the state of the run calls this. A member that
        finds nothing, or less than others, receives the state from them afterwards.

        Args:
            group: the process group that stands.
            begin: where the train function begins by itself; an earlier state is passed over.

        Returns:
            What was saved, None if there is none for us.

        Raises:
            RuntimeError: the group broke.
            StorageError: there are checkpoints, and no member can read any of them.
        """
        snapshotter, context = self._snapshotter, self._context
        if snapshotter is None or context is None:
            return None
        if self._objects.is_sharded:
            return self._restore_shards(group, snapshotter, begin)
        run = RunDirectory(context.run_path) if context.run_path else None
        problems: list[str] = []

        def listed() -> list[Candidate] | None:
            with self._working(f"lists the checkpoints in {context.run_path}"):
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
            with self._working("reads a snapshot in this node's memory"):
                return _attempt(lambda: snapshotter.read_held(held), "this node's memory", problems)

        def from_copy() -> Found | None:
            with self._working("reads a snapshot in another node's memory"):
                return _attempt(copies.read, "another node's memory", problems) if fetches else None

        def from_storage(above: int, most: int) -> Found | None:
            wanted = [one for one in known or listed() or () if above < one[0] <= most]
            with self._working(f"reads a checkpoint of {context.run_path}"):
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

    def _restore_shards(self, group: Any, snapshotter: Snapshotter, begin: Cursor) -> State | None:
        """Do the same for a model of which every member has rows; all come to them, or none."""
        context = self._context
        path, rank = (context.run_path, context.world_rank) if context is not None else ("", 0)
        saved = context.saved if context is not None else ""
        run = RunDirectory(path) if path else None
        objects = self._objects
        ours = {"objects": with_expected(objects.take(), objects.optimizers)}

        def listed() -> Sequence[Candidate] | None:
            if run is None:
                return []
            with self._working(f"lists the checkpoints in {path}"):
                return _attempt(lambda: _candidates(run, saved), path, restorer.problems)

        def read(name: str, marker: CheckpointMarker | None) -> State:
            check(run is not None, "a checkpoint without a run directory")
            there = cast("RunDirectory", run)
            if marker is None and (marker := there.marker(name)) is None:
                raise ValueError("others list it, and it is not there for this worker")
            ours_of_it = name, rank, group.size()
            if ours_of_it not in self._read_shards:
                with self._working(f"reads its part of checkpoint {name} of {path}"):
                    state = read_checkpoint(there, name, marker, ours=ours, rank=rank)
                self._read_shards = {ours_of_it: state}
            return self._read_shards[ours_of_it]

        copies = PeerCopies.of(context) if context is not None else None
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


def _plain(data: Data) -> dict[str, Any]:
    """Return how data is cut in numbers and strings."""
    fields = asdict(data)
    return {name: v.value if isinstance(v, Enum) else v for name, v in fields.items()}


def _agreed(group: Any, found: Found | None) -> tuple[bool, State | None]:
    """Keep what we have found if it is what all members continue from.

    Members may find different things, if one of them cannot read the newest. Those of as many
    steps need not be the same: after a loss, steps are done again.

    Returns:
        Whether any member has found anything, and ours, if it is that; all others receive it.
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


UNKNOWN = -2
"""Stands for the steps of the newest checkpoint where storage cannot be asked."""
Candidate = tuple[int, str, CheckpointMarker]
"""Steps of the run, name, marker."""
Found = tuple[str, State]
"""What distinguishes a saved state from others of as many steps, and the state."""


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
