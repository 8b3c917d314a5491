"""A dataset as a table of blocks: what has to be known to read any row by its number.

A dataset is a tree of nodes, from sources to operations. Its rows can be read by number as far as
sources can (`Source.listing`) and operations keep rows; above that, rows are written out once, and
the tree goes on from there. So a table is a list of parts: a source, its files, its blocks, and the
operations that are done to rows when they are read.

Rule: what a run trains with lies in its directory, RUN/data/<name>.json: the files with their sizes
and stamps, and the blocks. Whoever goes on with the run finds the same, or a refusal.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from elastic.data.batches import (
    Batch,
    arrow,
    batched,
    joined,
    num_rows,
    sliced,
    taken,
    to_numpy,
    to_table,
)
from elastic.data.files import DataError, File, Reader, check_unchanged
from elastic.data.lanes import Lanes
from elastic.data.operations import Operation, row_slice
from elastic.data.sources import Block, FileSource, Memory, Parquet, Source
from elastic.errors import UsageError
from elastic.storage.files import Files

log = logging.getLogger(__name__)

FOLDER = "data"
"""In the run directory."""
SHUFFLE_BYTES = 512 * 1024**2
"""Of memory for the windows of all lanes, unless `DataConfig` says otherwise."""
WINDOW_MAX = 64
SMALL_BYTES, SMALL_ROWS = 32 * 1024**2, 2**17
"""A table no larger than both is shuffled as a whole, and held as a whole by whoever reads it."""
GROUP_BYTES, GROUP_ROWS = 8 * 1024**2, 65536
"""Of a row group that is written here."""
FILE_BYTES = 256 * 1024**2


@dataclass
class Node:
    """A dataset that is not computed yet.

    Attributes:
        parents: what it is made of.
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
    """An operation on all rows."""

    operation: Operation = field(default_factory=Operation)

    def stream(self) -> Iterator[Batch]:
        """Yield all rows in order."""
        return self.operation.stream(self.parents[0].stream())


@dataclass
class Slice(Node):
    """Some rows that follow each other; `stop` None for the rest."""

    start: int = 0
    stop: int | None = None

    def stream(self) -> Iterator[Batch]:
        """Yield all rows in order."""
        return row_slice(self.parents[0].stream(), self.start, self.stop)


@dataclass
class Union(Node):
    """The rows of several, one after the other."""

    def stream(self) -> Iterator[Batch]:
        """Yield all rows in order."""
        for parent in self.parents:
            yield from parent.stream()


