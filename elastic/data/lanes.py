"""The order of an epoch: lanes of row groups, shuffled in windows. Pure functions.

A table is a list of blocks (row groups). For an epoch they are permuted and concatenated; this line
of rows is cut into V lanes of equal length, one for each micro-batch of a step, and micro-batch v
of step s is the next rows of lane v. Within a lane, rows are shuffled in windows of some blocks.

Rule: the order depends on (table, V, micro-batch, seed, epoch) alone. So a position in the epoch is
enough to resume, at any world size, and a rank reads the blocks of its own lanes and few others.
(A shuffle over all rows would make every rank read every block.)
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elastic.core.policy.data_plan import Permutation
from elastic.core.policy.seeds import derive, shuffle_seed
from elastic.errors import check
from elastic.worker.data.randomness import permuted

LANE = 6
"""Purpose number for the seeds of windows; others are in core/policy/seeds.py."""
Ints = NDArray[np.int64]
Ranges = list[tuple[int, int]]
Files = tuple[tuple[int | None, tuple[int, ...]], ...]
"""Runs of files: the seed of their order, None for always the same, and the blocks of each."""


@dataclass(frozen=True)
class Lanes:
    """The order of a table's rows, different in each epoch.

    Attributes:
        blocks: rows of each block, all at least 1.
        num_lanes: V, micro-batches of a step.
        micro_batch_size: b, rows of a micro-batch.
        seed: of the shuffle.
        window: blocks that are shuffled together.
        shuffle: False for the order of the table within each lane.
        reseeds: False for the order of the first epoch in each.
        files: without `shuffle`: which blocks change places only together; () for none.
    """

    blocks: tuple[int, ...]
    num_lanes: int = 1
    micro_batch_size: int = 1
    seed: int = 0
    window: int = 1
    shuffle: bool = True
    reseeds: bool = True
    files: Files = ()

    @cached_property
    def rows(self) -> int:
        """Return N, the rows of the table."""
        return sum(self.blocks)

    @cached_property
    def fingerprint(self) -> int:
        """Return a hash of the order: equal for equal orders."""
        blocks = zlib.crc32(np.asarray(self.blocks, np.int64).tobytes())
        blocks = zlib.crc32(repr(self.files).encode() if self.files else b"", blocks)
        how = int(self.shuffle) + 2 * int(not self.reseeds)
        return derive(
            self.seed, LANE, blocks, self.num_lanes, self.micro_batch_size, self.window, how
        )

    def of(self, epoch: int) -> EpochOrder:
        return EpochOrder(self, epoch)


@dataclass(frozen=True)
class Found:
    """Locations of rows: one entry per place.

    Attributes:
        block: number of the block in the table.
        row: number of the row in its block.
        lane: the lane that the place belongs to.
    """

    block: Ints
    row: Ints
    lane: Ints


class EpochOrder:
    """The order of one epoch: places 0 to N - 1, step after step, micro-batch after micro-batch.

    The last step, which is not full, has the remaining rows of all lanes, one lane after the other.
    """

    def __init__(self, lanes: Lanes, epoch: int) -> None:
        """Permute the blocks for an epoch."""
        self._lanes = lanes
        self._epoch = epoch if lanes.reseeds else 0
        count = len(lanes.blocks)
        order = np.arange(count, dtype=np.uint64)
        if lanes.shuffle:
            order = permuted(Permutation(count, shuffle_seed(lanes.seed, self._epoch)), order)
        elif lanes.files:
            order = self._by_file()
        self._order = order.astype(np.int64)
        self._ends: Ints = np.cumsum(np.asarray(lanes.blocks, np.int64)[self._order])
        self._starts: Ints = np.concatenate([[0], self._ends[:-1]])
        rows, number = lanes.rows, lanes.num_lanes
        self._bounds: Ints = np.arange(number + 1, dtype=np.int64) * rows // number
        self._full_steps = rows // number // lanes.micro_batch_size
        remaining = np.diff(self._bounds) - self._full_steps * lanes.micro_batch_size
        self._tail_ends: Ints = np.cumsum(remaining)
        self._windows: dict[int, Ints] = {}

    def _by_file(self) -> Any:
        """Return the blocks of all files, in the order of this epoch."""
        found, first = [], 0
        for seed, counts in self._lanes.files:
            ends = first + np.cumsum(counts)
            first = int(ends[-1])
            numbers = np.arange(len(counts), dtype=np.uint64)
            if seed is not None:
                permutation = Permutation(len(counts), shuffle_seed(seed, self._epoch))
                numbers = permuted(permutation, numbers)
            found += [np.arange(ends[n] - counts[n], ends[n]) for n in numbers.tolist()]
        return np.concatenate(found)

    def find(self, places: Ints) -> Found:
        """Return the locations of the rows at these places, each from 0 to N - 1."""
        lane, offset = self._in_lanes(places)
        line = np.empty_like(offset)
        for number in np.unique(lane).tolist():
            mine = lane == number
            line[mine] = self._shuffled(number, offset[mine])
        at = np.searchsorted(self._ends, line, side="right")
        return Found(self._order[at], line - self._starts[at], lane)

    def windows_at(self, place: int) -> tuple[list[int], list[int]]:
        """Return the blocks of a place's window, and those of the next window of its lane."""
        lanes, offsets = self._in_lanes(np.asarray([place]))
        lane = int(lanes[0])
        windows = self._windows_of(lane)
        at = int(np.searchsorted(windows, self._bounds[lane] + offsets[0], side="right")) - 1
        return self._blocks(windows, at), self._blocks(windows, at + 1)

    def _in_lanes(self, places: Ints) -> tuple[Ints, Ints]:
        """Return the lane of each place, and its offset in that lane."""
        size, number = self._lanes.micro_batch_size, self._lanes.num_lanes
        step, offset_in_step = np.divmod(places, size * number)
        lane, offset = offset_in_step // size, step * size + offset_in_step % size
        full = self._full_steps * size * number
        is_last = places >= full
        if is_last.any():
            left = places[is_last] - full
            last = np.searchsorted(self._tail_ends, left, side="right")
            begins = self._tail_ends[last] - np.diff(self._bounds)[last]
            lane[is_last], offset[is_last] = last, left - begins
        return lane, offset

    def _shuffled(self, lane: int, offset: Ints) -> Ints:
        """Return the positions of these rows of a lane in the line of all rows, shuffled."""
        line = self._bounds[lane] + offset
        if not self._lanes.shuffle:
            return line
        windows = self._windows_of(lane)
        window = np.searchsorted(windows, line, side="right") - 1
        for number in np.unique(window).tolist():
            mine, begin = window == number, windows[number]
            seed = derive(self._lanes.seed, LANE, self._epoch, lane, number)
            permutation = Permutation(int(windows[number + 1] - begin), seed)
            moved = permuted(permutation, (line[mine] - begin).astype(np.uint64))
            line[mine] = begin + moved.astype(np.int64)
        return line

    def _windows_of(self, lane: int) -> Ints:
        """Return the starts of the windows of a lane, and the end of the last one."""
        if lane not in self._windows:
            first, last = self._bounds[lane], self._bounds[lane + 1]
            low = np.searchsorted(self._starts, first, side="right")
            high = np.searchsorted(self._starts, last, side="left")
            pieces = np.concatenate([[first], self._starts[low:high]])
            self._windows[lane] = np.append(pieces[:: self._lanes.window], last)
        return self._windows[lane]

    def _blocks(self, windows: Ints, number: int) -> list[int]:
        if not 0 <= number < len(windows) - 1 or windows[number] == windows[number + 1]:
            return []
        low = np.searchsorted(self._ends, windows[number], side="right")
        high = np.searchsorted(self._ends, windows[number + 1] - 1, side="right")
        found: list[int] = self._order[low : high + 1].tolist()
        return found


