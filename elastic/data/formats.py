"""Sources for sequential formats (CSV, JSON, text, arrays), and for whole files as rows."""

from __future__ import annotations

import bisect
import codecs
import contextlib
import copy
import io
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from elastic.data.batches import Batch, array_of, arrow, batched, of_rows
from elastic.data.files import DataError, File, Reader, chunks
from elastic.data.parquet import READERS, check_schema, completed, has_null
from elastic.data.sources import BLOCK_ROWS, Block, FileSource, Listing

CHUNK_BYTES = 8 * 1024**2
FILES_IN_BLOCK, BLOCK_BYTES = 16, 8 * 1024**2
"""Files that form one block, because they are mostly small, such as images: up to so many, and
further ones while they have so many bytes at most."""
CONVERSION = "CSV conversion error"
"""In Arrow's message of a value that has not the type of its column."""
Line = tuple[int, bytes]
"""The number of a line, and its text."""


@dataclass
class Csv(FileSource):
    """CSV files, read in chunks; the first file determines the types of columns.

    Attributes:
        arrow_options: `read_options`, `parse_options`, `convert_options` of pyarrow.csv.
    """

    arrow_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._first: Any = None
        # The number of the last row with a wrong number of columns.
        self._counted = 0

    def _rows(self, reader: Reader, file: File) -> Iterator[Batch]:
        done = self._counted = 0
        try:
            for table in self._tables(reader, file, _known(self._first)):
                done += table.num_rows
                yield table
        except DataError as error:
            if not (self.skips and self._first and CONVERSION in str(error)):
                raise
            yield from self._row_by_row(reader, file, done)

    def _convert_options(self, types: Mapping[str, Any]) -> Any:
        import pyarrow.csv as csv

        # A copy: other reads may be given the same ones.
        convert = copy.copy(self.arrow_options.get("convert_options")) or csv.ConvertOptions()
        convert.column_types = {**types, **dict(convert.column_types or {})}
        return convert

    def _tables(
        self, reader: Reader, file: File, types: Mapping[str, Any], *, as_texts: bool = False
    ) -> Iterator[Any]:
        """Yield the rows of a file, with these types of columns; `as_texts`: all as they are."""
        import pyarrow.csv as csv

        pa, options = arrow(), self.arrow_options
        convert = self._convert_options(types)
        if as_texts:
            convert.column_types = types
        # Values may have several lines in any case; without it not where a chunk ends.
        own = csv.ParseOptions(newlines_in_values=True)
        parse = copy.copy(options.get("parse_options")) or own
        # With several threads pyarrow does not count rows, whose numbers errors name.
        read = copy.copy(options.get("read_options")) or csv.ReadOptions(use_threads=False)
        if self.skips:
            parse.invalid_row_handler = partial(self._skip_row, file)
            read.use_threads = False
        opened = reader.open(file, self.compression)
        try:
            found = csv.open_csv(
                opened,
                read_options=read,
                parse_options=parse,
                convert_options=convert,
            )
            casts = found.schema.names if as_texts else ()
            check_schema(self._first or (file, found.schema), file, found.schema, None, casts)
            if not as_texts:
                self._first = completed(self._first, file, found.schema)
            for batch in found:
                yield pa.Table.from_batches([batch])
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(f"elastic.data: {file.path}: {error}") from error
        finally:
            opened.close()

    def _row_by_row(self, reader: Reader, file: File, done: int) -> Iterator[Any]:
        """Yield what follows on the first rows, without those that have a value of another type."""
        texts = dict.fromkeys(self._first[1].names, arrow().string())
        seen = 0
        for table in self._tables(reader, file, texts, as_texts=True):
            rest = table.slice(max(0, done - seen))
            seen += table.num_rows
            if rest.num_rows:
                yield from self._converted(file, rest)

    def _converted(self, file: File, texts: Any) -> Iterator[Any]:
        """Yield rows of texts as rows with the known types; halves, until bad ones are alone."""
        import pyarrow.csv as csv

        pa, held = arrow(), io.BytesIO()
        csv.write_csv(texts, held)
        held.seek(0)
        try:
            found = csv.read_csv(
                held,
                csv.ReadOptions(use_threads=False, block_size=held.getbuffer().nbytes),
                csv.ParseOptions(newlines_in_values=True),
                self._convert_options(_known(self._first)),
            )
            self._first = completed(self._first, file, found.schema)
            yield found
        except pa.ArrowInvalid as error:
            if texts.num_rows == 1:
                values = list(texts.to_pylist()[0].values())
                self.skip("rows", f"{file.path}, the row {repr(values)[:80]}: {error}")
                return
            half = texts.num_rows // 2
            for part in (texts.slice(0, half), texts.slice(half)):
                yield from self._converted(file, part)

    def _skip_row(self, file: File, row: Any) -> str:
        if row.number <= self._counted:
            return "skip"  # The file is read for the second time.
        self._counted = row.number
        text = (row.text or "")[:80]
        why = f"{row.actual_columns} columns, {row.expected_columns} expected"
        self.skip("rows", f"{file.path}, row {row.number} ({text!r}) has {why}")
        return "skip"


