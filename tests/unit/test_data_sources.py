"""elastic.data: tar files of samples, Lance tables and databases, read in a stable order."""

from __future__ import annotations

import io
import json
import sqlite3
import tarfile
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest
import torch

from elastic import data
from elastic.data.expressions import col
from elastic.data.files import DataError
from elastic.data.kept import table_of_run
from elastic.data.table_reader import TableReader
from elastic.errors import StorageError, UsageError
from elastic.storage.files import Files


def write_shard(path: Path, members: list[tuple[str, bytes]]) -> None:
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as out:
        for name, content in members:
            about = tarfile.TarInfo(name)
            about.size = len(content)
            out.addfile(about, io.BytesIO(content))


def run_table(ds: Any, run: Path) -> Any:
    run.mkdir(exist_ok=True)
    return table_of_run(ds.node, "train", Files(str(run)), writes=True)


def rows_of_run(ds: Any, run: Path) -> list[dict[str, Any]]:
    table = run_table(ds, run)
    found = TableReader(table, table.lanes(1, 1)).read(0, np.arange(table.rows))
    return data.from_arrow(found).take_all()


def test_samples_are_read_in_order_and_trained_with_from_the_run(tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    shards.mkdir()
    for shard, ending in enumerate(["tar", "tar.gz"]):
        members = [
            (f"d/{shard}{n}.{kind}", content)
            for n in range(3)
            for kind, content in (("txt", b"%d" % n), ("cls", b"%d" % shard), ("bin", b"\0\1"))
        ]
        write_shard(shards / f"{shard}.{ending}", [*members, ("README", b"no sample")])
    ds = data.read_webdataset(shards)
    rows = [
        {"__key__": f"d/{shard}{n}", "txt": str(n), "cls": shard, "bin": b"\0\1"}
        for shard in range(2)
        for n in range(3)
    ]
    assert ds.take_all() == rows
    assert rows_of_run(ds, tmp_path / "run") == rows
    labels = data.read_webdataset(shards, suffixes=["cls"], fileselect="d/*", include_paths=True)
    assert labels.columns() == ["__key__", "cls", "path"]
    assert labels.take(1)[0]["path"].endswith("shards/0.tar")
    plain = data.read_webdataset(shards / "0.tar", decoder=None, filerename=lambda n: n[2:])
    assert plain.take(1) == [{"__key__": "00", "txt": b"0", "cls": b"0", "bin": b"\0\1"}]
    twice = data.read_webdataset(shards, decoder=[True, lambda sample: {"x": sample["cls"] + 1}])
    assert twice.sum("x") == 9
    write_shard(shards / "0.tar", [("d/00.txt", b"9"), ("d/00.cls", b"9"), ("d/00.bin", b"")])
    with pytest.raises(DataError, match=r"begun with other files: .*0\.tar had"):
        run_table(data.read_webdataset(shards), tmp_path / "run")


def test_what_is_written_as_samples_is_read_again(tmp_path: Path) -> None:
    rows = [
        {
            "txt": f"ä{n}", "cls": n, "json": {"n": [n]}, "npy": np.arange(n + 1.0),
            "png": np.full((2 + n, 2, 3), n, np.uint8), "pth": torch.ones(n), "raw": b"x",
        }
        for n in range(3)
    ]  # fmt: skip
    data.from_items(rows).write_webdataset(tmp_path / "out")
    with tarfile.open(tmp_path / "out/part-00000.tar") as written:
        assert written.getnames()[:2] == ["000000000.txt", "000000000.cls"]
        content = written.extractfile("000000002.json")
        assert content is not None
        assert json.load(content) == {"n": [2]}
    again = data.read_webdataset(tmp_path / "out").take_all()
    for row, given in zip(again, rows, strict=True):
        assert [row[name] for name in ("txt", "cls", "json", "raw")] == [
            given[name] for name in ("txt", "cls", "json", "raw")
        ]
        assert all(np.array_equal(row[name], given[name]) for name in ("npy", "png", "pth"))
    with pytest.raises(UsageError, match="'raw' holds int values: expected bytes"):
        data.from_items([{"raw": 1}]).write_webdataset(tmp_path / "no", encoder=None)


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ([("a.x", b""), ("b.x", b""), ("a.y", b"")], "members of 'a' are not adjacent"),
        ([("a.x", b""), ("b.x", b""), ("b.y", b"")], r"sample 'b' has 'y'.*suffixes=\[...\]"),
        ([("a.x", b""), ("a.x", b"")], "there is a second 'a.x'"),
        ([("a.pkl", b"")], "'pkl' holds pickles.*decoder="),
        (None, "is no tar file"),
    ],
)
def test_broken_samples_are_named(tmp_path: Path, members: Any, says: str) -> None:
    path = tmp_path / "a.tar"
    if members is None:
        path.write_bytes(b"nothing" * 200)
    else:
        write_shard(path, members)
    with pytest.raises((DataError, UsageError), match=says):
        data.read_webdataset(path).take_all()
    if "pickles" not in says:
        left = data.read_webdataset(path, on_error="skip")
        assert len(left.take_all()) <= 1
        assert "1 files left out" in left.stats()


