"""A lazy dataset, with the methods of ray.data.

Rule: a transformation returns another dataset at once and reads nothing. Methods that show, count,
write or iterate read rows as a stream, whose memory does not depend on the size of the data.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic.data.arguments import OF_PASSES, check_others
from elastic.data.batches import (
    Batch,
    arrow,
    batched,
    check_format,
    check_size,
    columns_of,
    joined,
    names_of,
    num_rows,
    of_rows,
    rows_of,
    sliced,
    taken,
    to_format,
    to_numpy,
    to_pandas,
    to_table,
)
from elastic.data.context import MixStoppingCondition, RandomSeedConfig, reseeds, seed_of
from elastic.data.databases import Lance, write_lance
from elastic.data.engines import Engine, engine_of
from elastic.data.expressions import Expr, Unnested, expression_of
from elastic.data.functions import Function
from elastic.data.gathering import Gather, Groups, InMemory, explained
from elastic.data.iterator import Again, Collate, DataIterator, torch_dataset
from elastic.data.moments import Moments, floats_of
from elastic.data.nodes import (
    Apply,
    Mix,
    Node,
    Read,
    Shuffle,
    Slice,
    Union,
    Zip,
    begin_pass,
    counted,
    in_memory,
    nodes_of,
    skipped_of,
    table_nearby,
)
from elastic.data.operations import (
    ROWS_AT_ONCE,
    AddColumn,
    Blocks,
    Columns,
    FilterBy,
    MapBatches,
    MapRows,
    Operation,
    Sample,
    WithColumns,
    shown,
)
from elastic.data.parquet import Parquet
from elastic.data.sources import FileSource, Memory, check_on_error
from elastic.data.webdataset import coders_of, encoded, write_tar
from elastic.data.writing import (
    PARQUET_OPTIONS,
    Sink,
    by_rows,
    json_of,
    tables_alike,
    write_parquet,
    write_partitions,
    writing_to,
)
from elastic.errors import UsageError

if TYPE_CHECKING:
    from elastic.data.aggregate import AggregateFn

_FRAMEWORKS = "the rows go to PyTorch: iter_torch_batches, to_torch; or iter_batches for arrays"
_FRAMES = "to_pandas() for what fits in memory, write_parquet(path) for what does not"
_BLOCKS = "there is no object store: iter_batches(), to_pandas() or to_arrow()"
_DATABASES = "iter_batches() and the package that writes there; or write_parquet(path)"
NOT_HERE = {
    **dict.fromkeys(("iter_jax_batches", "iter_tf_batches", "to_jax", "to_tf"), _FRAMEWORKS),
    **dict.fromkeys(("to_daft", "to_dask", "to_mars", "to_modin", "to_spark"), _FRAMES),
    **dict.fromkeys(
        (
            "get_internal_block_refs",
            "iter_internal_ref_bundles",
            "to_arrow_refs",
            "to_numpy_refs",
            "to_pandas_refs",
        ),
        _BLOCKS,
    ),
    **dict.fromkeys(
        (
            "write_bigquery",
            "write_clickhouse",
            "write_datasink",
            "write_delta",
            "write_iceberg",
            "write_kafka",
            "write_mongo",
            "write_orc",
            "write_snowflake",
            "write_tfrecords",
            "write_turbopuffer",
        ),
        _DATABASES,
    ),
    "deserialize_lineage": "pickle.loads",
    "explain": "print(ds), which shows all steps",
    "serialize_lineage": "cloudpickle.dumps(ds)",
    "streaming_train_test_split": "train_test_split",
    "summary": "aggregate(Count(), Mean('age'), ...) of elastic.data.aggregate",
}
"""Methods that Ray has and this has not, on purpose -> what to write instead."""


class Dataset:
    """A lazy table of rows and columns.

    Example:
        >>> from elastic import data
        >>> data.range(4).map(lambda row: {"square": row["id"] ** 2}).take()
        [{'square': 0}, {'square': 1}, {'square': 4}, {'square': 9}]
    """

    def __init__(self, node: Node) -> None:
        """Wrap the node that computes the rows."""
        self._node = node
        self._count: int | None = None
        self._columns: Any = None

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError; for methods of Ray's it says what to write instead."""
        if name in NOT_HERE:
            raise AttributeError(
                f"Dataset.{name}: Ray has it, and there is none here: {NOT_HERE[name]}"
            )
        raise AttributeError(f"Dataset has no attribute {name!r}")

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without cached count and schema."""
        return {"_node": self._node, "_count": None, "_columns": None}

    @property
    def node(self) -> Node:
        """Return the node that computes the rows."""
        return self._node

    def over(self, node: Node) -> Dataset:
        """Return a dataset of the rows of another node."""
        return Dataset(node)

    def _apply(self, operation: Operation) -> Dataset:
        function = getattr(operation, "function", None)
        if isinstance(function, Function):
            function.place = sum(1 for one in nodes_of(self._node) if isinstance(one, Apply))
        return Dataset(Apply((self._node,), operation))

    def _stream(self) -> Iterator[Batch]:
        """Yield all rows in order."""
        begin_pass(self._node)
        return self._node.stream()

    # --------------------------------------------------------------------- rows to rows

    def map(
        self,
        fn: Callable[..., Mapping[str, Any]],
        *,
        fn_args: Sequence[Any] = (),
        fn_kwargs: Mapping[str, Any] | None = None,
        fn_constructor_args: Sequence[Any] = (),
        fn_constructor_kwargs: Mapping[str, Any] | None = None,
        on_error: str = "raise",
        **others: Any,
    ) -> Dataset:
        """Apply a function to each row.

        Args:
            fn: takes a row as a dict, returns one; or a class of such callables, with one
                instance per process.
            fn_args: for each call, after the row.
            fn_kwargs: for each call.
            fn_constructor_args: for the class.
            fn_constructor_kwargs: for the class.
            on_error: "skip" to leave out rows for which it raises; `stats()` counts them.
            others: Ray's placement arguments, without effect here.
        """
        check_others("map", others)
        check_on_error(on_error, "map")
        function = Function(fn, fn_args, fn_kwargs, fn_constructor_args, fn_constructor_kwargs)
        return self._apply(MapRows("map", function, on_error))

    def flat_map(
        self,
        fn: Callable[..., Any],
        *,
        fn_args: Sequence[Any] = (),
        fn_kwargs: Mapping[str, Any] | None = None,
        fn_constructor_args: Sequence[Any] = (),
        fn_constructor_kwargs: Mapping[str, Any] | None = None,
        on_error: str = "raise",
        **others: Any,
    ) -> Dataset:
        """Apply a function that returns a list of rows for each row; otherwise as `map`."""
        check_others("flat_map", others)
        check_on_error(on_error, "flat_map")
        function = Function(fn, fn_args, fn_kwargs, fn_constructor_args, fn_constructor_kwargs)
        return self._apply(MapRows("flat_map", function, on_error))

    def map_batches(
        self,
        fn: Callable[..., Any],
        *,
        batch_size: int | str | None = "default",
        batch_format: str | None = "default",
        fn_args: Sequence[Any] = (),
        fn_kwargs: Mapping[str, Any] | None = None,
        fn_constructor_args: Sequence[Any] = (),
        fn_constructor_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> Dataset:
        """Apply a function to batches of rows.

        Args:
            fn: takes a batch, returns one (or yields several); or a class, as in `map`. In training
                it is called with the rows of micro-batches, and must return as many rows.
            batch_size: maximum rows of a call; None for batches as they are read.
            batch_format: "numpy" (the default; a dict of arrays), "pandas" or "pyarrow".
            fn_args: for each call, after the batch.
            fn_kwargs: for each call.
            fn_constructor_args: for the class.
            fn_constructor_kwargs: for the class.
            others: Ray's placement arguments, without effect here.
        """
        check_others("map_batches", others)
        given = ROWS_AT_ONCE if batch_size in ("default", "auto") else batch_size
        size = check_size(given, "map_batches")
        function = Function(fn, fn_args, fn_kwargs, fn_constructor_args, fn_constructor_kwargs)
        return self._apply(MapBatches(function, size, check_format(batch_format, "map_batches")))

    def filter(
        self,
        fn: Callable[..., bool] | Expr | str | None = None,
        expr: Any = None,
        *,
        fn_args: Sequence[Any] = (),
        fn_kwargs: Mapping[str, Any] | None = None,
        fn_constructor_args: Sequence[Any] = (),
        fn_constructor_kwargs: Mapping[str, Any] | None = None,
        on_error: str = "raise",
        **others: Any,
    ) -> Dataset:
        """Keep the rows for which a function or an expression is true.

        Args:
            fn: takes a row as a dict; or a class, as in `map`; or an expression.
            expr: such as `col("age") > 30`, of `elastic.data.expressions` or pyarrow.compute, or
                its text, "age > 30".
            fn_args: as in `map`.
            fn_kwargs: as in `map`.
            fn_constructor_args: as in `map`.
            fn_constructor_kwargs: as in `map`.
            on_error: "skip" to leave out rows for which `fn` raises.
            others: Ray's placement arguments, without effect here.
        """
        check_others("filter", others)
        check_on_error(on_error, "filter")
        if (fn is None) == (expr is None):
            raise UsageError("filter: expected either a function or expr=...")
        given = fn if expr is None else expr
        if callable(given):
            function = Function(
                given, fn_args, fn_kwargs, fn_constructor_args, fn_constructor_kwargs
            )
            return self._apply(MapRows("filter", function, on_error))
        return self._apply(FilterBy(expression_of(given, "filter: expr")))

    def add_column(
        self, col: str, fn: Callable[[Any], Any], *, batch_format: str = "pandas", **others: Any
    ) -> Dataset:
        """Add a column, which a function computes from batches."""
        check_others("add_column", others)
        return self._apply(AddColumn(col, Function(fn), check_format(batch_format, "add_column")))

    def with_column(self, column_name: str, expr: Any, **others: Any) -> Dataset:
        """Add a column, or replace one, by an expression: `with_column("x2", col("x") * 2)`.

        Args:
            column_name: of the column.
            expr: of `elastic.data.expressions`, or pyarrow.compute.
            others: Ray's placement arguments, without effect here.
        """
        return self.with_columns({column_name: expr}, **others)

    def with_columns(
        self,
        exprs: Mapping[str, Any] | Expr | Unnested,
        *more: Mapping[str, Any] | Expr | Unnested,
        **others: Any,
    ) -> Dataset:
        """Add or replace columns, as `with_column`; each sees the columns of before.

        Args:
            exprs: expressions by the names of their columns, one with an alias, or
                `unnest(expression)`.
            more: such, too.
            others: Ray's placement arguments, without effect here.
        """
        check_others("with_columns", others)
        pairs: list[tuple[str | None, Expr]] = []
        for one in (exprs, *more):
            if isinstance(one, Unnested):
                pairs.append((None, one.expression))
            elif isinstance(one, Expr):
                if one.name is None:
                    raise UsageError(f"with_columns: {one!r}: expected a name: .alias('total')")
                pairs.append((one.name, one))
            else:
                pairs += [
                    (name, expression_of(expr, f"with_columns: {name}"))
                    for name, expr in one.items()
                ]
        return self._apply(WithColumns(pairs))

    def select_columns(self, cols: str | Sequence[str], **others: Any) -> Dataset:
        """Keep these columns only; of parquet files and Lance tables no others are read."""
        check_others("select_columns", others)
        names, node = names_of(cols), self._node
        source = node.source if isinstance(node, Read) else None
        if isinstance(source, (Parquet, Lance)) and source.columns is None:
            return Dataset(Read((), replace(source, columns=tuple(names))))
        return self._apply(Columns("select_columns", names))

    def drop_columns(self, cols: str | Sequence[str], **others: Any) -> Dataset:
        """Remove these columns."""
        check_others("drop_columns", others)
        return self._apply(Columns("drop_columns", names_of(cols)))

    def rename_columns(self, names: Mapping[str, str] | Sequence[str], **others: Any) -> Dataset:
        """Rename columns, by a dict, or by a list of new names for all columns."""
        check_others("rename_columns", others)
        if not isinstance(names, Mapping):
            names = dict(zip(self.columns(), names, strict=True))
        return self._apply(Columns("rename_columns", dict(names)))

    # --------------------------------------------------------------------- which rows

    def limit(self, limit: int) -> Dataset:
        """Keep the first `limit` rows."""
        return Dataset(Slice((self._node,), 0, max(0, limit)))

    def random_sample(
        self, fraction: float, *, seed: int | RandomSeedConfig | None = None
    ) -> Dataset:
        """Keep each row with a probability; the same rows for the same seed (None is 0)."""
        if not 0 <= fraction <= 1:
            raise UsageError(f"random_sample: fraction={fraction!r}: expected 0 to 1")
        return self._apply(Sample(fraction, seed_of(seed)))

    def random_shuffle(
        self, *, seed: int | RandomSeedConfig | None = None, **others: Any
    ) -> Dataset:
        """Shuffle the rows; in training each epoch has another order.

        The order depends on the seed alone (None is 0); with RandomSeedConfig(seed=1,
        reseed_after_execution=False) it is the same in each epoch. Row groups are permuted, and
        rows are shuffled within windows of them; a table of up to 32 MB is shuffled as a whole.
        """
        check_others("random_shuffle", others)
        return Dataset(Shuffle((self._node,), seed_of(seed), reseeds(seed)))

    def randomize_block_order(self, *, seed: int | RandomSeedConfig | None = None) -> Dataset:
        """Do the same as `random_shuffle`."""
        return self.random_shuffle(seed=seed)

    def repartition(
        self,
        num_blocks: int | None = None,
        target_num_rows_per_block: int | None = None,
        **others: Any,
    ) -> Dataset:
        """Set how many rows a function right behind it gets at once, if that changes their number.

        Else it does nothing: the distribution of rows to ranks does not depend on blocks.

        Args:
            num_blocks: without effect.
            target_num_rows_per_block: rows of a call of the `map_batches` behind it, whose function
                is tried once. If it returns another number of rows, it is called before training.
            others: Ray's, without effect here.
        """
        del num_blocks, others
        size = check_size(target_num_rows_per_block, "repartition")
        return self if size is None else self._apply(Blocks(size=size))

    def union(self, *other: Dataset) -> Dataset:
        """Append the rows of other datasets."""
        return Dataset(Union((self._node, *(one._node for one in other))))

    def mix(
        self,
        *other: Dataset,
        weights: Sequence[float] | None = None,
        stopping_condition: Any = "stop_on_longest_drop",
    ) -> Dataset:
        """Interleave the rows with those of other datasets, always in the same order.

        Args:
            other: datasets with the same columns.
            weights: rows of this one and of each other, in proportion; equal by default.
            stopping_condition: "stop_on_longest_drop": all rows, and a dataset that has ended drops
                out; or "stop_on_shortest": until the first has ended.
        """
        rates = tuple(weights or [1.0] * (1 + len(other)))
        if len(rates) != 1 + len(other) or not all(rate > 0 for rate in rates):
            raise UsageError(
                f"mix: weights={weights!r} of {1 + len(other)} datasets: expected a number above 0 "
                f"for each"
            )
        condition = MixStoppingCondition(stopping_condition)
        return Dataset(
            Mix(
                (self._node, *(one._node for one in other)),
                rates,
                condition is MixStoppingCondition.STOP_ON_SHORTEST,
            )
        )

    def zip(self, *other: Dataset) -> Dataset:
        """Add the columns of other datasets, row by row."""
        node = self._node
        for one in other:
            node = Zip((node, one._node))
        return Dataset(node)

    def split(self, n: int, *, equal: bool = False, locality_hints: Any = None) -> list[Dataset]:
        """Split the rows into n consecutive datasets, whose sizes differ by at most one row.

        With `equal` all have the same size, and surplus rows are left out.
        """
        del locality_hints
        if not isinstance(n, int) or n < 1:
            raise UsageError(f"split: n={n!r}: expected an int from 1 on")
        rows = self._rows()
        kept = rows - rows % n if equal else rows
        ends: list[int | None] = [kept * one // n for one in range(n + 1)]
        if not equal:  # A function of batches may return more rows.
            ends[-1] = None
        return [
            Dataset(Slice((self._node,), start or 0, stop))
            for start, stop in itertools.pairwise(ends)
        ]

    def split_at_indices(self, indices: Sequence[int]) -> list[Dataset]:
        """Split the rows at these row numbers.

        Raises:
            UsageError: they are no row numbers, or not in order.
        """
        if not all(low <= high for low, high in itertools.pairwise([0, *indices])):
            raise UsageError(
                f"split_at_indices: indices={list(indices)}: expected row numbers in order"
            )
        ends: list[int | None] = [0, *indices, None]
        return [
            Dataset(Slice((self._node,), start or 0, stop))
            for start, stop in itertools.pairwise(ends)
        ]

    def split_proportionately(self, proportions: Sequence[float]) -> list[Dataset]:
        """Split the rows into datasets of these fractions, and one with the remainder.

        Raises:
            UsageError: one is not above 0, or nothing remains.
        """
        if not all(share > 0 for share in proportions) or sum(proportions) >= 1:
            raise UsageError(
                f"split_proportionately: proportions={list(proportions)}: expected numbers above "
                f"0 whose sum is below 1; the remaining rows are the last dataset"
            )
        rows, ends, total = self._rows(), [], 0.0
        for share in proportions:
            total += share
            ends.append(int(rows * total))
        return self.split_at_indices(ends)

    def train_test_split(
        self,
        test_size: int | float,
        *,
        shuffle: bool = False,
        seed: int | None = None,
        stratify: str | None = None,
    ) -> tuple[Dataset, Dataset]:
        """Split the rows into a first part to train and a last part to test with.

        Args:
            test_size: a number of rows, or a fraction below 1.
            shuffle: shuffle the rows first, which writes them out.
            seed: of the shuffle.
            stratify: a column whose values keep their proportions in both parts; needs all rows in
                memory, and sorts them by it.
        """
        if stratify is not None:
            if shuffle:
                raise UsageError("train_test_split: expected either shuffle=True or stratify=...")
            return self._stratified(stratify, test_size)
        whole = self.random_shuffle(seed=seed) if shuffle else self
        rows = self._rows()
        # As Ray rounds: down the rows to train with.
        tested = rows - int(rows * (1 - test_size)) if isinstance(test_size, float) else test_size
        if not 0 < tested < rows:
            raise UsageError(
                f"train_test_split: test_size={test_size!r} of {rows} rows: expected between 0 and "
                f"1, or a number of rows below all of them"
            )
        train, test = whole.split_at_indices([rows - tested])
        return train, test

    def _stratified(self, column: str, test_size: int | float) -> tuple[Dataset, Dataset]:
        fraction = test_size if isinstance(test_size, float) else test_size / max(1, self._rows())
        if not 0 < fraction < 1:
            raise UsageError(
                f"train_test_split: test_size={test_size!r}: expected between 0 and 1, or a number "
                f"of rows below all of them"
            )
        groups = self.groupby(column)
        train, test = (
            groups.map_groups(_part_of, batch_format="pyarrow", fn_args=(1 - fraction, is_first))
            for is_first in (True, False)
        )
        return train, test

    def streaming_split(
        self, n: int, *, equal: bool = False, locality_hints: Any = None
    ) -> list[DataIterator]:
        """Return n iterators over disjoint parts of the rows, which together cover all.

        Their sizes differ by at most one row. With `equal` all yield as many batches, while
        gradients are enabled: one that has no row for its last batch repeats another's.
        """
        del locality_hints
        table = table_nearby(self._node)
        return [
            DataIterator(lambda: table, partial(_fixed, one, n), Dataset, pads=equal)
            for one in range(n)
        ]

    def set_name(self, name: str | None) -> None:
        """Of Ray, for its progress display; without effect."""
        del name

    def iterator(self) -> DataIterator:
        """Return an iterator over all rows whose position can be saved."""
        return self.streaming_split(1)[0]

    # --------------------------------------------------------------------- inspection

    def take(self, limit: int = 20) -> list[dict[str, Any]]:
        """Return the first `limit` rows."""
        return [row for batch in self.limit(limit)._stream() for row in rows_of(batch)]

    def take_all(self, limit: int | None = None) -> list[dict[str, Any]]:
        """Return all rows; UsageError if there are more than `limit`."""
        rows = self.take(sys.maxsize if limit is None else limit + 1)
        if limit is not None and len(rows) > limit:
            raise UsageError(f"take_all: there are more than limit={limit} rows")
        return rows

    def take_batch(self, batch_size: int = 20, *, batch_format: str | None = "default") -> Any:
        """Return the first rows as one batch."""
        name = check_format(batch_format, "take_batch")
        found = list(self.limit(batch_size)._stream())
        return to_format(joined(found) if found else of_rows([]), name)

    def show(self, limit: int = 20) -> None:
        """Print the first rows."""
        for row in self.take(limit):
            print(shown(row))

    def count(self) -> int:
        """Return the number of rows; of parquet files from the footers alone.

        Functions of `map_batches` are called, because they may return another number of rows.
        """
        if self._count is None:
            self._count = counted(self._node, by_functions=True)
        return self._count

    def _rows(self) -> int:
        """Return the number of rows if functions of batches keep it, without calling them."""
        return counted(self._node, by_functions=False) if self._count is None else self._count

    def schema(self, fetch_if_missing: bool = True) -> Any:
        """Return the pyarrow schema of the first rows; None if there are none.

        With `fetch_if_missing=False` None, too, if no rows were read for it before.
        """
        if self._columns is None and fetch_if_missing:
            first = next((b for b in self._stream() if num_rows(b)), None)
            if first is None:
                return None
            shown_of = to_table(sliced(first, 0, min(num_rows(first), 20)))
            self._columns = shown_of.schema.remove_metadata()
        return self._columns

    def columns(self) -> list[str]:
        """Return the names of the columns."""
        schema = self.schema()
        return list(schema.names) if schema is not None else []

    def input_files(self) -> list[str]:
        """Return the paths of all files."""
        return [
            file.path
            for node in nodes_of(self._node)
            if isinstance(node, Read)
            for file in node.source.listing().files
        ]

    def size_bytes(self) -> int:
        """Return the size of the source rows in memory, where known; 0 otherwise."""
        blocks = [
            block
            for node in nodes_of(self._node)
            if isinstance(node, Read)
            for block in node.source.listing().blocks or ()
        ]
        return sum(block.size for block in blocks)

    def num_blocks(self) -> int:
        """Return the number of blocks in which the rows are read."""
        return len(table_nearby(self._node).blocks)

    def stats(self) -> str:
        """Return a text about the files, rows, and skipped rows."""
        lines = [repr(self)]
        for node in nodes_of(self._node):
            if isinstance(node, Read):
                listing = node.source.listing()
                size = sum(file.size for file in listing.files)
                blocks = "" if listing.blocks is None else f", {len(listing.blocks)} blocks"
                lines.append(
                    f"{node.source.name}: {len(listing.files)} files, {size:,} bytes{blocks}"
                )
        for name, skipped in skipped_of(self._node):
            lines += [f"{name}: {count} {what} left out" for what, count in skipped.most.items()]
        return "\n".join(lines)

    def sum(self, on: str | Sequence[str] | None = None, ignore_nulls: bool = True) -> Any:
        """Return the sum of a column.

        Args:
            on: a column, several, or None for all; of more than one the result is a dict by
                "sum(column)".
            ignore_nulls: False: the result is None where a value is missing.
        """
        return self._reduced(on, "sum", ignore_nulls)

    def min(self, on: str | Sequence[str] | None = None, ignore_nulls: bool = True) -> Any:
        """Return the smallest value of a column, or of several; see `sum`."""
        return self._reduced(on, "min", ignore_nulls)

    def max(self, on: str | Sequence[str] | None = None, ignore_nulls: bool = True) -> Any:
        """Return the largest value of a column, or of several; see `sum`."""
        return self._reduced(on, "max", ignore_nulls)

    def mean(self, on: str | Sequence[str] | None = None, ignore_nulls: bool = True) -> Any:
        """Return the mean of the numbers of a column, or of several; NaN if there are none."""
        return self._averaged(on, "mean", ignore_nulls, lambda one: one.average())

    def std(
        self,
        on: str | Sequence[str] | None = None,
        ddof: int = 1,
        ignore_nulls: bool = True,
    ) -> Any:
        """Return the standard deviation of a column, or of several; NaN of too few numbers."""
        return self._averaged(on, "std", ignore_nulls, lambda one: one.std(ddof))

    def _averaged(
        self, on: Any, how: str, ignore_nulls: bool, value: Callable[[Moments], float]
    ) -> Any:
        names = self.columns() if on is None else names_of(on)
        found = {name: Moments() for name in names}
        for batch in self.select_columns(names)._stream():
            for name, values in to_numpy(batch).items():
                found[name].add(floats_of(values))
        return _one_or_all(
            {
                f"{how}({name})": value(one) if ignore_nulls or not one.missing else None
                for name, one in found.items()
            },
        )

    def _reduced(self, on: Any, how: str, ignore_nulls: bool) -> Any:
        names = self.columns() if on is None else names_of(on)
        reduce = partial(
            getattr(__import__("pyarrow.compute").compute, how), skip_nulls=ignore_nulls
        )
        parts: dict[str, list[Any]] = {name: [] for name in names}
        for batch in self.select_columns(names)._stream():
            table = to_table(batch)
            for name in names:
                with explained(how, table, [name]):
                    parts[name].append(reduce(table.column(name)))
        return _one_or_all(
            {
                f"{how}({name})": reduce(arrow().array([v.as_py() for v in values])).as_py()
                if values
                else None
                for name, values in parts.items()
            },
        )

    def __repr__(self) -> str:
        steps = " → ".join(_reported(self._node))
        known = [f"{self._count:,} rows"] if self._count is not None else []
        if self._columns is not None:
            known.append(", ".join(f"{one.name}: {one.type}" for one in self._columns))
        return f"Dataset({steps})" + "".join(f"\n  {line}" for line in known)

    # --------------------------------------------------------------------- output

    def materialize(self) -> Dataset:
        """Compute the rows now, and keep them in memory."""
        part = in_memory(self._node)
        return Dataset(Read((), part.source))

    def iter_rows(self, **others: Any) -> Iterable[dict[str, Any]]:
        """Return an iterable over each row, as a dict; each pass over it reads all rows."""
        check_others("iter_rows", others, *OF_PASSES)
        return Again(lambda: (row for batch in self._stream() for row in rows_of(batch)))

    def iter_batches(
        self,
        *,
        batch_size: int | None = 256,
        batch_format: str | None = "default",
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        **others: Any,
    ) -> Iterable[Any]:
        """Return an iterable over batches of rows; each pass over it reads all rows.

        Args:
            batch_size: rows of each; None for batches as they are read.
            batch_format: "numpy" (the default), "pandas" or "pyarrow".
            drop_last: leave out a smaller last batch.
            local_shuffle_buffer_size: shuffle within buffers of this many rows.
            local_shuffle_seed: of the shuffle; None is 0.
            others: Ray's, without effect here.
        """
        check_others("iter_batches", others, *OF_PASSES)
        name, size = (
            check_format(batch_format, "iter_batches"),
            check_size(batch_size, "iter_batches"),
        )

        def batches() -> Iterator[Any]:
            found = self._stream()
            if local_shuffle_buffer_size:
                found = _mixed(found, local_shuffle_buffer_size, local_shuffle_seed or 0)
            for batch in batched(found, size):
                if not (drop_last and size and num_rows(batch) < size):
                    yield to_format(batch, name)

        return Again(batches)

    def iter_torch_batches(
        self,
        *,
        batch_size: int | None = 256,
        dtypes: Any = None,
        device: Any = None,
        collate_fn: Callable[[Any], Any] | None = None,
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        **others: Any,
    ) -> Iterable[Any]:
        """Return an iterable over dicts of tensors, or the results of `collate_fn`.

        Args:
            batch_size: see `iter_batches`.
            dtypes: a torch.dtype, or one for each column.
            device: of the tensors; the CPU by default.
            collate_fn: takes a dict of arrays.
            drop_last: see `iter_batches`.
            local_shuffle_buffer_size: see `iter_batches`.
            local_shuffle_seed: see `iter_batches`.
            others: Ray's, without effect here.
        """
        check_others("iter_torch_batches", others, *OF_PASSES)
        make = Collate(collate_fn, dtypes, None if device == "auto" else device)
        batches = self.iter_batches(
            batch_size=batch_size,
            batch_format="pyarrow" if make.needs_table else "numpy",
            drop_last=drop_last,
            local_shuffle_buffer_size=local_shuffle_buffer_size,
            local_shuffle_seed=local_shuffle_seed,
        )
        return Again(lambda: map(make, batches))

    def to_torch(self, **options: Any) -> Any:
        """Return a torch IterableDataset of batches, with the arguments of `iter_torch_batches`."""
        return torch_dataset(lambda: iter(self.iter_torch_batches(**options)))

    def to_pandas(self, limit: int | None = None) -> Any:
        """Return all rows as a DataFrame; UsageError if there are more than `limit`."""
        rows = self if limit is None else self.limit(limit + 1)
        found = list(rows._stream())
        frame = to_pandas(joined(found) if found else of_rows([]))
        if limit is not None and len(frame) > limit:
            raise UsageError(f"to_pandas: there are more than limit={limit} rows")
        return frame

    def to_arrow(self) -> Any:
        """Return all rows as a pyarrow table."""
        found = list(self._stream())
        return to_table(joined([to_table(one) for one in found]) if found else of_rows([]))

    def write_parquet(
        self,
        path: str | os.PathLike[str],
        *,
        partition_cols: Sequence[str] | None = None,
        **others: Any,
    ) -> None:
        """Write all rows to parquet files in a folder, in order.

        Args:
            path: of the folder.
            partition_cols: columns that become folders like "year=2024" instead.
            others: mode, of SaveMode: by default files are added to those that are there;
                filesystem, of fsspec or pyarrow, that the path is in; max_rows_per_file;
                filename_provider, of `elastic.data.datasource`, which names the files, and replaces
                those that have such a name; compression and others of pyarrow.parquet, also in a
                dict that arrow_parquet_args_fn() returns; Ray's, without effect here.
        """
        options = others.pop("arrow_parquet_args_fn", dict)()
        options |= {name: others.pop(name) for name in PARQUET_OPTIONS if name in others}
        with writing_to("write_parquet", path, others) as target:
            if target is None:
                return
            batches = _watched(tables_alike(self._stream()), "write_parquet")
            if partition_cols:
                write_partitions(batches, target, names_of(partition_cols), options)
                return
            name_of = partial(target.name_of_rows, ending="parquet")
            for some in by_rows(batches, target.rows_per_file):
                write_parquet(some, target.files, name_of, options)

    def write_csv(self, path: str | os.PathLike[str], **others: Any) -> None:
        """Write all rows to a CSV file in a folder; others as in `write_parquet`.

        It is one file, unless `max_rows_per_file` is given.
        """

        def write(output: Any, batches: Iterator[Batch]) -> None:
            import pyarrow.csv as csv

            target, names = arrow().PythonFile(Sink(output.write), mode="w"), None
            for table in batches:
                # Types may differ: a column has no value at first, or none that is missing.
                options = csv.WriteOptions(include_header=names is None)
                names = names or table.column_names
                csv.write_csv(_with_columns(table, names, "write_csv"), target, options)

        self._write_files("write_csv", path, others, tables_alike(self._stream()), write)

    def write_json(self, path: str | os.PathLike[str], **others: Any) -> None:
        """Write all rows to a file in a folder, one JSON object a line; see `write_csv`.

        Times are texts, bytes are too if they are UTF-8, and what is no number is missing: null.

        Raises:
            UsageError: a column has other bytes.
        """

        def write(output: Any, batches: Iterator[Batch]) -> None:
            for table in batches:
                for row in rows_of(table):
                    output.write(json_of(row).encode() + b"\n")

        self._write_files("write_json", path, others, tables_alike(self._stream()), write)

    def write_numpy(
        self, path: str | os.PathLike[str], *, column: str | None = None, **others: Any
    ) -> None:
        """Write a column to an .npy file in a folder; without `column` it has to be the only one.

        Raises:
            UsageError: there is no such column, several and no choice, or rows of several shapes.
        """
        names = self.columns() if column is None else [column]
        if len(names) != 1:
            raise UsageError(f"write_numpy: column={column!r}: expected one of {names}")

        def write(output: Any, batches: Iterator[Batch]) -> None:
            rows = [one[names[0]] for one in map(to_numpy, batches)]
            if any(one.dtype == object for one in rows):
                raise UsageError(f"write_numpy: column {names[0]!r} is not of numbers of one shape")
            np.lib.format.write_array(output, np.concatenate(rows))

        batches = self.select_columns(names)._stream()
        self._write_files("write_numpy", path, others, batches, write, "npy")

    def write_images(
        self,
        path: str | os.PathLike[str],
        column: str,
        file_format: str = "png",
        **others: Any,
    ) -> None:
        """Write the images of a column to files in a folder, named by their numbers.

        Args:
            path: of the folder.
            column: of arrays: height, width, and channels if any.
            file_format: of Pillow, such as "png" or "jpeg".
            others: as in `write_parquet`; filename_provider sees all columns.
        """
        from PIL import Image

        with writing_to("write_images", path, others) as target:
            if target is None:
                return
            ds = self.select_columns([column]) if target.provider is None else self
            for row in ds.iter_rows():
                held = io.BytesIO()
                Image.fromarray(row[column]).save(held, format=file_format)
                with target.files.writing(target.name_of_row(row, file_format)) as output:
                    output.write(held.getvalue())

    def write_webdataset(
        self, path: str | os.PathLike[str], *, encoder: Any = True, **others: Any
    ) -> None:
        """Write all rows as samples to a tar file in a folder, named by "__key__" or their numbers.

        Args:
            path: of the folder.
            encoder: True: values become bytes by the names of columns, as `read_webdataset` decodes
                them; a function of a sample, or several; None if they are bytes.
            others: Ray's, without effect here.
        """
        encoders = coders_of(encoder, encoded)

        def write(output: Any, batches: Iterator[Batch]) -> None:
            rows = itertools.chain.from_iterable(map(rows_of, batches))
            write_tar(Sink(output.write), rows, encoders)

        self._write_files("write_webdataset", path, others, self._stream(), write, "tar")

    def write_lance(
        self,
        path: str | os.PathLike[str],
        *,
        schema: Any = None,
        mode: str = "create",
        max_rows_per_file: int | None = None,
        data_storage_version: str | None = None,
        storage_options: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        """Write all rows to a Lance table, in order, as one version of it; needs pylance.

        Args:
            path: of the table.
            schema: of pyarrow: the columns to write, and their types.
            mode: "create" a table where there is none, "append" to one, or "overwrite" it.
            max_rows_per_file: rows of a fragment at most.
            data_storage_version: of Lance's format.
            storage_options: of Lance.
            others: Ray's, without effect here.
        """
        check_others("write_lance", others, "min_rows_per_file")
        given = {
            "max_rows_per_file": max_rows_per_file,
            "data_storage_version": data_storage_version,
            "storage_options": storage_options,
        }
        options = {name: value for name, value in given.items() if value is not None}
        tables = _watched(tables_alike(self._stream()), "write_lance")
        write_lance(tables, os.fspath(path), schema, mode, options)

    def write_sql(self, sql: str, connection_factory: Callable[[], Any], **others: Any) -> None:
        """Execute a statement for each row, in order, as one transaction.

            ds.write_sql("INSERT INTO film VALUES (?, ?)", lambda: sqlite3.connect("films.db"))

        Args:
            sql: the statement, with a place for each column, in their order.
            connection_factory: returns a connection as PEP 249 has them.
            others: Ray's, without effect here.
        """
        check_others("write_sql", others)
        with contextlib.closing(connection_factory()) as connection:
            with contextlib.closing(connection.cursor()) as cursor:
                names = None
                for batch in batched(self._stream(), ROWS_AT_ONCE):
                    names = names or columns_of(batch)
                    rows = rows_of(_with_columns(batch, names, "write_sql"))
                    cursor.executemany(sql, [tuple(row.values()) for row in rows])
            connection.commit()

    def _write_files(
        self,
        what: str,
        path: str | os.PathLike[str],
        others: dict[str, Any],
        batches: Iterator[Batch],
        write: Callable[[Any, Iterator[Batch]], None],
        ending: str = "",
    ) -> None:
        """Write batches to files in a folder, each of them by `write`.

        Their names end as the method's, unless `ending` says otherwise.
        """
        with writing_to(what, path, others) as target:
            if target is None:
                return
            for some in by_rows(_watched(batches, what), target.rows_per_file):
                first = next(some, None)
                name = target.name_of_rows(first, ending or what.removeprefix("write_"))
                with target.files.writing(name) as output:
                    write(output, itertools.chain([] if first is None else [first], some))

    # --------------------------------------------------------------------- engines

    def using(self, engine: str, **options: Any) -> Engine[Dataset] | InMemory[Dataset]:
        """Return this dataset for an engine that sorts, groups and joins.

            ds.using("dask").sort("age")

        Args:
            engine: "dask", or "arrow", which `sort`, `groupby` and `join` themselves use.
            options: of "dask" `address=` of a cluster, by default this machine's cores, and `path=`
                for the result; of "arrow" `memory=`, bytes that the rows may have.

        Raises:
            UsageError: there is no such engine, or its package is missing.
        """
        return engine_of(engine, self, options)

    def sort(
        self, key: str | Sequence[str], descending: bool | Sequence[bool] = False, **others: Any
    ) -> Dataset:
        """Return the rows sorted by columns, in memory; missing values come last.

        Args:
            key: a column, or several.
            descending: the largest first; for all columns, or for each.
            others: Ray's `boundaries` of blocks, without effect here.
        """
        check_others("sort", others, "boundaries")
        return InMemory(self).sort(key, descending)

    def groupby(
        self, key: str | Sequence[str] | None, num_partitions: int | None = None
    ) -> Groups[Dataset]:
        """Return groups of rows with equal values in columns, which are computed in memory.

        ds.groupby("city").mean("age")
        ds.groupby(["city", "year"]).map_groups(largest, batch_format="pandas")
        """
        del num_partitions
        return InMemory(self).groupby(key)

    def aggregate(self, *aggs: AggregateFn) -> dict[str, Any]:
        """Return aggregates of all rows, which are read into memory, by name.

        ds.aggregate(Mean("age"), Quantile("age", q=0.9))
        """
        return InMemory(self).aggregate(*aggs)

    def join(
        self,
        ds: Dataset,
        join_type: str = "inner",
        num_partitions: int | None = None,
        on: str | Sequence[str] = ("id",),
        right_on: str | Sequence[str] | None = None,
        left_suffix: str | None = None,
        right_suffix: str | None = None,
        **others: Any,
    ) -> Dataset:
        """Return the columns of both datasets for rows with equal keys, joined in memory.

        Args:
            ds: the right side.
            join_type: "inner", "left_outer", "right_outer", "full_outer"; or "left_semi" and
                "left_anti", rows of the left side with or without a row on the right, and
                "right_semi" and "right_anti".
            num_partitions: Ray's, without effect here.
            on: key columns of both.
            right_on: those of the right side, where they have other names.
            left_suffix: for columns of the left side that both have.
            right_suffix: for those of the right side, by default "_1".
            others: Ray's, without effect here.
        """
        check_others(
            "join", others, "partition_size_hint", "aggregator_ray_remote_args", "validate_schemas"
        )
        return InMemory(self).join(
            ds, join_type, num_partitions, on, right_on, left_suffix, right_suffix
        )

    def unique(self, column: str, ignore_nulls: bool = False) -> list[Any]:
        """Return the different values of a column, in the order of their first appearance.

        One that is missing is None, unless `ignore_nulls`.
        """
        parts = []
        for batch in self.select_columns([column])._stream():
            table = to_table(batch)
            with explained("unique", table, [column]):
                parts.append(arrow().table({column: table.column(column).unique()}))
        found = joined(parts).column(column).unique().to_pylist() if parts else []
        return [one for one in found if one is not None] if ignore_nulls else found


def _part_of(rows: Any, fraction: float, is_first: bool) -> Any:
    cut = int(rows.num_rows * fraction)
    return rows.slice(0, cut) if is_first else rows.slice(cut)


def _one_or_all(found: dict[str, Any]) -> Any:
    return next(iter(found.values())) if len(found) == 1 else found


def _fixed(rank: int, world_size: int) -> tuple[int, int]:
    return rank, world_size


def _with_columns(batch: Batch, names: Sequence[str], what: str) -> Batch:
    """Return a batch with its columns in the order of the first batch.

    Raises:
        UsageError: it has others.
    """
    there = columns_of(batch)
    if set(there) != set(names):
        raise UsageError(
            f"Dataset.{what}: some rows have the columns {there}, and the first {list(names)}: "
            f"expected the same in all: select_columns([...])"
        )
    return {name: batch[name] for name in names} if isinstance(batch, dict) else batch.select(names)


def _reported(node: Node) -> list[str]:
    """Return the steps to a node, as texts."""
    if isinstance(node, Read):
        where = ""
        if isinstance(node.source, FileSource):
            where = f"({node.source.paths!r})"
        elif isinstance(node.source, Memory):
            where = f"({sum(num_rows(one) for one in node.source.batches):,} rows)"
        return [f"{node.source.name}{where}"]
    if isinstance(node, (Mix, Union, Zip)):
        inner = ", ".join(" → ".join(_reported(parent)) for parent in node.parents)
        return [f"{type(node).__name__.lower()}({inner})"]
    steps = _reported(node.parents[0])
    if isinstance(node, Gather):
        return [*steps, node.name]
    if isinstance(node, Apply):
        return [*steps, repr(node.operation)]
    if isinstance(node, Slice):
        stop = "" if node.stop is None else f"{node.stop:,}"
        return [*steps, f"rows[{node.start:,}:{stop}]"]
    return [*steps, f"random_shuffle(seed={node.seed})" if isinstance(node, Shuffle) else "?"]


def _mixed(batches: Iterator[Batch], size: int, seed: int) -> Iterator[Batch]:
    """Yield the rows shuffled within buffers of `size` rows."""
    generator = np.random.default_rng(seed)
    for batch in batched(batches, size):
        yield taken(batch, generator.permutation(num_rows(batch)))


def _watched(batches: Iterator[Batch], what: str) -> Iterator[Batch]:
    """Show the number of processed rows, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield from batches
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task, rows = progress.add_task(what), 0
        for batch in batches:
            rows += num_rows(batch)
            progress.update(task, description=f"{what}: {rows:,} rows")
            yield batch