@dataclass
class Lines(FileSource):
    """Files of lines: plain text, or a JSON object each (a file may also be one JSON list).

    Attributes:
        is_json: the lines are JSON objects.
        drop_empty: leave out empty lines of text.
        encoding: of text.
    """

    is_json: bool = False
    drop_empty: bool = True
    encoding: str = "utf-8"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._first: Any = None

    def _rows(self, reader: Reader, file: File) -> Iterator[Batch]:
        with reader.open(file, self.compression) as opened:
            pieces = chunks(opened, CHUNK_BYTES)
            yield from self._json(file, pieces) if self.is_json else self._text(file, pieces)

    def _text(self, file: File, pieces: Iterator[bytes]) -> Iterator[Batch]:
        decoder = codecs.getincrementaldecoder(self.encoding)()
        number, partial = 1, ""
        for piece in itertools.chain(pieces, [b""]):
            try:
                text = partial + decoder.decode(piece, final=not piece)
            except UnicodeDecodeError as error:
                raise DataError(
                    f"elastic.data: {file.path}, line {number} and on: {error}"
                ) from error
            whole, cut, partial = text.rpartition("\n") if piece else (text, text, "")
            if cut:
                lines = whole.split("\n")
                number += len(lines)
                kept = [x.removesuffix("\r") for x in lines if x.strip() or not self.drop_empty]
                yield arrow().table({"text": arrow().array(kept, arrow().string())})

    def _json(self, file: File, pieces: Iterator[bytes]) -> Iterator[Batch]:
        partial = next(pieces, b"").removeprefix(codecs.BOM_UTF8)
        if partial.lstrip()[:1] == b"[":
            yield self._of_list(file, b"".join([partial, *pieces]))
            return
        number = 1
        for piece in pieces:
            whole, cut, partial = partial.rpartition(b"\n")
            if cut:
                yield self._of_lines(file, whole, number)
                number += whole.count(b"\n") + 1
            partial += piece
        if partial:
            yield self._of_lines(file, partial, number)

    def _of_list(self, file: File, text: bytes) -> Batch:
        try:
            items = json.loads(text)
        except ValueError as error:
            raise DataError(f"elastic.data: {file.path} is no JSON list: {error}") from error
        lines = []
        for number, item in enumerate(items, start=1):
            if not isinstance(item, dict):
                self._leave_out(f"{file.path}, item {number} ({repr(item)[:80]}): no object")
            lines.append(json.dumps(item).encode() if isinstance(item, dict) else b"")
        if objects := [item for item in items if isinstance(item, dict)]:
            self._first = completed(self._first, file, _schema_of(objects))
        return self._of_lines(file, b"\n".join(lines), 1, "item")

    def _of_lines(self, file: File, text: bytes, number: int, unit: str = "line") -> Batch:
        """Return the rows of some lines, the first of which has this number, as `unit`."""
        try:
            found = self._parsed(text)
        except arrow().ArrowInvalid:
            found = self._one_by_one(file, text, number, unit)
        return self._noted(file, found)

    def _parsed(self, text: bytes) -> Any:
        """Return the rows of some lines, with the types that columns had before.

        ArrowInvalid if they are no JSON or no UTF-8, or have a new column or values of another
        type.
        """
        import pyarrow.json as arrow_json

        pa, types = arrow(), _known(self._first)
        options = arrow_json.ParseOptions(
            explicit_schema=pa.schema(types) if types else None, unexpected_field_behavior="infer"
        )
        read = arrow_json.ReadOptions(block_size=len(text) + 2)
        found = arrow_json.read_json(io.BytesIO(text + b"\n"), read, options)
        found.validate(full=True)
        known = found.column_names if self._first is None else self._first[1].names
        more = [name for name in found.column_names if name not in known]
        if more:
            raise pa.ArrowInvalid(
                f"has the column {more[0]!r}, which {self._first[0].path} begins without"
            )
        return found

    def _one_by_one(self, file: File, text: bytes, number: int, unit: str) -> Any:
        """Parse line by line after an error: leave out the invalid lines, or name the first one."""
        lines = [one for one in enumerate(text.split(b"\n"), start=number) if one[1].strip()]
        lines = self._valid(file, lines, unit)
        if lines and not self._fit(lines):
            # Each is valid, so that their types differ: those of the first ones count.
            first = bisect.bisect(
                range(len(lines)), False, key=lambda n: not self._fit(lines[: n + 1])
            )
            found = self._parsed(_text_of(lines[:first]))
            self._first = completed(self._first, file, found.schema)
            lines = self._valid(file, lines, unit)
        return self._parsed(_text_of(lines)) if lines else arrow().table({})

    def _valid(self, file: File, lines: Sequence[Line], unit: str) -> list[Line]:
        found = []
        for number, line in lines:
            try:
                self._parsed(line)
                found.append((number, line))
            except arrow().ArrowInvalid as error:
                self._leave_out(f"{file.path}, {unit} {number} ({line[:80]!r}): {error}")
        return found

    def _fit(self, lines: Sequence[Line]) -> bool:
        try:
            self._parsed(_text_of(lines))
        except arrow().ArrowInvalid:
            return False
        return True

    def _leave_out(self, problem: str) -> None:
        if not self.skips:
            raise DataError(f"elastic.data: {problem}")
        self.skip("rows", problem)

    def _noted(self, file: File, found: Any) -> Any:
        """Return a table with the columns of the first one, whose types are known from here on."""
        if not found.num_rows:
            return found
        self._first = completed(self._first, file, found.schema)
        nothing = arrow().nulls(found.num_rows)
        names = self._first[1].names
        return arrow().table(
            {name: found.column(name) if name in found.column_names else nothing for name in names}
        )


