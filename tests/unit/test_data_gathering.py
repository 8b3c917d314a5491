"""Sort, groupby, join and aggregates: by Arrow, in memory, with the results of pandas."""

from __future__ import annotations

import sqlite3
from typing import Any

import numpy as np
import pandas as pd
import pytest

from elastic import data
from elastic.data import aggregate as by
from elastic.data.files import DataError
from elastic.errors import UsageError

JOINS = {"inner": "inner", "left_outer": "left", "right_outer": "right", "full_outer": "outer"}


def frame() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    x = rng.normal(size=3000)
    x[::7] = np.nan
    return pd.DataFrame({"g": rng.integers(0, 9, 3000), "s": rng.choice(["a", "b"], 3000), "x": x})


def listed(ds: Any) -> list[tuple[Any, ...]]:
    return [tuple(None if v != v else v for v in row.values()) for row in ds.take_all()]


def column(ds: Any, name: str) -> list[Any]:
    return [row[name] for row in ds.take_all()]


def test_rows_are_sorted_by_several_columns_and_equal_ones_keep_their_order() -> None:
    given = frame().reset_index(names="row")
    ds = data.from_pandas(given).sort(["s", "g"], descending=[True, False])
    right = given.sort_values(["s", "g"], ascending=[False, True], kind="stable")
    assert column(ds, "row") == right["row"].tolist()
    assert ds.sort("x").take_all()[-1]["x"] is None  # Missing values come last.
    images = data.from_items([{"image": np.full((2, 2), n), "n": -n} for n in range(3)])
    assert images.sort("n").take_batch()["image"][:, 0, 0].tolist() == [2, 1, 0]


def test_groups_have_the_aggregates_that_pandas_finds() -> None:
    given = frame()
    groups = data.from_pandas(given).groupby(["g", "s"])
    theirs = given.groupby(["g", "s"])["x"]
    found = groups.aggregate(
        by.Count(), by.Count("x", ignore_nulls=True), by.Sum("x"), by.Mean("x"), by.Std("x"),
        by.Min("x"), by.Quantile("x", q=0.25), by.AbsMax("x"), by.Max("x", alias_name="top"),
    ).to_pandas()  # fmt: skip
    right = pd.DataFrame(
        {
            "count()": theirs.size(), "count(x)": theirs.count(), "sum(x)": theirs.sum(),
            "mean(x)": theirs.mean(), "std(x)": theirs.std(), "min(x)": theirs.min(),
            "quantile(x)": theirs.quantile(0.25),
            "abs_max(x)": theirs.apply(lambda v: v.abs().max()), "top": theirs.max(),
        }
    ).reset_index()  # fmt: skip
    pd.testing.assert_frame_equal(found, right, check_dtype=False)
    assert column(groups.mean("x"), "mean(x)") == pytest.approx(theirs.mean().to_numpy())
    assert groups.std("x", ddof=0).columns() == ["g", "s", "std(x)"]
    tops = groups.map_groups(lambda rows: rows.nlargest(1, "x"), batch_format="pandas")
    assert column(tops, "x") == theirs.max().tolist()
    signed = data.from_items([{"k": k, "n": n} for n, k in enumerate([0.0, 1.0, -0.0, 0.0])])
    assert column(signed.groupby("k").sum("n"), "sum(n)") == [5, 1]
    parts = signed.groupby("k").map_groups(lambda rows: {"n": [len(rows["n"])]})
    assert column(parts, "n") == [3, 1]


