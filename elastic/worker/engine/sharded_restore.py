"""How the members of a new group get the state of a sharded model, of which none has all.

Each member reports which rows are in its node's memory, of which snapshots, and which copies of
other nodes' rows the agents hold that it has asked. If all rows of one snapshot are there, they are
sent to the ranks that need them now; otherwise each member reads its rows from storage, from a
listing that one member makes for all. If a copy cannot be fetched, another copy of the same rows is
used.

Rule: all members resume from the same snapshot or checkpoint, or none does: they exchange what is
there, all choose alike, and what one member could not read is used by none. No member holds more
than its own rows of a sharded tensor, plus those of a lost node while it passes them on. Whatever
members exchange raises RuntimeError if the group breaks.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from elastic.core.policy.shares import RowRange, RowSources, TensorRows
from elastic.storage.marker import CheckpointMarker
from elastic.worker.checkpoint.snapshotter import Snapshotter
from elastic.worker.engine.peer_copies import PeerCopies, ShardCopy
from elastic.worker.engine.sharded_choice import (
    SnapshotInfo,
    SnapshotKey,
    SnapshotOffer,
    SnapshotSource,
    Stretches,
    choices,
    sources_of,
)
from elastic.worker.group.member_links import links_of, share_bytes
from elastic.worker.reduce.step_metadata import send_metadata
from elastic.worker.state.arena import SnapshotMark, SnapshotSlot, StateLayout, dtype_of, extent_of
from elastic.worker.state.packing import TensorSpec, read_skeleton, tensors_of, unpack, views_of
from elastic.worker.state.sharded_state import Held, like, places_of, rows_of, without_held
from elastic.worker.state.train_state import State

log = logging.getLogger(__name__)

OTHERS_S = 60.0
"""After so long no further node is asked for a copy that could not be fetched: what is older, or in
storage, is there at once."""
IN_TIME, LATE = 1.0, 2.0
"""What a member sends when it has fetched all that it was to fetch; the same below zero if not."""
GONE = (ConnectionRefusedError, TimeoutError)
"""Errors after which an agent will not give its other copies either."""
Candidate = tuple[int, str, CheckpointMarker]
"""Steps of the run, name, marker."""


@dataclass(frozen=True)
class MemorySnapshot:
    """A snapshot in this node's memory, or of another node in ours.

    Attributes:
        skeleton: what is no tensor, as bytes.
    """

    slot: SnapshotSlot
    skeleton: bytes
    layout: StateLayout

    @staticmethod
    def of(slot: SnapshotSlot, mark: SnapshotMark) -> MemorySnapshot:
        """Read about the snapshot in a slot; Exception if it is damaged."""
        skeleton, layout = _read_text(slot.skeleton(mark))
        return MemorySnapshot(slot, skeleton, layout)

    def rows(self, spec: TensorSpec, part: RowRange) -> torch.Tensor:
        return self.slot.chunk(self.layout, TensorRows(spec.number, *part))


def _read_text(text: bytes) -> tuple[bytes, StateLayout]:
    """Return skeleton and layout of a snapshot; raises whatever bytes that are none lead to."""
    skeleton, held = without_held(text)
    return skeleton, StateLayout.of(tensors_of(read_skeleton(skeleton)), held or ())


def _stretches(layout: StateLayout) -> Stretches:
    """Return the rows of sharded tensors that are there."""
    held: Held = layout.held
    totals = layout.extents()
    return {n: (totals[n].rows, one) for n, one in enumerate(held) if one is not None}


def _key_of(mark: SnapshotMark) -> SnapshotKey:
    return SnapshotKey(mark.steps, mark.generation, mark.number, mark.tensors)


class ShardedRestorer:
    """Finds and reads the state of one group that has none."""

    def __init__(
        self,
        group: Any,
        snapshotter: Snapshotter,
        ours: Any,
        *,
        listed: Callable[[], Sequence[Candidate] | None],
        read: Callable[[str, CheckpointMarker | None], State],
        copies: PeerCopies,
    ) -> None:
        """Search for nothing yet.

        Args:
            group: the process group that is formed, whose members have met.
            snapshotter: knows this node's memory.
            ours: our state, from which it follows how a saved one is sharded here.
            listed: returns the checkpoints in storage, newest first; None if it cannot be asked.
            read: returns the state in one, sharded as ours is; where others have listed it, the
                marker is still to be read.
            copies: of other nodes' snapshots.
        """
        self._group, self._rank, self._size = group, group.rank(), group.size()
        self._snapshotter, self._ours = snapshotter, ours
        self._listed, self._read, self._copies = listed, read, copies
        self.problems: list[str] = []

    def restore(self) -> tuple[State | None, bool]:
        """Return the newest state that is whole, and whether there is anything at all."""
        here = self._in_memory()
        shards = self._offered()
        candidates, members = self._exchange_info(here, [offer for offer, _ in shards])
        markers = {name: marker for _, name, marker in candidates or ()}
        for choice in choices(members):
            if isinstance(choice, SnapshotKey):
                sources, ours = self._gathered(choice, members, here, [one for _, one in shards])
                state = self._from_members(sources, ours) if sources else None
                where = f"memory copies={sum(source.offer >= 0 for source in sources)}"
            else:
                state, where = self._from_storage(choice, markers.get(choice)), choice
            if all(row[0] > 0 for row in send_metadata(self._group, [float(state is not None)])):
                steps = state["steps"] if state is not None else 0
                log.info("restored_shards from=%s steps=%d", where, steps)
                return state, True
        unknown = all(one.checkpoints is None for one in members)
        return None, unknown or bool(choices(members))

    def _exchange_info(
        self, here: Mapping[SnapshotKey, MemorySnapshot], offers: Sequence[SnapshotOffer]
    ) -> tuple[Sequence[Candidate] | None, list[SnapshotInfo]]:
        """Return what we have listed of storage, and what everyone reports.

        One lists for all. If it cannot, the others try.
        """
        candidates: Sequence[Candidate] | None = None
        members: list[SnapshotInfo] = []
        for lists in (self._rank == 0, self._rank > 0):
            candidates = self._listed() if lists else candidates
            names = None if candidates is None else tuple((s, name) for s, name, _ in candidates)
            mine = SnapshotInfo(
                {k: _stretches(one.layout) for k, one in here.items()}, names, (*offers,)
            )
            members = [SnapshotInfo.of(text) for text in share_bytes(self._group, mine.to_bytes())]
            if members[0].checkpoints is not None:
                break
        return candidates, members

    def _in_memory(self) -> dict[SnapshotKey, MemorySnapshot]:
        found = {}
        for slot, mark in self._snapshotter.held_snapshots():
            try:
                found[_key_of(mark)] = MemorySnapshot.of(slot, mark)
            except Exception as error:  # Bytes that are no state raise whatever their reader meets.
                self._note("this node's memory", error)
        return found

    def _offered(self) -> list[tuple[SnapshotOffer, ShardCopy]]:
        """Return the copies of rows that are with the agents which are ours to ask."""
        found = []
        here = [mark for _, mark in self._snapshotter.held_snapshots()]
        for shard in self._copies.list_shards(here):
            try:
                rows = _stretches(_read_text(shard.text)[1])
            except Exception as error:  # As above.
                self._note(f"a copy at {shard.address}", error)
            else:
                offer = SnapshotOffer(_key_of(shard.mark), shard.source, shard.address, rows)
                found.append((offer, shard))
        return found

    def _note(self, where: str, error: object) -> None:
        self.problems.append(f"{where}: {error}")
        log.warning("checkpoint_refused path=%s reason=%r: it is not used", where, str(error))

    def _from_storage(self, name: str, marker: CheckpointMarker | None) -> State | None:
        try:
            return self._read(name, marker)
        except Exception as error:  # As above.
            self._note(name, error)
            return None

    # ------------------------------------------------------------------- from memory

    def _gathered(
        self,
        key: SnapshotKey,
        members: Sequence[SnapshotInfo],
        here: Mapping[SnapshotKey, MemorySnapshot],
        shards: Sequence[ShardCopy],
    ) -> tuple[list[SnapshotSource], dict[int, MemorySnapshot]]:
        """Fetch all copies of rows that a snapshot needs, from other nodes where some fail.

        Each is tried once. All receive what has failed, and choose others alike. Returns who has,
        together, all rows, none if they are not to be had; and what is ours of those, by number.
        """
        fetched: dict[int, MemorySnapshot] = {}
        failed: set[tuple[int, int]] = set()
        until_s = time.monotonic() + OTHERS_S
        while sources := sources_of(key, members, failed):
            wanted = [one.offer for one in sources if one.rank == self._rank and one.offer >= 0]
            self._fetch(wanted, shards, fetched)
            if all(one.offer < 0 for one in sources):
                break
            missing = [offer for offer in wanted if offer not in fetched]
            patience = LATE if time.monotonic() > until_s else IN_TIME
            answers = send_metadata(self._group, [-patience if missing else patience])
            if all(row[0] > 0 for row in answers):
                break
            if any(abs(row[0]) == LATE for row in answers):
                return [], {}
            texts = share_bytes(self._group, json.dumps(missing).encode())
            failed |= {(rank, n) for rank, text in enumerate(texts) for n in json.loads(text)}
            log.info("copies_sought_elsewhere steps=%d failed=%d", key.steps, len(failed))
        ours = {
            number: here[key] if one.offer < 0 else fetched[one.offer]
            for number, one in enumerate(sources)
            if one.rank == self._rank
        }
        return sources, ours

    def _fetch(
        self, wanted: Sequence[int], shards: Sequence[ShardCopy], fetched: dict[int, MemorySnapshot]
    ) -> None:
        gone: set[str] = set()
        for offer in wanted:
            shard = shards[offer]
            if offer in fetched or shard.address in gone:
                continue
            try:
                fetched[offer] = MemorySnapshot.of(self._copies.fetch_shard(shard), shard.mark)
            except Exception as error:  # As above.
                self._note(f"the copy of {shard.source} at {shard.address}", error)
                # An agent with the rows of many nodes would have us wait as many times.
                gone |= {shard.address} if isinstance(error, GONE) else set()

    def _from_members(
        self, sources: Sequence[SnapshotSource], ours: Mapping[int, MemorySnapshot]
    ) -> State:
        """Have the rows that we need of a snapshot that is whole in the memory of these."""
        texts = share_bytes(self._group, ours[0].skeleton if 0 in ours else b"")
        skeleton = read_skeleton(texts[sources[0].rank])
        specs = tensors_of(skeleton)
        places = places_of(skeleton, self._ours)
        rows = {number: rows_of(tensor, self._rank) for number, tensor in places.items()}
        wanted = [rows.get(spec.number) or _all_of(spec) for spec in specs]
        reported_wanted = share_bytes(self._group, json.dumps(wanted).encode())
        wants = [[RowRange(*one) for one in json.loads(text)] for text in reported_wanted]
        tensors = [_room(spec, wanted[spec.number]) for spec in specs]
        self._fill(tensors, specs, wants, sources, ours)
        placed = [
            like(places[n], tensor) if n in places else tensor for n, tensor in enumerate(tensors)
        ]
        state: State = unpack(skeleton, placed)
        return state

    def _fill(
        self,
        tensors: Sequence[torch.Tensor],
        specs: Sequence[TensorSpec],
        wants: Sequence[Sequence[RowRange]],
        sources: Sequence[SnapshotSource],
        ours: Mapping[int, MemorySnapshot],
    ) -> None:
        """Copy or receive the rows of our tensors, and send other members theirs.

        What one member sends to another is one message; both put it together in the same order.
        """
        sends: dict[int, list[torch.Tensor]] = {}
        receives: dict[int, list[torch.Tensor]] = {}
        for spec, tensor in zip(specs, tensors, strict=True):
            held = [(source.rank, _held(source.stretches, spec)) for source in sources]
            takers = [one[spec.number] for one in wants]
            givers = RowSources(held, takers)
            for taker, taken in enumerate(takers):
                if taker != self._rank and not givers.may_give(self._rank, taken):
                    continue
                for number, part in givers.of(taker, taken):
                    giver = sources[number].rank
                    if giver == self._rank:
                        given = ours[number].rows(spec, part)
                        if taker == giver:
                            _part_of(tensor, taken, part).copy_(given)
                        else:
                            sends.setdefault(taker, []).append(given)
                    elif taker == self._rank:
                        receives.setdefault(giver, []).append(_part_of(tensor, taken, part))
        if self._size > 1:
            sent, received = _by_rank(sends), _by_rank(receives)
            with links_of(self._group).sockets_to({*sent, *received}) as sockets:
                sockets.exchange(sent, received)


def _part_of(tensor: torch.Tensor, rows: RowRange, part: RowRange) -> torch.Tensor:
    """Return a part of a tensor that has these rows; all of one without dimensions."""
    return tensor[part.first - rows.first :][: part.rows] if tensor.dim() else tensor


def _by_rank(tensors: Mapping[int, Sequence[torch.Tensor]]) -> dict[int, list[memoryview]]:
    views = {rank: views_of(some) for rank, some in tensors.items()}
    return {rank: some for rank, some in views.items() if some}


def _all_of(spec: TensorSpec) -> RowRange:
    return RowRange(0, extent_of(spec).rows)


def _held(stretches: Stretches, spec: TensorSpec) -> tuple[RowRange, ...]:
    return stretches[spec.number][1] if spec.number in stretches else (_all_of(spec),)


def _room(spec: TensorSpec, rows: RowRange) -> torch.Tensor:
    shape = (rows.rows, *spec.shape[1:]) if spec.shape else ()
    return torch.empty(shape, dtype=dtype_of(spec))
