"""Source for parquet files, with random access by row group."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from elastic.data.batches import Batch, arrow
from elastic.data.files import TAIL_BYTES, DataError, File, RangedFile, Reader
from elastic.data.sources import Block, FileSource, Listing, with_columns

FOOTERS_KEPT = 64
READERS = 16
"""Threads that read footers while a table is listed."""
_footers_lock = threading.Lock()


@dataclass
class Parquet(FileSource):
    """Parquet files; a block is a row group, which is fetched in one request.

    Attributes:
        columns: those to read, None for all.
        schema: of pyarrow, with the types to which they are cast; None for those of the files.
        is_kept: written for a run: files may differ in the types of arrays, by their shapes.
        types: of columns by name, as files have them in which they have a value.
    """

    columns: tuple[str, ...] | None = None
    schema: Any = None
    is_kept: bool = False
    types: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Start with an empty cache of footers."""
        super().__post_init__()
        self._footers: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the footers, which cannot be pickled."""
        return {**super().__getstate__(), "_footers": {}}

    def _check(self) -> Listing:
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
                schema = footer.schema.to_arrow_schema()
                names = self._names_in(schema.names, self.partitions(file))
                if not self.is_kept:
                    casts = () if self.schema is None else self.schema.names
                    check_schema(first or (file, schema), file, schema, names, casts)
                first = completed(first, file, schema)
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
        self.types = {one.name: one.type for one in (first[1] if first else ())}
        return Listing(tuple(files), tuple(blocks))

    def _try_footer(self, reader: Reader, file: File) -> Any:
        try:
            return self._footer(reader, file)[0]
        except DataError as error:
            return error

    def _footer(self, reader: Reader, file: File) -> tuple[Any, RangedFile | None]:
        """Return the footer of a file, and the end of the file if that was fetched for it."""
        import pyarrow.parquet as parquet

        pa = arrow()
        footer = self._footers.get(file.path)
        if footer is not None:
            return footer, None
        tail = RangedFile(reader, file, file.size - TAIL_BYTES, file.size)
        try:
            footer = parquet.read_metadata(tail)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"elastic.data: {file.path} is no parquet file: {error}") from error
        with _footers_lock:
            while len(self._footers) >= FOOTERS_KEPT:
                del self._footers[next(iter(self._footers))]
            self._footers[file.path] = footer
        return footer, tail

    def read(self, reader: Reader, files: Sequence[File], block: Block) -> Batch:
        import pyarrow.parquet as parquet

        pa, file = arrow(), files[block.file]
        footer, tail = self._footer(reader, file)
        partitions = self.partitions(file)
        names = self._names_in(footer.schema.names, partitions)
        if names == []:  # Rows of some column have to be read, to be counted.
            names = footer.schema.to_arrow_schema().names[:1]
        start, stop = _span_of(footer.row_group(block.group), names)
        try:
            # All of a small file is there already.
            is_whole = tail is not None and file.size <= TAIL_BYTES
            fetched = tail if is_whole else RangedFile(reader, file, start, stop)
            # No threads: Arrow's own would hold a reference to `fetched`, and abort the process if
            # they release the last one while the interpreter exits (apache/arrow#34314).
            opened = parquet.ParquetFile(fetched, metadata=footer, pre_buffer=False)
            found = opened.read_row_group(block.group, columns=names, use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"elastic.data: {file.path}, row group {block.group} of {footer.num_row_groups} "
                f"({block.stop:,} rows) cannot be read: {error}: remove the file, or write it anew"
            ) from error
        if (block.start, block.stop) != (0, found.num_rows):
            found = found.slice(block.start, block.stop - block.start)
        found = with_columns(self._filled(found), partitions)
        if self.columns is not None:
            paths = ["path"] if self.with_paths and "path" not in self.columns else []
            found = found.select([*self.columns, *paths])
        return found if self.schema is None else self._cast(found, file)

    def _filled(self, table: Any) -> Any:
        """Return a table whose columns without a value have the types of other files."""
        pa = arrow()
        for number, one in enumerate(table.schema):
            if pa.types.is_null(one.type) and one.name in self.types:
                nothing = pa.nulls(len(table), self.types[one.name])
                table = table.set_column(number, one.name, nothing)
        return table

    def _cast(self, table: Any, file: File) -> Any:
        pa = arrow()
        wanted = {one.name: one for one in self.schema}
        try:
            return table.cast(pa.schema([wanted.get(one.name, one) for one in table.schema]))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise DataError(
                f"elastic.data: {file.path} cannot be read with the given schema: {error}"
            ) from error

    def _names_in(self, has: Sequence[str], partitions: Mapping[str, Any]) -> list[str] | None:
        """Return the columns to read from a file; the others are its folders. None for all."""
        if self.columns is None:
            return None
        return [name for name in self.columns if name in has or name not in partitions]


def _span_of(group: Any, names: list[str] | None) -> tuple[int, int]:
    """Return the byte range of the columns of a row group in the file."""
    start, stop = 2**62, 0
    for number in range(group.num_columns):
        column = group.column(number)
        path = column.path_in_schema  # With dots before the fields of a struct, or in a name.
        if names is not None and not {path, path.partition(".")[0]} & {*names}:
            continue
        begins = [column.data_page_offset, column.dictionary_page_offset or 2**62]
        begin = min(one for one in begins if one > 0)
        start, stop = min(start, begin), max(stop, begin + column.total_compressed_size)
    return (0, 0) if stop == 0 else (start, stop)


def completed(before: tuple[File, Any] | None, file: File, found: Any) -> tuple[File, Any]:
    """Return the first file and its schema, with the types of columns that had no value there."""
    if before is None:
        return file, found
    first, schema = before
    types = {one.name: one.type for one in found if not arrow().types.is_null(one.type)}
    for number, one in enumerate(schema):
        if has_null(one.type) and one.name in types:
            schema = schema.set(number, one.with_type(types[one.name]))
    return first, schema


def has_null(kind: Any) -> bool:
    """Return whether a type, or one inside of it, is that of missing values alone."""
    inner = (kind.field(number).type for number in range(kind.num_fields))
    return bool(arrow().types.is_null(kind)) or any(map(has_null, inner))


def _kind(kind: Any) -> Any:
    """Return a type without how its values are stored: categories, wide offsets, equal lengths."""
    pa = arrow()
    if pa.types.is_dictionary(kind):
        return _kind(kind.value_type)
    if isinstance(kind, pa.FixedShapeTensorType):
        inner = kind.value_type
        for _ in kind.shape:
            inner = pa.list_(inner)
        return inner
    if hasattr(kind, "value_type"):  # Of lists.
        return pa.list_(_kind(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([one.with_type(_kind(one.type)) for one in kind])
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return pa.binary()
    return kind


def check_schema(
    before: tuple[File, Any],
    file: File,
    found: Any,
    columns: Sequence[str] | None,
    casts: Sequence[str] = (),
) -> None:
    """Refuse a file whose columns differ from those of the first, but for those without a value.

    `before` is the first file and its schema. Of `columns` None is for all; `casts` may have any
    type. The DataError names the file and the column.
    """
    first, expected = before
    twice = [name for name in found.names if found.names.count(name) > 1]
    if twice:
        raise DataError(f"elastic.data: {file.path} has several columns {twice[0]!r}")
    wanted = list(columns) if columns is not None else expected.names
    lacking = [name for name in wanted if name not in found.names]
    more = [name for name in found.names if name not in expected.names and columns is None]
    others = [
        name
        for name in {*wanted} & {*found.names} & {*expected.names} - {*casts}
        if _kind(found.field(name).type) != _kind(expected.field(name).type)
        and not (has_null(found.field(name).type) or has_null(expected.field(name).type))
    ]
    if lacking and lacking[0] not in expected.names:
        raise DataError(
            f"elastic.data: there is no column {lacking[0]!r} in {file.path}: expected some of "
            f"{found.names}"
        )
    if lacking or more or others:
        name = (lacking or more or sorted(others))[0]
        has = found.field(name).type if name in found.names else "no such column"
        had = expected.field(name).type if name in expected.names else "no such column"
        raise DataError(
            f"elastic.data: the schema changes between files: column {name!r} is {had} in "
            f"{first.path} and {has} in {file.path}: write the files alike, name the columns that "
            f"all have (columns=[...]), or of read_parquet their types (schema=...), or leave such "
            f"files out (on_error='skip')"
        )
