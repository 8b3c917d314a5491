"""Writes rows to files: parquet of moderate row groups and sizes, which reads well, and JSON."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from elastic.data.batches import (
    Batch,
    arrow,
    check_columns,
    joined,
    num_rows,
    sliced,
    to_table,
)
from elastic.data.sources import bytes_of
from elastic.errors import UsageError
from elastic.storage.files import Files

GROUP_BYTES, GROUP_ROWS = 8 * 1024**2, 65536
"""Size limits of a row group."""
FILE_BYTES = 256 * 1024**2
NUMBERED = re.compile(r"(?:part-)?(\d+)")
"""Names of files that are written here: their numbers."""


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


def first_free(files: Files) -> int:
    """Return the number of the next file: larger than those of all that are there."""
    files.fs.invalidate_cache()
    names = (str(one).rpartition("/")[2] for one in files.fs.find(files.root))
    return max((int(found[1]) for one in names if (found := NUMBERED.match(one))), default=-1) + 1


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


def write_parquet(batches: Iterator[Batch], files: Files, folder: str, number: int = 0) -> int:
    """Write rows to parquet files of moderate row groups; return the number of the next file.

    Args:
        batches: the rows.
        files: the directory.
        folder: in it, "" for none.
        number: of the first file.

    Raises:
        StorageError: they cannot be written.
    """
    groups = _row_groups(batches)
    first = next(groups, None)
    while first is not None:
        with files.writing(f"{folder}/part-{number:05d}.parquet".lstrip("/")) as output:
            first = _write_file(output, first, groups)
        number += 1
    return number


def write_partitions(
    batches: Iterator[Batch],
    files: Files,
    columns: Sequence[str],
    number: int,
    rows_per_file: int | None,
) -> None:
    """Write rows to parquet files in folders of the values of columns, such as "year=2024/".

    Args:
        batches: the rows.
        files: the directory.
        columns: of the folders.
        number: is in the names of the files: no earlier ones have it.
        rows_per_file: at most so many, None for no limit.

    Raises:
        UsageError: there is no such column.
    """
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
    dataset.write_dataset(
        arrow().RecordBatchReader.from_batches(schema, rows),
        files.root,
        filesystem=files.fs,
        format="parquet",
        partitioning=dataset.partitioning(
            arrow().schema([schema.field(name) for name in columns]), flavor="hive"
        ),
        basename_template=f"part-{number:05d}-{{i}}.parquet",
        existing_data_behavior="overwrite_or_ignore",
        max_partitions=GROUP_ROWS,
        max_rows_per_file=rows_per_file or 0,
        max_rows_per_group=min(GROUP_ROWS, rows_per_file or GROUP_ROWS),
        preserve_order=True,
    )


def _write_file(output: Any, table: Any, groups: Iterator[Any]) -> Any:
    """Write row groups until the file is large enough, or the schema changes; return the next."""
    import pyarrow.parquet as parquet

    pa = arrow()
    size = 0
    following: Any = table
    with parquet.ParquetWriter(pa.PythonFile(Sink(output.write), mode="w"), table.schema) as writer:
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
