"""Automatic checkpoints: the state is copied between two steps, and written as training goes on.

This worker's share is copied into the agent's memory (`arena.py`). A thread of its own then writes
this rank's part to storage; the thread of rank 0 waits for all parts, and has the checkpoint
committed (`committer`).

Weights and optimizer state do not change before the next `optimizer.step()`. So a copying thread
reads them during the forward and backward before it. Why it copies the state of the boundary:

    boundary      All else is copied at once: buffers, values, what the script has registered. Of
                  the tensors that are left, the version counters are noted.
    until settled The copying thread reads tensors and writes to the slot, and touches nothing else
                  of ours. On a device it does so in a stream of its own, which follows all that
                  was queued at the boundary, and waits on the host until the device has done it.
    settle        The training thread waits for the copy and compares the counters: it is in no
                  operation that has written and not counted yet. If one differs, the snapshot is
                  given up, another one is due at once, and this process copies at the boundary
                  from then on. Otherwise it marks the snapshot. The engine settles before it
                  commits, before it puts a received state or enters a group, and before the
                  script leaves the loop. Access to a parameter's `data`, through which torch counts
                  no changes, settles first (`data_waits`); steps of optimizers that were not
                  prepared, which need not count any, are refused (`strangers_refused`).

Who dies before it has settled leaves its slot unmarked, and the snapshot in the other slot whole.
A wait that an interrupt ends gives the snapshot up. Until it has settled, a member reports that it
is busy, so that none overwrites the other slot before all have marked this one; all mark it at the
same commit.

Copied at the boundary are sharded models, small states, and those that are saved at each step, of
which each would wait.

Rule: no storage error or delay reaches the training loop. A snapshot that cannot be written is
reported and given up, and the last good checkpoint stays.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from elastic.core.policy.cursor import Cursor
from elastic.core.policy.saving import SavingPlan, is_due
from elastic.core.policy.shares import TensorRows, share_of
from elastic.core.world import SNAPSHOT_SLOTS
from elastic.runtime.snapshot_memory import SnapshotMark
from elastic.worker.base.mailboxes import WAIT_SLICE_S
from elastic.worker.checkpoint.checkpoint_writer import CheckpointWriter, PartFailure
from elastic.worker.checkpoint.snapshot import StateSnapshot, name_of
from elastic.worker.group.accelerators import accelerator_of, beside, record, wait_done
from elastic.worker.state.arena import SnapshotSlot, StateLayout
from elastic.worker.state.replica_checksums import NOTHING_OWN, PerRankState, combined, state_prints
from elastic.worker.state.replication_progress import ReplicationProgress
from elastic.worker.state.sharded_state import (
    Held,
    answered_by,
    held_by,
    spread_of,
    with_held,
)
from elastic.worker.state.transfer import (
    Trace,
    places_print,
    split_and_trace,
    tensors_of,
    unpack,
    write_skeleton,
)

log = logging.getLogger(__name__)

FINISH_S = 600.0
"""How long the end of a train function waits for what is still being written."""
FINISH_REPORTED_S = 10.0
"""How long it does so without a log line."""

LEAVING_S = 30.0
"""How long members of a sharded model that leave by plan wait for its checkpoint."""

BESIDE_BYTES_MIN = 16 << 20
"""Less than this is copied at the boundary: that takes no time, and it counts a step sooner."""
AT_ONCE_BYTES_MAX = 16 << 20
"""If more than this may change early, all is copied at the boundary: else that part is twice."""


@dataclass(frozen=True)
class RankInfo:
    """Where this worker is in its group, as far as copies and parts are concerned.

    Attributes:
        generation, rank, world_size: of the group.
        local_rank, local_world_size: among the group's workers on this node.
    """

    generation: int = 0
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


@dataclass(frozen=True)
class SnapshotLayout:
    """How a state lies in memory, and what of it is ours; the same from one snapshot to the next.

    Attributes:
        trace: of the state that it was made for.
        rank_info: ours.
        layout: of all tensors, as far as this node has them.
        places: fingerprint of the tensors and their places.
        pieces: what we copy.
        written: what we write to storage.
    """

    trace: Trace
    rank_info: RankInfo
    layout: StateLayout
    places: int
    pieces: tuple[TensorRows, ...]
    written: tuple[TensorRows, ...]


@dataclass(frozen=True)
class _BegunSnapshot:
    """A state at its boundary, of which the tensors are still to be copied to their slot.

    Attributes:
        number, steps: of the mark.
        state: as it was given; for checksums.
        own: what is left out of them.
        values: what is no tensor.
        tensors: by number.
        versions: of what is read beside the loop, with the tensors; None: all is read at once.
        streams: of devices, to be entered where the tensors are read.
        arrangement: where they lie.
        slot: whose turn it is.
        warming: prepares its memory.
        room: bytes for what is no tensor.
    """

    number: int
    steps: int
    state: Any
    own: PerRankState
    values: Any
    tensors: Sequence[torch.Tensor]
    versions: Sequence[tuple[torch.Tensor, int]] | None
    streams: Sequence[AbstractContextManager[object]]
    arrangement: SnapshotLayout
    slot: SnapshotSlot
    warming: threading.Thread | None
    room: int

    def has_changed(self) -> bool:
        """Return whether what was read beside the loop has changed."""
        return any(tensor._version != version for tensor, version in self.versions or ())


@dataclass(frozen=True)
class _CopiedSnapshot:
    """What is known of a snapshot once its tensors are in their slot.

    Attributes:
        mark: of it.
        skeleton: what is no tensor.
        prints: see `replica_checksums.state_prints`.
    """

    mark: SnapshotMark
    skeleton: bytes
    prints: Mapping[str, int]


@dataclass
class _Copying:
    """A snapshot that is copied beside the training loop.

    Attributes:
        begun: what is copied.
        pid, taker: the process and its training thread.
        copied: by the copying thread.
        end: has it marked and written, or reports why not.
        is_left: it was not waited for until the end: the state may have changed.
    """

    begun: _BegunSnapshot
    pid: int
    taker: int
    copied: Future[_CopiedSnapshot]
    end: Callable[[_Copying], None]
    is_left: bool = False

    def result(self) -> _CopiedSnapshot:
        """Return what was copied; raises if that failed, or is not the state of the boundary."""
        if self.begun.has_changed():
            raise RuntimeError(
                "weights or optimizer state were changed before the next optimizer.step(): from "
                "here on snapshots are copied before the loop continues"
            )
        if self.is_left:
            raise RuntimeError("an interrupt ended the wait for its copy")
        return self.copied.result()


class Snapshotter:
    """The automatic checkpoints of one process, over all its groups.

    Attributes:
        plan: how often to storage.
        copies: how often to memory alone, from where the agent sends it to another node.
        arrival: whether the newest has come there, if that matters.
        number: of the newest snapshot that this worker knows of; part of the run's state.
        last_steps: steps of the run that were committed when it was taken; likewise.
        last_generation: in which it was taken; likewise.
    """

    def __init__(self, paths: Sequence[str], writer: CheckpointWriter | None) -> None:
        """Take nothing yet.

        Args:
            paths: of the agent's memory for the job, one for each slot; empty for our own.
            writer: writes to storage; None keeps snapshots in memory only.
        """
        self.plan, self.copies = SavingPlan(), SavingPlan()
        self.arrival = ReplicationProgress()
        self.is_async = True
        self.number, self.last_steps, self.last_generation = 0, 0, 0
        self._paths, self._writer = tuple(paths), writer
        self._slots: list[SnapshotSlot] = []
        self._arrangement: SnapshotLayout | None = None
        self._rank_info = RankInfo()
        self._last_s = time.monotonic()
        self._served = 0
        self._warming: threading.Thread | None = None
        self._is_warm = False
        # Until a device refuses.
        self._can_pin = True
        self._is_stored = False
        # Memory is reserved for it: if it grows a little, nothing else has to move.
        self._skeleton_room = 0
        # Tensors, and meanwhile what is no tensor.
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="elastic-snapshot")
        self._skeletons = ThreadPoolExecutor(1, thread_name_prefix="elastic-skeleton")
        self._copying: _Copying | None = None
        # An interrupt may come between the beginning of a copy and the note of it.
        self._one_copy = threading.Lock()
        # Until a script changes weights between steps; and then another snapshot is due.
        self._can_overlap, self._is_again = True, False

    def configure(self, options: Mapping[str, Any]) -> None:
        """Take what the user chose."""
        every_n, every_s = options.get("every_n_steps"), options.get("every_s")
        self.plan = SavingPlan(int(every_n or 0), float(every_s or 0.0))
        self.copies = SavingPlan(int(options.get("copies_every") or 0))
        self.is_async = bool(options.get("async_save", True))

    def enter(self, rank_info: RankInfo) -> None:
        self.settle()
        # Our private memory holds all of the state: no other rank can write to it.
        self._rank_info = (
            rank_info if self._paths else replace(rank_info, local_rank=0, local_world_size=1)
        )
        self._served = 0  # An unserved request is sent again to the next group.
        self.arrival.forget()  # What this group continues from stays until it has taken two.
        if self._writer is not None:
            self._writer.generation = rank_info.generation

    def memory(self) -> int:
        """Return what identifies this node's shared memory, 0 if we have none."""
        if not self._paths:
            return 0
        try:
            return self._all_slots()[0].identity
        except OSError as error:
            log.warning("no_shared_memory paths=%s error=%r", self._paths, str(error))
            self._use_own_memory()
            return 0

    def agree_on_memory(self, memories: Sequence[int]) -> None:
        """Do without the agent's memory for good, if not all workers of this node have it.

        Each would wait for the others' share of every snapshot otherwise.

        Args:
            memories: what `memory` returned, by rank.
        """
        rank_info = self._rank_info
        if not self._paths or len(memories) != rank_info.world_size:
            return
        first = rank_info.rank - rank_info.local_rank
        here = set(memories[first : first + rank_info.local_world_size])
        if 0 in here or len(here) != 1:
            log.warning(
                "shared_memory_left: not all workers of this node have it; each keeps its "
                "snapshots in memory of its own, which ends with it"
            )
            self._use_own_memory()

    def _use_own_memory(self) -> None:
        self._paths, self._slots, self._arrangement = (), [], None
        self.arrival.is_awaited = False
        self._rank_info = replace(self._rank_info, local_rank=0, local_world_size=1)

    # ------------------------------------------------------------------- when

    def wants(self, steps: int, request: int) -> bool:
        """Return whether this worker asks for a snapshot after a step.

        Args:
            steps: committed in the run, with that step.
            request: number of the newest user request in this generation, 0 for none.
        """
        if request > self._served or self._is_again:
            return True
        waited_s = time.monotonic() - self._last_s if self._rank_info.rank == 0 else 0.0
        return is_due(self.plan, steps=steps, last_steps=self.last_steps, waited_s=waited_s).value

    def wants_copy(self, steps: int) -> bool:
        """Return whether a snapshot for another node is due after a step: alike on all members."""
        return is_due(self.copies, steps=steps, last_steps=self.last_steps, waited_s=0.0).value

    def is_busy(self) -> bool:
        """Return whether no other one is begun now: storage, or another node, is slow.

        A snapshot that a user requested is not given up for a newer one, requested or not.
        """
        return self._is_full() or (self._writer is not None and self._writer.is_requested_for())

    def _is_full(self) -> bool:
        """Return whether there is no room for another one."""
        if not self._slots:
            return False
        if self._copying is not None:
            return True
        slot = self._slot_of(self.number + 1)
        if self._is_being_written(slot) or slot.is_sent():
            return True
        return self.arrival.is_missing(self._slot_of)

    def await_copies(self) -> None:
        """From here on no snapshot is begun before the one before has come to other nodes."""
        self.arrival.is_awaited = bool(self._paths)  # The agent does not know memory of our own.

    def wait_for_room(self, is_over: Callable[[], bool], timeout_s: float = FINISH_S) -> None:
        """Wait until there is room for another one; not in a group that is over, nor for ever."""
        self.settle()
        deadline, writer = time.monotonic() + timeout_s, self._writer
        try:
            while self._is_full() and not is_over() and time.monotonic() < deadline:
                if writer is not None:
                    writer.is_awaited = True
                time.sleep(WAIT_SLICE_S)
        finally:
            if writer is not None:
                writer.is_awaited = False

    def wait_durable(
        self, is_over: Callable[[], bool], beat: Callable[[], None], timeout_s: float = LEAVING_S
    ) -> None:
        """Wait until what was taken is durable or given up; for a while, and in a living group."""
        self.settle()
        deadline = time.monotonic() + timeout_s
        while self._writer is not None and not self._writer.finish(WAIT_SLICE_S):
            if is_over() or time.monotonic() > deadline:
                return
            beat()

    def has_taken(self, steps: int) -> bool:
        """Return whether this group has taken one for storage after so many steps."""
        last = [self.last_steps, self.last_generation, self._is_stored]
        return [steps, self._rank_info.generation, True] == last

    def last(self) -> list[int]:
        """Return number, steps and generation of the newest snapshot that we know of."""
        return [self.number, self.last_steps, self.last_generation]

    def go_on(self, last: Sequence[int]) -> None:
        """Continue at the run's position, as read from `last`."""
        self.number, self.last_steps, self.last_generation = last

    # ------------------------------------------------------------------- taking

    def warm_up(self, state: Callable[[], Any]) -> None:
        """Have memory found for snapshots, beside the training loop; once."""
        if self._is_warm or not (self.plan.is_on or self.copies.is_on):
            return
        self._is_warm = True
        values, tensors, trace = split_and_trace(state())
        arrangement = self._arranged(values, tensors, trace)
        self._skeleton_room = 2 * len(write_skeleton(values))
        num_bytes = arrangement.layout.data_bytes + self._skeleton_room
        devices = _devices_of(tensors, arrangement.pieces)

        def find() -> None:
            try:
                for slot in self._all_slots():
                    slot.warm_up(num_bytes)
            except OSError as error:
                log.warning("snapshot_memory bytes=%d error=%r", num_bytes, str(error))
                return
            self._pin(self._all_slots(), arrangement, devices)

        self._begin_warming(find)

    def _begin_warming(self, find: Callable[[], None]) -> None:
        """Prepare memory on a thread of its own: only the next snapshot waits for it."""
        self._warming = threading.Thread(target=find, name="elastic-warm-up", daemon=True)
        self._warming.start()

    def _pin(
        self,
        slots: Sequence[SnapshotSlot],
        arrangement: SnapshotLayout,
        devices: Sequence[torch.device],
    ) -> None:
        """Pin the pages of our share for our devices; once that is refused, never again."""
        try:
            for slot in slots if devices else ():  # What one device registers, all may copy to.
                slot.pin(arrangement.layout, arrangement.pieces, devices[0])
        except OSError as error:
            self._can_pin = False
            log.warning("snapshot_memory_not_pinned error=%r: copies are slower", str(error))

    def _take_warming(self) -> threading.Thread | None:
        warming, self._warming = self._warming, None
        return warming

    def take(
        self,
        state: Callable[[], Any],
        cursor: Cursor,
        steps: int,
        *,
        request: int = 0,
        about: Mapping[str, Any] | None = None,
        aliases: Sequence[Mapping[str, str]] = (),
        own: PerRankState = NOTHING_OWN,
        durable: bool = True,
        still: Iterable[torch.Tensor] | None = None,
    ) -> threading.Event:
        """Copy our share of the state, and have it written.

        All members of the group take the same snapshot.

        Args:
            state: returns the state; it must know what `last` is then.
            cursor: where in the run this is.
            steps: committed in the run.
            request: the number of the request that this serves.
            about: values that people want to see beside it.
            aliases: see `checkpoint_files.write_rest`.
            own: see `replica_checksums.state_prints`.
            durable: False to leave it in memory only.
            still: what does not change before the caller has called `settle`, and may be copied
                until then; None to copy all of it now.

        Returns:
            Set once it is durable, or given up.

        Raises:
            UsageError: the state holds what cannot be saved.
            OSError: there is not enough memory, or the one before the last is still being written.
        """
        self.settle()
        # First of all: members agree on the number even if one of them cannot take it.
        self.go_on([self.number + 1, steps, self._rank_info.generation])
        began, self._is_stored = time.monotonic(), durable
        if durable:
            self._last_s, self._served = began, max(request, self._served)
            self._is_again = False
        done, rank_info = threading.Event(), self._rank_info
        name = name_of(steps, rank_info.generation, self.number)
        noted, others = dict(about or {}), tuple(aliases)

        def end(copied: _CopiedSnapshot) -> None:
            mark, arrangement = copied.mark, begun.arrangement
            self._mark(begun, mark)
            log.info(
                "snapshot number=%d epoch=%d step=%d bytes=%d ms=%.1f", mark.number, cursor.epoch,
                cursor.step, mark.data_bytes, (time.monotonic() - began) * 1e3,
            )  # fmt: skip
            if self._writer is None or not durable:
                done.set()
                return
            self._writer.put(
                StateSnapshot(
                    generation=rank_info.generation,
                    rank=rank_info.rank,
                    world_size=rank_info.world_size,
                    mark=mark,
                    slot=begun.slot,
                    layout=arrangement.layout,
                    pieces=arrangement.written,
                    skeleton=copied.skeleton,
                    cursor=cursor,
                    about=noted,
                    aliases=others,
                    done=done,
                    request=request,
                    prints=copied.prints,
                )
            )

        def end_later(copying: _Copying) -> None:
            try:
                end(copying.result())
            except Exception as error:
                log.warning("snapshot_failed steps=%d reason=%r", steps, str(error))
                if begun.has_changed():
                    self._can_overlap, self._is_again = False, durable
                with suppress(RuntimeError):  # There is no thread to be had.
                    self._report_failed(name, rank_info.rank, error, durable=durable)
                done.set()

        copied = None
        try:
            begun = self._begin(state(), steps, own, still)
            if begun.versions is None:
                copied = self._copy(begun)
        except Exception as error:
            self._report_failed(name, rank_info.rank, error, durable=durable)
            raise
        if copied is not None:
            end(copied)
        else:
            copy = self._copier.submit(self._copy, begun)
            self._copying = _Copying(begun, os.getpid(), threading.get_ident(), copy, end_later)
        return done

    def _report_failed(self, name: str, rank: int, error: Exception, *, durable: bool) -> None:
        """Let the others not wait for our part of a snapshot that we could not take."""
        if self._writer is not None and durable:
            self._writer.fail_part(PartFailure(rank, name, str(error)))

    def settle(self) -> None:
        """Have what is copied beside the loop marked and written; then the state may change.

        Raises nothing but an interrupt. On other threads than the one that took it this waits for
        the copy alone.
        """
        copying = self._copying
        if copying is None or copying.pid != os.getpid():
            return  # A forked process has neither the thread nor the slot.
        try:
            wait([copying.copied])
        except BaseException:
            copying.is_left = True
            raise
        if copying.taker == threading.get_ident():
            self._copying = None
            copying.end(copying)

    def _begin(
        self, state: Any, steps: int, own: PerRankState, still: Iterable[torch.Tensor] | None
    ) -> _BegunSnapshot:
        """Do what cannot wait."""
        values, tensors, trace = split_and_trace(state)
        arrangement = self._arranged(values, tensors, trace)
        layout, slot = arrangement.layout, self._slot_of(self.number)
        if self._is_being_written(slot):
            raise OSError(f"snapshot {self.number}: one in the same place is still being written")
        versions, streams = None, list[AbstractContextManager[object]]()
        if still is not None and not layout.held and self._may_overlap():
            versions = self._hold(tensors, still)
        if versions is not None:
            state = None  # Its containers are the script's, and may change.
            streams = beside(dict.fromkeys(tensor.device for tensor in tensors))
        if layout.held:
            tensors = [answered_by(self._rank_info.rank, tensor) for tensor in tensors]
        return _BegunSnapshot(
            self.number, steps, state, own, values, tensors, versions, streams, arrangement,
            slot, self._take_warming(), self._skeleton_room,
        )  # fmt: skip

    def _may_overlap(self) -> bool:
        plans = (self.plan, self.copies)
        return self._can_overlap and all(plan.every_n_steps != 1 for plan in plans)

    def _hold(
        self, tensors: list[torch.Tensor], still: Iterable[torch.Tensor]
    ) -> list[tuple[torch.Tensor, int]] | None:
        """Put copies in the place of tensors that may change soon.

        Returns:
            All that is still, with its versions; None to copy everything at once.
        """
        watched = [tensor for tensor in still if _address_of(tensor)]
        addresses = {_address_of(tensor) for tensor in watched}
        changing = [
            number for number, tensor in enumerate(tensors) if _address_of(tensor) not in addresses
        ]
        total, at_once = (
            sum(tensor.nbytes for tensor in some)
            for some in (tensors, [tensors[number] for number in changing])
        )
        if total - at_once <= BESIDE_BYTES_MIN or at_once > AT_ONCE_BYTES_MAX:
            return None
        for number in changing:
            tensors[number] = tensors[number].clone()
        return [(tensor, tensor._version) for tensor in watched]

    def _copy(self, begun: _BegunSnapshot) -> _CopiedSnapshot:
        """Copy our share into its slot; any thread, one at a time."""
        with self._one_copy, ExitStack() as streams:
            for stream in begun.streams:
                streams.enter_context(stream)
            return self._copy_alone(begun)

    def _copy_alone(self, begun: _BegunSnapshot) -> _CopiedSnapshot:
        layout, pieces = begun.arrangement.layout, begun.arrangement.pieces
        rank_info, slot = begun.arrangement.rank_info, begun.slot
        if begun.warming is not None:
            begun.warming.join()
        slot.unmark(rank_info.local_rank)
        slot.reserve(layout.data_bytes + begun.room)
        # Runs while the copy has released the interpreter lock; these values no longer change.
        writing = self._skeletons.submit(write_skeleton, begun.values)
        slot.put(layout, begun.tensors, pieces)
        wait_done(record(_devices_of(begun.tensors, pieces)))
        state = unpack(begun.values, begun.tensors) if begun.state is None else begun.state
        prints = state_prints(state, begun.own)
        skeleton = writing.result()
        text = with_held(skeleton, layout.held)
        mark = SnapshotMark(
            begun.number, rank_info.generation, begun.steps, rank_info.local_world_size,
            layout.data_bytes, begun.arrangement.places ^ combined(prints), len(text),
            zlib.crc32(text),
        )  # fmt: skip
        slot.reserve(mark.num_bytes)
        if rank_info.local_rank == 0:
            slot.put_skeleton(layout, text)
        return _CopiedSnapshot(mark, skeleton, prints)

    def _mark(self, begun: _BegunSnapshot, mark: SnapshotMark) -> None:
        """Let a snapshot count that is in its slot."""
        arrangement, slot = begun.arrangement, begun.slot
        self._skeleton_room = max(self._skeleton_room, 2 * mark.skeleton_bytes)
        self.arrival.begin(mark.number, mark.generation)
        slot.mark(arrangement.rank_info.local_rank, mark)
        devices = _devices_of(begun.tensors, arrangement.pieces)
        is_pinned = not devices or slot.is_pinned(arrangement.layout, arrangement.pieces)
        if self._can_pin and not is_pinned:
            # There is more of it, or our share is another one, since that was done.
            self._begin_warming(partial(self._pin, [slot], arrangement, devices))

    def _arranged(
        self, values: Any, tensors: Sequence[torch.Tensor], trace: Trace
    ) -> SnapshotLayout:
        """Return how this state lies in memory; for hundreds of tensors that takes a while."""
        rank_info, known = self._rank_info, self._arrangement
        if known is None or known.rank_info != rank_info or known.trace != trace:
            spreads = [spread_of(tensor) for tensor in tensors]
            held: Held = ()
            if any(spread is not None for spread in spreads):
                # Ranks are contiguous on a node.
                first = rank_info.rank - rank_info.local_rank
                held = held_by(spreads, range(first, first + rank_info.local_world_size))
            layout = StateLayout.of(tensors_of(values), held)
            copied, written = (
                share_of(layout.extents(), spreads, rank=rank_info.rank, part=part, parts=parts)
                for part, parts in (
                    (rank_info.local_rank, rank_info.local_world_size),
                    (rank_info.rank, rank_info.world_size),
                )
            )
            known = SnapshotLayout(trace, rank_info, layout, places_print(values), copied, written)
            self._arrangement = known
        return known

    # ------------------------------------------------------------------- what is held

    def held(self) -> int:
        """Return the steps of the newest snapshot in this node's memory, -1 if there is none."""
        self.settle()
        try:
            return max((mark.steps for _, mark in self._whole()), default=-1)
        except OSError as error:
            log.warning("snapshot_unreadable error=%r", str(error))
            return -1

    def read_held(self, steps: int) -> tuple[str, Any]:
        """Return the state in this node's memory, and its key among those of as many steps.

        Its tensors are copies.

        Raises:
            ValueError: there is none of so many steps, or it is damaged.
        """
        for slot, mark in self._whole():
            if mark.steps == steps:
                return f"generation {mark.generation}, number {mark.number}", slot.state(mark)
        raise ValueError(f"no snapshot of step {steps} in this node's memory")

    def held_snapshots(self) -> list[tuple[SnapshotSlot, SnapshotMark]]:
        """Return the snapshots in this node's memory, newest first; none if it cannot be read."""
        self.settle()
        try:
            return sorted(self._whole(), key=lambda pair: pair[1].steps, reverse=True)
        except OSError as error:
            log.warning("snapshot_unreadable error=%r", str(error))
            return []

    def _whole(self) -> list[tuple[SnapshotSlot, SnapshotMark]]:
        found = []
        for slot in self._all_slots():
            mark = slot.whole()
            if mark is not None:
                found.append((slot, mark))
        return found

    def _slot_of(self, number: int) -> SnapshotSlot:
        return self._all_slots()[number % SNAPSHOT_SLOTS]

    def _is_being_written(self, slot: SnapshotSlot) -> bool:
        return self._writer is not None and self._writer.reads(slot)

    def _all_slots(self) -> list[SnapshotSlot]:
        if not self._slots:
            paths = self._paths or ("",) * SNAPSHOT_SLOTS
            self._slots = [SnapshotSlot(path) for path in paths]
        return self._slots

    # ------------------------------------------------------------------- the end

    def finish(self) -> None:
        """Wait until what was taken is durable, or given up."""
        self.settle()
        if self._writer is None or self._writer.finish(FINISH_REPORTED_S):
            return
        log.warning(
            "checkpoint_awaited: the train function has returned, and its last checkpoint is still "
            "being written; waits for %.0f s at most",
            FINISH_S,
        )
        if not self._writer.finish(FINISH_S):
            log.warning("checkpoint_left: storage has not taken it in %.0f s", FINISH_S)

    def close(self) -> None:
        """Take nothing any more; memory and thread end with what is still being written."""
        self._slots = []
        self._copier.shutdown(wait=False)
        self._skeletons.shutdown(wait=False)
        if self._writer is not None:
            self._writer.close()


def _address_of(tensor: torch.Tensor) -> int:
    """Return where a tensor lies; 0 if it has no memory of its own, or torch counts no changes."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_inference()
    return tensor.data_ptr() if is_plain and tensor.layout is torch.strided else 0


def _devices_of(
    tensors: Sequence[torch.Tensor], pieces: Sequence[TensorRows]
) -> list[torch.device]:
    """Return the devices that pieces are on, but for those that have copied when they return."""
    found = dict.fromkeys(tensors[piece.tensor].device for piece in pieces)
    return [device for device in found if accelerator_of(device) is not None]