@dataclass
class Zip(Node):
    """The columns of two, row by row; of equal names those of the second get "_1"."""

    def stream(self) -> Iterator[Batch]:
        """Yield all rows in order.

        Raises:
            UsageError: they differ in length.
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
                columns[f"{name}_1" if name in columns else name] = values
            yield columns


@dataclass
class Shuffle(Node):
    """All rows in an order that is drawn: windows of blocks, see lanes.py."""

    seed: int = 0

    def stream(self) -> Iterator[Batch]:
        """Yield all rows in the order of the first epoch."""
        table = table_of(self, in_memory)
        reader = TableReader(table, table.lanes(1, 1))
        for start in range(0, table.rows, 1024):
            yield reader.read(0, np.arange(start, min(table.rows, start + 1024)))


# -------------------------------------------------------------------------------- tables


@dataclass(frozen=True)
class Part:
    """Blocks of one source.

    Attributes:
        source: reads them.
        files: of the source.
        blocks: of the source; some of them may be cut.
        operations: done to the rows when they are read.
    """

    source: Source
    files: tuple[File, ...]
    blocks: tuple[Block, ...]
    operations: tuple[Operation, ...] = ()


@dataclass(frozen=True)
class Table:
    """Rows that can be read by number.

    Attributes:
        parts: in order.
        shuffle: order the rows anew in each epoch.
        seed: of that.
    """

    parts: tuple[Part, ...]
    shuffle: bool = False
    seed: int = 0

    @cached_property
    def blocks(self) -> list[tuple[Part, Block]]:
        """Return all blocks, each with the part that it is in."""
        return [(part, block) for part in self.parts for block in part.blocks]

    @cached_property
    def sizes(self) -> list[int]:
        """Return the rows of each block."""
        return [block.stop - block.start for _, block in self.blocks]

    @property
    def operations(self) -> list[tuple[Operation, ...]]:
        """Return what is done to the rows of each part."""
        return [part.operations for part in self.parts]

    @cached_property
    def rows(self) -> int:
        """Return how many rows there are."""
        return sum(self.sizes)

    @cached_property
    def is_small(self) -> bool:
        """Return whether it is shuffled as a whole."""
        size = sum(block.size for _, block in self.blocks)
        return self.shuffle and size <= SMALL_BYTES and self.rows <= SMALL_ROWS

    def lanes(self, num_lanes: int, micro_batch: int, memory: int = SHUFFLE_BYTES) -> Lanes:
        """Return the order of its rows.

        Args:
            num_lanes: V.
            micro_batch: rows of a micro-batch.
            memory: bytes that the windows of all lanes may take, this one's and the next one's.
        """
        window = 1
        if self.shuffle and not self.is_small and self.blocks:
            mean = sum(block.size for _, block in self.blocks) / len(self.blocks)
            window = int(memory / (2 * num_lanes * max(mean, 1.0)))
        blocks = (1,) * self.rows if self.is_small else tuple(self.sizes)
        window = max(1, min(WINDOW_MAX, window))
        return Lanes(blocks, num_lanes, micro_batch, self.seed, window, self.shuffle)


Keep = Callable[[Node], Part]
"""Computes a node, and puts its rows where they can be read by number."""


def table_of(node: Node, keep: Keep, *, travels: bool = False) -> Table:
    """Return a dataset as a table.

    Args:
        node: the dataset.
        keep: for what cannot be read by number.
        travels: other processes will read it, so that what lies in memory is kept, too.
    """
    operations: tuple[Operation, ...] = ()
    # Operations that keep rows may as well be done to rows that were shuffled before.
    while isinstance(node, Apply) and node.operation.keeps_rows:
        operations, node = (node.operation, *operations), node.parents[0]
    shuffle, seed = isinstance(node, Shuffle), 0
    while isinstance(node, Shuffle):
        seed, node = node.seed, node.parents[0]
    parts = [
        replace(part, operations=(*part.operations, *operations))
        for part in _parts(node, keep, travels)
    ]
    return Table(tuple(part for part in parts if part.blocks), shuffle, seed)


def _parts(node: Node, keep: Keep, travels: bool) -> list[Part]:
    if isinstance(node, Read):
        listing = node.source.listing()
        if listing.blocks is None or (travels and isinstance(node.source, Memory)):
            return [keep(node)]
        return [Part(node.source, listing.files, listing.blocks)]
    if isinstance(node, Apply) and node.operation.keeps_rows:
        more = (node.operation,)
        return [
            replace(part, operations=(*part.operations, *more))
            for part in _parts(node.parents[0], keep, travels)
        ]
    if isinstance(node, Slice):
        return _cut(_parts(node.parents[0], keep, travels), node.start, node.stop)
    if isinstance(node, Union):
        return [part for parent in node.parents for part in _parts(parent, keep, travels)]
    return [keep(node)]


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
    """Compute a node, and keep its rows in this process."""
    source = Memory("rows in memory", batches=list(node.stream()))
    listing = source.listing()
    return Part(source, (), listing.blocks or ())


def counted(node: Node) -> int:
    """Return the rows of a dataset; without reading them, where that can be."""

    class Unknown(Exception):
        pass

    def refuse(node: Node) -> Part:
        raise Unknown

    try:
        return table_of(node, refuse).rows
    except Unknown:
        return sum(num_rows(batch) for batch in node.stream())


# --------------------------------------------------------------------------- with the run


def table_of_run(node: Node, name: str, run: Files, *, writes: bool) -> Table | None:
    """Return the table that a run trains with, which is written down at its first beginning.

    Args:
        node: the dataset as it is now.
        name: of the dataset, in the run.
        run: the run directory.
        writes: False to return None if nothing is written down yet.

    Raises:
        DataError: the run has begun with other files.
        StorageError: the run directory cannot be read or written.
    """
    path = f"{FOLDER}/{name}.json"
    sources = _sources_of(node)
    if run.exists(path):
        saved = json.loads(run.read(path))
        check_unchanged(_files(saved["sources"]), sources, name)
        kept = iter(saved["kept"])
        table = table_of(node, lambda _: _kept_part(run, next(kept)), travels=True)
        if [len(part.blocks) for part in table.parts] != saved["blocks"]:
            raise DataError(
                f"dataset {name!r}: the run has begun with another dataset: parts of "
                f"{saved['blocks']} blocks, and now {[len(p.blocks) for p in table.parts]}; begin "
                f"a new run under another name"
            )
        return table
    if not writes:
        return None
    kept_parts: list[Part] = []

    def keep(part_of: Node) -> Part:
        kept_parts.append(write_part(part_of, run, f"{FOLDER}/{name}-{len(kept_parts)}"))
        return kept_parts[-1]

    table = table_of(node, keep, travels=True)
    if not table.rows:
        raise UsageError(f"dataset {name!r} has no rows; expected at least 1 to train with")
    saved = {
        "version": 1,
        "rows": table.rows,
        "sources": [[file.path, file.size, file.stamp] for file in sources],
        "kept": [
            {
                "files": [[file.path, file.size, file.stamp] for file in part.files],
                "blocks": [[b.file, b.group, b.start, b.stop, b.size] for b in part.blocks],
            }
            for part in kept_parts
        ],
        "blocks": [len(part.blocks) for part in table.parts],
    }
    run.write(path, json.dumps(saved).encode())
    return table


def _files(rows: Sequence[Sequence[Any]]) -> tuple[File, ...]:
    return tuple(File(*row) for row in rows)


def _kept_part(run: Files, saved: dict[str, Any]) -> Part:
    blocks = tuple(Block(*row) for row in saved["blocks"])
    return Part(Parquet("rows kept with the run"), _files(saved["files"]), blocks)


def _sources_of(node: Node) -> tuple[File, ...]:
    """Return all that a dataset is made of; rows in memory as a file with a checksum."""
    if isinstance(node, Read):
        if isinstance(node.source, FileSource):
            return node.source.listing().files
        if isinstance(node.source, Memory):
            return (_file_of(node.source),)
        return ()
    return tuple(file for parent in node.parents for file in _sources_of(parent))


class Sink:
    """What pyarrow writes to: counts and sums up the bytes, and hands them on."""

    closed = False

    def __init__(self, hand_on: Callable[[Any], object] | None = None) -> None:
        """Take the function that is called with the bytes."""
        self.size = self.crc32 = 0
        self._hand_on = hand_on

    def write(self, data: Any) -> int:
        """Take some bytes."""
        if self._hand_on is not None:
            self._hand_on(bytes(data))
        else:
            self.crc32 = zlib.crc32(data, self.crc32)
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing: whoever opened the file closes it."""


