"""Sources that are read by other packages: Lance tables, which are written too, and databases."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from elastic.data.batches import Batch, arrow
from elastic.data.files import DataError, File, Reader
from elastic.data.sources import BLOCK_ROWS, Block, Listing, Source
from elastic.errors import StorageError, UsageError


@dataclass
class Lance(Source):
    """A Lance table, with random access; a block is some rows of a fragment.

    Attributes:
        uri: of the table.
        version: a number or a tag; None for the newest when the table is listed.
        columns: those to read, None for all.
        filter: SQL of a condition; with one there is no random access.
        options: for its storage.
    """

    uri: str = ""
    version: int | str | None = None
    columns: tuple[str, ...] | None = None
    filter: str | None = None
    options: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self._table: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the open table."""
        return {**super().__getstate__(), "_table": None}

    def _opened(self) -> Any:
        if self._table is None:
            with self._explained():
                self._table = _lance("read_lance").dataset(
                    self.uri, version=self.version, storage_options=self.options
                )
        return self._table

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, OSError, KeyError) as error:
            raise DataError(f"elastic.data: cannot read {self.uri}: {error}") from error

    def _check(self) -> Listing:
        table = self._opened()
        files: list[File] = []
        blocks: list[Block] = []
        self.version = table.version
        with self._explained():
            for fragment in table.get_fragments():
                rows = fragment.count_rows()
                size = sum(one.file_size_bytes or 0 for one in fragment.data_files())
                for start in range(0, rows, BLOCK_ROWS):
                    stop = min(rows, start + BLOCK_ROWS)
                    part = size * (stop - start) // rows
                    blocks.append(Block(len(files), fragment.fragment_id, start, stop, part))
                for one in fragment.data_files():
                    path = f"{self.uri.rstrip('/')}/data/{one.path}"
                    files.append(File(path, one.file_size_bytes or 0, f"version {self.version}"))
        return Listing(tuple(files), None if self.filter else tuple(blocks))

    def read(self, reader: Reader, files: Sequence[File], block: Block) -> Batch:
        del reader, files
        with self._explained():
            fragment = self._opened().get_fragment(block.group)
            return fragment.to_table(
                columns=self._names(), offset=block.start, limit=block.stop - block.start
            )

    def stream(self) -> Iterator[Batch]:
        if self.filter is None:
            yield from super().stream()
            return
        self.listing()
        with self._explained():
            found = self._opened().to_batches(columns=self._names(), filter=self.filter)
            for batch in found:
                yield arrow().Table.from_batches([batch])

    def _names(self) -> list[str] | None:
        return None if self.columns is None else list(self.columns)


def write_lance(tables: Iterator[Any], uri: str, schema: Any, mode: str, options: Any) -> None:
    """Write rows to a Lance table, as one version of it.

    Args:
        tables: the rows.
        uri: of the table.
        schema: of pyarrow, to which they are cast; None for that of the first ones.
        mode: "create", "append" or "overwrite".
        options: of Lance.

    Raises:
        UsageError: the mode is another one, there are no rows to know the columns by, or later rows
            have others.
        StorageError: it cannot be written, or is there already.
    """
    lance, pa = _lance("write_lance"), arrow()
    if mode not in ("create", "append", "overwrite"):
        raise UsageError(f"write_lance: mode={mode!r}: expected create, append or overwrite")
    first = next(tables, None)
    if schema is None:
        if first is None:
            raise UsageError("write_lance: no rows to know the columns by: expected schema=")
        schema = first.schema.remove_metadata()

    failed: list[Exception] = []

    def cast() -> Iterator[Any]:
        try:
            for table in itertools.chain([] if first is None else [first], tables):
                yield from _cast(table, schema)
        except Exception as error:  # Of which Lance hands on the text alone.
            failed.append(error)
            raise

    rows = pa.RecordBatchReader.from_batches(schema, cast())
    try:
        lance.write_dataset(rows, uri, mode=mode, **options)
    except OSError as error:
        if failed:
            raise failed[0] from None
        raise StorageError(f"write_lance: cannot write {uri}: {error}") from error


def _cast(table: Any, schema: Any) -> list[Any]:
    try:
        return table.select(schema.names).cast(schema).to_batches()  # type: ignore[no-any-return]
    except (KeyError, ValueError, arrow().ArrowException) as error:
        raise UsageError(f"write_lance: rows do not fit {schema}: {error}") from error


def _lance(what: str) -> Any:
    try:
        import lance
    except ImportError as error:
        raise UsageError(f"{what}: {error}: pip install pylance") from error
    return lance


@dataclass
class Sql(Source):
    """The rows of a query.

    Attributes:
        sql: of the query.
        connect: returns a connection as PEP 249 has them; called where the rows are read.
        params: of the query.
    """

    sql: str = ""
    connect: Callable[[], Any] = lambda: None
    params: Any = None

    def stream(self) -> Iterator[Batch]:
        """Yield all rows, in the order of the database; DataError if a column changes its type."""
        pa, schema = arrow(), None
        connection = self.connect()
        with contextlib.closing(connection), contextlib.closing(connection.cursor()) as cursor:
            cursor.execute(self.sql, *([] if self.params is None else [self.params]))
            names = [column[0] for column in cursor.description]
            while rows := cursor.fetchmany(BLOCK_ROWS):
                columns = [list(column) for column in zip(*rows, strict=True)]
                try:
                    found = pa.table(dict(zip(names, columns, strict=True)), schema=schema)
                except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
                    raise DataError(
                        f"elastic.data: read_sql({self.sql!r}): a column has other values than in "
                        f"the first rows, {dict(zip(names, rows[0], strict=True))}: {error}: CAST "
                        f"it in the query"
                    ) from error
                schema = found.schema
                yield found
