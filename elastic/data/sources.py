"""Where rows come from: files in their formats, and what lies in memory.

Rule: a source whose rows can be read from the middle says so by `blocks`, which tell where; any
other one is read from its beginning, and whoever has to have its rows by number writes them to
parquet files first (`table.py`).
"""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from elastic.data.batches import (
    Batch,
    array_of,
    arrow,
    batched,
    num_rows,
    of_rows,
    sliced,
)
from elastic.data.files import (
    TAIL_BYTES,
    DataError,
    File,
    RangedFile,
    Reader,
    chunks,
    find_files,
)
from elastic.errors import UsageError

log = logging.getLogger(__name__)

BLOCK_ROWS = 8192
"""Rows of a block that is made here, rather than found in a file."""
FILES_IN_BLOCK = 16
"""Small files that are read together, such as images."""
CHUNK_BYTES = 8 * 1024**2
FOOTERS_KEPT = 64
READERS = 16
"""Threads that read footers while a table is listed."""
_footers_lock = threading.Lock()


@dataclass(frozen=True)
class Block:
    """Rows that are read together.

    Attributes:
        file: number of the file in the source's list.
        group: number of the row group in the file, or of the block in the source.
        start, stop: which of its rows; all, unless the dataset was cut.
        size: bytes in memory, as far as that is known.
    """

    file: int
    group: int
    start: int
    stop: int
    size: int = 0


@dataclass(frozen=True)
class Listing:
    """What a source consists of: its files, and its blocks if rows can be read by number."""

    files: tuple[File, ...] = ()
    blocks: tuple[Block, ...] | None = None


@dataclass
class Source:
    """The rows of a dataset before any operation.

    Attributes:
        name: for people.
        skipped: what `on_error="skip"` has left out, by kind.
    """

    name: str
    skipped: dict[str, int] = field(default_factory=dict, init=False)
    _listing: Listing | None = field(default=None, init=False, repr=False)

    def listing(self) -> Listing:
        """Return what there is; looked up once.

        Raises:
            DataError: a file cannot be read, or has another schema than the first.
        """
        if self._listing is None:
            self._listing = self._look()
        return self._listing

    def _look(self) -> Listing:
        return Listing()

    def read(self, reader: Reader, files: Sequence[File], block: Block) -> Batch:
        """Return the rows of a block.

        Raises:
            DataError: its file has changed, or cannot be read.
        """
        raise NotImplementedError(self.name)

    def stream(self) -> Iterator[Batch]:
        """Yield all rows in order."""
        listing, reader = self.listing(), Reader(getattr(self, "options", None))
        for block in listing.blocks or ():
            yield self.read(reader, listing.files, block)

    def skip(self, what: str, why: str) -> None:
        """Count something that is left out, and say so once for each kind."""
        count = self.skipped[what] = self.skipped.get(what, 0) + 1
        (log.warning if count == 1 else log.info)("data_skipped %s: %s", what, why)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what each process looks up by itself."""
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
    """

    paths: Any = ()
    extensions: tuple[str, ...] | None = None
    options: dict[str, Any] | None = None
    on_error: str = "raise"

    def __post_init__(self) -> None:
        """Refuse what nothing can be done with."""
        check_on_error(self.on_error, self.name)

    @property
    def skips(self) -> bool:
        """Return whether what is broken is left out."""
        return self.on_error == "skip"

    def files(self) -> list[File]:
        """Return the files that are there."""
        return find_files(self.paths, self.extensions, self.options)

    def _look(self) -> Listing:
        return Listing(tuple(self.files()))

    def stream(self) -> Iterator[Batch]:
        """Yield the rows of each file; a broken one ends it, or is left out from there on."""
        listing, reader = self.listing(), Reader(self.options)
        if listing.blocks is not None:
            yield from super().stream()
            return
        for file in listing.files:
            try:
                yield from self._rows(reader, file)
            except DataError as error:
                if not self.skips:
                    raise
                self.skip("files", str(error))

    def _rows(self, reader: Reader, file: File) -> Iterator[Batch]:
        raise NotImplementedError(self.name)


def check_on_error(value: str, what: str) -> None:
    """Refuse another word than "raise" and "skip".

    Raises:
        UsageError: it is one.
    """
    if value not in ("raise", "skip"):
        raise UsageError(f"{what}: on_error={value!r}: expected 'raise' or 'skip'")


