"""Operations that need all rows at once, for tables that fit in memory: Arrow sorts, groups, joins.

Rule: nothing is computed before rows are requested, and the order of rows is always the same: that
of the keys, and of the rows among equal keys.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from elastic.data.aggregate import AggregateFn, Count, Max, Mean, Min, Std, Sum
from elastic.data.arguments import check_others
from elastic.data.batches import (
    Batch,
    arrow,
    check_columns,
    check_format,
    joined,
    names_of,
    of_rows,
    to_table,
)
from elastic.data.expressions import expression_of
from elastic.data.functions import Function
from elastic.data.nodes import Node
from elastic.data.operations import MapBatches, WithColumns
from elastic.errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import Self

MEMORY_BYTES = 4 * 1024**3
"""Default size of the tables that are sorted, grouped and joined in memory."""
JOINS = (
    "inner", "left_outer", "right_outer", "full_outer",
    "left_semi", "right_semi", "left_anti", "right_anti",
)  # fmt: skip
ROW = "row of the {}"


class Gatherable(Protocol):
    """A dataset, as its engines see it; what they compute is one, too."""

    @property
    def node(self) -> Node: ...

    def over(self, node: Node) -> Self:
        """Return a dataset of the rows of another node."""
        ...

    def columns(self) -> list[str]: ...

    def select_columns(self, cols: str | Sequence[str]) -> Self: ...

    def input_files(self) -> list[str]: ...

    def take_all(self) -> list[dict[str, Any]]: ...

    def to_arrow(self) -> Any: ...

    def write_parquet(self, path: str) -> None: ...


D = TypeVar("D", bound=Gatherable)


@dataclass
class Gather(Node):
    """Rows that a function makes of all rows of the parents.

    Attributes:
        name: of the operation, for messages.
        work: takes a table of each parent, returns batches.
        memory: bytes that the tables may have.
    """

    name: str = ""
    work: Callable[..., Iterable[Batch]] = lambda *tables: tables
    memory: int = MEMORY_BYTES

    def stream(self) -> Iterator[Batch]:
        """Yield all rows in order.

        Raises:
            UsageError: they do not fit in memory, or lack a column.
        """
        tables = [gathered(parent, self.name, self.memory) for parent in self.parents]
        yield from self.work(*tables)

    def first_rows(self) -> Batch:
        """Return some rows, to know their columns; none if a few of the parents make none."""
        tables = [to_table(parent.first_rows()) for parent in self.parents]
        return next(iter(self.work(*tables)), {})


def gathered(node: Node, what: str, memory: int) -> Any:
    """Return all rows of a node as one table.

    Raises:
        UsageError: they need more than `memory` bytes.
    """
    found, size = [], 0
    for batch in node.stream():
        table = to_table(batch)
        found.append(table)
        size += table.nbytes
        if size > memory:
            raise UsageError(
                f"Dataset.{what}: the rows need more than the {memory:,} bytes of memory that it "
                f"may take: write ds.using('dask').{what}(...), which needs pip install "
                f"'elastic-torch[dask]', or ds.using('arrow', memory=BYTES).{what}(...)"
            )
    return joined(found) if found else to_table(of_rows([]))


class InMemory(Generic[D]):
    """Operations on a dataset by Arrow, in the memory of the process that requests the rows."""

    def __init__(self, dataset: D, memory: int = MEMORY_BYTES) -> None:
        """Compute nothing yet; `memory` is the limit in bytes."""
        self._dataset, self._memory = dataset, memory

    def sort(self, key: str | Sequence[str], descending: bool | Sequence[bool] = False) -> D:
        """Return the rows sorted by columns; missing values come last.

        Args:
            key: a column, or several.
            descending: the largest first; for all columns, or for each.
        """
        keys = names_of(key)
        falls = [descending] * len(keys) if isinstance(descending, bool) else list(descending)
        if len(falls) != len(keys):
            raise UsageError(
                f"Dataset.sort: {len(keys)} keys and {len(falls)} values of descending: expected "
                f"as many, or one bool"
            )
        return self._gather("sort", partial(_sorted, keys=keys, falls=falls))

    def groupby(self, key: str | Sequence[str] | None) -> Groups[D]:
        """Return groups of rows with equal values in columns; None: one group of all rows."""
        return Groups(self, [] if key is None else names_of(key))

    def join(
        self,
        ds: D,
        join_type: str = "inner",
        num_partitions: int | None = None,
        on: str | Sequence[str] = ("id",),
        right_on: str | Sequence[str] | None = None,
        left_suffix: str | None = None,
        right_suffix: str | None = None,
    ) -> D:
        """Return rows of both datasets with equal keys; see `Dataset.join`."""
        del num_partitions
        if join_type not in JOINS:
            raise UsageError(
                f"Dataset.join: join_type={join_type!r}: expected one of {', '.join(JOINS)}"
            )
        left, right = names_of(on), names_of(on if right_on is None else right_on)
        if len(left) != len(right):
            raise UsageError(f"Dataset.join: on={left}, right_on={right}: expected as many columns")
        suffixes = left_suffix or "", "_1" if right_suffix is None else right_suffix
        work = partial(_joined, kind=join_type, keys=(left, right), suffixes=suffixes)
        return self._gather("join", work, ds)

    def drop_duplicates(self, on: str | Sequence[str] | None = None) -> D:
        """Keep the first of rows with equal values in these columns, None for all columns."""
        return self._gather("drop_duplicates", partial(_distinct, keys=on and names_of(on)))

    def aggregate(self, *functions: AggregateFn) -> dict[str, Any]:
        """Return aggregates of all rows, by their names."""
        rows = self.groupby(None).aggregate(*functions).to_arrow().to_pylist()
        return rows[0] if rows else {one.name: None for one in functions}

    def _gather(self, name: str, work: Callable[..., Any], *others: D) -> D:
        parents = tuple(one.node for one in (self._dataset, *others))
        return self._dataset.over(Gather(parents, name, work, self._memory))


class Groups(Generic[D]):
    """Rows grouped by columns; each method returns a dataset with the groups in their order."""

    def __init__(self, engine: InMemory[D], keys: list[str]) -> None:
        self._engine, self._keys = engine, keys

    def aggregate(self, *functions: AggregateFn) -> D:
        """Return a row for each group: its keys, and the results of `elastic.data.aggregate`.

        Raises:
            UsageError: one is no aggregate, or none is given.
        """
        wrong = [one for one in functions if not isinstance(one, AggregateFn)]
        if wrong or not functions:
            raise UsageError(
                f"aggregate: got {wrong[0]!r}: expected aggregates such as Mean('age')"
                if wrong
                else "aggregate: expected at least one aggregate, such as Mean('age')"
            )
        work = partial(_aggregated, keys=self._keys, functions=functions)
        return self._engine._gather("aggregate", work)

    def count(self) -> D:
        """Return the number of rows of each group, as "count()"."""
        return self.aggregate(Count())

    def sum(self, on: str | Sequence[str] | None = None, ignore_nulls: bool = True) -> D:
        """Return sums, as "sum(column)"; of several columns, or None for all but the keys."""
        return self._each(Sum, on, ignore_nulls=ignore_nulls)

    def min(self, on: str | Sequence[str] | None = None, ignore_nulls: bool = True) -> D:
        """Return the smallest values, as `sum`."""
        return self._each(Min, on, ignore_nulls=ignore_nulls)

    def max(self, on: str | Sequence[str] | None = None, ignore_nulls: bool = True) -> D:
        """Return the largest values, as `sum`."""
        return self._each(Max, on, ignore_nulls=ignore_nulls)

    def mean(self, on: str | Sequence[str] | None = None, ignore_nulls: bool = True) -> D:
        """Return means, as `sum`."""
        return self._each(Mean, on, ignore_nulls=ignore_nulls)

    def std(
        self, on: str | Sequence[str] | None = None, ddof: int = 1, ignore_nulls: bool = True
    ) -> D:
        """Return standard deviations, as `sum`."""
        return self._each(Std, on, ddof=ddof, ignore_nulls=ignore_nulls)

    def map_groups(
        self,
        fn: Callable[..., Any],
        *,
        batch_format: str | None = "default",
        fn_args: Sequence[Any] = (),
        fn_kwargs: Mapping[str, Any] | None = None,
        fn_constructor_args: Sequence[Any] = (),
        fn_constructor_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> D:
        """Apply a function to the rows of each group, as `Dataset.map_batches` does to batches."""
        check_others("map_groups", others)
        function = Function(fn, fn_args, fn_kwargs, fn_constructor_args, fn_constructor_kwargs)
        each = MapBatches(function, None, check_format(batch_format, "map_groups"), "map_groups")
        return self._engine._gather("map_groups", partial(_mapped, keys=self._keys, each=each))

    def with_column(self, column_name: str, expr: Any, **others: Any) -> D:
        """Add a column, as `Dataset.with_column`; a `udf` is called with the rows of a group."""
        work = WithColumns([(column_name, expression_of(expr, f"with_column: {column_name}"))])
        return self.map_groups(work.apply, batch_format="pyarrow", **others)

    def _each(self, kind: Any, on: str | Sequence[str] | None, **options: Any) -> D:
        columns = self._engine._dataset.columns() if on is None else names_of(on)
        return self.aggregate(*(kind(one, **options) for one in columns if one not in self._keys))


# ---------------------------------------------------------------------- of whole tables


def _sorted(table: Any, *, keys: Sequence[str], falls: Sequence[bool]) -> Iterator[Any]:
    if table.num_rows:
        yield _in_order(table, keys, falls, "sort")


def _in_order(table: Any, keys: Sequence[str], falls: Sequence[bool], what: str) -> Any:
    """Return a table sorted by columns; equal rows keep their order."""
    check_columns(keys, table.column_names, f"Dataset.{what}")
    compute = __import__("pyarrow.compute").compute
    order = [(key, "descending" if f else "ascending") for key, f in zip(keys, falls, strict=True)]
    with explained(what, table, keys):
        return table.take(compute.sort_indices(table.select(keys), sort_keys=order))


def _aggregated(
    table: Any, *, keys: Sequence[str], functions: Sequence[AggregateFn]
) -> Iterator[Any]:
    if not table.num_rows:
        return
    read = [one.on for one in functions if one.on is not None]
    check_columns([*keys, *read], table.column_names, "Dataset.aggregate")
    fast = [one for one in functions if one.kernel is not None]
    kernels = [one.kernel for one in fast] or [([], "count_all", None)]
    with explained("aggregate", table, [*keys, *read]):
        found = _unsigned(table, keys).group_by(list(keys), use_threads=False).aggregate(kernels)
    names = [*keys, *([one.name for one in fast] or ["count()"])]
    found = found.rename_columns(names)
    if keys:
        found = _in_order(found, keys, [False] * len(keys), "aggregate")
    columns = {name: found.column(name) for name in names}
    slow = [one for one in functions if one.kernel is None]
    if slow:
        groups = list(_groups(table, keys))
        for one in slow:
            values = [one.of(key, rows) for key, rows in groups]
            columns[one.name] = to_table(of_rows([{"x": value} for value in values])).column("x")
    yield arrow().table({name: columns[name] for name in [*keys, *(f.name for f in functions)]})


def _groups(table: Any, keys: Sequence[str]) -> Iterator[tuple[Any, Any]]:
    """Yield the key and the rows of each group, in the order of the keys."""
    if not keys:
        yield None, table
        return
    check_columns(keys, table.column_names, "Dataset.groupby")
    with explained("groupby", table, keys):
        counts = (
            _unsigned(table, keys)
            .group_by(list(keys), use_threads=False)
            .aggregate([([], "count_all")])
        )
    rising = [False] * len(keys)
    counts, table = (_in_order(one, keys, rising, "groupby") for one in (counts, table))
    sizes = counts.column("count_all").to_pylist()
    for number, start in enumerate(itertools.accumulate(sizes[:-1], initial=0)):
        values = tuple(counts.column(key)[number].as_py() for key in keys)
        rows = table.slice(start, sizes[number])
        yield values[0] if len(values) == 1 else values, rows


def _unsigned(table: Any, keys: Sequence[str]) -> Any:
    """Return a table with one zero in columns of numbers; Arrow groups 0.0 and -0.0 apart."""
    pa = arrow()
    add = __import__("pyarrow.compute").compute.add
    for key in keys:
        kind = table.schema.field(key).type
        if kind in (pa.float32(), pa.float64()):
            index = table.schema.get_field_index(key)
            table = table.set_column(index, key, add(table.column(key), pa.scalar(0.0, kind)))
    return table


def _mapped(table: Any, *, keys: Sequence[str], each: MapBatches) -> Iterator[Batch]:
    if table.num_rows:
        for _, rows in _groups(table, keys):
            yield from each.stream(iter([rows]))


def _distinct(table: Any, *, keys: Sequence[str] | None) -> Iterator[Any]:
    if not table.num_rows:
        return
    keys = keys or table.column_names
    check_columns(keys, table.column_names, "Dataset.drop_duplicates")
    row = ROW.format("table")
    with explained("drop_duplicates", table, keys):
        firsts = _numbered(table.select(keys), row).group_by(list(keys)).aggregate([(row, "min")])
    yield table.take(firsts.column(f"{row}_min").combine_chunks().sort())


def _joined(
    left: Any,
    right: Any,
    *,
    kind: str,
    keys: tuple[Sequence[str], Sequence[str]],
    suffixes: tuple[str, str],
) -> Iterator[Any]:
    sides = {"left": (left, keys[0]), "right": (right, keys[1])}
    for side, (table, on) in sides.items():
        check_columns(on, table.column_names, f"Dataset.join, on the {side}")
    rows = {side: ROW.format(side) for side in sides}
    # Arrow joins keys and row numbers alone, since it has no join of columns of lists or tensors.
    with explained("join", left, keys[0]):
        ours, theirs = left.select(keys[0]), right.select(keys[1]).rename_columns(list(keys[0]))
        types = arrow().unify_schemas(
            [one.schema.remove_metadata() for one in (ours, theirs)], promote_options="permissive"
        )
        found = _numbered(ours.cast(types), rows["left"]).join(
            _numbered(theirs.cast(types), rows["right"]),
            keys=list(keys[0]),
            join_type=kind.replace("_", " "),
        )
    order = [(row, "ascending") for row in rows.values() if row in found.column_names]
    found = found.sort_by(order)
    if kind.endswith(("_semi", "_anti")):
        table, _ = sides[kind.partition("_")[0]]
        yield table.take(found.column(order[0][0]))
        return
    columns = {name: found.column(name) for name in keys[0]}
    both = (set(left.column_names) & set(right.column_names)) - {*keys[0], *keys[1]}
    for (side, (table, on)), suffix in zip(sides.items(), suffixes, strict=True):
        rest = [name for name in table.column_names if name not in on]
        taken = table.select(rest).take(found.column(rows[side]))
        for name in rest:
            new = f"{name}{suffix}" if name in both else name
            if new in columns:
                raise UsageError(
                    f"Dataset.join: both datasets have a column {name!r}: expected left_suffix= or "
                    f"right_suffix= that give it two names"
                )
            columns[new] = taken.column(name)
    yield arrow().table(columns)


def _numbered(table: Any, name: str) -> Any:
    return table.append_column(name, arrow().array(range(table.num_rows), arrow().int64()))


@contextlib.contextmanager
def explained(what: str, table: Any, columns: Sequence[str]) -> Iterator[None]:
    """Turn Arrow's refusals into errors that name operation and columns."""
    pa = arrow()
    try:
        yield
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid, pa.ArrowTypeError) as error:
        kinds = ", ".join(f"{one!r} of {table.schema.field(one).type}" for one in columns)
        raise UsageError(f"Dataset.{what}: not possible with {kinds}: {error}") from error