def test_all_rows_are_aggregated_in_one_call_or_column_by_column() -> None:
    ds = data.from_items([{"a": n % 3, "b": None if n == 5 else n} for n in range(10)])
    assert ds.aggregate(
        by.Count(), by.Unique("a"), by.CountDistinct("b"), by.ValueCounter("a"), by.AsList("b"),
        by.MissingValuePercentage("b"), by.ZeroPercentage("b"), by.ApproximateTopK("a", k=1),
        by.ApproximateQuantile("a", quantiles=[0.0, 1.0]),
    ) == {
        "count()": 10, "unique(a)": [0, 1, 2], "count_distinct(b)": 9,
        "value_counter(a)": {"values": [0, 1, 2], "counts": [4, 3, 3]},
        "list(b)": [0, 1, 2, 3, 4, None, 6, 7, 8, 9],
        "missing_pct(b)": 10.0, "zero_pct(b)": 100 / 9, "approx_topk(a)": [{"a": 0, "count": 4}],
        "approx_quantile(a)": [0, 2],
    }  # fmt: skip
    assert (ds.sum("b"), ds.sum("b", ignore_nulls=False)) == (40, None)
    assert ds.max(["a", "b"]) == {"max(a)": 2, "max(b)": 9}
    assert ds.mean() == {"mean(a)": 0.9, "mean(b)": pytest.approx(40 / 9)}
    assert (ds.mean(["a"]), ds.select_columns(["b"]).max()) == (0.9, 9)
    assert ds.unique("b") == [0, 1, 2, 3, 4, None, 6, 7, 8, 9]
    product = by.AggregateFn(
        init=lambda key: 1, accumulate_row=lambda a, row: a * (row["a"] + 1), name="product"
    )
    assert ds.aggregate(product) == {"product": 1**4 * 2**3 * 3**3}
    assert data.from_items([]).aggregate(product) == {"product": None}

    class Span(by.AggregateFnV2):
        def __init__(self, on: str) -> None:
            super().__init__(f"span({on})", lambda: 0, on=on)

        def aggregate_block(self, block: Any) -> int:
            values = block.column(self._target_col_name).to_pylist()
            return max(values) - min(values)

        def combine(self, current_accumulator: int, new: int) -> int:
            return max(current_accumulator, new)

    assert ds.groupby("a").aggregate(Span("a")).take(1) == [{"a": 0, "span(a)": 0}]


@pytest.mark.parametrize("kind", JOINS)
def test_joins_are_those_of_pandas(kind: str) -> None:
    left = pd.DataFrame({"k": [3, 1, 2, 2, None], "x": range(5), "same": "l"})
    right = pd.DataFrame({"k": [2, 3, 4, 2], "y": range(4), "same": "r"})
    found = data.from_pandas(left).join(data.from_pandas(right), kind, 2, on=("k",))
    theirs = left.dropna().merge(right, on="k", how=JOINS[kind], suffixes=("", "_1"))
    if kind in ("left_outer", "full_outer"):  # For pandas, a missing key equals another.
        theirs = pd.concat([theirs, left[left["k"].isna()]])
    key = lambda row: str(row)  # noqa: E731
    assert sorted(listed(found), key=key) == sorted(listed(data.from_pandas(theirs)), key=key)


def test_rows_with_and_without_a_match_are_told_apart() -> None:
    left, right = data.range(4), data.from_items([{"n": 2, "y": np.ones(2)}, {"n": 5, "y": None}])
    join = lambda kind: left.join(right, kind, on="id", right_on="n").take_all()  # noqa: E731
    assert join("left_semi") == [{"id": 2}]
    assert join("left_anti") == [{"id": 0}, {"id": 1}, {"id": 3}]
    assert [row["n"] for row in join("right_anti")] == [5]
    assert join("inner")[0]["y"].tolist() == [1.0, 1.0]


def test_rows_that_are_all_filtered_away_leave_their_columns() -> None:
    users = data.from_items([{"id": 1, "x": "a"}])
    none = users.filter(lambda row: row["id"] > 1)
    assert users.join(none, "left_outer", on="id").take_all() == [{"id": 1, "x": "a", "x_1": None}]
    assert none.sort("x").take_all() == []
    assert none.groupby("x").count().take_all() == []
    assert list(none.to_pandas()["x"]) == []
    assert none.map(lambda row: {"y": row["x"]}).to_arrow().column_names == []


def test_few_rows_are_computed_to_know_the_columns_of_a_union() -> None:
    seen: list[int] = []

    def note(row: dict[str, Any]) -> dict[str, Any]:
        seen.append(row["id"])
        return {**row, "x": 1}

    noted = data.range(500).map(note)
    for ds in (noted.sort("id"), noted.random_shuffle(), noted.filter(lambda row: row["id"])):
        seen.clear()
        batches = data.from_items([{"a": 1}]).union(ds.limit(90)).iter_batches()
        assert all(sorted(batch) == ["a", "id", "x"] for batch in batches)
        assert len(seen) <= 520