@dataclass
class Parquet(FileSource):
    """Parquet files; a block is a row group, which is fetched in one request.

    Attributes:
        columns: those to read, None for all.
    """

    columns: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Begin with no footer known."""
        super().__post_init__()
        self._footers: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave the footers out, which no pickle can hold."""
        return {**super().__getstate__(), "_footers": {}}

    def _look(self) -> Listing:
        found, reader = self.files(), Reader(self.options)
        with ThreadPoolExecutor(READERS) as pool:
            footers = list(pool.map(lambda file: self._try_footer(reader, file), found))
        files: list[File] = []
        blocks: list[Block] = []
        first: Any = None
        for file, footer in zip(found, footers, strict=True):
            try:
                if isinstance(footer, DataError):
                    raise footer
                first = first or (file, footer.schema.to_arrow_schema())
                _check_schema(first, file, footer.schema.to_arrow_schema(), self.columns)
            except DataError as error:
                if not self.skips:
                    raise
                self.skip("files", str(error))
                continue
            for group in range(footer.num_row_groups):
                about = footer.row_group(group)
                if about.num_rows:
                    rows, size = about.num_rows, about.total_byte_size
                    blocks.append(Block(len(files), group, 0, rows, size))
            files.append(file)
        return Listing(tuple(files), tuple(blocks))

    def _try_footer(self, reader: Reader, file: File) -> Any:
        try:
            return self._footer(reader, file)
        except DataError as error:
            return error

    def _footer(self, reader: Reader, file: File) -> Any:
        import pyarrow.parquet as parquet

        pa = arrow()
        footer = self._footers.get(file.path)
        if footer is None:
            tail = RangedFile(reader, file, file.size - TAIL_BYTES, file.size)
            try:
                footer = parquet.read_metadata(tail)
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"elastic.data: {file.path} is no parquet file: {error}") from error
            with _footers_lock:
                while len(self._footers) >= FOOTERS_KEPT:
                    del self._footers[next(iter(self._footers))]
                self._footers[file.path] = footer
        return footer

    def read(self, reader: Reader, files: Sequence[File], block: Block) -> Batch:
        """Return a row group, or a part of it."""
        import pyarrow.parquet as parquet

        pa, file = arrow(), files[block.file]
        footer = self._footer(reader, file)
        names = list(self.columns) if self.columns is not None else None
        start, stop = _span_of(footer.row_group(block.group), names)
        try:
            fetched = RangedFile(reader, file, start, stop)
            opened = parquet.ParquetFile(fetched, metadata=footer)
            found = opened.read_row_group(block.group, columns=names, use_threads=True)
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"elastic.data: {file.path}, row group {block.group} of {footer.num_row_groups} "
                f"({block.stop:,} rows) cannot be read: {error}"
            ) from error
        if (block.start, block.stop) != (0, found.num_rows):
            found = found.slice(block.start, block.stop - block.start)
        return found


def _span_of(group: Any, names: list[str] | None) -> tuple[int, int]:
    """Return the bytes of a file that the columns of a row group take."""
    start, stop = 2**62, 0
    for number in range(group.num_columns):
        column = group.column(number)
        if names is not None and column.path_in_schema.partition(".")[0] not in names:
            continue
        begins = [column.data_page_offset, column.dictionary_page_offset or 2**62]
        begin = min(one for one in begins if one > 0)
        start, stop = min(start, begin), max(stop, begin + column.total_compressed_size)
    return (0, 0) if stop == 0 else (start, stop)


def _check_schema(
    before: tuple[File, Any], file: File, found: Any, columns: Sequence[str] | None
) -> None:
    """Refuse a file whose columns are not those of the first.

    Raises:
        DataError: names the file and the column.
    """
    first, expected = before
    wanted = list(columns) if columns is not None else expected.names
    lacking = [name for name in wanted if name not in found.names]
    more = [name for name in found.names if name not in expected.names and columns is None]
    others = [
        name
        for name in wanted
        if name in found.names
        and name in expected.names
        and found.field(name).type != expected.field(name).type
    ]
    if lacking or more or others:
        name = (lacking or more or others)[0]
        has = found.field(name).type if name in found.names else "no such column"
        had = expected.field(name).type if name in expected.names else "no such column"
        raise DataError(
            f"elastic.data: the schema changes between files: column {name!r} is {had} in "
            f"{first.path} and {has} in {file.path}: write the files alike, name the columns that "
            f"all have (columns=[...]), or leave such files out (on_error='skip')"
        )


