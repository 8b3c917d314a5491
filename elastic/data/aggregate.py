"""Aggregates with the names of ray.data.aggregate: a value of each group of rows, or of all rows.

    ds.aggregate(Count(), Mean("age"))  # {'count()': 150, 'mean(age)': 41.5}
    ds.groupby("city").aggregate(Max("age"), Quantile("age", q=0.9))

Rule: what Arrow's group_by computes is left to it (`kernel`); the other aggregates are functions
of the rows of one group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from elastic.data.batches import rows_of
from elastic.errors import UsageError


def _compute() -> Any:
    return __import__("pyarrow.compute").compute


class AggregateFn:
    """An aggregate made of functions, which see each row of a group once.

    Attributes:
        name: of the column of results.
        on: the column that it reads; None for rows.
        kernel: (column or [], name, options) for Arrow's group_by; None for `of`.
    """

    on: str | None = None
    kernel: Any = None

    def __init__(
        self,
        init: Callable[[Any], Any],
        merge: Callable[[Any, Any], Any] | None = None,
        name: str = "",
        accumulate_row: Callable[[Any, dict[str, Any]], Any] | None = None,
        accumulate_block: Callable[[Any, Any], Any] | None = None,
        finalize: Callable[[Any], Any] = lambda value: value,
    ) -> None:
        """Use these functions.

        Args:
            init: takes the key of a group (None without groups), returns the first value.
            merge: Ray's, not called: a group's rows are in one place.
            name: of the column of results.
            accumulate_row: takes the value and a row, returns the next value.
            accumulate_block: takes the value and all rows of the group as a pyarrow table.
            finalize: takes the last value, returns the result.

        Raises:
            UsageError: the name is missing, or not one of the two functions is given.
        """
        del merge
        if not name or (accumulate_row is None) == (accumulate_block is None):
            raise UsageError(
                "AggregateFn: expected a name, and either accumulate_row or accumulate_block"
            )
        self.name = name
        self._init = init
        self._row = accumulate_row
        self._block = accumulate_block
        self._finalize_value = finalize

    def of(self, key: Any, table: Any) -> Any:
        """Return the result for the rows of a group."""
        value = self._init(key)
        if self._block is not None:
            return self._finalize_value(self._block(value, table))
        for row in rows_of(table):
            value = self._row(value, row)  # type: ignore[misc]
        return self._finalize_value(value)


class AggregateFnV2(AggregateFn):
    """Base class of one's own aggregates: `aggregate_block`, `combine`, and maybe `finalize`."""

    def __init__(
        self,
        name: str,
        zero_factory: Callable[[], Any],
        *,
        on: str | None = None,
        ignore_nulls: bool = True,
    ) -> None:
        """Name the aggregate.

        Args:
            name: of the column of results.
            zero_factory: returns the first value.
            on: the column that it reads.
            ignore_nulls: for the subclass to read, as `_ignore_nulls`.
        """
        self.name, self.on = name, on
        self._target_col_name, self._ignore_nulls = on, ignore_nulls
        self._zero = zero_factory

    def aggregate_block(self, block: Any) -> Any:
        """Return a value for some rows, given as a pyarrow table."""
        raise NotImplementedError

    def combine(self, current_accumulator: Any, new: Any) -> Any:
        """Return one value for two."""
        raise NotImplementedError

    def finalize(self, accumulator: Any) -> Any:
        """Return the result for the last value."""
        return accumulator

    def of(self, key: Any, table: Any) -> Any:
        """Return the result for the rows of a group."""
        del key
        part = self.aggregate_block(table)
        value = self._zero()
        return self.finalize(value if part is None else self.combine(value, part))


class _OfColumn(AggregateFn):
    """An aggregate of the values of one column."""

    label = ""

    def __init__(
        self, on: str | None = None, ignore_nulls: bool = True, alias_name: str | None = None
    ) -> None:
        """Choose the column.

        Args:
            on: the column.
            ignore_nulls: False: the result is missing where a value is.
            alias_name: of the column of results; by default such as "sum(age)".
        """
        if on is None and not isinstance(self, Count):
            raise UsageError(f"{type(self).__name__}: expected on=, the name of a column")
        self.on, self._ignore_nulls = on, ignore_nulls
        self.name = alias_name or f"{self.label}({on or ''})"

    def of(self, key: Any, table: Any) -> Any:
        """Return the result for the rows of a group."""
        del key
        column = table.column(self.on)
        if self._ignore_nulls:
            column = column.drop_null()
        elif column.null_count:
            return None
        return self._value(column)

    def _value(self, column: Any) -> Any:
        """Return the result for values none of which is missing."""
        raise NotImplementedError


class _ByArrow(_OfColumn):
    @property
    def kernel(self) -> Any:  # type: ignore[override]
        options = _compute().ScalarAggregateOptions(skip_nulls=self._ignore_nulls, min_count=1)
        return self.on, self.label, options


class Sum(_ByArrow):
    """The sum."""

    label = "sum"


class Min(_ByArrow):
    """The smallest value."""

    label = "min"


class Max(_ByArrow):
    """The largest value."""

    label = "max"


class Mean(_ByArrow):
    """The mean."""

    label = "mean"


