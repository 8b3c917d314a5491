"""Sources for sequential formats (CSV, JSON, text, arrays), and for whole files as rows."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from elastic.data.batches import Batch, array_of, arrow, batched, of_rows
from elastic.data.files import DataError, File, Reader, chunks
from elastic.data.parquet import check_schema
from elastic.data.sources import BLOCK_ROWS, Block, FileSource, Listing

CHUNK_BYTES = 8 * 1024**2
FILES_IN_BLOCK = 16
"""Files that form one block, because they are mostly small, such as images."""


@dataclass
class Csv(FileSource):
    """CSV files, read in chunks; the first file determines the types of columns.

    Attributes:
        arrow_options: `read_options`, `parse_options`, `convert_options` of pyarrow.csv.
    """

    arrow_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Start without a schema."""
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
                # With several threads pyarrow does not count rows, whose numbers errors name.
                read_options=options.get("read_options") or csv.ReadOptions(use_threads=False),
                parse_options=parse,
                convert_options=convert,
            )
            self._first = self._first or (file, found.schema)
            if found.schema.names != self._first[1].names:
                check_schema(self._first, file, found.schema, None)
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
        is_json: the lines are JSON objects.
        drop_empty: leave out empty lines of text.
        encoding: of text.
    """

    is_json: bool = False
    drop_empty: bool = True
    encoding: str = "utf-8"

    def __post_init__(self) -> None:
        """Start without a schema."""
        super().__post_init__()
        self._first: Any = None

    def _rows(self, reader: Reader, file: File) -> Iterator[Batch]:
        with reader.open(file) as opened:
            number, partial, is_first = 1, b"", True
            for piece in chunks(opened, CHUNK_BYTES):
                if is_first and self.is_json and piece.lstrip()[:1] == b"[":
                    yield self._of_list(file, piece + opened.read())
                    return
                is_first = False
                whole, cut, partial = (partial + piece).rpartition(b"\n")
                if whole or cut:
                    yield self._of_lines(file, whole, number)
                    number += whole.count(b"\n") + 1
            if partial:
                yield self._of_lines(file, partial, number)

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
        """Parse line by line after an error: skip the invalid lines, or name the first one."""
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
    """Files of one array each; a row is an entry of the first axis."""

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
        with_paths: add a column "path".
    """

    with_paths: bool = False

    def _check(self) -> Listing:
        files = tuple(self.files())
        blocks = []
        for number, start in enumerate(range(0, len(files), FILES_IN_BLOCK)):
            some = files[start : start + FILES_IN_BLOCK]
            size = sum(file.size for file in some)
            blocks.append(Block(start, number, 0, len(some), size))
        return Listing(files, tuple(blocks))

    def read(self, reader: Reader, files: Sequence[File], block: Block) -> Batch:
        """Return the content of the files of a block."""
        some = files[block.file + block.start : block.file + block.stop]
        found = {"bytes": array_of([reader.read(file) for file in some])}
        if self.with_paths:
            found["path"] = array_of([file.path for file in some])
        folders = of_rows([self.partitions(file) for file in some])
        return {**folders, **found}
