"""Sources of rows: files in several formats, and data in memory.

Rule: a source with random access lists its `blocks`; any other one is read sequentially, and if its
rows are needed by number, they are written to parquet files first (`table.py`).
"""

from __future__ import annotations

import logging
import lzma
import random
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from elastic.data.batches import (
    Batch,
    arrow,
    batched,
    columns_of,
    num_rows,
    of_rows,
    sliced,
    to_table,
)
from elastic.data.context import FileShuffleConfig, reseeds, seed_of
from elastic.data.datasource.partitioning import Partitioning
from elastic.data.files import DataError, File, Reader, find_files, unreadable
from elastic.data.skipped import SkippedCounts
from elastic.errors import UsageError

log = logging.getLogger(__name__)

BLOCK_ROWS = 8192
"""Rows of a block that is not a row group of a file."""
OBJECTS_LOOKED_AT = 64
"""Of a column, to estimate the memory of all."""


@dataclass(frozen=True)
class Block:
    """Rows that are read together.

    Attributes:
        file: number of the file in the source's list.
        group: number of the row group in the file, or of the block in the source.
        start, stop: range of its rows; all, unless the dataset was sliced.
        size: bytes in memory, 0 if unknown.
    """

    file: int
    group: int
    start: int
    stop: int
    size: int = 0


@dataclass(frozen=True)
class Listing:
    """Content of a source: its files, and its blocks, None without random access."""

    files: tuple[File, ...] = ()
    blocks: tuple[Block, ...] | None = None


