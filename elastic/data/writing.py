"""Writes rows to parquet files that read well: moderate row groups and file sizes."""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
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


def write_parquet(batches: Iterator[Batch], files: Files, folder: str, number: int = 0) -> int:
    """Write rows to parquet files of moderate row groups; return the number of rows.

    Args:
        batches: the rows.
        files: the directory.
        folder: in it, "" for none.
        number: of the first file.

    Raises:
        StorageError: they cannot be written.
    """
    groups = _row_groups(batches)
    first, rows = next(groups, None), 0
    while first is not None:
        with files.writing(f"{folder}/part-{number:05d}.parquet".lstrip("/")) as output:
            first, count = _write_file(output, first, groups)
        number, rows = number + 1, rows + count
    return rows


def write_partitions(
    batches: Iterator[Batch], files: Files, columns: Sequence[str], number: int
) -> None:
    """Write rows to parquet files in folders of the values of columns, such as "year=2024/".

    `number` is in the names of the files: no earlier ones have it.

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
        preserve_order=True,
    )


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
    """Yield tables of about `GROUP_ROWS` rows or `GROUP_BYTES` bytes."""
    held: list[Any] = []
    size = rows = 0
    for batch in _in_pieces(batches):
        table = to_table(batch)
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