def test_columns_of_a_union_are_looked_at_as_little_as_they_can_be() -> None:
    first = data.from_items([{"a": 1}])
    calls: list[str] = []

    def connect() -> Any:
        calls.append("connect")
        return sqlite3.connect(":memory:")

    class Large:
        def __init__(self) -> None:
            pytest.fail("an instance, whose rows nobody asks for")

    first.union(data.range(3).map_batches(Large), data.read_sql("SELECT 1", connect)).take(1)
    assert calls == []
    first.union(data.range(500).filter(lambda row: calls.append("row"))).take(1)
    assert len(calls) <= 16
    skipping = first.union(data.range(3).map(lambda row: {"x": 1 // row["id"]}, on_error="skip"))
    assert skipping.count() == 3
    assert "1 rows left out" in skipping.stats()
    failing = [DataError("503")]

    def fails_once(row: dict[str, Any]) -> dict[str, Any]:
        if failing:
            raise failing.pop()
        return {"x": row["id"]}

    union = first.union(data.range(3).map(fails_once))
    with pytest.raises(DataError, match="503"):
        union.take(1)
    assert union.take(1) == [{"a": 1, "x": None}]


def test_datasets_are_interleaved_by_weight_each_row_once() -> None:
    one, two = data.range(3), data.range(5).map(lambda row: {"id": -row["id"] - 1})
    assert column(one.mix(two), "id") == [0, -1, 1, -2, 2, -3, -4, -5]
    assert column(one.mix(two, weights=[1, 3]), "id") == [-1, -2, 0, -3, -4, -5, 1, 2]
    shortest = data.MixStoppingCondition.STOP_ON_SHORTEST
    assert column(one.mix(two, stopping_condition=shortest), "id") == [0, -1, 1, -2, 2]
    assert one.mix(data.from_items([{"x": 7}])).take(2) == [
        {"id": 0, "x": None},
        {"id": None, "x": 7},
    ]
    large = 2**53 + 1
    ids = data.from_items([{"a": 0, "id": large}]).mix(data.from_items([{"a": 1}]))
    assert ids.take() == [{"a": 0, "id": large}, {"a": 1, "id": None}]
    many = data.range(5000).mix(data.range(3000), weights=[2, 1])
    assert sorted(column(many, "id")) == sorted([*range(5000), *range(3000)])
    assert sum(value < 20 for value in column(many, "id")[:30]) == 30


def test_parts_of_a_stratified_split_have_the_same_proportions() -> None:
    ds = data.range(100).map(lambda row: {**row, "g": row["id"] % 5 == 0})
    train, test = ds.train_test_split(0.25, stratify="g")
    assert test.groupby("g").count().take_all() == [
        {"g": False, "count()": 20},
        {"g": True, "count()": 5},
    ]
    ids = [row["id"] for part in (train, test) for row in part.take_all()]
    assert sorted(ids) == list(range(100))


def test_what_cannot_be_done_is_said_with_the_column() -> None:
    ds = data.from_items([{"a": 1, "t": "x", "v": np.ones(2)}])
    for act, says in [
        (lambda: ds.sort("b").take(), "sort: there is no column 'b'; expected some of"),
        (lambda: ds.sort(["a", "t"], [True]), "2 keys and 1 values of descending"),
        (lambda: ds.groupby("v").count().take(), "aggregate: not possible with 'v' of"),
        (lambda: ds.sum("t"), "sum: not possible with 't' of string"),
        (lambda: ds.groupby("a").aggregate("mean"), "got 'mean': expected aggregates"),
        (lambda: by.Mean(), "Mean: expected on="),
        (lambda: ds.join(ds, "outer"), "join_type='outer': expected one of inner, left_outer"),
        (lambda: ds.join(ds, on="a", right_suffix="").take(), "both datasets have a column 't'"),
        (lambda: ds.using("arrow", memory=1).sort("a").take(), r"using\('dask'\).sort.*\[dask\]"),
        (lambda: ds.using("arrow", address="x"), "address: expected memory"),
        (lambda: ds.mix(ds, weights=[1]), "weights=.* of 2 datasets: expected a number above 0"),
    ]:
        with pytest.raises(UsageError, match=says):
            act()
