"""Reads rows of a table by their places, and caches the windows of blocks in use."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from elastic.data.batches import Batch, joined, sliced, taken
from elastic.data.files import Reader
from elastic.data.lanes import Lanes
from elastic.data.operations import Operation
from elastic.data.table import Table

Gathered = list[tuple[int, Batch, Any]]
"""Rows of a batch: for each part with rows its number, the rows, and their places in the batch."""


def finish(operations: Sequence[Sequence[Operation]], gathered: Gathered) -> Batch:
    """Apply the operations of their parts to rows, and return them in order."""
    pieces = []
    for part, batch, _ in gathered:
        for operation in operations[part]:
            batch = operation.apply(batch)
        pieces.append(batch)
    if len(pieces) == 1:
        return pieces[0]
    where = np.concatenate([places for _, _, places in gathered])
    return _take(joined(pieces), np.argsort(where, kind="stable"))


class TableReader:
    """Reads rows of a table in the order of its lanes, and caches the windows in use."""

    def __init__(self, table: Table, lanes: Lanes) -> None:
        self._table, self._lanes = table, lanes
        self._orders: dict[int, Any] = {}
        self._sizes = np.asarray(table.sizes, np.int64)
        self._ends = np.cumsum(self._sizes)
        counts = [len(part.blocks) for part in table.parts]
        self._part_of = np.repeat(np.arange(len(counts)), counts)
        # Blocks in memory, those being read, and those that each lane needs.
        self._held: dict[int, Batch] = {}
        self._coming: dict[int, Future[Batch]] = {}
        self._pool = ThreadPoolExecutor(1, "elastic-data")
        self._needed: dict[int, set[int]] = {}
        self._turn = 0
        self._last_turn: dict[int, int] = {}
        self._readers = {
            id(part): Reader(getattr(part.source, "options", None)) for part in table.parts
        }

    @property
    def bytes_read(self) -> int:
        return sum(reader.bytes_read for reader in self._readers.values())

    def gather(self, epoch: int, places: Any) -> Gathered:
        """Return the rows at these places of an epoch, before any operation.

        Args:
            epoch: the pass over the data.
            places: numbers from 0 to N - 1.
        """
        order = self._order(epoch)
        found = order.find(np.asarray(places, np.int64))
        block, row = found.block, found.row
        if self._table.is_small:
            block = np.searchsorted(self._ends, found.block, side="right")
            row = found.block - (self._ends[block] - self._sizes[block])
        else:
            self._note(order, places, found.lane)
        gathered = self._gather(block, row)
        self._let_go()
        return gathered

    def read(self, epoch: int, places: Any) -> Batch:
        """Return the rows at these places of an epoch, after the operations."""
        return finish(self._table.operations, self.gather(epoch, places))

    def _order(self, epoch: int) -> Any:
        if epoch not in self._orders:
            while len(self._orders) >= 2:
                del self._orders[min(self._orders)]
            self._orders[epoch] = self._lanes.of(epoch)
        return self._orders[epoch]

    def _note(self, order: Any, places: Any, lanes: Any) -> None:
        """Note the blocks that the lanes of these places need, and prefetch their next windows."""
        self._turn += 1
        for lane in np.unique(lanes).tolist():
            mine = np.asarray(places)[lanes == lane]
            now, following = order.windows_at(int(mine[-1]))
            first = order.windows_at(int(mine[0]))[0] if len(mine) > 1 else []
            self._needed[lane], self._last_turn[lane] = {*first, *now, *following}, self._turn
            for number in following:
                if number not in self._held and number not in self._coming:
                    self._coming[number] = self._pool.submit(self._fetch, number)

    def _gather(self, blocks: Any, rows: Any) -> Gathered:
        """Return rows of several blocks, grouped by part, in the order of their places."""
        of_part: dict[int, list[int]] = {}
        for number in np.unique(blocks).tolist():
            of_part.setdefault(int(self._part_of[number]), []).append(number)
        gathered: Gathered = []
        for part, numbers in of_part.items():
            places = [np.flatnonzero(blocks == number) for number in numbers]
            pieces = [
                _take(self._block(number), rows[mine])
                for number, mine in zip(numbers, places, strict=True)
            ]
            # Functions of batches get rows in this order, independent of their blocks.
            where = np.concatenate(places)
            sort = np.argsort(where, kind="stable")
            gathered.append((part, _take(joined(pieces), sort), where[sort]))
        return gathered

    def _block(self, number: int) -> Batch:
        if number not in self._held:
            coming = self._coming.pop(number, None)
            if coming is None or coming.cancel():
                self._held[number] = self._fetch(number)
            else:
                self._held[number] = coming.result()
        return self._held[number]

    def _fetch(self, number: int) -> Batch:
        part, block = self._table.blocks[number]
        return part.source.read(self._readers[id(part)], part.files, block)

    def close(self) -> None:
        """Stop reading ahead, and drop all rows."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._held, self._coming = {}, {}

    def _let_go(self) -> None:
        """Drop the blocks that no recently read lane needs."""
        if self._table.is_small:
            return
        recent = self._turn - 2 * self._lanes.num_lanes
        for lane in [one for one, turn in self._last_turn.items() if turn < recent]:
            del self._last_turn[lane], self._needed[lane]
        needed = set().union(*self._needed.values()) if self._needed else set()
        for number in [one for one in self._held if one not in needed]:
            del self._held[number]
        for number in [one for one in self._coming if one not in needed]:
            self._coming.pop(number).cancel()


def _take(batch: Batch, rows: Any) -> Batch:
    if len(rows) and len(rows) == rows[-1] - rows[0] + 1 and (np.diff(rows) == 1).all():
        return sliced(batch, int(rows[0]), int(rows[-1]) + 1)
    return taken(batch, rows)
