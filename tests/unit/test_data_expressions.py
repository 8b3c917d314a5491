"""elastic.data.expressions: Ray's language of columns, computed by Arrow."""

from __future__ import annotations

import operator
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import cloudpickle
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyarrow.fs import LocalFileSystem

from elastic import data
from elastic.data import expressions as ex
from elastic.data.datatype import DataType
from elastic.data.expressions import col, lit, udf
from elastic.data.files import DataError
from elastic.errors import UsageError

ROWS = [
    {"a": -3, "b": 2, "s": " xa ", "t": datetime(2020, 2, 3, 4, 5), "l": [3, 1], "n": None},
    {"a": 5, "b": -2, "s": "Bab", "t": datetime(2021, 6, 30), "l": [2, 9], "n": "q"},
    {"a": 7, "b": 2, "s": "c", "t": datetime(2022, 12, 31, 23), "l": [5, 4], "n": "r"},
]


def values(expr: Any, rows: Any = ROWS) -> list[Any]:
    given = data.from_arrow(rows) if isinstance(rows, pa.Table) else data.from_items(rows)
    return given.with_column("found", expr).to_arrow().column("found").to_pylist()


@pytest.mark.parametrize("name", ["add", "sub", "mul", "floordiv", "mod", "gt", "ge", "lt", "le",
                                  "eq", "ne"])  # fmt: skip
def test_operators_compute_what_python_does_on_either_side(name: str) -> None:
    act = getattr(operator, name)
    assert values(act(col("a"), col("b"))) == [act(row["a"], row["b"]) for row in ROWS]
    assert values(act(col("a"), 2)) == [act(row["a"], 2) for row in ROWS]
    for seven in (7, np.int64(7)):
        assert values(act(seven, col("b"))) == [act(7, row["b"]) for row in ROWS]
    halves = [{"x": -1.5}, {"x": 2.5}]
    assert values(act(col("x"), 2), halves) == [act(row["x"], 2) for row in halves]


def test_conditions_are_joined_and_missing_values_are_neither_true_nor_false() -> None:
    assert values((col("a") > 0) & (col("b") > 0)) == [False, False, True]
    assert values(~(col("a") > 0) | (col("s") == "c")) == [True, False, True]
    assert values(col("n") == "q") == [None, True, False]
    assert values(col("n").is_null()) == [True, False, False]
    assert values(col("n").is_not_null() & True) == [False, True, True]
    assert values(col("n").fill_null("-")) == ["-", "q", "r"]
    assert values(col("b").is_in([2, 3])) == [True, False, True]
    assert values(col("b").not_in([2])) == [False, True, False]
    with pytest.raises(UsageError, match="write & for 'and'"):
        bool(col("a") > 1 and col("b") > 1)


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        (lit(1), [1, 1, 1]),
        (-col("a"), [3, -5, -7]),
        (col("a") / 2.0, [-1.5, 2.5, 3.5]),
        (col("a").abs().power(2), [9, 25, 49]),
        (col("a").cast(DataType.string()) + "!", ["-3!", "5!", "7!"]),
        ("<" + col("s").str.strip().str.upper(), ["<XA", "<BAB", "<C"]),
        (col("s").str.len(), [4, 3, 1]),
        (col("s").str.contains("a"), [True, True, False]),
        (col("s").str.starts_with("B"), [False, True, False]),
        (col("s").str.replace("a", "o"), [" xo ", "Bob", "c"]),
        (col("s").str.lstrip(" B").str.split("a"), [["x", " "], ["", "b"], ["c"]]),
        (col("s").str.pad(4, "*", side="left"), [" xa ", "*Bab", "***c"]),
        (col("t").dt.year(), [2020, 2021, 2022]),
        (col("t").dt.strftime("%d.%m."), ["03.02.", "30.06.", "31.12."]),
        (col("t").dt.floor("month").dt.day(), [1, 1, 1]),
        (col("l").list.len(), [2, 2, 2]),
        (col("l").list[0], [3, 2, 5]),
        (col("l").list[-1], [1, 9, 4]),
        (col("l").list[:1], [[3], [2], [5]]),
        (col("l").list.sort("descending"), [[3, 1], [9, 2], [5, 4]]),
    ],
)
def test_functions_are_those_of_arrow_by_rays_names(expr: Any, expected: Any) -> None:
    assert values(expr) == expected


def test_nested_values_are_taken_apart() -> None:
    table = pa.table(
        {
            "lists": pa.array([[[2], [None, 1]], None, [[]]]),
            "ragged": pa.array([[2, None, 1], None, []]),
            "map": pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int64())),
            "struct": [{"x": 1, "y": {"z": "u"}}, None, {"x": 3, "y": {"z": "v"}}],
        }
    ).slice(0, 3)
    assert values(col("lists").list.flatten(), table) == [[2, None, 1], None, []]
    assert values(col("ragged").list.sort(), table) == [[1, 2, None], None, []]
    ordered = col("ragged").list.sort("descending", "at_start")
    assert values(ordered, table) == [[None, 2, 1], None, []]
    assert values(col("ragged").list[-2], table.slice(0, 2)) == [None, None]
    assert values(col("map").map.keys(), table) == [["k"], None, []]
    assert values(col("map").map.values(), table) == [[1], None, []]
    assert values(col("struct").struct["y"].struct[0], table) == ["u", None, "v"]
    ds = data.from_arrow(table).with_columns(
        {"w": lit(0)}, ex.unnest(col("struct")), (lit(1) + 1).alias("two")
    )
    assert ds.columns() == [*table.column_names, "w", "x", "y", "two"]
    assert ds.sum("x") == 4