# --------------------------------------------------------------------- by rank, in plain loops


def share_of(left: Ranges, rank: int, world_size: int) -> Ranges:
    """Return a rank's part of the remaining places; parts differ by at most one place."""
    total = sum(stop - start for start, stop in left)
    first, last = rank * total // world_size, (rank + 1) * total // world_size
    return _between(left, first, last)


def num_batches(left: Ranges, world_size: int, size: int, drop_last: bool = False) -> int:
    """Return the number of batches of a rank, equal for all; with `drop_last` of full ones."""
    total = sum(stop - start for start, stop in left)
    if drop_last:
        return total // world_size // size
    most = -(-total // world_size)
    return -(-most // size)


def batch_sizes(rows: int, batches: int, size: int) -> list[int]:
    """Return the rows of each batch: full batches, then the rest; only the last ones are empty.

    A rank with one row less might lack a last batch, and the others' last backward would wait for
    it; so it keeps one row of an earlier batch for the last.
    """
    sizes = []
    for number in range(batches):
        taken = min(size, max(min(1, rows), rows - (batches - number - 1)))
        sizes.append(taken)
        rows -= taken
    return sizes


def left_after(
    left: Ranges, done: int, world_size: int, size: int, drop_last: bool = False
) -> Ranges:
    """Return the remaining places after every rank has read `done` batches."""
    batches = num_batches(left, world_size, size, drop_last)
    check(0 <= done <= batches, f"{done} of {batches} batches")
    if drop_last and done == batches:
        return []  # What fills no batch is left out.
    return _left_by_rank(
        left, world_size, lambda rows: sum(batch_sizes(rows, batches, size)[:done])
    )


def left_after_rows(left: Ranges, done: int, world_size: int) -> Ranges:
    """Return the remaining places after every rank has read `done` rows, or all of its own."""
    return _left_by_rank(left, world_size, lambda rows: min(rows, done))


def _left_by_rank(left: Ranges, world_size: int, read_of: Callable[[int], int]) -> Ranges:
    """Return the remaining places; `read_of` returns how many of its rows a rank has read."""
    joined: Ranges = []
    for rank in range(world_size):
        mine = share_of(left, rank, world_size)
        rows = sum(stop - start for start, stop in mine)
        for start, stop in _between(mine, read_of(rows), rows):
            if joined and joined[-1][1] == start:
                joined[-1] = joined[-1][0], stop
            else:
                joined.append((start, stop))
    return joined


def places_of(ranges: Ranges, first: int, last: int) -> Any:
    """Return the places with indices `first` to `last` - 1 in these ranges, as an array."""
    parts = [np.arange(start, stop) for start, stop in _between(ranges, first, last)]
    return np.concatenate([np.empty(0, np.int64), *parts])


def _between(ranges: Ranges, first: int, last: int) -> Ranges:
    found, seen = [], 0
    for start, stop in ranges:
        low, high = max(first - seen, 0), min(last - seen, stop - start)
        if low < high:
            found.append((start + low, start + high))
        seen += stop - start
    return found
