"""Copies this worker's share of a state into its slot of memory, often beside the loop.

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
                  prepared, which need not count any, are refused (`unprepared_refused`).

Who dies before it has settled leaves its slot unmarked, and the snapshot in the other slot whole.
A wait that an interrupt ends gives the snapshot up.

Copied at the boundary are small states, and those that are saved at each step, of which each would
wait.
"""

from __future__ import annotations

import logging
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from elastic.core.policy.shares import TensorRows, share_of
from elastic.runtime.snapshot_memory import SnapshotMark
from elastic.worker.checkpoint.snapshot import RankInfo
from elastic.worker.group.accelerators import accelerator_of, beside, record, wait_done
from elastic.worker.state.arena import SnapshotSlot, StateLayout
from elastic.worker.state.dtensor import local_part
from elastic.worker.state.packing import (
    Trace,
    places_print,
    split_and_trace,
    tensors_of,
    unpack,
    write_skeleton,
)
from elastic.worker.state.replica_checksums import PerRankState, combined, state_prints
from elastic.worker.state.sharded_state import Held, answered_by, held_by, spread_of, with_held

log = logging.getLogger(__name__)

BESIDE_BYTES_MIN = 16 << 20
"""Less than this is copied at the boundary: that takes no time, and it counts a step sooner."""
AT_ONCE_BYTES_MAX = 16 << 20
"""If more than this may change early, all is copied at the boundary: else that part is twice."""


