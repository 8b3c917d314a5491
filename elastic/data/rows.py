"""Rows by epoch and place, as a torch dataset for loaders.

Rule: random numbers in the user's functions depend on (seed, epoch, places) alone, so that a batch
is the same in any process that computes it, and when it is computed again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic.core.policy.data_plan import DataPlan
from elastic.core.policy.seeds import AUGMENT, derive
from elastic.data.batches import Batch
from elastic.data.lanes import Lanes
from elastic.data.table import Table
from elastic.data.table_reader import TableReader, finish
from elastic.worker.data.randomness import seeded
from elastic.worker.data.sampler_order import OrderedSampler

if TYPE_CHECKING:
    from elastic.data.feeders import Feeders, FeederSource

Wanted = Sequence[tuple[int, Any]]
"""Epochs and places of batches that will be requested next."""


class Rows:
    """The rows of a table in the order of its lanes; the index of a row is epoch * N + place.

    Attributes:
        lanes: the order.
    """

    def __init__(
        self, table: Table, lanes: Lanes, *, feeders: Callable[[], FeederSource] | None = None
    ) -> None:
        """Read nothing yet; `feeders` makes a source of processes that compute batches ahead."""
        self.lanes = lanes
        self._table = table
        self._reader: TableReader | None = None
        self._feeders: Feeders | None = None
        if feeders is not None:
            from elastic.data.feeders import Feeders

            self._feeders = Feeders(table.operations, feeders())
        self._steps = DataPlan(
            num_samples=table.rows,
            micro_batch_size=lanes.micro_batch_size,
            num_micro_batches=lanes.num_lanes,
            shuffle=False,
        )

    @property
    def bytes_read(self) -> int:
        return self._reader.bytes_read if self._reader is not None else 0

    def __len__(self) -> int:
        return self._table.rows

    def __getitem__(self, number: int) -> Batch:
        return self.__getitems__([number])

    def __getitems__(self, numbers: Sequence[int]) -> Batch:
        """Return the rows of a micro-batch, and request the next ones from feeders."""
        epoch = numbers[0] // self._table.rows
        places = np.asarray(numbers, np.int64) - epoch * self._table.rows
        return self.get(epoch, places, self._following(epoch, places))

    def get(self, epoch: int, places: Any, ahead: Wanted = ()) -> Batch:
        """Return rows of an epoch.

        Args:
            epoch: the pass over the data.
            places: numbers from 0 to N - 1.
            ahead: what will be requested next.
        """
        feeders = self._feeders
        if feeders is None:
            return self.compute(epoch, places)
        for one, some in ahead:
            if feeders.has_room and not feeders.has(_seed(self.lanes.seed, one, some)):
                seed = _seed(self.lanes.seed, one, some)
                rows = self._the_reader().gather(one, some)
                feeders.request(seed, rows, self._position(one, some))
        began = time.monotonic()
        seed, position = _seed(self.lanes.seed, epoch, places), self._position(epoch, places)
        batch = feeders.take(seed, position)
        if batch is None:
            alone = time.monotonic()
            batch = self.compute(epoch, places)
            feeders.note_own(time.monotonic() - alone)
        feeders.note_wait(time.monotonic() - began)
        return batch

    def compute(self, epoch: int, places: Any) -> Batch:
        """Return rows of an epoch, computed in this process."""
        gathered = self._the_reader().gather(epoch, places)
        with seeded(_seed(self.lanes.seed, epoch, places)):
            return finish(self._table.operations, gathered)

    def _the_reader(self) -> TableReader:
        if self._reader is None:
            self._reader = TableReader(self._table, self.lanes)
        return self._reader

    def _position(self, epoch: int, places: Any) -> tuple[int, int]:
        return epoch, int(places[0]) // self._steps.global_batch

    def _following(self, epoch: int, places: Any) -> Wanted:
        """Return the same lane's micro-batches of the next steps."""
        if self._feeders is None:
            return ()
        steps, first = self._steps, int(places[0])
        step = first // steps.global_batch
        number = first % steps.global_batch // steps.micro_batch_size
        found = []
        for _ in range(self._feeders.depth):
            step += 1
            if step >= steps.steps:
                epoch, step = epoch + 1, 0
            start, stop = steps.positions(step, number)
            if start < stop:
                found.append((epoch, np.arange(start, stop)))
        return found

    def close(self) -> None:
        if self._feeders is not None:
            self._feeders.close()
        if self._reader is not None:
            self._reader.close()
        self._feeders = self._reader = None


def _seed(seed: int, epoch: int, places: Any) -> int:
    """Return the seed for random numbers in a batch; different for each batch."""
    return derive(seed, AUGMENT, epoch, int(places[0]), int(places[-1]), len(places))


class LaneOrder(OrderedSampler):
    """The sampler of a loader over `Rows`: all places in order, with other indices per epoch."""

    def __init__(self, rows: Rows) -> None:
        self._size, self._lanes = len(rows), rows.lanes

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        """Yield the indices of the first epoch."""
        return iter(self.of(0))

    def of(self, epoch: int) -> Sequence[int]:
        return range(epoch * self._size, (epoch + 1) * self._size)

    def print(self, epoch: int) -> int:
        """Return a 32-bit fingerprint of an epoch's order."""
        return derive(self._lanes.fingerprint, epoch) & 0xFFFFFFFF
