"""The lazy plan of a dataset: a tree of nodes, from sources to operations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from elastic.data.batches import Batch, batched, joined, num_rows, sliced, taken, to_numpy
from elastic.data.operations import Operation, row_slice
from elastic.data.sources import Source
from elastic.errors import UsageError


@dataclass
class Node:
    """A node of the plan; computes rows from those of its parents.

    Attributes:
        parents: the input nodes.
    """

    parents: tuple[Node, ...] = ()

    def stream(self) -> Iterator[Batch]:
        """Yield all rows in order."""
        raise NotImplementedError


@dataclass
class Read(Node):
    """The rows of a source."""

    source: Source = field(default_factory=lambda: Source("nothing"))

    def stream(self) -> Iterator[Batch]:
        """Yield all rows in order."""
        return self.source.stream()


@dataclass
class Apply(Node):
    """An operation on the rows of the parent."""

    operation: Operation = field(default_factory=Operation)

    def stream(self) -> Iterator[Batch]:
        """Yield all rows in order."""
        return self.operation.stream(self.parents[0].stream())


@dataclass
class Slice(Node):
    """The rows from `start` to `stop`; None for the end."""

    start: int = 0
    stop: int | None = None

    def stream(self) -> Iterator[Batch]:
        """Yield all rows in order."""
        return row_slice(self.parents[0].stream(), self.start, self.stop)


@dataclass
class Union(Node):
    """The rows of all parents, one after the other."""

    def stream(self) -> Iterator[Batch]:
        """Yield all rows in order."""
        for parent in self.parents:
            yield from parent.stream()


@dataclass
class Mix(Node):
    """The rows of all parents, interleaved by weights.

    Attributes:
        weights: rows of each parent, in proportion.
        stops_on_shortest: end with the first parent that ends; else that one drops out.
    """

    weights: tuple[float, ...] = ()
    stops_on_shortest: bool = False

    def stream(self) -> Iterator[Batch]:
        """Yield all rows; the next one is of the parent that is furthest behind its weight."""
        sources = [batched(parent.stream(), 1024) for parent in self.parents]
        heads: dict[int, Batch] = {}
        counts = [0] * len(sources)
        live = set(range(len(sources)))
        while True:
            for number in sorted(live - set(heads)):
                head = next(sources[number], None)
                if head is None:
                    live.discard(number)
                    if self.stops_on_shortest:
                        return
                else:
                    heads[number] = head
            if not heads:
                return
            used, order = dict.fromkeys(heads, 0), []
            while all(used[one] < num_rows(heads[one]) for one in heads):
                number = min(heads, key=lambda one: ((counts[one] + 1) / self.weights[one], one))
                order.append((number, used[number]))
                used[number] += 1
                counts[number] += 1
            parts = {one: sliced(head, 0, used[one]) for one, head in heads.items() if used[one]}
            ends = np.cumsum([num_rows(part) for part in parts.values()])
            starts = dict(zip(parts, [0, *ends[:-1]], strict=True))
            rows = [starts[number] + row for number, row in order]
            yield taken(joined(list(parts.values())), np.asarray(rows, np.int64))
            heads = {
                one: sliced(head, used[one], num_rows(head))
                for one, head in heads.items()
                if used[one] < num_rows(head)
            }


@dataclass
class Zip(Node):
    """The columns of two parents, row by row; duplicate names of the second get "_1", "_2", ...."""

    def stream(self) -> Iterator[Batch]:
        """Yield all rows in order.

        Raises:
            UsageError: the parents differ in length.
        """
        one, two = (batched(parent.stream(), 1024) for parent in self.parents)
        while True:
            left, right = next(one, None), next(two, None)
            lengths = [0 if batch is None else num_rows(batch) for batch in (left, right)]
            if lengths[0] != lengths[1]:
                raise UsageError(
                    f"zip: the datasets have different numbers of rows; after the last full 1,024 "
                    f"one has {lengths[0]} left and the other {lengths[1]}"
                )
            if left is None:
                return
            columns = dict(to_numpy(left))
            for name, values in to_numpy(right).items():
                free, number = name, 0
                while free in columns:
                    number += 1
                    free = f"{name}_{number}"
                columns[free] = values
            yield columns


@dataclass
class Shuffle(Node):
    """All rows in a random order: shuffled in windows of blocks, see lanes.py."""

    seed: int = 0

    def stream(self) -> Iterator[Batch]:
        """Yield all rows in the order of the first epoch."""
        from elastic.data.table import in_memory, table_of
        from elastic.data.table_reader import TableReader

        table = table_of(self, in_memory)
        reader = TableReader(table, table.lanes(1, 1))
        for start in range(0, table.rows, 1024):
            yield reader.read(0, np.arange(start, min(table.rows, start + 1024)))