class Std(_OfColumn):
    """The standard deviation."""

    label = "std"

    def __init__(
        self,
        on: str | None = None,
        ddof: int = 1,
        ignore_nulls: bool = True,
        alias_name: str | None = None,
    ) -> None:
        """Choose the column; `ddof` is subtracted from the number of values."""
        super().__init__(on, ignore_nulls, alias_name)
        self._ddof = ddof

    @property
    def kernel(self) -> Any:  # type: ignore[override]
        """Return Arrow's kernel."""
        options = _compute().VarianceOptions(ddof=self._ddof, skip_nulls=self._ignore_nulls)
        return self.on, "stddev", options


class Count(_OfColumn):
    """The number of rows, or of the values of a column."""

    label = "count"

    def __init__(
        self, on: str | None = None, ignore_nulls: bool = False, alias_name: str | None = None
    ) -> None:
        """Choose the column, None for rows; with `ignore_nulls` missing values do not count."""
        super().__init__(on, ignore_nulls, alias_name)

    @property
    def kernel(self) -> Any:  # type: ignore[override]
        """Return Arrow's kernel."""
        if self.on is None:
            return [], "count_all", None
        mode = "only_valid" if self._ignore_nulls else "all"
        return self.on, "count", _compute().CountOptions(mode=mode)


class CountDistinct(Count):
    """The number of different values."""

    label = "count_distinct"

    def __init__(self, on: str, ignore_nulls: bool = True, alias_name: str | None = None) -> None:
        """Choose the column."""
        super().__init__(on, ignore_nulls, alias_name)

    @property
    def kernel(self) -> Any:  # type: ignore[override]
        """Return Arrow's kernel."""
        column, _, options = super().kernel
        return column, "count_distinct", options


class AbsMax(_OfColumn):
    """The largest absolute value."""

    label = "abs_max"

    def _value(self, column: Any) -> Any:
        return _compute().max(_compute().abs(column)).as_py()


class Quantile(_OfColumn):
    """The value below which a part of the values lies; interpolated linearly."""

    label = "quantile"

    def __init__(
        self,
        on: str | None = None,
        q: float = 0.5,
        ignore_nulls: bool = True,
        alias_name: str | None = None,
    ) -> None:
        """Choose the column, and the part from 0 to 1."""
        super().__init__(on, ignore_nulls, alias_name)
        self._q = q

    def _value(self, column: Any) -> Any:
        return _compute().quantile(column, self._q)[0].as_py()


class ApproximateQuantile(_OfColumn):
    """Several quantiles, as a list; here they are exact."""

    label = "approx_quantile"

    def __init__(
        self, on: str, quantiles: Sequence[float] = (0.5,), alias_name: str | None = None, **_: Any
    ) -> None:
        """Choose the column, and the parts from 0 to 1."""
        super().__init__(on, True, alias_name)
        self._quantiles = list(quantiles)

    def _value(self, column: Any) -> Any:
        return _compute().quantile(column, self._quantiles, interpolation="nearest").to_pylist()


class ApproximateTopK(_OfColumn):
    """The most frequent values with their counts, as a list of dicts; here they are exact."""

    label = "approx_topk"

    def __init__(self, on: str, k: int, alias_name: str | None = None, **_: Any) -> None:
        """Choose the column, and how many of its values."""
        super().__init__(on, True, alias_name)
        self._k = k

    def _value(self, column: Any) -> Any:
        found = sorted(_counted(column), key=lambda one: -one[1])[: self._k]
        return [{self.on: value, "count": count} for value, count in found]


class Unique(_OfColumn):
    """The different values, as a list in the order of their first appearance."""

    label = "unique"

    def _value(self, column: Any) -> Any:
        return column.unique().to_pylist()


class ValueCounter(_OfColumn):
    """The different values and how often each occurs: {"values": [...], "counts": [...]}."""

    label = "value_counter"

    def _value(self, column: Any) -> Any:
        found = _counted(column)
        return {"values": [one for one, _ in found], "counts": [count for _, count in found]}


class AsList(_OfColumn):
    """All values, as a list; missing ones too, unless `ignore_nulls`."""

    label = "list"

    def __init__(self, on: str, ignore_nulls: bool = False, alias_name: str | None = None) -> None:
        """Choose the column."""
        super().__init__(on, ignore_nulls, alias_name)

    def of(self, key: Any, table: Any) -> Any:
        """Return the values of a group."""
        column = table.column(self.on)
        return (column.drop_null() if self._ignore_nulls else column).to_pylist()


class MissingValuePercentage(_OfColumn):
    """How many percent of the values are missing."""

    label = "missing_pct"

    def __init__(self, on: str, alias_name: str | None = None) -> None:
        """Choose the column."""
        super().__init__(on, False, alias_name)

    def of(self, key: Any, table: Any) -> Any:
        """Return the part of a group's values that are missing, from 0 to 100."""
        column = table.column(self.on)
        return 100.0 * column.null_count / len(column) if len(column) else None


class ZeroPercentage(_OfColumn):
    """How many percent of the values are zero."""

    label = "zero_pct"

    def of(self, key: Any, table: Any) -> Any:
        """Return the part of a group's values that are zero, from 0 to 100."""
        column = table.column(self.on)
        count = len(column) - (column.null_count if self._ignore_nulls else 0)
        zeros = _compute().sum(_compute().equal(column, 0), min_count=0).as_py()
        return 100.0 * zeros / count if count else None


def _counted(column: Any) -> list[tuple[Any, int]]:
    return [(one["values"], one["counts"]) for one in column.value_counts().to_pylist()]