def _file_of(source: Memory) -> File:
    """Return what stands for rows in memory: their size and checksum, as Arrow says them."""
    pa, total = arrow(), Sink()
    for batch in source.batches:
        table = to_table(batch)
        with pa.ipc.new_stream(pa.PythonFile(total, mode="w"), table.schema) as stream:
            stream.write_table(table)
    return File(source.name, total.size, f"{total.crc32:08x}")


def write_part(node: Node, files: Files, folder: str) -> Part:
    """Compute a node, and write its rows to parquet files.

    Raises:
        StorageError: they cannot be written.
    """
    log.info("data_written rows of %s to %s/%s", type(node).__name__.lower(), files.path, folder)
    for left in files.list(f"{folder}/*.parquet"):  # By an attempt that was killed.
        files.delete(left)
    write_parquet(node.stream(), files, folder)
    source = Parquet("rows kept with the run", paths=f"{files.path}/{folder}")
    if not files.list(f"{folder}/*.parquet"):
        return Part(source, (), ())
    listing = source.listing()
    return Part(source, listing.files, listing.blocks or ())


def write_parquet(batches: Iterator[Batch], files: Files, folder: str) -> int:
    """Write rows to parquet files of moderate row groups; return how many there were.

    Raises:
        StorageError: they cannot be written.
    """
    groups = _row_groups(batches)
    first = next(groups, None)
    number = rows = 0
    while first is not None:
        with files.writing(f"{folder}/part-{number:05d}.parquet".lstrip("/")) as output:
            first, count = _write_file(output, first, groups)
        number, rows = number + 1, rows + count
    return rows


def _write_file(output: Any, table: Any, groups: Iterator[Any]) -> tuple[Any, int]:
    """Write row groups until the file is large enough, or the schema changes."""
    import pyarrow.parquet as parquet

    pa = arrow()
    size = rows = 0
    following: Any = table
    with parquet.ParquetWriter(pa.PythonFile(Sink(output.write), mode="w"), table.schema) as writer:
        while following is not None and size < FILE_BYTES and following.schema == table.schema:
            writer.write_table(following, row_group_size=max(1, following.num_rows))
            size, rows = size + following.nbytes, rows + following.num_rows
            following = next(groups, None)
    return following, rows


