"""elastic.data: what is read, what the verbs make of it, and what is refused with file and row."""

from __future__ import annotations

import asyncio
import csv
import gzip
import json
import math
import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import fsspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from pyarrow.fs import LocalFileSystem

from elastic import data
from elastic.data import nodes, writing
from elastic.data.collate_fn import ArrowBatchCollateFn
from elastic.data.datasource import FilenameProvider
from elastic.data.datasource.partitioning import Partitioning
from elastic.data.expressions import lit
from elastic.data.files import DataError, filesystem_of
from elastic.data.nodes import write_part
from elastic.data.table import Part, Table
from elastic.data.table_reader import TableReader
from elastic.errors import UsageError
from elastic.storage.files import Files
from tests.patience import wait_for


@pytest.fixture
def table(tmp_path: Path) -> Path:
    folder = tmp_path / "table"
    folder.mkdir()
    for number in range(3):
        ids = np.arange(number * 40, number * 40 + 40)
        rows = pa.table({"id": ids, "x": ids * 0.5, "name": [f"n{one}" for one in ids]})
        pq.write_table(rows, folder / f"{number}.parquet", row_group_size=10)
    (folder / "_SUCCESS").touch()
    return folder


def ids_of(rows: Any) -> list[int]:
    return [row["id"] for row in rows]


def test_files_come_in_a_stable_order_by_folder_pattern_and_list(table: Path) -> None:
    assert ids_of(data.read_parquet(table).take_all()) == list(range(120))
    assert ids_of(data.read_parquet(f"{table}/[12].parquet").iter_rows()) == list(range(40, 120))
    several = [f"{table}/2.parquet", f"file://{table}/0.parquet"]
    assert ids_of(data.read_parquet(several).take(41))[-1] == 0
    with pytest.raises(DataError, match=r"nothing\*.parquet leads to no file"):
        data.read_parquet(f"{table}/nothing*.parquet").count()
    with pytest.raises(UsageError, match="storage_options"):
        data.read_parquet(table, sorted=True)


def test_folders_of_a_partitioned_table_are_columns(tmp_path: Path) -> None:
    root = tmp_path / "table"
    rows = pa.table(
        {"id": range(6), "year": [2023, 2023, 2024] * 2, "place": ["a b", "c", None] * 2}
    )
    pq.write_to_dataset(rows, root, partition_cols=["year", "place"])
    ds = data.read_parquet(root)
    assert ds.columns() == ["id", "year", "place"]
    assert sorted((row["id"], row["year"], row["place"]) for row in ds.take_all()) == [
        (0, "2023", "a b"), (1, "2023", "c"), (2, "2024", None),
        (3, "2023", "a b"), (4, "2023", "c"), (5, "2024", None),
    ]  # fmt: skip
    assert data.read_parquet(root, partitioning=None).columns() == ["id"]
    years = data.read_parquet(root, columns=["year"])
    assert sorted(row["year"] for row in years.take_all()) == ["2023"] * 4 + ["2024"] * 2
    assert years.columns() == ["year"]
    with pytest.raises(
        DataError, match=r"there is no column 'month' in .*expected some of \['id'\]"
    ):
        data.read_parquet(root, columns=["month"]).count()
    (root / "year=2023" / "rows.csv").write_text("id\n7\n")
    assert data.read_csv(f"{root}/year=2023/*.csv").take_all() == [{"id": 7, "year": "2023"}]
    pq.write_table(rows.select(["id"]), root / "loose.parquet")
    with pytest.raises(DataError, match=r"loose.parquet lies in folders of|partitioning=None"):
        data.read_parquet(root).count()
    with pytest.raises(UsageError, match="partitioning='dir': expected 'hive'"):
        data.read_parquet(root, partitioning="dir")


def test_paths_are_columns_of_all_that_is_read(table: Path) -> None:
    path = str(table / "0.parquet")
    ds = data.read_parquet(path, include_paths=True)
    assert ds.columns() == ["id", "x", "name", "path"]
    few = data.read_parquet(path, columns=["id"], include_paths=True)
    assert few.take(1) == [{"id": 0, "path": path}]
    data.range(1).write_csv(table / "csv")
    (row,) = data.read_csv(table / "csv", include_paths=True).take_all()
    assert Path(row["path"]).read_text() == '"id"\n0\n'
    (row,) = data.read_binary_files(table / "csv", include_paths=True).take_all()
    assert row == {"path": f"{table}/csv/part-00000.csv", "bytes": b'"id"\n0\n'}


def test_folders_are_columns_by_their_places_and_types(tmp_path: Path) -> None:
    for name, pixel in (("cat", 1), ("dog", 2)):
        for number in range(2):
            folder = tmp_path / "root" / name / str(number)
            folder.mkdir(parents=True)
            Image.fromarray(np.full((2, 2), pixel, np.uint8)).save(folder / "a.png")
    root = f"{tmp_path}/root"
    classes = Partitioning("dir", root, ["class", "n"], {"n": int})
    rows = data.read_images(root, partitioning=classes).take_all()
    assert [(row["class"], row["n"], row["image"][0, 0]) for row in rows] == [
        ("cat", 0, 1), ("cat", 1, 1), ("dog", 0, 2), ("dog", 1, 2),
    ]  # fmt: skip
    texts = tmp_path / "year=2024" / "new=true"
    texts.mkdir(parents=True)
    (texts / "a.txt").write_text("x")
    typed = Partitioning("hive", field_types={"year": int, "new": bool})
    assert data.read_text(tmp_path / "year=2024", partitioning=typed).take_all() == [
        {"text": "x", "year": 2024, "new": True}
    ]
    with pytest.raises(DataError, match=r"folder new='true': expected int"):
        data.read_text(texts, partitioning=Partitioning("hive", None, None, {"new": int})).take()
    with pytest.raises(DataError, match=r"lies in the folders \['cat', '0'\] below"):
        data.read_images(root, partitioning=Partitioning("dir", root, ["class"])).take()
    for act in (lambda: Partitioning("dir", root), lambda: Partitioning("tree")):
        with pytest.raises(UsageError, match="expected"):
            act()


def test_verbs_make_rows_of_rows(table: Path) -> None:
    ds = data.read_parquet(table)
    assert "read_parquet" in repr(ds)
    assert ds.count() == 120  # By the footers.
    assert ds.columns() == ["id", "x", "name"]
    assert "120 rows" in repr(ds)
    assert ds.limit(2).rename_columns({"x": "y"}).drop_columns("name").take_all() == [
        {"id": 0, "y": 0.0}, {"id": 1, "y": 0.5},
    ]  # fmt: skip
    twice = ds.flat_map(lambda row: [row, row]).select_columns(["id"])
    assert ids_of(twice.take(4)) == [0, 0, 1, 1]
    assert twice.count() == 240
    kept = [
        ds.filter(lambda row: row["id"] > 117), ds.filter(expr="id > 117 and name != 'x'"),
        ds.filter(expr=pc.field("id") > 117),
    ]  # fmt: skip
    assert [ids_of(one.take_all()) for one in kept] == [[118, 119]] * 3
    beside = data.range(120).zip(ds.select_columns(["id"]))
    assert beside.take(1) == [{"id": 0, "id_1": 0}]
    assert ids_of(ds.union(data.range(2)).select_columns(["id"]).take_all())[-2:] == [0, 1]
    assert ds.add_column("z", lambda frame: frame["x"] * 2).take(2)[1]["z"] == 1.0
    assert (ds.sum("id"), ds.min("x"), ds.max("id"), ds.mean("x")) == (7140, 0.0, 119, 29.75)
    assert ids_of(ds.random_sample(0.5, seed=1).take_all()) == ids_of(
        ds.random_sample(0.5, seed=1).iter_rows()
    )
    for parts in (ds.split(7), ds.random_shuffle(seed=2).train_test_split(0.1)):
        assert sorted(one for part in parts for one in ids_of(part.take_all())) == list(range(120))
    assert {one.count() for one in ds.split(7, equal=True)} == {17}
    assert ds.repartition(4).count() == 120


