"""The lazy plan of a dataset: a tree of nodes, from sources to operations.

Rows of a plan have random access if the sources do (`Source.listing`) and operations keep rows;
otherwise the rows of such a node are written out once, and the plan continues from there.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import cloudpickle
import numpy as np

from elastic.data.batches import (
    Batch,
    alike,
    arrow,
    batched,
    columns_of,
    joined,
    num_rows,
    sliced,
    taken,
    to_table,
)
from elastic.data.databases import Sql
from elastic.data.files import Reader
from elastic.data.functions import Function
from elastic.data.operations import Blocks, Fetch, Fill, MapBatches, Operation, row_slice
from elastic.data.parquet import Parquet
from elastic.data.skipped import SkippedCounts
from elastic.data.sources import FileSource, Memory, Source, bytes_of
from elastic.data.table import Part, Table
from elastic.data.table_reader import TableReader
from elastic.data.writing import write_parquet
from elastic.errors import StorageError, UsageError
from elastic.storage.files import Files
from elastic.worker.data.randomness import seeded

ROWS_TRIED = 16
"""With so many rows functions are tried, to know the columns that they return."""
HELD_BYTES = 256 * 1024**2
"""Rows that are read by number without random access are held in memory up to this size."""


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

    def first_rows(self) -> Batch:
        """Return some rows, to know their columns, at the price of a few; or none.

        They need not be the first ones, or have the values of any others.
        """
        found: Batch = next((batch for batch in self.stream() if num_rows(batch)), {})
        return sliced(found, 0, ROWS_TRIED)

    def filled_parents(self) -> list[Iterator[Batch]]:
        """Return the rows of each parent, with the columns of all of them."""
        return [self._fill.stream(parent.stream()) for parent in self.parents]

    @cached_property
    def _fill(self) -> Fill:
        return Fill(_merged([_types_of(parent) for parent in self.parents]))


@dataclass
class Read(Node):
    """The rows of a source."""

    source: Source = field(default_factory=lambda: Source("nothing"))

    def stream(self) -> Iterator[Batch]:
        return self.source.stream()


@dataclass
class ReadFile(Node):
    """The rows of one file of a source, by its number."""

    source: FileSource = field(default_factory=lambda: FileSource("nothing"))
    number: int = 0

    def stream(self) -> Iterator[Batch]:
        return self.source.stream_file(self.number)


@dataclass
class Apply(Node):
    """An operation on the rows of the parent."""

    operation: Operation = field(default_factory=Operation)

    def stream(self) -> Iterator[Batch]:
        return self.operation.stream(self.parents[0].stream())

    def first_rows(self) -> Batch:
        batches = self.operation.stream(iter([self.parents[0].first_rows()]))
        found = next((batch for batch in batches if columns_of(batch)), None)
        return super().first_rows() if found is None else found

    @cached_property
    def keeps_rows(self) -> bool:
        """Return whether there is one output row per input row.

        Functions of batches are taken to keep the number. One behind `repartition` is tried:
        it may make one row of a block, also where training reads single rows.
        """
        before, operation = self.parents[0], self.operation
        is_given_blocks = isinstance(before, Apply) and isinstance(before.operation, Blocks)
        if is_given_blocks and isinstance(operation, MapBatches):
            return operation.keeps_number(before.stream())
        return operation.keeps_rows


@dataclass
class Slice(Node):
    """The rows from `start` to `stop`; None for the end."""

    start: int = 0
    stop: int | None = None

    def stream(self) -> Iterator[Batch]:
        return row_slice(self.parents[0].stream(), self.start, self.stop)

    def first_rows(self) -> Batch:
        return self.parents[0].first_rows()


@dataclass
class Union(Node):
    """The rows of all parents, one after the other, each with the columns of all."""

    def stream(self) -> Iterator[Batch]:
        return itertools.chain.from_iterable(self.filled_parents())


@dataclass
class Mix(Node):
    """The rows of all parents, interleaved by weights, each with the columns of all.

    Attributes:
        weights: rows of each parent, in proportion.
        stops_on_shortest: end with the first parent that ends; else that one drops out.
    """

    weights: tuple[float, ...] = ()
    stops_on_shortest: bool = False

    def stream(self) -> Iterator[Batch]:
        """Yield all rows; the next one is of the parent that is furthest behind its weight."""
        sources = [batched(rows, 1024) for rows in self.filled_parents()]
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
        """Yield all rows in order; UsageError if the parents differ in length."""
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
            left, right = alike(left, right)
            columns = {name: left[name] for name in columns_of(left)}
            for name in columns_of(right):
                free, number = name, 0
                while free in columns:
                    number += 1
                    free = f"{name}_{number}"
                columns[free] = right[name]
            yield columns if isinstance(left, dict) else arrow().table(columns)


@dataclass
class Shuffle(Node):
    """All rows in a random order: shuffled in windows of blocks, see lanes.py.

    Attributes:
        seed: of the order.
        reseeds: each epoch has another one.
    """

    seed: int = 0
    reseeds: bool = True

    def first_rows(self) -> Batch:
        return self.parents[0].first_rows()

    def stream(self) -> Iterator[Batch]:
        """Yield all rows in the order of the first epoch."""
        with tempfile.TemporaryDirectory("-elastic-data") as folder:
            table = _table_in(folder, self)
            with contextlib.closing(TableReader(table, table.lanes(1, 1))) as reader:
                for start in range(0, table.rows, 1024):
                    yield reader.read(0, np.arange(start, min(table.rows, start + 1024)))


# ---------------------------------------------------------------------- as a table

Keep = Callable[[Node], Part]
"""Computes a node, and stores its rows with random access."""


def table_of(node: Node, keep: Keep, *, travels: bool = False, counts: bool = False) -> Table:
    """Return a dataset as a table; `keep` is for nodes without random access.

    If it `travels`, other processes will read it, so that rows in memory are stored, too. If only
    the number of rows `counts`, no function is tried, and nothing shuffled.
    """
    begin_pass(node)
    shuffle = _shuffle_of(node)

    def parts_of(node: Node, most: int | None, *, in_order: bool) -> list[Part]:
        """Return a dataset's parts, or those of its first `most` rows."""
        if isinstance(node, Shuffle) and not in_order:  # The table is shuffled as a whole.
            return parts_of(node.parents[0], most, in_order=False)
        if isinstance(node, Read):
            source, listing = node.source, node.source.listing()
            if listing.blocks is not None and not (travels and isinstance(source, Memory)):
                return [Part(source, listing.files, listing.blocks, files_seed=source.files_seed)]
        if isinstance(node, Apply) and node.keeps_rows:
            parts = parts_of(node.parents[0], most, in_order=in_order)
            return [_behind(part, node.operation) for part in parts]
        if isinstance(node, Slice):
            ends = (node.stop, None if most is None else node.start + most)
            needed = min((one for one in ends if one is not None), default=None)
            parts = parts_of(node.parents[0], needed, in_order=not counts)
            return _cut(parts, node.start, node.stop)
        if isinstance(node, Union):
            found = [parts_of(one, most, in_order=in_order) for one in node.parents]
            parts = list(itertools.chain.from_iterable(found))
            return parts if counts else _filled(parts)
        seed, files = _by_file(node)
        return [
            replace(keep(one if most is None else Slice((one,), 0, most)), files_seed=seed)
            for one in files
        ]

    whole = parts_of(node, None, in_order=shuffle is None and not counts)
    parts = tuple(part for part in whole if part.blocks)
    return Table(parts) if shuffle is None else Table(parts, True, shuffle.seed, shuffle.reseeds)


