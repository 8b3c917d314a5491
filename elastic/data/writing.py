"""Writes rows to files: their names, parquet of moderate row groups and sizes, and JSON."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
import re
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic.data.arguments import check_others
from elastic.data.batches import (
    Batch,
    arrow,
    check_columns,
    check_size,
    joined,
    num_rows,
    sliced,
    to_table,
)
from elastic.data.context import SaveMode
from elastic.data.datasource.filename_provider import FilenameProvider
from elastic.data.sources import bytes_of
from elastic.errors import StorageError, UsageError
from elastic.storage.files import Files
from elastic.storage.filesystems import as_fsspec

log = logging.getLogger(__name__)

GROUP_BYTES, GROUP_ROWS = 8 * 1024**2, 65536
"""Size limits of a row group."""
FILE_BYTES = 256 * 1024**2
NUMBERED = re.compile(r"(?:part-)?(\d+)")
"""Names of files that are written here: their numbers."""
ROWS_PER_FILE = ("max_rows_per_file", "num_rows_per_file", "min_rows_per_file")
"""Ray's arguments for how many rows a file has that is written; the first one counts."""
PARQUET_OPTIONS = ("compression", "compression_level", "use_dictionary", "version")
"""Of pyarrow's, those that `write_parquet` hands on."""