@dataclass
class Source:
    """The rows of a dataset before any operation.

    Attributes:
        name: for messages.
        skipped: items left out by `on_error="skip"`.
    """

    name: str
    skipped: SkippedCounts = field(default_factory=SkippedCounts, init=False, repr=False)
    _listing: Listing | None = field(default=None, init=False, repr=False)

    def listing(self) -> Listing:
        """Return files and blocks; computed once.

        DataError if a file cannot be read, or has another schema than the first.
        """
        if self._listing is None:
            self._listing = self._check()
        return self._listing

    def _check(self) -> Listing:
        return Listing()

    def read(self, reader: Reader, files: Sequence[File], block: Block) -> Batch:
        """Return the rows of a block; DataError if its file has changed, or cannot be read."""
        raise NotImplementedError(self.name)

    def stream(self) -> Iterator[Batch]:
        """Yield all rows in order."""
        listing, reader = self.listing(), Reader(getattr(self, "options", None))
        for block in listing.blocks or ():
            yield self.read(reader, listing.files, block)

    def skip(self, what: str, why: str) -> None:
        """Count a skipped item, and log it; the first of each kind as a warning."""
        is_first = self.skipped.add(what) == 1
        (log.warning if is_first else log.info)("data_skipped %s: %s", what, why)

    @property
    def files_seed(self) -> int | None:
        """Return the seed of another order of the files in each epoch, None for the same."""
        return None

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the listing, which each process computes itself."""
        return {**self.__dict__, "_listing": None}


# --------------------------------------------------------------------------------- files


@dataclass
class FileSource(Source):
    """Files below some paths.

    Attributes:
        paths: files, folders or patterns.
        extensions: of the files in a folder.
        options: for the file system.
        on_error: "raise" or "skip".
        partitioning: which folders in a file's path are columns of its rows, None for none.
        shuffle: the seed of a random order of the files, None for that of their names.
        with_paths: add a column "path".
        compression: of their content, such as "gzip"; None: that of the ends of their names.
    """

    paths: Any = ()
    extensions: tuple[str, ...] | None = None
    options: dict[str, Any] | None = None
    on_error: str = "raise"
    partitioning: Partitioning | None = None
    shuffle: FileShuffleConfig | None = None
    with_paths: bool = False
    compression: str | None = None

    def __post_init__(self) -> None:
        check_on_error(self.on_error, self.name)

    @property
    def skips(self) -> bool:
        return self.on_error == "skip"

    def files(self) -> list[File]:
        """List the files; DataError if folders give some of them other columns than the first."""
        found = find_files(self.paths, self.extensions, self.options)
        if self.shuffle is not None:
            random.Random(seed_of(self.shuffle)).shuffle(found)
        names = [*self.partitions(found[0])] if found else []
        for file in found:
            if [*self.partitions(file)] != names:
                raise DataError(
                    f"elastic.data: {file.path} lies in folders of "
                    f"{[*self.partitions(file)] or 'no columns'}, and {found[0].path} in those of "
                    f"{names or 'no columns'}: read folders of the same kind, or none as columns "
                    f"({self.name}(..., partitioning=None))"
                )
        return found

    def partitions(self, file: File) -> dict[str, Any]:
        """Return the columns that follow from where a file is, with their value in its rows."""
        found = {} if self.partitioning is None else self.partitioning.of(file.path)
        return {**found, "path": file.path.removeprefix("file://")} if self.with_paths else found

    def _check(self) -> Listing:
        return Listing(tuple(self.files()))

    @property
    def files_seed(self) -> int | None:
        if self.shuffle is None or not reseeds(self.shuffle):
            return None
        return seed_of(self.shuffle)

    def stream(self) -> Iterator[Batch]:
        """Yield the rows of each file; a broken one raises, or the rest of it is skipped."""
        if self.listing().blocks is not None:
            yield from super().stream()
            return
        for number in range(len(self.listing().files)):
            yield from self.stream_file(number)

    def stream_file(self, number: int) -> Iterator[Batch]:
        """Yield the rows of one file, by its number in the listing."""
        listing, reader = self.listing(), Reader(self.options)
        if listing.blocks is not None:
            for block in listing.blocks:
                if block.file == number:
                    yield self.read(reader, listing.files, block)
            return
        file = listing.files[number]
        partitions = self.partitions(file)
        try:
            for batch in self._rows_named(reader, file):
                yield with_columns(batch, partitions)
        except DataError as error:
            if not self.skips:
                raise
            self.skip("files", str(error))

    def _rows_named(self, reader: Reader, file: File) -> Iterator[Batch]:
        try:
            yield from self._rows(reader, file)
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:  # Of a damaged archive.
            raise unreadable(file, error) from error

    def _rows(self, reader: Reader, file: File) -> Iterator[Batch]:
        raise NotImplementedError(self.name)


def with_columns(batch: Batch, values: Mapping[str, Any]) -> Batch:
    """Return a batch with columns of one value each, of a text if it is None; others stay."""
    missing = [name for name in values if name not in columns_of(batch)]
    if not missing:
        return batch
    batch, pa = to_table(batch), arrow()
    for name in missing:
        value = values[name]
        kind = pa.string() if value is None else None
        batch = batch.append_column(name, pa.repeat(pa.scalar(value, kind), batch.num_rows))
    return batch


def check_on_error(value: str, what: str) -> None:
    if value not in ("raise", "skip"):
        raise UsageError(f"{what}: on_error={value!r}: expected 'raise' or 'skip'")


# -------------------------------------------------------------------------------- memory


@dataclass
class Memory(Source):
    """Rows in the memory of this process.

    Attributes:
        batches: in order.
    """

    batches: Sequence[Batch] = ()

    def __post_init__(self) -> None:
        """Split large batches into blocks."""
        self.batches = [part for one in self.batches for part in batched([one], BLOCK_ROWS)]

    def _check(self) -> Listing:
        sizes = [num_rows(one) for one in self.batches]
        return Listing(
            (),
            tuple(Block(0, n, 0, rows, bytes_of(self.batches[n])) for n, rows in enumerate(sizes)),
        )

    def read(self, reader: Reader, files: Sequence[File], block: Block) -> Batch:
        del reader, files
        return sliced(self.batches[block.group], block.start, block.stop)


@dataclass
class Range(Source):
    """The numbers from 0 to `count` - 1, in the column "id"."""

    count: int = 0

    def _check(self) -> Listing:
        return Listing((), _blocks_of(self.count, 8))

    def read(self, reader: Reader, files: Sequence[File], block: Block) -> Batch:
        del reader, files
        begin = block.group * BLOCK_ROWS
        return {"id": np.arange(begin + block.start, begin + block.stop)}


def bytes_of(batch: Batch) -> int:
    """Return about how many bytes of memory a batch needs."""
    if not isinstance(batch, dict):
        return int(batch.nbytes)
    found = 0
    for values in batch.values():
        found += values.nbytes
        if values.dtype == object:  # Some of its values stand for all.
            some = values[:: len(values) // OBJECTS_LOOKED_AT + 1]
            found += sum(map(sys.getsizeof, some)) * len(values) // max(1, len(some))
    return found


def _blocks_of(count: int, row_bytes: int) -> tuple[Block, ...]:
    starts = range(0, count, BLOCK_ROWS)
    sizes = [min(BLOCK_ROWS, count - start) for start in starts]
    return tuple(Block(0, n, 0, rows, rows * row_bytes) for n, rows in enumerate(sizes))


@dataclass
class HuggingFace(Source):
    """A dataset of the `datasets` package, map-style or iterable."""

    dataset: Any = None

    def stream(self) -> Iterator[Batch]:
        held: list[Any] = []
        if hasattr(self.dataset, "with_format") and hasattr(self.dataset, "__len__"):
            yield from self.dataset.with_format("arrow").iter(batch_size=BLOCK_ROWS)
            return
        for row in self.dataset:
            held.append(row)
            if len(held) == BLOCK_ROWS:
                yield of_rows(held)
                held = []
        if held:
            yield of_rows(held)