def _known(first: tuple[File, Any] | None) -> dict[str, Any]:
    """Return the types of columns that have a value, by name."""
    schema = () if first is None else first[1]
    return {one.name: one.type for one in schema if not has_null(one.type)}


def _schema_of(objects: Sequence[Mapping[str, Any]]) -> Any:
    """Return the schema of objects, in which texts are texts, and values of several types null."""
    pa = arrow()
    kinds = {}
    for name in dict.fromkeys(name for one in objects for name in one):
        kinds[name] = pa.null()
        with contextlib.suppress(pa.ArrowException, OverflowError):
            kinds[name] = pa.array([one.get(name) for one in objects]).type
    return pa.schema(kinds)


def _text_of(lines: Sequence[Line]) -> bytes:
    return b"\n".join(line for _, line in lines)


@dataclass
class Numpy(FileSource):
    """Files of one array each; a row is an entry of the first axis."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._first: tuple[File, Any] | None = None

    def _rows(self, reader: Reader, file: File) -> Iterator[Batch]:
        try:
            whole = np.load(io.BytesIO(reader.read(file)), allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            raise DataError(f"elastic.data: {file.path} is no array: {error}") from error
        if not (isinstance(whole, np.ndarray) and whole.ndim):
            raise DataError(f"elastic.data: {file.path}: expected an array of one axis or more")
        found = whole.dtype.newbyteorder("=")
        self._first = self._first or (file, found)
        first, kind = self._first
        # Texts and bytes may have any length.
        if found != kind and not (found.kind == kind.kind and kind.kind in "US"):
            raise DataError(
                f"elastic.data: the type changes between files: it is {kind} in {first.path} and "
                f"{found} in {file.path}: write the files alike, or leave such files out "
                f"(on_error='skip')"
            )
        yield from batched([{"data": whole}], BLOCK_ROWS)


@dataclass
class Binary(FileSource):
    """A row for each file: its bytes.

    Attributes:
        decode: called with the bytes and the path of each file, to leave out those for which it
            raises a DataError, if `on_error` is "skip".
    """

    decode: Callable[[bytes, str], object] | None = None

    def _check(self) -> Listing:
        files = tuple(self._readable(self.files()) if self.skips else self.files())
        blocks: list[Block] = []
        most = FILES_IN_BLOCK if self.files_seed is None else 1
        for number, file in enumerate(files):
            last = blocks[-1] if blocks else Block(0, 0, 0, most)
            if last.stop < most and last.size + file.size <= BLOCK_BYTES:
                blocks[-1] = replace(last, stop=last.stop + 1, size=last.size + file.size)
            else:
                blocks.append(Block(number, len(blocks), 0, 1, file.size))
        return Listing(files, tuple(blocks))

    def _readable(self, files: Sequence[File]) -> list[File]:
        """Return the files that can be read and decoded; all of them are read for that."""
        reader = Reader(self.options)

        def problem(file: File) -> str:
            try:
                content = reader.read(file)
                if self.decode is not None:
                    self.decode(content, file.path)
            except DataError as error:
                return str(error)
            return ""

        with ThreadPoolExecutor(READERS) as pool:
            problems = list(pool.map(problem, files))
        for why in filter(None, problems):
            self.skip("files", why)
        return [file for file, why in zip(files, problems, strict=True) if not why]

    def read(self, reader: Reader, files: Sequence[File], block: Block) -> Batch:
        some = files[block.file + block.start : block.file + block.stop]
        found = {"bytes": array_of([reader.read(file) for file in some])}
        return {**found, **of_rows([self.partitions(file) for file in some])}
