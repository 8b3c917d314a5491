"""How the members of a new group come to the state of a sharded model, of which nobody has all.

Each tells which rows lie in its node's memory, of which snapshots. If those of one snapshot are all
there, they are sent to whoever needs them now; else every member reads its rows from storage.

Rule: all members go on from the same snapshot or checkpoint, or none does: what is there is told
first, all choose alike, and what one could not read is used by nobody. No member ever holds more
than its own rows of a sharded tensor.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from elastic.core.policy.shares import Piece, Rows, givers, merged
from elastic.storage.marker import Marker
from elastic.worker.arena import Layout, Mark, Slot, dtype_of, extent_of
from elastic.worker.meeting import share_bytes
from elastic.worker.rows import tell_rows
from elastic.worker.saving import Saver
from elastic.worker.sharded_state import Held, like, places_of, rows_of, without_held
from elastic.worker.state import State
from elastic.worker.transfer import TAG, TensorSpec, bytes_of, read_skeleton, tensors_of, unpack

log = logging.getLogger(__name__)

Candidate = tuple[int, str, Marker]
"""Steps of the run, name, marker."""


class Key(NamedTuple):
    """Which snapshot; alike on all nodes that have a part of it.

    Attributes:
        steps, generation, number, tensors: see `Mark`.
    """

    steps: int
    generation: int
    number: int
    tensors: int


Stretches = dict[int, tuple[int, tuple[Rows, ...]]]
"""Of each sharded tensor, by number: its rows in all, and those that are held."""


@dataclass(frozen=True)
class Told:
    """What a member tells of what could be gone on from.

    Attributes:
        snapshots: in its node's memory, with the rows of each.
        checkpoints: (steps, name) in storage, newest first; None if it cannot be asked.
    """

    snapshots: Mapping[Key, Stretches]
    checkpoints: tuple[tuple[int, str], ...] | None

    def to_bytes(self) -> bytes:
        """Return it as it is sent."""
        memory = [
            [list(key), [[n, total, held] for n, (total, held) in stretches.items()]]
            for key, stretches in self.snapshots.items()
        ]
        return json.dumps([memory, self.checkpoints]).encode()

    @staticmethod
    def of(text: bytes) -> Told:
        """Read what was sent."""
        memory, checkpoints = json.loads(text)
        snapshots = {
            Key(*key): {n: (total, tuple(Rows(*rows) for rows in held)) for n, total, held in rows_}
            for key, rows_ in memory
        }
        listed = None if checkpoints is None else tuple((s, name) for s, name in checkpoints)
        return Told(snapshots, listed)


@dataclass(frozen=True)
class InMemory:
    """A snapshot in this node's memory.

    Attributes:
        slot: where it lies.
        skeleton: what is no tensor, as bytes.
        layout: where which rows lie.
    """

    slot: Slot
    skeleton: bytes
    layout: Layout

    @staticmethod
    def of(slot: Slot, mark: Mark) -> InMemory:
        """Look at the snapshot in a slot.

        Raises:
            Exception: it is damaged.
        """
        skeleton, held = without_held(slot.skeleton(mark))
        specs = tensors_of(read_skeleton(skeleton))
        return InMemory(slot, skeleton, Layout.of(specs, held or ()))

    def stretches(self) -> Stretches:
        """Return the rows of sharded tensors that are here."""
        held: Held = self.layout.held
        totals = self.layout.extents()
        return {n: (totals[n].rows, one) for n, one in enumerate(held) if one is not None}


def complete(key: Key, told: Sequence[Told]) -> bool:
    """Return whether all rows of a snapshot are in somebody's memory."""
    having = [one.snapshots[key] for one in told if key in one.snapshots]
    for number, (total, _) in having[0].items() if having else ():
        found = merged(rows for stretches in having for rows in stretches[number][1])
        if total and found != (Rows(0, total),):
            return False
    return bool(having)


def choices(told: Sequence[Told]) -> list[Key | str]:
    """Return what could be gone on from, best first: snapshots by key, checkpoints by name.

    What is newest first; memory, if they are equal.
    """
    keys = sorted({key for one in told for key in one.snapshots if complete(key, told)})
    listed = next((one.checkpoints for one in told if one.checkpoints is not None), ())
    found: list[tuple[int, int, int, Key | str]] = []
    for place, key in enumerate(keys):
        found.append((key.steps, 1, place, key))
    for place, (steps, name) in enumerate(listed):
        found.append((steps, 0, -place, name))
    return [one[3] for one in sorted(found, key=lambda one: one[:3], reverse=True)]