def test_lance_tables_are_read_by_row_at_the_version_that_was_listed(tmp_path: Path) -> None:
    lance = pytest.importorskip("lance")
    uri = str(tmp_path / "a.lance")
    rows = pa.table({"id": range(20000), "s": [f"s{n}" for n in range(20000)]})
    lance.write_dataset(rows, uri, max_rows_per_file=9000).delete("id % 1000 = 7")
    ds = data.read_lance(uri)
    ids = [n for n in range(20000) if n % 1000 != 7]
    assert ds.count() == len(ids)
    assert [row["id"] for row in ds.iter_rows()] == ids
    assert ds.select_columns("s").columns() == ["s"]
    run = tmp_path / "run"
    assert [row["id"] for row in rows_of_run(ds, run)] == ids
    assert not [*run.glob("data/train-0")]  # Read from the table itself.
    middle = ds.split_at_indices([9990, 10000])[1]
    assert [row["id"] for row in rows_of_run(middle, tmp_path / "run-2")] == ids[9990:10000]
    assert data.read_lance(uri, filter="id < 10", columns=["id"]).count() == 9
    assert data.read_lance([uri, uri]).count() == 2 * len(ids)
    assert data.read_lance(uri, version=1).count() == 20000
    lance.dataset(uri).delete("id = 1")
    assert ds.count() == len(ids)
    with pytest.raises(DataError, match=r"\(stamp version 2\).*\(stamp version 3\)"):
        run_table(data.read_lance(uri), run)
    with pytest.raises(DataError, match=r"cannot read .*none"):
        data.read_lance(str(tmp_path / "none")).count()


def test_rows_are_written_to_lance_tables(tmp_path: Path) -> None:
    pytest.importorskip("lance")
    uri = str(tmp_path / "a.lance")
    ds = data.range(3000).map(lambda row: {"id": row["id"], "x": [row["id"]] * 2})
    ds.write_lance(uri, max_rows_per_file=1000)
    assert [row["id"] for row in data.read_lance(uri).iter_rows()] == [*range(3000)]
    assert data.read_lance(uri).take(2)[1]["x"].tolist() == [1, 1]
    with pytest.raises(StorageError, match=r"write_lance: cannot write .*a\.lance"):
        ds.write_lance(uri)
    ds.limit(2).write_lance(uri, mode="append")
    assert data.read_lance(uri).count() == 3002
    data.read_lance(uri).filter(col("id") < 3).write_lance(uri, mode="overwrite")
    assert sorted(row["id"] for row in data.read_lance(uri).iter_rows()) == [0, 0, 1, 1, 2]
    schema = pa.schema({"id": pa.int16()})
    data.range(0).write_lance(str(tmp_path / "empty.lance"), schema=schema)
    data.range(2).write_lance(str(tmp_path / "empty.lance"), schema=schema, mode="append")
    assert data.read_lance(str(tmp_path / "empty.lance")).schema().types == [pa.int16()]
    for wrong, says in (
        ({"mode": "error"}, "mode='error': expected create, append or overwrite"),
        ({"schema": pa.schema({"no": pa.int8()})}, "rows do not fit no: int8"),
        ({"sorted": True}, "unknown arguments: sorted"),
    ):
        with pytest.raises(UsageError, match=says):
            data.range(2).write_lance(str(tmp_path / "no.lance"), **wrong)
    with pytest.raises(ZeroDivisionError):
        data.range(2).map(lambda row: {"x": 1 // (1 - row["id"])}).write_lance(
            str(tmp_path / "no.lance")
        )
    with pytest.raises(UsageError, match="no rows to know the columns by: expected schema="):
        data.range(0).write_lance(str(tmp_path / "no.lance"))


def test_queries_of_databases_are_rows(tmp_path: Path) -> None:
    path = tmp_path / "films.db"
    with sqlite3.connect(path) as films:
        films.execute("CREATE TABLE film(title, year, score)")
        films.executemany(
            "INSERT INTO film VALUES (?, ?, ?)", [("a", 1975, 8.2), ("b", 1979, None)]
        )
    films.close()
    ds = data.read_sql("SELECT * FROM film ORDER BY year", lambda: sqlite3.connect(path))
    rows = [{"title": "a", "year": 1975, "score": 8.2}, {"title": "b", "year": 1979, "score": None}]
    assert ds.to_arrow().to_pylist() == rows
    assert ds.filter(col("year") > 1975).count() == 1
    kept = run_table(ds, tmp_path / "run")
    copies = data.range(3000).map(lambda row: {"title": "c", "year": row["id"], "score": None})
    copies.write_sql("INSERT INTO film VALUES (?, ?, ?)", lambda: sqlite3.connect(path))
    assert ds.count() == 3002
    path.unlink()
    assert run_table(ds, tmp_path / "run").rows == kept.rows == 2
    query = "SELECT range AS id FROM range(20000) WHERE range >= ?"
    numbers = data.read_sql(query, duckdb.connect, sql_params=[5])
    assert numbers.sum("id") == sum(range(5, 20000))
    assert data.from_duckdb(duckdb.sql("SELECT 7 AS x, 'a' AS y")).take() == [{"x": 7, "y": "a"}]
    mixed = "SELECT CASE WHEN range > 9000 THEN 'x' END AS x FROM range(9999)"
    with pytest.raises(DataError, match=r"other values than in the first rows, .*CAST it"):
        data.read_sql(mixed, duckdb.connect).take_all()