def _row_groups(batches: Iterator[Batch]) -> Iterator[Any]:
    """Yield tables of at most so many rows and about so many bytes."""
    held: list[Any] = []
    size = rows = 0
    for batch in batched(batches, 1024):
        table = to_table(batch)
        held.append(table)
        size, rows = size + table.nbytes, rows + table.num_rows
        if size >= GROUP_BYTES or rows >= GROUP_ROWS:
            yield to_table(joined(held))
            held, size, rows = [], 0, 0
    if held:
        yield to_table(joined(held))


# ------------------------------------------------------------------------------- reading

Gathered = list[tuple[int, Batch, Any]]
"""Rows of a batch: for each part that has some its number, the rows, and their places in it."""


def finish(operations: Sequence[Sequence[Operation]], gathered: Gathered) -> Batch:
    """Return rows as the operations of their parts leave them, in order."""
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
    """Reads rows of a table in the order of its lanes, and holds the windows that are in use."""

    def __init__(self, table: Table, lanes: Lanes) -> None:
        """Read nothing yet."""
        self._table, self._lanes = table, lanes
        self._orders: dict[int, Any] = {}
        self._sizes = np.asarray(table.sizes, np.int64)
        self._ends = np.cumsum(self._sizes)
        counts = [len(part.blocks) for part in table.parts]
        self._part_of = np.repeat(np.arange(len(counts)), counts)
        # Blocks in memory, those on their way, and those that each lane needs.
        self._held: dict[int, Batch] = {}
        self._coming: dict[int, Future[Batch]] = {}
        self._pool = ThreadPoolExecutor(1, "elastic-data")
        self._needed: dict[int, set[int]] = {}
        self._turn = 0
        self._asked: dict[int, int] = {}
        self._readers = {
            id(part): Reader(getattr(part.source, "options", None)) for part in table.parts
        }

    @property
    def bytes_read(self) -> int:
        """Return the bytes that were read from files, by this process."""
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
        """Return the rows at these places of an epoch, as the operations leave them."""
        return finish(self._table.operations, self.gather(epoch, places))

    def _order(self, epoch: int) -> Any:
        if epoch not in self._orders:
            while len(self._orders) >= 2:
                del self._orders[min(self._orders)]
            self._orders[epoch] = self._lanes.of(epoch)
        return self._orders[epoch]

    def _note(self, order: Any, places: Any, lanes: Any) -> None:
        """Say which blocks the lanes of these places need, and begin to read their next ones."""
        self._turn += 1
        for lane in np.unique(lanes).tolist():
            mine = np.asarray(places)[lanes == lane]
            now, following = order.windows_at(int(mine[-1]))
            first = order.windows_at(int(mine[0]))[0] if len(mine) > 1 else []
            self._needed[lane], self._asked[lane] = {*first, *now, *following}, self._turn
            for number in following:
                if number not in self._held and number not in self._coming:
                    self._coming[number] = self._pool.submit(self._fetch, number)

    def _gather(self, blocks: Any, rows: Any) -> Gathered:
        """Return rows of several blocks: those of each part in the order of their places."""
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
            # Functions of batches see them in this order, whatever blocks they are in.
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
        """Stop reading ahead, and forget all rows."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._held, self._coming = {}, {}

    def _let_go(self) -> None:
        """Forget the blocks that no lane needs which was asked for of late."""
        if self._table.is_small:
            return
        recent = self._turn - 2 * self._lanes.num_lanes
        for lane in [one for one, turn in self._asked.items() if turn < recent]:
            del self._asked[lane], self._needed[lane]
        needed = set().union(*self._needed.values()) if self._needed else set()
        for number in [one for one in self._held if one not in needed]:
            del self._held[number]
        for number in [one for one in self._coming if one not in needed]:
            self._coming.pop(number).cancel()


def _take(batch: Batch, rows: Any) -> Batch:
    if len(rows) and len(rows) == rows[-1] - rows[0] + 1 and (np.diff(rows) == 1).all():
        return sliced(batch, int(rows[0]), int(rows[-1]) + 1)
    return taken(batch, rows)