@dataclass
class Csv(FileSource):
    """CSV files, read in chunks; the types of columns are those of the first file.

    Attributes:
        arrow_options: `read_options`, `parse_options`, `convert_options` of pyarrow.csv.
    """

    arrow_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Begin with no schema known."""
        super().__post_init__()
        self._first: Any = None

    def _rows(self, reader: Reader, file: File) -> Iterator[Batch]:
        import pyarrow.csv as csv

        pa, options = arrow(), dict(self.arrow_options)
        convert = options.get("convert_options") or csv.ConvertOptions()
        parse = options.get("parse_options") or csv.ParseOptions()
        types = {**{f.name: f.type for f in (self._first[1] if self._first else ())}}
        convert.column_types = {**types, **dict(convert.column_types or {})}
        if self.skips:
            parse.invalid_row_handler = lambda row: self._skip_row(file, row)
        opened = reader.open(file)
        try:
            found = csv.open_csv(
                opened,
                # Several threads do not count the rows, which errors name.
                read_options=options.get("read_options") or csv.ReadOptions(use_threads=False),
                parse_options=parse,
                convert_options=convert,
            )
            self._first = self._first or (file, found.schema)
            if found.schema.names != self._first[1].names:
                _check_schema(self._first, file, found.schema, None)
            for batch in found:
                yield pa.Table.from_batches([batch])
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(f"elastic.data: {file.path}: {error}") from error
        finally:
            opened.close()

    def _skip_row(self, file: File, row: Any) -> str:
        number = f"row {row.number}" if row.number is not None else "a row"
        text = (row.text or "")[:80]
        why = f"{row.actual_columns} columns, {row.expected_columns} expected"
        self.skip("rows", f"{file.path}, {number} ({text!r}) has {why}")
        return "skip"


@dataclass
class Lines(FileSource):
    """Files of lines: plain text, or a JSON object each (a file may also be one JSON list).

    Attributes:
        is_json: what the lines are.
        drop_empty: leave empty lines of text out.
        encoding: of text.
    """

    is_json: bool = False
    drop_empty: bool = True
    encoding: str = "utf-8"

    def __post_init__(self) -> None:
        """Begin with no schema known."""
        super().__post_init__()
        self._first: Any = None

    def _rows(self, reader: Reader, file: File) -> Iterator[Batch]:
        with reader.open(file) as opened:
            number, rest, is_first = 1, b"", True
            for piece in chunks(opened, CHUNK_BYTES):
                if is_first and self.is_json and piece.lstrip()[:1] == b"[":
                    yield self._of_list(file, piece + opened.read())
                    return
                is_first = False
                whole, cut, rest = (rest + piece).rpartition(b"\n")
                if whole or cut:
                    yield self._of_lines(file, whole, number)
                    number += whole.count(b"\n") + 1
            if rest:
                yield self._of_lines(file, rest, number)

    def _of_lines(self, file: File, text: bytes, number: int) -> Batch:
        if self.is_json:
            return self._of_json(file, text, number)
        try:
            lines = text.decode(self.encoding).split("\n")
        except UnicodeDecodeError as error:
            raise DataError(f"elastic.data: {file.path}, line {number} and on: {error}") from error
        kept = [line.removesuffix("\r") for line in lines if line.strip() or not self.drop_empty]
        return arrow().table({"text": arrow().array(kept, arrow().string())})

    def _of_list(self, file: File, text: bytes) -> Batch:
        try:
            return arrow().Table.from_pylist(json.loads(text))
        except (ValueError, TypeError) as error:
            raise DataError(f"elastic.data: {file.path} is no JSON list: {error}") from error

    def _of_json(self, file: File, text: bytes, number: int) -> Batch:
        import pyarrow.json as arrow_json

        pa = arrow()
        schema = self._first[1] if self._first else None
        options = arrow_json.ParseOptions(
            explicit_schema=schema, unexpected_field_behavior="error" if schema else "infer"
        )
        try:
            read = arrow_json.ReadOptions(block_size=len(text) + 2)
            found = arrow_json.read_json(io.BytesIO(text + b"\n"), read, options)
        except pa.ArrowInvalid as error:
            found = self._one_by_one(file, text, number, schema, str(error))
        self._first = self._first or (file, found.schema)
        return found

    def _one_by_one(self, file: File, text: bytes, number: int, schema: Any, why: str) -> Any:
        """Read lines of which one is wrong: leave it out, or say which one it is."""
        pa, rows = arrow(), []
        for at, line in enumerate(text.split(b"\n"), start=number):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                more = sorted(set(row) - set(schema.names)) if schema is not None else []
                if more:
                    raise ValueError(
                        f"has the column {more[0]!r}, which {self._first[0].path} begins without"
                    )
                if schema is not None:
                    pa.Table.from_pylist([row], schema=schema)
                rows.append(row)
            except (ValueError, TypeError, pa.ArrowException) as error:
                problem = f"{file.path}, line {at} ({line[:80]!r}): {error}"
                if not self.skips:
                    raise DataError(f"elastic.data: {problem}") from error
                self.skip("rows", problem)
        if not self.skips:
            raise DataError(f"elastic.data: {file.path}, line {number} and on: {why}")
        return pa.Table.from_pylist(rows, schema=schema)


@dataclass
class Numpy(FileSource):
    """Files of one array each; a row is what its first axis counts."""

    def _rows(self, reader: Reader, file: File) -> Iterator[Batch]:
        try:
            whole = np.load(io.BytesIO(reader.read(file)), allow_pickle=False)
        except ValueError as error:
            raise DataError(f"elastic.data: {file.path} is no array: {error}") from error
        yield from batched([{"data": whole}], BLOCK_ROWS)


@dataclass
class Binary(FileSource):
    """A row for each file: its bytes.

    Attributes:
        with_paths: also its path.
    """

    with_paths: bool = False

    def _look(self) -> Listing:
        files = tuple(self.files())
        blocks = []
        for number, start in enumerate(range(0, len(files), FILES_IN_BLOCK)):
            some = files[start : start + FILES_IN_BLOCK]
            size = sum(file.size for file in some)
            blocks.append(Block(start, number, 0, len(some), size))
        return Listing(files, tuple(blocks))

    def read(self, reader: Reader, files: Sequence[File], block: Block) -> Batch:
        """Return the content of some files."""
        some = files[block.file + block.start : block.file + block.stop]
        found = {"bytes": array_of([reader.read(file) for file in some])}
        if self.with_paths:
            found["path"] = array_of([file.path for file in some])
        return found


# -------------------------------------------------------------------------------- memory


@dataclass
class Memory(Source):
    """Rows that lie in this process.

    Attributes:
        batches: in order.
    """

    batches: Sequence[Batch] = ()

    def __post_init__(self) -> None:
        """Cut large batches."""
        self.batches = [part for one in self.batches for part in batched([one], BLOCK_ROWS)]

    def _look(self) -> Listing:
        sizes = [num_rows(one) for one in self.batches]
        return Listing(
            (),
            tuple(Block(0, n, 0, rows, _bytes_of(self.batches[n])) for n, rows in enumerate(sizes)),
        )

    def read(self, reader: Reader, files: Sequence[File], block: Block) -> Batch:
        """Return some rows."""
        del reader, files
        return sliced(self.batches[block.group], block.start, block.stop)


@dataclass
class Range(Source):
    """The numbers below another one, in the column "id"."""

    count: int = 0

    def _look(self) -> Listing:
        return Listing((), _blocks_of(self.count, 8))

    def read(self, reader: Reader, files: Sequence[File], block: Block) -> Batch:
        """Return some numbers."""
        del reader, files
        begin = block.group * BLOCK_ROWS
        return {"id": np.arange(begin + block.start, begin + block.stop)}


def _bytes_of(batch: Batch) -> int:
    if not isinstance(batch, dict):
        return int(batch.nbytes)
    return sum(values.nbytes for values in batch.values())


def _blocks_of(count: int, row_bytes: int) -> tuple[Block, ...]:
    starts = range(0, count, BLOCK_ROWS)
    sizes = [min(BLOCK_ROWS, count - start) for start in starts]
    return tuple(Block(0, n, 0, rows, rows * row_bytes) for n, rows in enumerate(sizes))


@dataclass
class HuggingFace(Source):
    """A dataset of the `datasets` package, map-style or iterable."""

    dataset: Any = None

    def stream(self) -> Iterator[Batch]:
        """Yield all rows in order."""
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