@udf(DataType.float64())
class Scaled:
    made = 0

    def __init__(self, factor: float) -> None:
        Scaled.__wrapped__.made += 1
        self.factor = factor

    def __call__(self, array: Any, plus: Any = 0) -> Any:
        return array.to_numpy() * self.factor + plus


def test_functions_of_the_user_get_arrays_and_constants() -> None:
    @udf(return_dtype=DataType.int32())
    def added(one: pa.ChunkedArray, two: pa.ChunkedArray, third: int) -> Any:
        assert len(one) == len(two) <= 3
        return pc.add(pc.add(one, two), third)

    ds = data.from_items(ROWS).with_column("sum", added(col("a"), col("b") * 2, 1) + 1)
    assert [row["sum"] for row in ds.take_all()] == [3, 3, 13]
    assert str(ds.schema().field("sum").type) == "int64"
    twice = Scaled(2)
    large = data.range(3000).with_column("y", twice(col("id"), plus=col("id"))).filter(col("y") > 6)
    copied = cloudpickle.loads(cloudpickle.dumps(large))
    assert copied.take(1) == large.take(1) == [{"id": 3, "y": 9.0}]
    images = udf()(lambda image: np.stack([one.to_numpy() + 1 for one in image.combine_chunks()]))
    rows = data.from_items([{"v": np.zeros((2, 2))}] * 2).with_column("v", images(col("v")))
    assert rows.take_batch()["v"].tolist() == [[[1, 1], [1, 1]]] * 2
    centred = udf()(lambda x: pc.subtract(x, pc.mean(x)))
    groups = data.from_items(ROWS).groupby("b").with_column("c", centred(col("a")))
    assert [row["c"] for row in groups.take_all()] == [0, -5, 5]
    with pytest.raises(UsageError, match=r"returned 1 values for 3 rows"):
        values(udf()(lambda x: x[:1])(col("a")))


def test_what_numbers_rows_is_the_same_however_they_are_read() -> None:
    numbered = data.range(5000).with_columns(
        {"n": ex.monotonically_increasing_id(), "r": ex.random(seed=3), "u": ex.uuid()}
    )
    assert not numbered.node.operation.keeps_rows
    rows = numbered.take_all()
    assert [row["n"] for row in rows] == list(range(5000))
    assert rows == numbered.materialize().take_all()
    assert len({row["r"] for row in rows}) == len({row["u"] for row in rows}) == 5000
    assert 0.45 < sum(row["r"] for row in rows) / 5000 < 0.55
    assert UUID(rows[0]["u"]).version == 4
    half = data.range(100).filter(ex.random(seed=3) < 0.5).take_all()
    assert [row["id"] for row in half] == [row["id"] for row in rows[:100] if row["r"] < 0.5]


def test_rows_are_chosen_by_ours_by_arrows_and_by_text(tmp_path: Path) -> None:
    ds = data.from_items(ROWS)
    for given in (
        (col("a") > 0) & ~(col("b") == 2), (pc.field("a") > 0) & ~(pc.field("b") == 2),
        "a > 0 and not b in [2, 4]", "0 < a and b % 4 == 2 and b != 2", lambda row: row["b"] < 0,
    ):  # fmt: skip
        for chosen in (ds.filter(given), ds.filter(expr=given)):
            assert [row["a"] for row in chosen.iter_rows()] == [5]
    assert values(pc.field("a") + 1) == [-2, 6, 8]
    (tmp_path / "one").write_bytes(b"1")
    files = [{"f": f"file://{tmp_path}/one"}, {"f": None}]
    for filesystem in (None, LocalFileSystem(), fsspec.filesystem("file")):
        assert values(ex.download("f", filesystem=filesystem), files) == [b"1", None]
    with pytest.raises(DataError, match=r"download: cannot read .*two"):
        values(ex.download("f"), [{"f": f"{tmp_path}/two"}])


def test_wrong_expressions_are_named() -> None:
    ds = data.from_items(ROWS)
    for act, says in [
        (lambda: ds.with_column("y", col("no")).take(), r"col\('no'\): there is no column 'no'"),
        (
            lambda: ds.with_column("y", -col("s")).take(),
            r"with_columns\(y\) is not possible .*s:",
        ),
        (lambda: ds.with_columns(col("a") + 1), r"plus\(col\('a'\), 1\): expected a name: .alias"),
        (lambda: ds.with_column("y", 3), "y=3: expected an expression such as"),
        (lambda: ds.filter(expr="a ^ 2"), "'a . 2' is not understood: expected comparisons"),
        (lambda: ds.filter(expr="+a > 1"), "'.a' is not understood"),
        (lambda: ds.filter(expr="a >"), "filter: expr='a >': invalid syntax"),
        (lambda: ds.with_columns(ex.unnest(col("a"))).take(), "unnest of int64: expected structs"),
        (lambda: ex.unnest("a"), "unnest: got 'a': expected an expression"),
        (lambda: col("s").str.pad(3, side="up"), "side='up': expected one of left"),
        (lambda: values(col("l").list[-3]), "index -3 of a list of 2"),
    ]:
        with pytest.raises(UsageError, match=says):
            act()
    with pytest.raises(AttributeError, match="no function for 'sum'"):  # One value, not one a row.
        col("a").sum()
    with pytest.raises(AttributeError, match="pyarrow has no such type"):
        DataType.number()