class Sink:
    """A file object for pyarrow: counts the bytes, and passes them on or computes their CRC-32."""

    closed = False

    def __init__(self, hand_on: Callable[[Any], object] | None = None) -> None:
        """Set the function that receives the bytes; None to compute their CRC-32."""
        self.size = self.crc32 = 0
        self._hand_on = hand_on

    def write(self, data: Any) -> int:
        """Count bytes, and pass them on or add them to the CRC-32."""
        if self._hand_on is not None:
            self._hand_on(bytes(data))
        else:
            self.crc32 = zlib.crc32(data, self.crc32)
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing: the code that opened the file closes it."""


@dataclass
class WriteTarget:
    """A folder that files are written to.

    Attributes:
        files: the folder.
        rows_per_file: rows of a file at most, None for no limit.
        provider: names the files; None for numbers.
        first: the number of the first one: larger than those of all that are there.
        written: names that were given.
    """

    files: Files
    rows_per_file: int | None
    provider: FilenameProvider | None
    first: int
    written: set[str] = field(default_factory=set)
    _uuid: str = field(default_factory=lambda: uuid.uuid4().hex)

    def name_of_rows(self, rows: Batch | None, ending: str) -> str:
        """Return the name of the next file by its first rows; UsageError if another one has it."""
        number = len(self.written)
        if self.provider is None:
            return self._given(f"part-{self.first + number:05d}.{ending}")
        block = None if rows is None else to_table(rows)
        return self._given(self.provider.get_filename_for_block(block, self._uuid, number, 0))

    def name_of_row(self, row: dict[str, Any], ending: str) -> str:
        """Return the name of the next file, which has this row only; see `name_of_rows`."""
        number = len(self.written)
        if self.provider is None:
            return self._given(f"{self.first + number:06d}.{ending}")
        return self._given(self.provider.get_filename_for_row(row, self._uuid, 0, 0, number))

    def _given(self, name: str) -> str:
        if name in self.written:
            raise UsageError(
                f"filename_provider: {type(self.provider).__name__} has named two files {name!r}: "
                f"expected names that differ by task_index, or for images by row_index"
            )
        self.written.add(name)
        return name


@contextlib.contextmanager
def writing_to(
    what: str, path: str | os.PathLike[str], others: dict[str, Any]
) -> Iterator[WriteTarget | None]:
    """Open a folder to write to; None if nothing is to be written.

    Files that are replaced are deleted once the block has written all: it may read from them. If it
    fails, what it has written is deleted.

    Raises:
        UsageError: an argument is unknown, or there are files and must not be.
    """
    filesystem, mode = others.pop("filesystem", None), others.pop("mode", SaveMode.APPEND)
    provider = others.pop("filename_provider", None)
    sizes = [others.pop(name, None) for name in ROWS_PER_FILE]
    rows = next((check_size(one, what, "rows per file") for one in sizes if one is not None), None)
    check_others(what, others, "min_bytes_per_file", "try_create_dir")
    if mode not in [*SaveMode, *(one.value for one in SaveMode)]:
        known = ", ".join(one.value for one in SaveMode)
        raise UsageError(f"Dataset.{what}: mode={mode!r}: expected one of {known}")
    files = Files(absolute(path))
    if filesystem is not None:
        found, inside = as_fsspec(filesystem, os.fspath(path))
        files = Files(inside, found)
    mode, there = SaveMode(mode), [one.path for one in files.tree()]
    if there and mode is SaveMode.ERROR:
        raise UsageError(
            f"Dataset.{what}: {files.path} holds {there[0]} already: expected an empty folder, or "
            f"another mode"
        )
    target = WriteTarget(files, rows, provider, _first_free(there))
    try:
        yield None if there and mode is SaveMode.IGNORE else target
    except BaseException:
        _delete_all(files, target.written.difference(there))
        raise
    if mode is SaveMode.OVERWRITE:
        for name in there:
            if name not in target.written:
                files.delete_if_there(name)


def _delete_all(files: Files, names: Iterable[str]) -> None:
    """Delete what was written before an error, so that another attempt does not double rows."""
    for name in names:
        try:
            files.delete_if_there(name)
        except StorageError as error:  # The error before it says more.
            log.warning("written_file_stays path=%s/%s reason=%r", files.path, name, str(error))


def absolute(path: str | os.PathLike[str]) -> str:
    """Return a local path without "~", and from the root."""
    text = os.fspath(path)
    return text if "://" in text else os.path.abspath(os.path.expanduser(text))


def _first_free(names: Iterable[str]) -> int:
    """Return the number of the next file: larger than those of all that are there."""
    numbers = [NUMBERED.match(one.rpartition("/")[2]) for one in names]
    return max((int(one[1]) for one in numbers if one), default=-1) + 1


def by_rows(batches: Iterator[Batch], rows: int | None) -> Iterator[Iterator[Batch]]:
    """Yield the batches of each file, in order: of so many rows, None for one file of all.

    Those of a file have to be taken before the next one.
    """
    if rows is None:
        yield batches
        return
    most = rows
    some = (one for one in batches if num_rows(one))
    rest = next(some, None)

    def of_file() -> Iterator[Batch]:
        nonlocal rest
        missing = most
        while missing and rest is not None:
            count = min(missing, num_rows(rest))
            yield sliced(rest, 0, count)
            missing -= count
            is_taken = count == num_rows(rest)
            rest = next(some, None) if is_taken else sliced(rest, count, num_rows(rest))

    while rest is not None:
        yield of_file()


def tables_alike(batches: Iterable[Batch]) -> Iterator[Any]:
    """Yield tables that have the types of the first one, as far as nothing is lost by that.

    What NumPy makes of whole numbers depends on whether one of a batch is missing.
    """
    kinds: dict[str, Any] = {}
    for batch in batches:
        table = to_table(batch)
        kinds = kinds or {one.name: one.type for one in table.schema if table.num_rows}
        yield _cast(table, kinds)


def _cast(table: Any, kinds: Mapping[str, Any]) -> Any:
    pa = arrow()
    for number, one in enumerate(table.schema):
        kind = kinds.get(one.name, one.type)
        is_same = kind == one.type or not (_is_number(kind) and _is_number(one.type))
        if not is_same and not _rounds(one.type, kind):
            with contextlib.suppress(pa.ArrowInvalid, pa.ArrowNotImplementedError):
                values = table.column(number).cast(kind)
                table = table.set_column(number, one.name, values)
    return table


def _is_number(kind: Any) -> bool:
    types = arrow().types
    return bool(types.is_integer(kind) or types.is_floating(kind))


def _rounds(one: Any, other: Any) -> bool:
    """Return whether a cast to another type rounds values, which Arrow does without an error."""
    is_floating = arrow().types.is_floating
    return is_floating(one) and is_floating(other) and bool(one.bit_width > other.bit_width)


def write_parquet(
    batches: Iterator[Batch],
    files: Files,
    name_of: Callable[[Any], str],
    options: Mapping[str, Any] | None = None,
) -> None:
    """Write rows to parquet files of moderate row groups; files are named by their first rows."""
    groups = _row_groups(batches)
    first = next(groups, None)
    while first is not None:
        with files.writing(name_of(first)) as output:
            first = _write_file(output, first, groups, options or {})


def write_partitions(
    batches: Iterator[Batch],
    target: WriteTarget,
    columns: Sequence[str],
    options: Mapping[str, Any],
) -> None:
    """Write rows to parquet files in folders of the values of columns, such as "year=2024/".

    Raises:
        UsageError: there is no such column.
    """
    files, rows_per_file = target.files, target.rows_per_file
    dataset = __import__("pyarrow.dataset").dataset
    tables = _row_groups(batches)
    first = next(tables, None)
    if first is None:
        return
    check_columns(columns, first.column_names, "write_parquet: partition_cols")
    schema = first.schema
    rows = (
        batch
        for table in itertools.chain([first], tables)
        for batch in table.cast(schema).to_batches()
    )
    name = target.name_of_rows(first, "parquet")
    target.written.discard(name)  # There is no such file, only those that begin like it.
    begin, end = os.path.splitext(name)

    def note(file: Any) -> None:
        target.written.add(str(file.path).removeprefix(f"{files.root}/"))

    try:
        dataset.write_dataset(
            arrow().RecordBatchReader.from_batches(schema, rows),
            files.root,
            filesystem=files.fs,
            format="parquet",
            partitioning=dataset.partitioning(
                arrow().schema([schema.field(name) for name in columns]), flavor="hive"
            ),
            basename_template=f"{begin}-{{i}}{end}",
            file_options=dataset.ParquetFileFormat().make_write_options(**options),
            file_visitor=note,
            existing_data_behavior="overwrite_or_ignore",
            max_partitions=GROUP_ROWS,
            max_rows_per_file=rows_per_file or 0,
            max_rows_per_group=min(GROUP_ROWS, rows_per_file or GROUP_ROWS),
            preserve_order=True,
        )
    except BaseException:
        # `note` is told of whole files only.
        ours = re.compile(rf"(?:.*/)?{re.escape(begin)}-\d+{re.escape(end)}")
        with contextlib.suppress(StorageError):  # The error before it says more.
            target.written |= {one.path for one in files.tree() if ours.fullmatch(one.path)}
        raise


def _write_file(output: Any, table: Any, groups: Iterator[Any], options: Mapping[str, Any]) -> Any:
    """Write row groups until the file is large enough, or the schema changes; return the next."""
    import pyarrow.parquet as parquet

    pa = arrow()
    size = 0
    following: Any = table
    sink = pa.PythonFile(Sink(output.write), mode="w")
    with parquet.ParquetWriter(sink, table.schema, **options) as writer:
        while following is not None and size < FILE_BYTES and following.schema == table.schema:
            writer.write_table(following, row_group_size=max(1, following.num_rows))
            size += following.nbytes
            following = next(groups, None)
    return following


def _row_groups(batches: Iterator[Batch]) -> Iterator[Any]:
    """Yield tables of about `GROUP_ROWS` rows or `GROUP_BYTES` bytes."""
    held: list[Any] = []
    size = rows = 0
    for table in tables_alike(_in_pieces(batches)):
        held.append(table)
        size, rows = size + table.nbytes, rows + table.num_rows
        if size >= GROUP_BYTES or rows >= GROUP_ROWS:
            yield to_table(joined(held))
            held, size, rows = [], 0, 0
    if held:
        yield to_table(joined(held))


def _in_pieces(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yield the same rows, at most 1,024 or about `GROUP_BYTES` at once."""
    for batch in batches:
        rows = num_rows(batch)
        size = max(1, min(1024, GROUP_BYTES * rows // max(1, bytes_of(batch))))
        for start in range(0, rows, size):
            yield sliced(batch, start, min(rows, start + size))


def json_of(row: Mapping[str, Any]) -> str:
    """Return a row as a JSON object: bytes as texts, times too, and null for NaN.

    Raises:
        UsageError: a column holds bytes that are no text.
    """
    try:
        return json.dumps(row, default=_as_json, allow_nan=False)
    except ValueError:  # Of a NaN, or of bytes.
        plain = {name: _plain(value, name) for name, value in row.items()}
        return json.dumps(plain, default=_as_json)


def _as_json(value: Any) -> Any:
    """Return what JSON has for a value of NumPy, torch, or another type."""
    if isinstance(value, bytes):
        return value.decode()
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _plain(value: Any, column: str) -> Any:
    """Return a value without a NaN, and with texts for bytes."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {name: _plain(one, column) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one, column) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError as error:
        raise UsageError(
            f"Dataset.write_json: column {column!r} holds bytes that are no UTF-8 text: make them "
            f"text first, such as with base64, or use write_parquet"
        ) from error