@dataclass(frozen=True)
class SnapshotLayout:
    """How a state lies in memory, and what of it is ours; the same from one snapshot to the next.

    Attributes:
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
class BegunSnapshot:
    """A state at its boundary, of which the tensors are still to be copied to their slot.

    Attributes:
        state: as it was given; for checksums.
        own: what is left out of them.
        values: what is no tensor.
        tensors: by number.
        rows: of them, those that this rank answers for.
        versions: of what is read beside the loop, with the tensors; None: all is read at once.
        streams: of devices, to be entered where the tensors are read.
        slot: whose turn it is.
        room: bytes for what is no tensor.
    """

    number: int
    steps: int
    state: Any
    own: PerRankState
    values: Any
    tensors: Sequence[torch.Tensor]
    rows: Sequence[torch.Tensor]
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
class CopiedSnapshot:
    """What is known of a snapshot once its tensors are in their slot.

    Attributes:
        skeleton: what is no tensor.
        prints: see `replica_checksums.state_prints`.
    """

    mark: SnapshotMark
    skeleton: bytes
    prints: Mapping[str, int]


class SnapshotCopier:
    """The threads that copy, and what they know of the state's place in memory from before.

    Attributes:
        may_overlap: with the loop; until a script changes weights between steps.
    """

    def __init__(self) -> None:
        self.may_overlap = True
        self._arrangement: SnapshotLayout | None = None
        # Memory is reserved for it: if it grows a little, nothing else has to move.
        self._skeleton_room = 0
        self._warming: threading.Thread | None = None
        # Until a device refuses.
        self._can_pin = True
        # Tensors, and meanwhile what is no tensor.
        self._copying = ThreadPoolExecutor(1, thread_name_prefix="elastic-snapshot")
        self._skeletons = ThreadPoolExecutor(1, thread_name_prefix="elastic-skeleton")
        # An interrupt may come between the beginning of a copy and the note of it.
        self._one_copy = threading.Lock()

    def forget_layout(self) -> None:
        """The next snapshot lies in other memory."""
        self._arrangement = None

    def close(self) -> None:
        """Copy nothing any more; threads end with what they do."""
        self._copying.shutdown(wait=False)
        self._skeletons.shutdown(wait=False)

    # ------------------------------------------------------------------- memory, found ahead

    def warm_up(
        self, state: Any, rank_info: RankInfo, slots: Callable[[], Sequence[SnapshotSlot]]
    ) -> None:
        """Have memory found for such a state, beside the training loop."""
        values, tensors, trace = split_and_trace(state)
        arrangement = self._arranged(rank_info, values, tensors, trace)
        self._skeleton_room = 2 * len(write_skeleton(values))
        num_bytes = arrangement.layout.data_bytes + self._skeleton_room
        devices = _devices_of(tensors, arrangement.pieces)

        def find() -> None:
            try:
                for slot in slots():
                    slot.warm_up(num_bytes)
            except OSError as error:
                log.warning("snapshot_memory bytes=%d error=%r", num_bytes, str(error))
                return
            self._pin(slots(), arrangement, devices)

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

    def take_warming(self) -> threading.Thread | None:
        """Return the thread that prepares memory, once; None if there is none."""
        warming, self._warming = self._warming, None
        return warming

    # ------------------------------------------------------------------- one snapshot

    def begin(
        self,
        number: int,
        steps: int,
        state: Any,
        rank_info: RankInfo,
        slot: SnapshotSlot,
        own: PerRankState,
        still: Iterable[torch.Tensor] | None,
    ) -> BegunSnapshot:
        """Do what cannot wait; tensors of `still` may be copied later, None to copy all at once.

        For `own` see `replica_checksums.state_prints`.
        """
        values, tensors, trace = split_and_trace(state)
        arrangement = self._arranged(rank_info, values, tensors, trace)
        held = arrangement.layout.held
        versions, streams = None, list[AbstractContextManager[object]]()
        if still is not None and self.may_overlap:
            versions = _hold(tensors, still)
        if versions is not None:
            state = None  # Its containers are the script's, and may change.
            streams = beside(dict.fromkeys(tensor.device for tensor in tensors))
        rows = [answered_by(rank_info.rank, tensor) for tensor in tensors] if held else tensors
        return BegunSnapshot(
            number, steps, state, own, values, tensors, rows, versions, streams, arrangement, slot,
            self.take_warming(), self._skeleton_room,
        )  # fmt: skip

    def copy_later(self, begun: BegunSnapshot) -> Future[CopiedSnapshot]:
        """Copy our share into its slot on the copying thread."""
        return self._copying.submit(self.copy, begun)

    def copy(self, begun: BegunSnapshot) -> CopiedSnapshot:
        """Copy our share into its slot; any thread, one at a time."""
        with self._one_copy, ExitStack() as streams:
            for stream in begun.streams:
                streams.enter_context(stream)
            return self._copy_alone(begun)

    def _copy_alone(self, begun: BegunSnapshot) -> CopiedSnapshot:
        layout, pieces = begun.arrangement.layout, begun.arrangement.pieces
        rank_info, slot = begun.arrangement.rank_info, begun.slot
        if begun.warming is not None:
            begun.warming.join()
        slot.unmark(rank_info.local_rank, rank_info.generation, begun.number)
        slot.reserve(layout.data_bytes + begun.room)
        # Runs while the copy has released the interpreter lock; these values no longer change.
        writing = self._skeletons.submit(write_skeleton, begun.values)
        slot.put(layout, begun.rows, pieces)
        wait_done(record(_devices_of(begun.rows, pieces)))
        state = begun.state
        if state is None:
            state = unpack(begun.values, begun.tensors, orders=False)
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
        return CopiedSnapshot(mark, skeleton, prints)

    def mark(self, begun: BegunSnapshot, mark: SnapshotMark) -> None:
        """Let a snapshot count that is in its slot."""
        arrangement, slot = begun.arrangement, begun.slot
        self._skeleton_room = max(self._skeleton_room, 2 * mark.skeleton_bytes)
        slot.mark(arrangement.rank_info.local_rank, mark)
        devices = _devices_of(begun.rows, arrangement.pieces)
        is_pinned = not devices or slot.is_pinned(arrangement.layout, arrangement.pieces)
        if self._can_pin and not is_pinned:
            # There is more of it, or our share is another one, since that was done.
            self._begin_warming(partial(self._pin, [slot], arrangement, devices))

    def _arranged(
        self, rank_info: RankInfo, values: Any, tensors: Sequence[torch.Tensor], trace: Trace
    ) -> SnapshotLayout:
        """Return how this state lies in memory; for hundreds of tensors that takes a while."""
        known = self._arrangement
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


def _hold(
    tensors: list[torch.Tensor], still: Iterable[torch.Tensor]
) -> list[tuple[torch.Tensor, int]] | None:
    """Put copies in the place of tensors that may change soon; return the others' versions.

    None to copy everything at once.
    """
    ours = [local_part(tensor) for tensor in tensors]
    watched, addresses = list[torch.Tensor](), set[int]()
    for tensor in still:
        held = local_part(tensor)
        address = _address_of(held)
        if not address:
            continue
        addresses.add(address)
        # Operations on a DTensor count there, those on the tensor that it holds in that one.
        watched += (tensor,) if held is tensor else (tensor, held)
    changing = [number for number, held in enumerate(ours) if _address_of(held) not in addresses]
    total, at_once = (
        sum(held.nbytes for held in some) for some in (ours, [ours[number] for number in changing])
    )
    if total - at_once <= BESIDE_BYTES_MIN or at_once > AT_ONCE_BYTES_MAX:
        return None
    for number in changing:
        tensors[number] = tensors[number].clone()
    return [(tensor, tensor._version) for tensor in watched]


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