@pytest.mark.parametrize("form", ["numpy", "pandas", "pyarrow"])
def test_functions_of_batches_get_the_form_that_they_ask_for(form: str) -> None:
    kinds = {"numpy": dict, "pandas": "DataFrame", "pyarrow": pa.Table}

    def check(batch: Any) -> Any:
        kind = kinds[form]
        assert type(batch).__name__ == kind if isinstance(kind, str) else type(batch) is kind
        assert len(batch["id"]) <= 4
        return batch

    ds = data.range(10).map_batches(check, batch_format=form, batch_size=4)
    assert ids_of(ds.take_all()) == list(range(10))


def test_a_class_keeps_its_state_and_arrays_keep_their_shape() -> None:
    class Scale:
        made = 0

        def __init__(self, factor: int) -> None:
            Scale.made += 1
            self.factor = factor

        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            return {
                "x": np.ones((len(batch["id"]), 2, 3)) * self.factor,
                "t": torch.ones(len(batch["id"])),
            }

    ds = data.range(20).map_batches(Scale, batch_size=5, fn_constructor_args=[3], concurrency=2)
    batches = list(ds.iter_torch_batches(batch_size=8, dtypes={"x": torch.float16}))
    assert [tuple(one["x"].shape) for one in batches] == [(8, 2, 3), (8, 2, 3), (4, 2, 3)]
    assert batches[0]["x"].dtype is torch.float16
    assert float(batches[2]["x"].sum()) == 72
    assert Scale.made == 1
    with pytest.raises(UsageError, match=r"column 'item' holds str .* drop_columns"):
        next(iter(data.from_items(["a", "b"]).iter_torch_batches()))


def test_functions_may_write_to_what_they_get_and_change_no_row_of_the_dataset() -> None:
    def halve(batch: dict[str, Any]) -> dict[str, Any]:
        batch["data"] /= 2
        return batch

    given = np.ones((4, 2))
    for ds in (data.from_numpy(given), data.from_numpy(given).materialize()):
        halved = ds.map_batches(halve).map(halve)
        for _ in range(2):
            assert halved.take_batch()["data"].tolist() == [[0.25, 0.25]] * 4
            for batch in ds.iter_torch_batches():
                batch["data"] *= 3
    assert given.sum() == 8

    def grow(row: dict[str, Any]) -> dict[str, Any]:
        row["x"][0] += 1
        row["y"]["n"] = 9
        return row

    uneven = data.from_items([{"x": np.zeros(n + 1), "y": {"n": n}} for n in range(2)])
    for _ in range(2):
        assert [row["x"][0] for row in uneven.map(grow).take()] == [1, 1]
    assert [(row["x"].sum(), row["y"]["n"]) for row in uneven.take()] == [(0, 0), (0, 1)]