def _shuffle_of(node: Node) -> Shuffle | None:
    """Return the shuffle that orders a node's rows, None if there is none.

    What others leave of shuffled rows, and a union of such, is shuffled anew in each epoch, too.
    """
    if isinstance(node, (Apply, Slice)):
        return _shuffle_of(node.parents[0])
    if isinstance(node, Union):
        found = [one for one in map(_shuffle_of, node.parents) if one is not None]
        # One that has always the same order decides.
        is_whole = len(found) == len(node.parents)
        return min(found, key=lambda one: one.reseeds) if is_whole else None
    return node if isinstance(node, Shuffle) else None


def _behind(part: Part, operation: Operation) -> Part:
    return replace(part, operations=(*part.operations, operation))


def begin_pass(node: Node) -> None:
    """Count anew what is skipped."""
    for _, skipped in skipped_of(node):
        skipped.begin_pass()


def skipped_of(node: Node) -> Iterator[tuple[str, SkippedCounts]]:
    """Yield the names and counts of all that may leave something out, in order."""
    for one in nodes_of(node):
        if isinstance(one, Read):
            yield one.source.name, one.source.skipped
        elif isinstance(one, Apply):
            yield repr(one.operation), one.operation.skipped


def nodes_of(node: Node) -> Iterator[Node]:
    """Yield a node behind all those that it is computed from."""
    for parent in node.parents:
        yield from nodes_of(parent)
    yield node