class Restorer:
    """Finds and reads the state of one group that has none."""

    def __init__(
        self,
        group: Any,
        saver: Saver,
        ours: Any,
        *,
        listed: Callable[[], Sequence[Candidate] | None],
        read: Callable[[str, Marker], State],
    ) -> None:
        """Look for nothing yet.

        Args:
            group: the process group that stands; of a CPU backend for CPU tensors.
            saver: knows this node's memory.
            ours: our state, from which it follows how a saved one is sharded here.
            listed: returns the checkpoints in storage, newest first; None if it cannot be asked.
            read: returns the state in one, sharded as ours is.
        """
        self._group, self._rank, self._size = group, group.rank(), group.size()
        self._saver, self._ours = saver, ours
        self._listed, self._read = listed, read
        self.problems: list[str] = []

    def restore(self) -> tuple[State | None, bool]:
        """Return the newest state that is whole, and whether there is anything at all.

        Raises:
            RuntimeError: the group broke.
        """
        here = self._in_memory()
        candidates = self._listed()
        names = None if candidates is None else tuple((s, name) for s, name, _ in candidates)
        mine = Told({key: one.stretches() for key, one in here.items()}, names)
        told = [Told.of(text) for text in share_bytes(self._group, mine.to_bytes())]
        markers = {name: marker for _, name, marker in candidates or ()}
        for choice in choices(told):
            state: State | None
            if isinstance(choice, Key):
                state, where = self._from_members(choice, here.get(choice), told), "memory"
            else:
                state, where = self._from_storage(choice, markers.get(choice)), choice
            if all(row[0] > 0 for row in tell_rows(self._group, [float(state is not None)])):
                steps = state["steps"] if state is not None else 0
                log.info("restored_shards from=%s steps=%d", where, steps)
                return state, True
        unknown = all(one.checkpoints is None for one in told)
        return None, unknown or bool(choices(told))

    def _in_memory(self) -> dict[Key, InMemory]:
        found = {}
        for slot, mark in self._saver.held_snapshots():
            try:
                one = InMemory.of(slot, mark)
            except Exception as error:  # Bytes that are no state raise whatever their reader meets.
                self._note("this node's memory", error)
            else:
                found[Key(mark.steps, mark.generation, mark.number, mark.tensors)] = one
        return found

    def _note(self, where: str, error: object) -> None:
        self.problems.append(f"{where}: {error}")
        log.warning("checkpoint_refused path=%s reason=%r: it is not used", where, str(error))

    def _from_storage(self, name: str, marker: Marker | None) -> State | None:
        try:
            if marker is None:  # Committed since we looked: its writer may be of the group before.
                marker = next((m for _, n, m in self._listed() or () if n == name), None)
            if marker is None:
                raise ValueError("others list it, and it is not there for this worker")
            return self._read(name, marker)
        except Exception as error:  # As above.
            self._note(name, error)
            return None

    # ------------------------------------------------------------------- from members' nodes

    def _from_members(self, key: Key, here: InMemory | None, told: Sequence[Told]) -> State:
        """Have the rows that we need of a snapshot that is whole in the memory of all nodes.

        Raises:
            RuntimeError: the group broke.
        """
        having = [rank for rank, one in enumerate(told) if key in one.snapshots]
        skeleton = read_skeleton(self._spread(here.skeleton if here else b"", having[0]))
        specs = tensors_of(skeleton)
        places = places_of(skeleton, self._ours)
        rows = {number: rows_of(tensor, self._rank) for number, tensor in places.items()}
        wanted = [rows.get(spec.number) or _all_of(spec) for spec in specs]
        told_wanted = share_bytes(self._group, json.dumps(wanted).encode())
        wants = [[Rows(*one) for one in json.loads(text)] for text in told_wanted]
        tensors = [_room(spec, wanted[spec.number]) for spec in specs]
        works = []
        for spec in specs:
            held = {r: _held(told[r].snapshots[key], spec) for r in having}
            for taker in range(self._size):
                asked = sorted(held.items(), key=lambda pair: pair[0] != taker)
                for giver, part in givers(wants[taker][spec.number], asked):
                    works += self._pass_on(spec, part, (giver, taker), here, tensors, wanted)
        for work in works:
            work.wait()
        placed = [
            like(places[n], tensor) if n in places else tensor for n, tensor in enumerate(tensors)
        ]
        state: State = unpack(skeleton, placed)
        return state

    def _pass_on(
        self,
        spec: TensorSpec,
        part: Rows,
        ends: tuple[int, int],
        here: InMemory | None,
        tensors: Sequence[torch.Tensor],
        wanted: Sequence[Rows],
    ) -> list[Any]:
        """Send, receive or copy rows, if one of the ends is ours; returns what to wait for."""
        giver, taker = ends
        if self._rank not in ends:
            return []
        target = tensors[spec.number]
        if target.dim():
            target = target[part.first - wanted[spec.number].first :][: part.rows]
        if giver == self._rank and here is not None:
            source = here.slot.chunk(here.layout, Piece(spec.number, *part))
            if giver == taker:
                target.copy_(source)
                return []
            if not source.numel():
                return []
            return [self._group.send([bytes_of(source)], taker, TAG + spec.number)]
        if not target.numel():
            return []
        return [self._group.recv([bytes_of(target)], giver, TAG + spec.number)]

    def _spread(self, mine: bytes, source: int) -> bytes:
        """Return what one rank has, on all ranks."""
        size = int(tell_rows(self._group, [float(len(mine))])[source][0])
        if self._size == 1:
            return mine
        is_mine = self._rank == source
        text = torch.empty(size, dtype=torch.uint8)
        if is_mine:
            text = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        torch.distributed.broadcast(text, group=self._group, group_src=source)
        return text.numpy().tobytes()


def _all_of(spec: TensorSpec) -> Rows:
    return Rows(0, extent_of(spec).rows)


def _held(stretches: Stretches, spec: TensorSpec) -> tuple[Rows, ...]:
    return stretches[spec.number][1] if spec.number in stretches else (_all_of(spec),)


def _room(spec: TensorSpec, rows: Rows) -> torch.Tensor:
    shape = (rows.rows, *spec.shape[1:]) if spec.shape else ()
    return torch.empty(shape, dtype=dtype_of(spec))