def test_rows_have_what_is_missing_and_times_as_they_are(tmp_path: Path) -> None:
    big = 2**60 + 1
    columns = {
        "n": pa.array([big, None]),
        "t": pa.array([1_700_000_000_123_456_789, None], pa.timestamp("ns", "Europe/Berlin")),
        "d": pa.array([1, None], pa.duration("ns")),
        "u": pa.array([2**63 + 1, None], pa.uint64()),
        "c": pa.array(["a", None]).dictionary_encode(),
        "x": pa.array([1.5, None]),
        "b": pa.array([True, None]),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    ds = data.read_parquet(tmp_path)
    first, second = ds.take()
    assert (first["n"], first["c"], first["x"], first["b"]) == (big, "a", 1.5, True)
    assert first["t"].isoformat() == "2023-11-14T23:13:20.123456789+01:00"
    assert second == dict.fromkeys(columns)
    assert ds.filter(lambda row: row["n"] is not None).count() == 1
    again = ds.map(lambda row: row)
    assert again.schema().field("t").type == pa.timestamp("ns", "Europe/Berlin")
    assert data.from_arrow(again.to_arrow()).take() == [first, second]
    frames = ds.select_columns(["c", "b"]).map_batches(lambda f: f, batch_format="pandas")
    assert frames.take() == [{"c": "a", "b": True}, {"c": None, "b": None}]
    times = data.range(1).map_batches(lambda b: {"t": b["id"].astype("datetime64[ns]")})
    assert times.take()[0]["t"].year == 1970
    beside = data.read_parquet(tmp_path).zip(data.range(2).map_batches(lambda b: {"m": b["id"]}))
    assert beside.take(1)[0]["n"] == big


def test_columns_that_some_rows_lack_are_missing_there() -> None:
    ds = data.from_items([{"a": 1}]).union(data.from_items([{"a": 2, "b": "x"}]))
    assert [batch["b"].tolist() for batch in ds.iter_batches()] == [[None, "x"]]
    numbers = data.from_items([{"a": 1}]).union(ds.map(lambda row: {"a": 3, "c": 1}), ds)
    assert numbers.take(2) == [{"a": 1, "c": None, "b": None}, {"a": 3, "c": 1, "b": None}]
    assert [sorted(one) for one in numbers.iter_batches(batch_size=1)] == [["a", "b", "c"]] * 5
    late = data.range(2000).map(lambda row: row if row["id"] < 1500 else {**row, "late": 1})
    assert late.to_pandas()["late"].sum() == 500
    assert ds.sum("a") == 3
    (batch,) = data.from_items([{"a": 1}, {"a": None}]).iter_torch_batches()
    assert batch["a"].nan_to_num(-1).tolist() == [1, -1]


def test_batches_may_be_iterated_over_again() -> None:
    ds = data.range(5)
    shard = ds.iterator()
    for batches in (
        ds.iter_batches(batch_size=2), ds.iter_torch_batches(batch_size=2),
        shard.iter_batches(batch_size=2), shard.iter_torch_batches(batch_size=2),
    ):  # fmt: skip
        assert [sum(len(one["id"]) for one in batches) for _ in range(2)] == [5, 5]
    for rows in (ds.iter_rows(), shard.iter_rows()):
        assert [ids_of(rows) for _ in range(2)] == [[0, 1, 2, 3, 4]] * 2
    assert not list(ds.limit(0).iterator().iter_batches())


def test_what_lies_in_memory_is_read_too(tmp_path: Path) -> None:
    frame = data.from_items([{"a": 1, "b": [1, 2]}, {"a": 2, "b": [3, 4]}]).to_pandas()
    assert data.from_pandas(frame).take_batch(2)["b"].tolist() == [[1, 2], [3, 4]]
    numbers = pa.table({"a": [1, 2]})
    assert data.from_arrow(numbers, override_num_blocks=1).take(1) == [{"a": 1}]
    frames = SimpleNamespace(
        to_arrow=lambda: numbers,  # As of Daft.
        toArrow=lambda: numbers,  # As of Spark.
        compute=numbers.to_pandas,  # As of Dask.
        iter_batches=lambda **_: iter([numbers]),  # As of Ray.
    )
    for read in (data.from_daft, data.from_spark, data.from_dask, data.from_ray):
        assert read(frames).sum("a") == 3
    assert data.from_numpy(np.eye(3)).take_batch()["data"].shape == (3, 3)
    pairs = torch.utils.data.TensorDataset(torch.arange(5), torch.arange(5) * 2)
    assert [int(row["item"][1]) for row in data.from_torch(pairs).take_all()] == [0, 2, 4, 6, 8]
    import datasets

    plain = datasets.Dataset.from_dict({"a": [1, 2, 3]})
    assert data.from_huggingface(plain).sum("a") == 6
    stream = plain.to_iterable_dataset()
    assert data.from_huggingface(stream).sum("a") == 6
    with pytest.raises(UsageError, match=r"dataset\['train'\]"):
        data.from_huggingface(datasets.DatasetDict({"train": plain}))


def test_what_is_written_is_read_again(tmp_path: Path, table: Path) -> None:
    ds = data.read_parquet(table)
    for ending in ("parquet", "csv", "json"):
        getattr(ds, f"write_{ending}")(tmp_path / ending)
        assert getattr(data, f"read_{ending}")(tmp_path / ending).take_all() == ds.take_all()


def test_arrays_and_images_are_written_and_batches_come_as_asked_for(tmp_path: Path) -> None:
    data.range_tensor(3, shape=(2, 2)).write_json(tmp_path / "json")
    assert data.read_json(tmp_path / "json").take_batch()["data"][2].tolist() == [[2, 2]] * 2
    data.range_tensor(3, shape=(2, 2)).write_numpy(tmp_path / "npy")
    assert data.read_numpy(tmp_path / "npy").take_batch()["data"][:, 1, 1].tolist() == [0, 1, 2]
    images = data.from_items([{"image": np.full((4, 4, 3), n, np.uint8)} for n in range(3)])
    images.write_images(tmp_path / "images", column="image")
    again = data.read_images(tmp_path / "images").take_batch()["image"]
    assert again[:, 0, 0, 0].tolist() == [0, 1, 2]
    lists = data.from_items([{"t": ["a", "b"]}, {"t": ["c", "d"]}])
    assert str(lists.schema().field("t").type) == "list<item: string>"

    class Summed(ArrowBatchCollateFn):
        def __call__(self, batch: Any) -> Any:
            return sum(batch.column("id").to_pylist())

    for rows in (data.range(4), data.range(4).iterator()):
        assert list(rows.iter_torch_batches(collate_fn=Summed())) == [6]
        with pytest.raises(UsageError, match=r"dtypes=torch.int8 is for batches without collate_"):
            rows.iter_torch_batches(collate_fn=Summed(), dtypes=torch.int8)

    class Raw(ArrowBatchCollateFn):
        def __call__(self, batch: Any) -> Any:
            return np.frombuffer(batch.column("id").chunk(0).buffers()[1], np.int64).tolist()

    found = data.from_arrow(pa.table({"id": [5, 6]})).iter_torch_batches(
        batch_size=1, collate_fn=Raw()
    )
    assert list(found) == [[5], [6]]
    pairs = data.range(4).iter_torch_batches(
        device="meta", collate_fn=lambda batch: (torch.as_tensor(batch["id"]), {"n": len(batch)})
    )
    [(ids, rest)] = pairs
    assert ids.is_meta
    assert rest == {"n": 1}
    with pytest.raises(UsageError, match=r"column=None: expected one of \['id', 'x'\]"):
        data.range(2).with_column("x", lit(1)).write_numpy(tmp_path / "two")


@pytest.mark.parametrize(
    "lists",
    [
        [[[1], [2, 3]], [[4], [5, 6]]], [[1, 2], None, [3]], [["a"], ["b", "c"]],
        [[1.5, None], [2]], [[["a"], ["b", "c"]], []], [[], [1]],
        [[[]], [[1, 2], [3, 4]]], [None, None], [["a"], [], None], [[{"a": 1}], []],
        [[[1], [2, 3]], [[1, 2], [3, 4]], None, []],
    ],
)  # fmt: skip
def test_lists_of_any_lengths_become_arrays_or_stay_lists(lists: Any) -> None:
    def plain(value: Any) -> Any:
        return value.tolist() if isinstance(value, np.ndarray) else value

    found = data.from_arrow(pa.table({"x": pa.array([None, *lists])}).slice(1)).take_all()
    assert [plain(row["x"]) for row in found] == lists
    again = data.from_items(found).map(lambda row: row).to_arrow()
    assert [plain(row["x"]) for row in data.from_arrow(again).take_all()] == lists


def test_arrays_of_several_shapes_are_kept_with_their_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "GROUP_ROWS", 1024)
    shapes = [(n % 5 + 1, n % 3 + 2, 3) for n in range(40)] + [(2, 2, 3)] * 1100

    def image(row: dict[str, Any]) -> dict[str, Any]:
        return {"x": np.full(shapes[row["id"]], row["id"] % 200, np.uint8), "id": row["id"]}

    ds = data.range(len(shapes)).map(image)
    ds.limit(40).write_parquet(tmp_path / "out")
    again = data.read_parquet(tmp_path / "out")
    assert str(again.schema().field("x").type) == (
        "list<element: list<element: fixed_size_list<element: uint8>[3]>>"
    )
    # The second row group holds arrays of one shape, so it lies in a file of its own.
    part = write_part(ds.filter(lambda row: True).node.stream(), Files(str(tmp_path)), "kept")
    table = Table((part,))
    assert len(part.files) == 2
    kept = TableReader(table, table.lanes(1, 1)).read(0, np.arange(table.rows))
    ds.write_parquet(tmp_path / "all")
    written = data.read_parquet(tmp_path / "all")
    for rows in (again.take_all(), data.from_arrow([kept]).iter_rows(), written.iter_rows()):
        for row in rows:
            assert row["x"].dtype == np.uint8
            assert np.array_equal(row["x"], image(row)["x"])
            row["x"][:] = 0  # A function may.


def test_no_more_rows_are_written_at_once_than_a_row_group_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writing, "GROUP_BYTES", 4000)
    images = data.from_items([{"x": np.zeros(1000, np.uint8)} for _ in range(10)])
    assert [one.num_rows for one in writing._row_groups(images.node.stream())] == [4, 4, 2]


def test_what_is_written_is_added_or_replaces_or_is_left(tmp_path: Path) -> None:
    for ending in ("parquet", "csv", "json"):
        folder = tmp_path / ending
        write = f"write_{ending}"
        read = getattr(data, f"read_{ending}")
        getattr(data.range(3), write)(folder)
        getattr(data.range(2), write)(folder, mode=data.SaveMode.APPEND)
        assert ids_of(read(folder).iter_rows()) == [0, 1, 2, 0, 1]
        getattr(data.range(9), write)(folder, mode="ignore")
        with pytest.raises(UsageError, match=rf"holds part-00000.{ending} already"):
            getattr(data.range(9), write)(folder, mode="error")
        getattr(data.range(4), write)(folder, mode=data.SaveMode.OVERWRITE)
        assert ids_of(read(folder).iter_rows()) == [0, 1, 2, 3]
    with pytest.raises(UsageError, match="mode='new': expected one of append, overwrite, ignore"):
        data.range(1).write_csv(tmp_path / "csv", mode="new")
    for _ in range(2):
        data.range(4).add_column("k", lambda f: f["id"] % 2).write_parquet(
            tmp_path / "folders", partition_cols=["k"]
        )
    assert data.read_parquet(tmp_path / "folders").count() == 8


