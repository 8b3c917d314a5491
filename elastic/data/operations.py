"""Operations on rows: functions of the user, column selection, sampling of rows.

Rule: an operation with exactly one output row per input row sets `keeps_rows`; it may be applied to
any rows at any time, such as to those of one micro-batch. An operation that changes the number of
rows is applied once, from the first row to the last.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from elastic.data.batches import (
    Batch,
    array_of,
    arrow,
    batched,
    check_columns,
    columns_of,
    joined,
    num_rows,
    of_rows,
    rows_of,
    sliced,
    taken,
    taken_from,
    to_format,
    to_numpy,
    to_table,
    writable,
)
from elastic.data.expressions import Expr
from elastic.data.functions import Function
from elastic.data.skipped import SkippedCounts
from elastic.errors import UsageError

ROWS_AT_ONCE = 1024
"""Default batch size of functions of batches."""
VALUE_CHARS = 200
"""Of a value that is shown."""


@dataclass
class Operation:
    """Base class: one step of processing.

    Attributes:
        skipped: rows left out by `on_error="skip"`.
    """

    skipped: SkippedCounts = field(
        default_factory=SkippedCounts, init=False, compare=False, repr=False
    )

    @property
    def keeps_rows(self) -> bool:
        """Return whether there is one output row per input row, in the same order."""
        return True

    @property
    def numbers_rows(self) -> bool:
        """Return whether a row's result depends on how many rows are before it."""
        return False

    def apply(self, batch: Batch) -> Batch:
        """Apply the operation to some rows.

        UsageError if a user's function returned an invalid value; what it raises has a note about
        the row or batch.
        """
        raise NotImplementedError

    def stream(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Apply the operation to all rows, in order."""
        for batch in batches:
            found = self.apply(batch) if num_rows(batch) else {}
            if columns_of(found):  # Also of no rows: a filter leaves the columns.
                yield found


@dataclass
class MapRows(Operation):
    """`map`, `flat_map` and `filter` by a function of one row."""

    kind: str
    function: Function
    on_error: str = "raise"

    def __repr__(self) -> str:
        return f"{self.kind}({self.function.name})"

    @property
    def keeps_rows(self) -> bool:
        """Return whether there is one output row per input row."""
        return self.kind == "map" and self.on_error == "raise"

    def apply(self, batch: Batch) -> Batch:
        """Apply the function to each row, and return the resulting rows."""
        if self.kind == "filter":
            kept = [n for n, row in enumerate(rows_of(batch)) if self._try(row)]
            return taken(batch, np.asarray(kept, np.int64))
        found: list[Any] = []
        for row in rows_of(batch):
            value = self._try(row)
            if value is not None or self.on_error == "raise":
                found.extend(self._checked(value))
        return of_rows(found)

    def _try(self, row: dict[str, Any]) -> Any:
        self.function.made()  # An error of a class's constructor is that of no row.
        try:
            return self.function(row)
        except Exception as error:
            if self.on_error == "raise":
                add_note(error, f"in {self!r}, of the row {shown(row)}")
                raise
            self.skipped.add("rows")
            return None

    def _checked(self, value: Any) -> Iterable[Mapping[str, Any]]:
        rows = [value] if self.kind == "map" else value
        is_list = isinstance(rows, Iterable) and not isinstance(rows, (Mapping, str, bytes))
        rows = list(rows) if is_list else [None]
        if not all(isinstance(one, Mapping) for one in rows):
            wanted = "a dict" if self.kind == "map" else "a list of dicts"
            raise UsageError(
                f"{self!r} returned a {type(value).__name__}: expected {wanted}, by column"
            )
        return rows


@dataclass
class Blocks(Operation):
    """`repartition(target_num_rows_per_block=)`: the rows of a call of the function behind it."""

    size: int = ROWS_AT_ONCE

    def __repr__(self) -> str:
        return f"repartition(target_num_rows_per_block={self.size})"

    def apply(self, batch: Batch) -> Batch:
        return batch

    def stream(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the rows, so many at a time."""
        return batched(batches, self.size)


@dataclass
class MapBatches(Operation):
    """`map_batches` and `map_groups`: a function of many rows at once."""

    function: Function
    batch_size: int | None = ROWS_AT_ONCE
    batch_format: str = "default"
    kind: str = "map_batches"

    def __repr__(self) -> str:
        return f"{self.kind}({self.function.name})"

    def keeps_number(self, batches: Iterator[Batch]) -> bool:
        """Try the function on the first batch: return whether it returns as many rows."""
        first = next(batched(batches, self.batch_size), None)
        return first is None or num_rows(self._call(first)) == num_rows(first)

    def apply(self, batch: Batch) -> Batch:
        """Apply the function; the number of rows must stay the same."""
        parts = [self._call(part) for part in batched([batch], self.batch_size)]
        count = sum(num_rows(part) for part in parts)
        if count != num_rows(batch):
            raise UsageError(
                f"{self!r} returned {count} rows for {num_rows(batch)}. Rows that are trained "
                f"with are found by their numbers, so a function that changes how many there are "
                f"is called beforehand: write ds.map_batches(...).materialize(), or .write_parquet"
                f"(path) and read_parquet(path) for what is larger than memory; or use flat_map"
            )
        return joined(parts)

    def stream(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Apply the function to batches of its size; the number of rows may change."""
        for batch in batched(batches, self.batch_size):
            found = self._call(batch)
            if num_rows(found):
                yield found

    def _call(self, batch: Batch) -> Batch:
        value = to_format(batch, self.batch_format)
        if isinstance(value, dict):
            value = {name: writable(column) for name, column in value.items()}
        try:
            found = self.function(value)
        except Exception as error:
            add_note(error, f"in {self!r}, of a batch of {num_rows(batch)} rows")
            raise
        if inspect.isgenerator(found):
            return joined([taken_from(one, repr(self)) for one in found])
        return taken_from(found, repr(self))


@dataclass
class Evaluated(Operation):
    """Base class: an operation by expressions, see expressions.py."""

    def apply(self, batch: Batch) -> Batch:
        """Return the rows after the operation; UsageError if an expression cannot be computed."""
        return self._at(to_table(batch), 0)

    def stream(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Apply the operation to all rows, which expressions may number."""
        first = 0
        for batch in batches:
            if count := num_rows(batch):
                yield self._at(to_table(batch), first)
                first += count

    def _at(self, table: Any, first: int) -> Any:
        raise NotImplementedError

    def _values(self, expression: Expr, table: Any, first: int) -> Any:
        """Return a value for each row of a table, whose first row has this number."""
        pa = arrow()
        try:
            found = expression.of(table, first)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
            kinds = ", ".join(f"{one.name}: {one.type}" for one in table.schema)
            why = str(error).splitlines()[0]
            raise UsageError(f"{self!r} is not possible with the columns {kinds}: {why}") from error
        if isinstance(found, pa.Scalar):
            return pa.repeat(found, table.num_rows)
        if len(found) != table.num_rows:
            raise UsageError(
                f"{self!r}: {expression!r} returned {len(found)} values for {table.num_rows} rows"
            )
        return found


@dataclass
class FilterBy(Evaluated):
    """`filter` by an expression."""

    expression: Expr

    def __repr__(self) -> str:
        return f"filter({self.expression!r})"

    @property
    def keeps_rows(self) -> bool:
        return False

    @property
    def numbers_rows(self) -> bool:
        return self.expression.numbers_rows

    def _at(self, table: Any, first: int) -> Any:
        chosen = self._values(self.expression, table, first)
        if not arrow().types.is_boolean(chosen.type):
            raise UsageError(f"{self!r} has values of {chosen.type}: expected true or false")
        return table.filter(chosen)


@dataclass
class WithColumns(Evaluated):
    """`with_columns`: columns by their names; without a name, the fields of structs."""

    expressions: Sequence[tuple[str | None, Expr]]

    def __repr__(self) -> str:
        named = (name or f"*{expression!r}" for name, expression in self.expressions)
        return f"with_columns({', '.join(named)})"

    @property
    def keeps_rows(self) -> bool:
        """Return whether it may be applied to rows whose numbers are unknown."""
        return not self.numbers_rows

    @property
    def numbers_rows(self) -> bool:
        return any(expression.numbers_rows for _, expression in self.expressions)

    def _at(self, table: Any, first: int) -> Any:
        columns = {name: table.column(name) for name in table.column_names}
        for name, expression in self.expressions:
            found = self._values(expression, table, first)
            if name is not None:
                columns[name] = found
                continue
            if not arrow().types.is_struct(found.type):
                raise UsageError(f"{self!r}: unnest of {found.type}: expected structs")
            fields = arrow().chunked_array(found).flatten()
            columns |= dict(zip((one.name for one in found.type), fields, strict=True))
        return arrow().table(columns)


@dataclass
class Columns(Operation):
    """`select_columns`, `drop_columns`, `rename_columns`."""

    kind: str
    names: Any

    def __repr__(self) -> str:
        return f"{self.kind}({self.names})"

    def apply(self, batch: Batch) -> Batch:
        there = columns_of(batch)
        check_columns(self.names, there, self.kind)
        if self.kind == "select_columns":
            wanted = {name: name for name in self.names}
        elif self.kind == "drop_columns":
            wanted = {name: name for name in there if name not in self.names}
        else:
            wanted = {name: self.names.get(name, name) for name in there}
            if len(set(wanted.values())) < len(wanted):
                raise UsageError(
                    f"{self!r}: two of {there} would have one name: expected a name for each"
                )
        if isinstance(batch, dict):
            return {new: batch[old] for old, new in wanted.items()}
        return batch.select(list(wanted)).rename_columns(list(wanted.values()))


@dataclass
class Fill(Operation):
    """Adds columns that rows lack, without a value.

    Attributes:
        kinds: their types, by name.
    """

    kinds: Mapping[str, Any]

    def apply(self, batch: Batch) -> Batch:
        pa = arrow()
        there = columns_of(batch)
        lacking = {name: kind for name, kind in self.kinds.items() if name not in there}
        if not lacking:
            return batch
        with contextlib.suppress(UsageError):  # An array of numbers cannot say that one is missing.
            batch = to_table(batch)
        nothing = {name: pa.nulls(num_rows(batch), kind) for name, kind in lacking.items()}
        if isinstance(batch, dict):
            return {**batch, **to_numpy(pa.table(nothing))}
        for name, column in nothing.items():
            batch = batch.append_column(name, column)
        return batch


@dataclass
class AddColumn(Operation):
    """`add_column`: a function computes a column from a batch."""

    name: str
    function: Function
    batch_format: str = "pandas"

    def __repr__(self) -> str:
        return f"add_column({self.name!r})"

    def apply(self, batch: Batch) -> Batch:
        value = self.function(to_format(batch, self.batch_format))
        if np.ndim(value) == 0:
            value = np.full(num_rows(batch), value)
        column = value if isinstance(value, np.ndarray) else array_of(list(value))
        if len(column) != num_rows(batch):
            raise UsageError(
                f"{self!r}: the function returned {len(column)} values for {num_rows(batch)} rows"
            )
        return {**to_numpy(batch), self.name: column}


@dataclass
class Sample(Operation):
    """`random_sample`: each row with the same probability."""

    fraction: float
    seed: int

    def __repr__(self) -> str:
        return f"random_sample({self.fraction})"

    @property
    def keeps_rows(self) -> bool:
        return False

    @property
    def numbers_rows(self) -> bool:
        """Return True: a random number is drawn for each row in turn."""
        return True

    def stream(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        generator = np.random.default_rng(self.seed)
        for batch in batches:
            chosen = generator.random(num_rows(batch)) < self.fraction
            if chosen.any():
                yield taken(batch, np.flatnonzero(chosen))


@dataclass
class Fetch(Operation):
    """Samples of a torch dataset, by the indices in the column "id", as column "item"."""

    items: Any

    def __repr__(self) -> str:
        return f"torch({type(self.items).__name__})"

    def apply(self, batch: Batch) -> Batch:
        numbers = to_numpy(batch)["id"].tolist()
        found = np.empty(len(numbers), dtype=object)
        for index, number in enumerate(numbers):
            found[index] = self.items[number]
        return {"item": found}


@dataclass
class Decode(Operation):
    """Decodes images from the bytes of files.

    Attributes:
        size: (height, width) to resize to, None for no change.
        mode: of Pillow, such as "RGB"; None for no change.
        drops_path: remove the column "path", which is only read for errors.
    """

    size: tuple[int, int] | None
    mode: str | None
    drops_path: bool

    def __repr__(self) -> str:
        return "decode_images"

    def apply(self, batch: Batch) -> Batch:
        """Return the images as arrays of uint8: height, width, and channels if any."""
        columns = to_numpy(batch)
        paths = columns["path"]
        images = [self.decode(*one) for one in zip(columns["bytes"], paths, strict=True)]
        rest = {name: values for name, values in columns.items() if name not in ("bytes", "path")}
        found = {"image": array_of(images), **rest}
        return found if self.drops_path else {**found, "path": paths}

    def decode(self, content: bytes, path: str) -> Any:
        """Return an image as an array; DataError if it is broken."""
        import io

        from PIL import Image

        from elastic.data.files import DataError

        try:
            with Image.open(io.BytesIO(content)) as opened:
                image: Any = opened
                if self.size is not None:  # First, and so, as Ray does it.
                    image = image.resize(self.size[::-1], Image.Resampling.BILINEAR)
                if self.mode:
                    image = image.convert(self.mode)
                return np.array(image)  # A copy, which functions may write to.
        except Exception as error:  # Of Pillow's decoders, each of which has its own.
            raise DataError(f"elastic.data: {path} cannot be decoded: {error}") from error


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an error about where it happened; needs Python 3.11."""
    if hasattr(error, "add_note"):
        error.add_note(f"elastic.data: {note}")


def shown(row: Mapping[str, Any]) -> str:
    """Return a row as one line of text, in which arrays and long values are cut."""
    parts = []
    for name, value in row.items():
        text = f"array{value.shape}" if isinstance(value, np.ndarray) else repr(value)
        parts.append(
            f"{name!r}: {text if len(text) <= VALUE_CHARS else text[:VALUE_CHARS] + '...'}"
        )
    return "{" + ", ".join(parts) + "}"


def row_slice(batches: Iterator[Batch], start: int, stop: int | None) -> Iterator[Batch]:
    """Yield the rows from `start` to `stop`, and read no further."""
    seen = 0
    if stop is not None and stop <= start:
        return
    for batch in batches:
        count = num_rows(batch)
        low = max(0, start - seen)
        high = count if stop is None else min(count, stop - seen)
        if low < high:
            yield sliced(batch, low, high)
        seen += count
        if stop is not None and seen >= stop:
            return