def _filled(parts: Sequence[Part]) -> list[Part]:
    """Return parts that have the columns of each other, as far as those are known."""
    known = [_types_in(part) for part in parts]
    fill = Fill(_merged(known))
    return [
        _behind(part, fill) if 0 < len(one) < len(fill.kinds) else part
        for part, one in zip(parts, known, strict=True)
    ]


def _merged(known: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the types of all columns; one that has only missing values has one elsewhere."""
    kinds: dict[str, Any] = {}
    for name, kind in (pair for one in known for pair in one.items()):
        if str(kinds.get(name, "null")) == "null":
            kinds[name] = kind
    return kinds


def _types_of(node: Node) -> dict[str, Any]:
    """Return the types of a node's columns by name, as its first rows have them; or none.

    Functions are tried as in `_types_in`, and no query is executed a second time.

    Raises:
        StorageError: the rows cannot be read.
    """
    for one in nodes_of(node):
        if isinstance(one, Apply) and _is_costly(one.operation):
            return {}
        if isinstance(one, Read) and isinstance(one.source, Sql):
            return {}
    source = node.source if isinstance(node, Read) else None
    try:
        with seeded(0):
            if isinstance(source, Parquet):
                source.listing()
                return _chosen_types(source)
            return {one.name: one.type for one in to_table(node.first_rows()).schema}
    except StorageError:
        raise
    except Exception:  # A function's comes again when the rows are read.
        return {}
    finally:
        begin_pass(node)


def _is_costly(operation: Operation) -> bool:
    function = getattr(operation, "function", None)
    is_class = isinstance(function, Function) and function.is_class
    return is_class or isinstance(operation, Fetch)


def _chosen_types(source: Parquet) -> dict[str, Any]:
    chosen = source.types if source.columns is None else source.columns
    return {name: source.types[name] for name in chosen if name in source.types}


def _types_in(part: Part) -> dict[str, Any]:
    """Return the types of a part's columns by name; none if they are unknown.

    Functions are tried with some rows. A class is not, as its instance may be large, and no torch
    dataset is read.
    """
    source = part.source
    if isinstance(source, Parquet) and not part.operations:
        return _chosen_types(source)
    if not part.blocks or any(map(_is_costly, part.operations)):
        return {}
    # Any error of theirs comes again when the rows are read.
    with contextlib.suppress(Exception), seeded(0):
        # What a function opens or draws here must not go along to other processes.
        operations = cloudpickle.loads(cloudpickle.dumps(part.operations))
        reader = Reader(getattr(source, "options", None))
        batch = sliced(source.read(reader, part.files, part.blocks[0]), 0, ROWS_TRIED)
        for operation in operations:
            batch = operation.apply(batch)
        return {one.name: one.type for one in to_table(batch).schema}
    return {}


def _by_file(node: Node) -> tuple[int | None, list[Node]]:
    """Return the seed of the order of files in each epoch, and a node for each.

    None and the node itself, if they are always in the same order.
    """
    below, operations = node, []
    while isinstance(below, Apply) and not below.operation.numbers_rows:
        operations.append(below.operation)
        below = below.parents[0]
    source = below.source if isinstance(below, Read) else None
    if not isinstance(source, FileSource) or source.files_seed is None:
        return None, [node]
    found: list[Node] = []
    for number in range(len(source.listing().files)):
        one: Node = ReadFile((), source, number)
        for operation in reversed(operations):
            one = Apply((one,), operation)
        found.append(one)
    return source.files_seed, found


def _cut(parts: Sequence[Part], start: int, stop: int | None) -> list[Part]:
    found, seen = [], 0
    for part in parts:
        blocks = []
        for block in part.blocks:
            rows = block.stop - block.start
            low = max(0, start - seen)
            high = rows if stop is None else min(rows, stop - seen)
            if low < high:
                size = block.size * (high - low) // rows
                begin = block.start
                blocks.append(replace(block, start=begin + low, stop=begin + high, size=size))
            seen += rows
        found.append(replace(part, blocks=tuple(blocks)))
    return found


def in_memory(node: Node) -> Part:
    """Compute a node, and keep its rows in the memory of this process."""
    return _held(list(node.stream()))


def table_nearby(node: Node) -> Table:
    """Return a dataset as a table, for this process.

    Rows without random access are held in memory; in files, if they need more than HELD_BYTES,
    which are deleted with the table.
    """
    folder = tempfile.TemporaryDirectory("-elastic-data")
    table = _table_in(folder.name, node)
    weakref.finalize(table, folder.cleanup)
    return table


def _table_in(folder: str, node: Node) -> Table:
    files, numbers = Files(folder), itertools.count()
    return table_of(node, lambda one: _nearby(one, files, str(next(numbers))))


def _held(batches: Sequence[Batch]) -> Part:
    source = Memory("rows in memory", batches=batches)
    return Part(source, (), source.listing().blocks or ())


def _nearby(node: Node, files: Files, folder: str) -> Part:
    """Compute a node, and keep its rows in memory; in files, if they need more than HELD_BYTES."""
    held, size, batches = [], 0, node.stream()
    for batch in batches:
        held.append(batch)
        size += bytes_of(batch)
        if size > HELD_BYTES:
            return write_part(itertools.chain(held, batches), files, folder)
    return _held(held)


def write_part(batches: Iterator[Batch], files: Files, folder: str) -> Part:
    """Write rows to parquet files in a folder, for random access.

    Raises:
        StorageError: they cannot be written.
    """
    for left in files.list(f"{folder}/*.parquet"):  # By an attempt that was killed.
        files.delete(left)
    numbers = itertools.count()
    write_parquet(batches, files, lambda _: f"{folder}/part-{next(numbers):05d}.parquet")
    source = Parquet("rows kept with the run", paths=f"{files.path}/{folder}", is_kept=True)
    if not files.list(f"{folder}/*.parquet"):
        return Part(source, (), ())
    listing = source.listing()
    return Part(source, listing.files, listing.blocks or ())


def counted(node: Node, *, by_functions: bool) -> int:
    """Return the number of rows of a dataset, if possible without reading them.

    Functions of batches are called `by_functions`, as they may return another number of rows; else
    they are taken to keep it, as training has it.
    """

    class Unknown(Exception):
        pass

    def refuse(node: Node) -> Part:
        raise Unknown

    def calls(node: Node) -> bool:
        is_one = isinstance(node, Apply) and isinstance(node.operation, MapBatches)
        return is_one or any(calls(parent) for parent in node.parents)

    if not (by_functions and calls(node)):
        with contextlib.suppress(Unknown):
            return table_of(node, refuse, counts=True).rows
    begin_pass(node)
    return sum(num_rows(batch) for batch in node.stream())