@pytest.mark.parametrize("ending", ["parquet", "csv", "json"])
def test_what_is_replaced_is_there_until_all_is_written(tmp_path: Path, ending: str) -> None:
    def rows_in(ds: Any) -> list[int]:
        return sorted(ids_of(ds.iter_rows()))

    folder, read = tmp_path / "out", getattr(data, f"read_{ending}")
    write = f"write_{ending}"
    getattr(data.range(9), write)(folder, max_rows_per_file=4)
    broken = read(folder).map(lambda row: {"id": 1 // (row["id"] - 8)})
    with pytest.raises(ZeroDivisionError):
        getattr(broken, write)(folder, mode="overwrite")
    assert rows_in(read(folder)) == [*range(9)]
    there = sorted(folder.iterdir())
    for mode in ("overwrite", "append"):
        with pytest.raises(ZeroDivisionError):
            getattr(broken, write)(folder, mode=mode, max_rows_per_file=2)
        assert sorted(folder.iterdir()) == there
    getattr(read(folder).filter(lambda row: row["id"] > 4), write)(folder, mode="overwrite")
    assert rows_in(read(folder)) == [5, 6, 7, 8]


def test_folders_of_columns_are_replaced(tmp_path: Path) -> None:
    zstd = {"compression": "zstd"}
    for count in (9, 3):
        ds = data.range(count).add_column("k", lambda f: f["id"] % 2)
        given: Any = zstd if count == 9 else {"arrow_parquet_args_fn": lambda: zstd}
        ds.write_parquet(tmp_path, partition_cols=["k"], mode="overwrite", **given)
    (file,) = tmp_path.glob("k=1/*.parquet")
    assert pq.ParquetFile(file).metadata.row_group(0).column(0).compression == "ZSTD"
    assert sorted(ids_of(data.read_parquet(tmp_path).iter_rows())) == [0, 1, 2]


def test_of_folders_that_fail_nothing_stays(tmp_path: Path) -> None:
    def fail(row: dict[str, Any]) -> dict[str, Any]:
        return {"id": 1 // (row["id"] - 199_999), "k": row["id"] % 2}

    data.range(4).add_column("k", lambda f: f["id"] % 2).write_parquet(
        tmp_path, partition_cols=["k"]
    )
    there = sorted(tmp_path.rglob("*.parquet"))
    with pytest.raises(Exception, match="by zero"):
        data.range(200_000).map(fail).write_parquet(tmp_path, partition_cols=["k"])
    assert sorted(tmp_path.rglob("*.parquet")) == there


def test_an_older_file_of_the_name_that_folders_files_begin_with_is_replaced(
    tmp_path: Path,
) -> None:
    class Fixed(FilenameProvider):
        def get_filename_for_block(self, *given: Any) -> str:
            return "data.parquet"

    ds = data.range(4).add_column("k", lambda f: f["id"] % 2)
    ds.write_parquet(tmp_path, filename_provider=Fixed())
    ds.write_parquet(tmp_path, partition_cols=["k"], mode="overwrite", filename_provider=Fixed())
    assert not (tmp_path / "data.parquet").exists()
    assert data.read_parquet(tmp_path).count() == 4


def test_what_another_process_has_deleted_is_replaced_too(tmp_path: Path) -> None:
    data.range(4).write_parquet(tmp_path)

    def delete(row: dict[str, Any]) -> dict[str, Any]:
        (tmp_path / "part-00000.parquet").unlink(missing_ok=True)
        return row

    data.range(3).map(delete).write_parquet(tmp_path, mode="overwrite")
    assert data.read_parquet(tmp_path).count() == 3


class Named(FilenameProvider):
    def get_filename_for_task(self, write_uuid: str, task_index: int) -> str:
        return f"mine-{task_index}.{self.file_format}"


def test_files_are_named_as_asked_for(tmp_path: Path) -> None:
    for ending in ("parquet", "csv", "json"):
        for rows in (9, 7):
            named = Named(file_format=ending)
            write = getattr(data.range(rows), f"write_{ending}")
            write(tmp_path / ending, filename_provider=named, max_rows_per_file=4)
        names = sorted(one.name for one in (tmp_path / ending).iterdir())
        assert names == [f"mine-{number}.{ending}" for number in range(3)]
    ds = data.range(4).add_column("k", lambda f: f["id"] % 2)
    ds.write_parquet(tmp_path / "k", partition_cols=["k"], filename_provider=Named(None, "pq"))
    assert sorted(one.name for one in (tmp_path / "k/k=0").iterdir()) == ["mine-0-0.pq"]

    class OfRows(FilenameProvider):
        def get_filename_for_row(self, row: Any, *numbers: Any) -> str:
            return f"{row['label']}_{numbers[-1]:06}.png"

        def get_filename_for_block(self, block: Any, *numbers: Any) -> str:
            return f"{block['label'][0].as_py()}.json"

    pixels = np.zeros((3, 2, 2), np.uint8)
    images = data.from_items([{"image": p, "label": n} for p, n in zip(pixels, "aab", strict=True)])
    images.write_images(tmp_path / "rows", "image", filename_provider=OfRows())
    assert data.read_images(tmp_path / "rows", include_paths=True).count() == 3
    images.write_images(tmp_path / "more", "image", filename_provider=Named(None, "png"))
    names = sorted(one.name for part in ("rows", "more") for one in (tmp_path / part).iterdir())
    derived = [f"mine-0_000000_00000{number}.png" for number in range(3)]
    assert names == ["a_000000.png", "a_000001.png", "b_000002.png", *derived]
    with pytest.raises(UsageError, match=r"OfRows has named two files 'a\.json': expected names"):
        images.write_json(tmp_path / "no", filename_provider=OfRows(), max_rows_per_file=1)
    default = FilenameProvider("d", "json").get_filename_for_task("u", 3)
    assert default == "d_u_000003.json"


def test_parquet_is_filtered_and_raw_arrays_are_read_as_ray_does(tmp_path: Path) -> None:
    arrays = np.arange(24, dtype=np.int16).reshape(4, 2, 3)
    columns = {"a.b": range(4), "x": [0.5, 1.5, 2.5, 3.5], "raw": [one.tobytes() for one in arrays]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    chosen = data.read_parquet(tmp_path, columns=["a.b"], filter=pc.field("x") > 1)
    assert chosen.take() == [{"a.b": 1}, {"a.b": 2}, {"a.b": 3}]
    assert data.read_parquet(tmp_path, columns=["a.b"]).sum() == 6
    kinds = {"raw": (np.int16, (2, 3))}
    ds = data.read_parquet(tmp_path, tensor_column_schema=kinds)
    assert np.array_equal(ds.take_batch()["raw"], arrays)


@pytest.mark.parametrize("ending", ["parquet", "csv", "json"])
def test_errors_of_functions_are_not_those_of_storage(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(row: dict[str, Any]) -> dict[str, Any]:
        return {"x": 1 / (2999 - row["id"])}

    monkeypatch.setattr(writing, "GROUP_ROWS", 1024)
    with pytest.raises(ZeroDivisionError):
        getattr(data.range(3000).map(late), f"write_{ending}")(tmp_path / "out")
    assert not [*tmp_path.glob("out/*")]


def test_columns_are_written_in_one_order_and_types_may_come_late(tmp_path: Path) -> None:
    late = data.range(3000).map(lambda row: {"id": row["id"], "x": None if row["id"] < 2900 else 1})
    swapped = data.from_items([{"x": 7, "id": -1}])
    late.union(swapped).write_csv(tmp_path / "csv")
    lines = (tmp_path / "csv" / "part-00000.csv").read_text().splitlines()
    assert (lines[0], lines[1], lines[-1], len(lines)) == ('"id","x"', "0,", "-1,7", 3002)
    ids = range(3000)
    holes = pa.table({"id": ids, "n": [None if n == 2500 else n for n in ids]})
    numbers = (
        data.from_arrow(holes)
        .map_batches(lambda batch: batch)
        .flat_map(lambda row: [row] if row["id"] > 1023 else [])
    )
    for ending in ("parquet", "csv", "json"):
        getattr(numbers, f"write_{ending}")(tmp_path / f"n-{ending}", max_rows_per_file=900)
        again = getattr(data, f"read_{ending}")(tmp_path / f"n-{ending}").to_arrow()
        assert again == holes.slice(1024)
    other = data.range(3000).map_batches(lambda b: b if b["id"][0] < 1000 else {"y": b["id"]})
    with pytest.raises(UsageError, match=r"write_csv: some rows have the columns \['y'\]"):
        other.write_csv(tmp_path / "no")


def test_numbers_are_not_rounded_to_the_type_of_the_first_ones(tmp_path: Path) -> None:
    numbers = [np.float16([1.5]), np.float32([70_000]), np.float64([1_700_000_001])]
    first, *others = (data.from_numpy(one) for one in numbers)
    first.union(*others).write_parquet(tmp_path)
    values = [row["data"] for row in data.read_parquet(tmp_path).take_all()]
    assert values == [1.5, 70_000, 1_700_000_001]


def test_files_have_as_many_rows_as_asked_for(tmp_path: Path) -> None:
    ds = data.range(10).union(data.range(13)).map(lambda row: {"id": row["id"]})
    for ending in ("parquet", "csv", "json"):
        folder = tmp_path / ending
        getattr(ds, f"write_{ending}")(folder, max_rows_per_file=7)
        read = getattr(data, f"read_{ending}")
        assert [read(one).count() for one in sorted(folder.iterdir())] == [7, 7, 7, 2]
        assert read(folder).take_all() == ds.take_all()
    halves = ds.add_column("half", lambda frame: frame["id"] > 5)
    halves.write_parquet(tmp_path / "folders", partition_cols=["half"], max_rows_per_file=5)
    counts = [len(pq.read_table(one)) for one in (tmp_path / "folders").rglob("*.parquet")]
    assert sorted(counts) == [1, 2, 5, 5, 5, 5]
    with pytest.raises(UsageError, match="write_csv: rows per file=0: expected an int from 1"):
        ds.write_csv(tmp_path / "no", min_rows_per_file=0)


def test_json_has_no_nan_and_texts_for_bytes_and_times(tmp_path: Path) -> None:
    time = pd.Timestamp("2024-01-02 03:04:05")
    lists = {"l": [1.0, math.inf], "d": {"n": np.int8(3)}}
    row = {"t": time, "b": "ä".encode(), "x": math.nan, **lists}
    data.from_items([row]).write_json(tmp_path / "json")
    (written,) = (tmp_path / "json").iterdir()
    text = '{"t": "2024-01-02 03:04:05", "b": "ä", "x": null, "l": [1.0, null], "d": {"n": 3}}'
    assert json.loads(written.read_text()) == json.loads(text)
    assert data.read_json(written).take()[0]["t"] == time
    with pytest.raises(UsageError, match="column 'raw' holds bytes that are no UTF-8 text"):
        data.from_items([{"raw": b"\xff"}]).write_json(tmp_path / "no")


def test_other_files_become_rows(tmp_path: Path) -> None:
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"id,s\n1,x\n2,y\n"))
    assert data.read_csv(tmp_path / "a.csv.gz").take_all() == [
        {"id": 1, "s": "x"},
        {"id": 2, "s": "y"},
    ]
    (tmp_path / "list.json").write_text(json.dumps([{"a": 1}, {"a": 2}]))
    assert data.read_json(tmp_path / "list.json").sum("a") == 3
    (tmp_path / "t.txt").write_text("one\n\ntwo")
    assert data.read_text(tmp_path / "t.txt").take_all() == [{"text": "one"}, {"text": "two"}]
    np.save(tmp_path / "n.npy", np.arange(6).reshape(3, 2))
    assert data.read_numpy(tmp_path / "n.npy").take_batch()["data"].tolist() == [
        [0, 1],
        [2, 3],
        [4, 5],
    ]
    for alike in ([np.array([b"a"]), np.array([b"bc"])], [np.ones(1, "<f4"), np.ones(1, ">f4")]):
        for number, values in enumerate(alike):
            np.save(tmp_path / f"alike{number}.npy", values)
        assert data.read_numpy(tmp_path / "alike*.npy").count() == 2
    np.save(tmp_path / "x.npy", np.ones(3))
    with pytest.raises(DataError, match=r"it is int64 in .*n.npy and float64 in .*x.npy"):
        data.read_numpy([tmp_path / "n.npy", tmp_path / "x.npy"]).take_all()
    for size in (4, 6):
        Image.new("RGB", (size, 5), (size, 0, 0)).save(tmp_path / f"{size}.png")
    images = data.read_images(tmp_path, size=(8, 9), include_paths=True)
    assert images.take_batch()["image"].shape == (2, 8, 9, 3)
    assert [row["path"][-5:] for row in images.take_all()] == ["4.png", "6.png"]
    binary = data.read_binary_files(tmp_path / "t.txt")
    assert binary.take_all() == [{"bytes": b"one\n\ntwo"}]


def test_columns_without_a_value_take_the_type_of_other_files(tmp_path: Path) -> None:
    for name, values in (("a", [None]), ("b", [1, 2]), ("c", [None, 3])):
        pq.write_table(pa.table({"id": values, "s": pa.nulls(len(values))}), tmp_path / name)
    ds = data.read_parquet(tmp_path, file_extensions=None)
    assert [row["id"] for row in ds.take_all()] == [None, 1, 2, None, 3]
    assert ds.schema().field("id").type == pa.int64()
    pq.write_table(pa.table({"id": ["x"], "s": ["y"]}), tmp_path / "d")
    with pytest.raises(DataError, match=r"column 'id' is int64 in .* and string in .*/d"):
        data.read_parquet(tmp_path, file_extensions=None).count()
    folder = tmp_path / "csv"
    folder.mkdir()
    (folder / "a.csv").write_text("id,s\n")
    (folder / "b.csv").write_text("id,s\n,\n")
    (folder / "c.csv").write_text("id,s\n1,x\n")
    assert data.read_csv(folder).take_all() == [{"id": None, "s": None}, {"id": 1, "s": "x"}]
    (folder / "d.csv").write_text("id,s\nx,x\n")
    with pytest.raises(DataError, match=r"d.csv: .*conversion error to int64"):
        data.read_csv(folder).count()
    json_files = tmp_path / "json"
    json_files.mkdir()
    (json_files / "a.json").write_text('{"id": null, "l": []}\n')
    (json_files / "b.json").write_text('{"id": 1, "l": ["x"]}\n{"l": ["y"]}\n')
    rows = data.read_json(json_files).take_all()
    assert [row["id"] for row in rows] == [None, 1, None]
    assert [list(row["l"]) for row in rows] == [[], ["x"], ["y"]]


def test_how_values_are_stored_is_no_other_schema(tmp_path: Path) -> None:
    few, many = pd.Categorical(["a", "b"]), pd.Categorical([f"{n:03}" for n in range(300)])
    for name, values in (("0", few), ("1", many), ("2", pa.array(["c"], pa.large_string()))):
        pq.write_table(pa.table({"x": pa.array(values)}), tmp_path / name)
    ds = data.read_parquet(tmp_path, file_extensions=None)
    assert [row["x"] for row in ds.take_all()] == ["a", "b", *many, "c"]
    (whole,) = ds.random_shuffle(seed=1).iterator().iter_batches(batch_size=400)
    assert sorted(whole["x"]) == sorted(["a", "b", *many, "c"])
    lists = tmp_path / "lists"
    lists.mkdir()
    kinds = [pa.list_(pa.int64()), pa.large_list(pa.int64()), pa.list_(pa.int64(), 2)]
    for number, kind in enumerate(kinds):
        pq.write_table(pa.table({"x": pa.array([[number, 1]], kind)}), lists / f"{number}.parquet")
    assert data.read_parquet(lists).take_batch()["x"].tolist() == [[0, 1], [1, 1], [2, 1]]
    wide = tmp_path / "wide"
    wide.mkdir()
    for number, values in enumerate(([1], [0.5])):
        pq.write_table(pa.table({"x": values}), wide / f"{number}.parquet")
    with pytest.raises(DataError, match=r"column 'x' is int64 .*schema=..."):
        data.read_parquet(wide).count()
    floats = pa.schema([("x", pa.float64())])
    assert data.read_parquet(wide, schema=floats).take_batch()["x"].tolist() == [1, 0.5]
    (tmp_path / "a.csv").write_text("x,x\n1,2\n")
    with pytest.raises(DataError, match=r"a.csv has several columns 'x'"):
        data.read_csv(tmp_path / "a.csv").take()


def test_quoted_values_have_any_number_of_lines(tmp_path: Path) -> None:
    rows = [{"id": n, "t": f'{n}\n"quoted", {"y" * (n % 70)}\n'} for n in range(20_000)]
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["id", "t"])
        writer.writeheader()
        writer.writerows(rows)
    assert data.read_csv(tmp_path).take_all() == rows


def test_options_of_one_read_are_not_those_of_another(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x\n1\n")
    (tmp_path / "b.csv").write_text("x\none\n")
    options = pyarrow.csv.ConvertOptions(strings_can_be_null=True)
    for name, expected in (("a", 1), ("b", "one")):
        ds = data.read_csv(tmp_path / f"{name}.csv", convert_options=options)
        assert ds.take() == [{"x": expected}]


@pytest.mark.parametrize("is_list", [False, True])
def test_each_json_object_has_all_columns(tmp_path: Path, is_list: bool) -> None:
    def write(name: str, rows: list[Any]) -> None:
        text = json.dumps(rows) if is_list else "\n".join(map(json.dumps, rows))
        (tmp_path / name).write_text(text)

    write("a.json", [{"a": 1}, {"b": "x", "a": 2}])
    assert data.read_json(tmp_path).take_all() == [{"a": 1, "b": None}, {"a": 2, "b": "x"}]
    write("a.json", [{"a": {"b": 1}}, {"a": {"c": "x"}}])
    rows = [{"a": {"b": 1, "c": None}}, {"a": {"b": None, "c": "x"}}]
    assert data.read_json(tmp_path).take_all() == rows
    write("a.json", [{"a": 1}, {"b": "x", "a": 2}])
    write("b.json", [{"a": 3}, {"a": "four"}, 5])
    with pytest.raises(DataError, match=r"b.json, (line 2|item 3)"):
        data.read_json(tmp_path).count()
    left = data.read_json(tmp_path, on_error="skip")
    assert [row["a"] for row in left.take_all()] == [1, 2, 3]
    assert "2 rows left out" in left.stats()
    write("b.json", [{"a": 3}, {"c": "four"}])
    with pytest.raises(DataError, match=r"b.json.* has the column 'c', which .*a.json begins"):
        data.read_json(tmp_path).count()


def test_texts_of_a_json_list_are_texts_also_if_they_are_those_of_times(tmp_path: Path) -> None:
    first = [{"t": "2024-01-02", "in": ["2024-01-02"], "late": None, "e": {}}]
    others = [{"t": "spring", "in": [], "late": "2024-01-02"}, {"t": "2024-01-02", "late": "x"}]
    for name, rows in (("a", first), ("b", others)):
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    found = data.read_json(tmp_path).take_all()
    assert [row["t"] for row in found] == ["2024-01-02", "spring", "2024-01-02"]
    assert [row["late"] for row in found] == [None, "2024-01-02", "x"]
    assert list(found[0]["in"]) == ["2024-01-02"]


def test_one_bad_line_costs_no_other(tmp_path: Path) -> None:
    good = '{"t": "2024-01-0%d 10:00:00", "n": %d}'
    (tmp_path / "a.json").write_text("\n".join(good % (n, n) for n in (1, 2)))
    lines = [good % (3, 3), '{"t": oh', good % (4, 4), '{"t": "never", "n": 5}', good % (6, 6)]
    (tmp_path / "b.json").write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"b.json, line 2 "):
        data.read_json(tmp_path).count()
    ds = data.read_json(tmp_path, on_error="skip")
    assert [(row["n"], row["t"].day) for row in ds.take_all()] == [(n, n) for n in (1, 2, 3, 4, 6)]
    (tmp_path / "a.json").write_text('{"n": 1}\n{"n": 2.5}\n{"n": "x"}\n{"n": 4}\n')
    with pytest.raises(DataError, match=r"a.json, line 3 "):
        data.read_json(tmp_path / "a.json").count()
    ds = data.read_json(tmp_path / "a.json", on_error="skip")
    assert [row["n"] for row in ds.take_all()] == [1, 2.5, 4]
    assert ds.count() == 3
    assert "1 rows left out" in ds.stats()  # In each of two passes.
    (tmp_path / "c.json").write_bytes(b'{"s": "x"}\n{"s": "\xff"}\n')
    with pytest.raises(DataError, match=r"c.json, line 2 .*Invalid UTF8"):
        data.read_json(tmp_path / "c.json").take()


def test_texts_have_any_encoding_and_compression(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("eins\r\n\nzwölf\n".encode("utf-16"))
    ds = data.read_text(tmp_path / "a.txt", encoding="utf-16", drop_empty_lines=False)
    assert [row["text"] for row in ds.take_all()] == ["eins", "", "zwölf"]
    with pytest.raises(DataError, match=r"a.txt, line 1 and on: .*utf-8"):
        data.read_text(tmp_path / "a.txt").count()
    with pa.CompressedOutputStream(str(tmp_path / "a.csv.zst"), "zstd") as file:
        file.write(b"id\n1\n2\n")
    assert data.read_csv(tmp_path / "a.csv.zst").sum("id") == 3
    (tmp_path / "packed").write_bytes(gzip.compress(b"id\n3\n"))
    packed = data.read_csv(tmp_path / "packed", arrow_open_stream_args={"compression": "gzip"})
    assert packed.sum("id") == 3
    whole = gzip.compress(b"".join(b'{"id": %d}\n' % n for n in range(3000)))
    (tmp_path / "a.json.gz").write_bytes(whole[:-20])
    with pytest.raises(DataError, match=r"cannot read .*a.json.gz: .*EOFError"):
        data.read_json(tmp_path / "a.json.gz").count()
    (tmp_path / "b.json.gz").write_bytes(whole)
    both = data.read_json(f"{tmp_path}/*.json.gz", on_error="skip")
    assert both.count() >= 3000
    assert "1 files left out" in both.stats()


def test_broken_images_are_named_or_left_out(tmp_path: Path) -> None:
    for name in "abc":
        Image.new("RGB", (4, 5), (9, 0, 0)).save(tmp_path / f"{name}.png")
    whole = (tmp_path / "b.png").read_bytes()
    (tmp_path / "b.png").write_bytes(whole[:50])
    (tmp_path / "empty.png").touch()
    with pytest.raises(DataError, match=r"b.png cannot be decoded"):
        data.read_images(tmp_path).take_all()
    ds = data.read_images(tmp_path, on_error="skip", include_paths=True)
    assert [row["path"][-5:] for row in ds.take_all()] == ["a.png", "c.png"]
    assert ds.count() == 2
    assert "2 files left out" in ds.stats()
    for row in ds.take():
        row["image"][:] = 0  # A function may.


def test_large_files_are_read_one_by_one(tmp_path: Path) -> None:
    for number, size in enumerate([1, 1, 9 * 1024**2, 1, 8 * 1024**2]):
        (tmp_path / f"{number}").write_bytes(bytes(size))
    ds = data.read_binary_files(tmp_path)
    assert [len(row["bytes"]) for row in ds.take_all()] == [1, 1, 9 * 1024**2, 1, 8 * 1024**2]
    assert ds.num_blocks() == 4


# --------------------------------------------------------------------- what is refused


def test_a_broken_file_and_a_changed_schema_are_named_or_left_out(table: Path) -> None:
    pq.write_table(pa.table({"id": ["text"], "x": [1.0], "name": ["n"]}), table / "3.parquet")
    with pytest.raises(DataError, match=r"column 'id' is int64 in .*0.parquet and string in .*3.p"):
        data.read_parquet(table).count()
    (table / "4.parquet").write_bytes(b"PAR1 nothing of the kind PAR1")
    ds = data.read_parquet(table, on_error="skip")
    assert ds.count() == 120
    assert "2 files left out" in ds.stats()
    assert data.read_parquet(table, columns=["x", "name"], on_error="skip").count() == 121


def test_a_bad_row_is_named_or_left_out_with_a_count(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n1,2\n3\n5,6\n")
    with pytest.raises(DataError, match=r"a.csv: .*Row #3"):
        data.read_csv(tmp_path / "a.csv").count()
    ds = data.read_csv(tmp_path / "a.csv", on_error="skip")
    assert ds.sum("a") == 6
    assert "1 rows left out" in ds.stats()
    rows = [f'{n},"t\n{n}"\n' for n in range(99_999)]
    rows[3], rows[90_000], rows[90_003], rows[90_005] = "4\n", "x,\n", ",0\n", "5\n"
    (tmp_path / "b.csv").write_text("a,b\n" + "".join(rows))
    ds = data.read_csv(tmp_path / "b.csv", on_error="skip")
    found = ds.to_arrow()
    assert found.schema == pa.schema([("a", pa.int64()), ("b", pa.string())])
    kept = [n for n in range(99_999) if n not in (3, 90_000, 90_005)]
    assert found["a"].to_pylist() == [None if n == 90_003 else n for n in kept]
    assert found["b"].to_pylist() == ["0" if n == 90_003 else f"t\n{n}" for n in kept]
    assert "3 rows left out" in ds.stats()
    rows = [f"{n},\n" for n in range(400_000)]
    rows[3], rows[200_000], rows[200_001] = "4\n", "5,5\n", f"{'0' * 2**20}6,\n"
    rows[-1] = "5,x\n"
    (tmp_path / "c.csv").write_text("a,b\n" + "".join(rows))
    options = pyarrow.csv.ReadOptions(block_size=1200_000, use_threads=True)
    ds = data.read_csv(tmp_path / "c.csv", on_error="skip", read_options=options)
    late = ds.to_arrow()
    assert late.schema == pa.schema([("a", pa.int64()), ("b", pa.int64())])
    assert late["a"].to_pylist()[199_998:200_001] == [199_999, 5, 6]
    assert "2 rows left out" in ds.stats()
    (tmp_path / "a.json").write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    with pytest.raises(DataError, match=r"a.json, line 2 "):
        data.read_json(tmp_path / "a.json").count()
    ds = data.read_json(tmp_path / "a.json", on_error="skip")
    assert ds.take_all() == [{"a": 1}, {"a": 3}]

    def only_even(row: dict[str, Any]) -> dict[str, Any]:
        return {"y": 1 // (1 - row["id"] % 2)}

    with pytest.raises(ZeroDivisionError) as caught:
        data.range(4).map(only_even).take_all()
    assert "of the row {'id': 1}" in str(getattr(caught.value, "__notes__", "of the row {'id': 1}"))
    ds = data.range(4).map(only_even, on_error="skip")
    assert ds.count() == 2
    assert "2 rows left out" in ds.stats()


def test_pools_of_ray_are_taken_and_change_no_rows() -> None:
    for pool in (data.ActorPoolStrategy(min_size=1, max_size=4), data.TaskPoolStrategy(size=2)):
        assert data.range(3).map_batches(lambda batch: batch, compute=pool).take() == [
            {"id": 0}, {"id": 1}, {"id": 2},
        ]  # fmt: skip
    with pytest.raises(UsageError, match="expected size, or min_size and max_size"):
        data.ActorPoolStrategy(size=2, max_size=3)


def test_rows_of_a_batch_are_at_least_one() -> None:
    ds = data.range(4)
    assert ids_of(ds.filter("id > 2").take_all()) == [3]
    assert len(list(ds.iter_torch_batches(batch_size=np.int64(2)))) == 2
    for size in (0, -3, 2.5, True):
        with pytest.raises(UsageError, match=r"batch_size=.* expected an int from 1 on, or None"):
            list(ds.iter_torch_batches(batch_size=size))
        with pytest.raises(UsageError, match="expected an int from 1 on"):
            ds.map_batches(lambda batch: batch, batch_size=size)


def test_wrong_use_says_what_to_write() -> None:
    ds = data.range(4)
    for call, hint in (
        (lambda: ds.using("spark"), "expected 'arrow' or 'dask'"),
        (lambda: ds.filter("age > 1").take(), r"no column 'age'; expected some of \['id'\]"),
        (lambda: list(ds.iter_torch_batches(dtypes={"x": None})), "dtypes: there is no column 'x'"),
        (lambda: ds.map(lambda row: 3).take(1), r"returned a int: expected a dict"),
        (lambda: ds.map_batches(lambda b: {"a": [1], "b": [1, 2]}).take(1), "different lengths"),
        (lambda: ds.map_batches(lambda b: b, batch_formt="x"), "unknown arguments: batch_formt"),
        (lambda: ds.select_columns(["no"]).take(1), r"no column 'no'; expected some of \['id'\]"),
        (lambda: ds.zip(data.range(3)).take(4), "different numbers of rows"),
        (lambda: ds.zip(ds).rename_columns({"id_1": "id"}).take(), "two of .* would have one name"),
        (lambda: ds.filter(expr="id ** 2 > 3").take(1), "not understood"),
        (lambda: ds.filter(expr="id").take(1), r"filter\(col\('id'\)\) has values of int64"),
        (lambda: ds.train_test_split(0.0), "test_size=0.0 of 4 rows"),
        (lambda: ds.read_parquet(), "no attribute"),
        (lambda: data.read_csv([]).take(), "an empty list of paths"),
        (lambda: ds.to_tf("x", "y"), "Dataset.to_tf: Ray has it.*iter_torch_batches"),
        (lambda: data.read_mongo("x"), "elastic.data.read_mongo: Ray has it.*from_pandas"),
        (lambda: ds.split_at_indices([3, 1]), r"indices=\[3, 1\]: expected row numbers in order"),
        (lambda: ds.split_proportionately([0.6, 0.5]), "numbers above 0 whose sum is below"),
        (lambda: ds.map_batches(lambda b: {"a": 3}).take(1), "returned a int as column 'a'"),
    ):  # fmt: skip
        with pytest.raises((UsageError, AttributeError, ImportError), match=hint):
            call()


def test_rays_way_to_read_a_bucket_without_credentials_is_known() -> None:
    fs, path = filesystem_of("s3://anonymous@bucket/folder/iris.csv")
    assert (fs.anon, path) == (True, "bucket/folder/iris.csv")


def test_rows_on_s3_are_fetched_once_each(tmp_path: Path) -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    rows = pa.table({"id": np.arange(4000), "x": np.random.default_rng(0).random(4000)})
    with fs.open("/bucket/a.parquet", "wb") as file:
        pq.write_table(rows, file, row_group_size=500)
    size = fs.size("/bucket/a.parquet")
    iterator = data.read_parquet("memory://bucket/a.parquet").random_shuffle().iterator()
    assert sorted(ids_of(iterator.iter_rows())) == list(range(4000))
    assert iterator.bytes_read() <= 1.5 * size  # The footer is a good part of so small a file.
    fs.rm("/bucket/a.parquet")


def test_nothing_warns_and_nothing_is_left_open(table: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = len(os.listdir("/proc/self/fd"))
        data.read_parquet(table).random_shuffle().take_all()
        assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_a_schema_chooses_columns_and_casts_them(table: Path) -> None:
    ds = data.read_parquet(table, schema=pa.schema([("x", pa.float32()), ("id", pa.int8())]))
    assert ds.schema() == pa.schema([("x", pa.float32()), ("id", pa.int8())])
    assert ds.take(2)[1] == {"x": 0.5, "id": 1}
    with pytest.raises(DataError, match=r"0\.parquet cannot be read with the given schema: .*'n9'"):
        data.read_parquet(table, schema=pa.schema([("name", pa.int64())])).take()


def test_rows_that_functions_of_batches_add_are_counted_and_in_some_part() -> None:
    def twice(batch: Any) -> Any:
        yield batch
        yield batch

    ds = data.range(10).map_batches(twice, batch_size=None)
    assert ds.count() == 20

    def evens(batch: Any) -> Any:
        if not batch["id"][0] % 2:
            yield {"id": pd.Series(batch["id"]), "same": pa.array(batch["id"])}

    assert ids_of(data.range(5).map_batches(evens, batch_size=1).take_all()) == [0, 2, 4]

    class Repeat:
        def __init__(self, times: int) -> None:
            self.times = times

        def __call__(self, row: dict[str, Any], more: int = 0) -> Any:
            return [row] * (self.times + more)

    assert data.range(2).flat_map(Repeat, fn_constructor_args=[2], fn_args=[1]).count() == 6
    assert data.range(2).filter(Repeat, fn_constructor_kwargs={"times": 0}).count() == 0
    parts = [*ds.split(3), *data.range(10).map_batches(twice).split(3)]
    assert sum(part.count() for part in parts) == 40


class Drawn:
    def __init__(self, name: str, *others: Any) -> None:
        self.name, self.value = name, np.random.random()

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return {**row, self.name: self.value}


def test_a_class_draws_by_its_place_and_arguments_alike_in_each_process() -> None:
    def row(*given: list[Any]) -> Any:
        ds = data.range(1)
        for args in given:
            ds = ds.map(Drawn, fn_constructor_args=args)
        return cloudpickle.loads(cloudpickle.dumps(ds)).take(1)[0]

    twice = row(["a", 1], ["b", 1])
    assert twice["a"] != twice["b"]
    assert twice == row(["a", 1], ["b", 1])
    assert row(["a", 1])["a"] == twice["a"] != row(["a", 2])["a"]
    # The text of an object would have its address.
    assert row(["a", object()]) == row(["a", object()])


def test_the_error_of_a_constructor_is_that_of_no_row() -> None:
    class Broken:
        def __init__(self) -> None:
            raise OSError("no model")

        def __call__(self, row: dict[str, Any]) -> Any:
            return row

    for ds in (data.range(3).map, data.range(3).filter, data.range(3).flat_map):
        left = ds(Broken, on_error="skip")
        for _ in range(2):
            with pytest.raises(OSError, match="no model"):
                left.take_all()

    def refuse(batch: Any) -> Any:
        raise AssertionError("called to split what is read later")

    train, test = data.range(10).map_batches(refuse).train_test_split(0.2)
    assert "rows[8:]" in repr(test)
    assert "rows[0:8]" in repr(train)


def test_async_functions_are_waited_for_in_one_loop_of_their_own() -> None:
    class Client:
        def __init__(self) -> None:
            self.lock = asyncio.Lock()  # Of one loop, once it was waited for.

        async def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
            async with self.lock:
                await asyncio.sleep(0)
            return {"id": row["id"] + 1}

    async def split(batch: Any) -> Any:
        for number in batch["id"]:
            yield {"id": [number]}

    async def notebook() -> list[int]:
        return ids_of(data.range(3).map(Client).map_batches(split).take_all())

    assert asyncio.run(notebook()) == [1, 2, 3]


def test_rows_are_shuffled_in_files_if_they_are_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("\n".join(f"line {n}" for n in range(5000)))
    ds = data.read_text(tmp_path / "a.txt").random_shuffle(seed=1)
    held = ds.take_all()
    assert held != data.read_text(tmp_path / "a.txt").take_all()
    written: list[Part] = []
    monkeypatch.setattr(nodes, "HELD_BYTES", 1000)
    monkeypatch.setattr(
        nodes, "write_part", lambda *a: written.append(write_part(*a)) or written[0]
    )
    assert ds.take_all() == held
    assert written[0].files
    assert not Path(written[0].files[0].path.removeprefix("file://")).exists()
    written.clear()
    parts = data.read_text(tmp_path / "a.txt").streaming_split(2)
    held = [row["text"] for part in parts for row in part.iter_rows()]
    assert held == [f"line {n}" for n in range(5000)]
    (file,) = (Path(one.path.removeprefix("file://")) for one in written[0].files)
    assert file.exists()
    for part in parts:
        part.close()
    del part, parts
    wait_for(lambda: not file.parent.exists())


def test_files_are_read_in_a_random_order_that_is_always_the_same(table: Path) -> None:
    def firsts(shuffle: Any) -> list[int]:
        return ids_of(data.read_parquet(table, shuffle=shuffle).iter_rows())[::40]

    assert firsts(None) == [0, 40, 80]
    orders = [firsts(data.FileShuffleConfig(seed=seed)) for seed in range(4)]
    assert all(sorted(order) == [0, 40, 80] for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    assert orders == [firsts(data.FileShuffleConfig(seed=seed)) for seed in range(4)]
    assert firsts("files") == orders[0]
    with pytest.raises(UsageError, match=r"shuffle=True: expected 'files'.*random_shuffle"):
        data.read_parquet(table, shuffle=True)


def test_rows_are_written_to_folders_and_file_systems_as_asked_for(tmp_path: Path) -> None:
    rows = [{"id": n, "year": 2020 + n % 2, "place": "a b" if n % 3 else "c"} for n in range(5000)]
    ds = data.from_items(rows)
    ds.write_parquet(tmp_path / "out", partition_cols=["year", "place"])
    assert [one.name for one in sorted((tmp_path / "out").iterdir())] == ["year=2020", "year=2021"]
    again = data.read_parquet(tmp_path / "out").sort("id").take_all()
    assert again == [{**row, "year": str(row["year"])} for row in rows]
    part = data.read_parquet(f"{tmp_path}/out/year=2021/place=c")
    assert ids_of(part.iter_rows()) == [n for n in range(5000) if n % 2 and not n % 3]
    with pytest.raises(UsageError, match="partition_cols: there is no column 'month'"):
        ds.write_parquet(tmp_path / "no", partition_cols=["month"])
    memory = fsspec.filesystem("memory")
    ds.limit(3).write_csv("memory://held/rows", filesystem=memory)
    assert memory.cat("/held/rows/part-00000.csv").startswith(b'"id","year","place"\n0,')
    local = LocalFileSystem()
    ds.limit(3).write_json(str(tmp_path / "held"), filesystem=local)
    assert data.read_json(str(tmp_path / "held"), filesystem=local).count() == 3
    with pytest.raises(UsageError, match="filesystem='s3': expected a file system of fsspec or py"):
        data.read_json(str(tmp_path / "held"), filesystem="s3")
