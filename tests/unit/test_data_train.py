"""Datasets in train functions: dealt out by steps and by rank, resumed, fed, refused if changed.

In this process: `test_data.py` among the chaos tests has groups that lose workers.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from elastic import data, train
from elastic.data import feeder_network
from elastic.data import feeders as feeders_module
from elastic.data import iterator as iterator_module
from elastic.data import table as table_module
from elastic.data.context import with_context
from elastic.data.dataset import Dataset
from elastic.data.feeder import LENGTH, TAG_BYTES, BatchServer, MessageConnection
from elastic.data.feeder_network import FeederServer, FeedersOnNodes, addresses_file
from elastic.data.feeders import CONNECTIONS, Feeders, Processes
from elastic.data.files import DataError
from elastic.data.iterator import DataIterator
from elastic.data.kept import table_of_run
from elastic.data.nodes import Node, in_memory, table_of
from elastic.data.rows import LaneOrder, Rows
from elastic.data.table import Part, Table
from elastic.errors import ElasticError, TrainingFailed, UsageError
from elastic.storage.files import Files
from elastic.train.torch import TorchTrainer, prepare_model, prepare_optimizer
from elastic.worker.process.entry import takes_config
from tests.patience import DEADLINE_S, wait_for

ROWS = 6000


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 row groups of 100 rows each, in three files; a row has about 2 KB."""
    folder = tmp_path_factory.mktemp("table")
    generator = np.random.default_rng(0)
    for number in range(3):
        ids = np.arange(number * 2000, number * 2000 + 2000)
        wide = pa.FixedSizeListArray.from_arrays(generator.random(2000 * 250), 250)
        rows = pa.table({"id": ids, "wide": wide})
        pq.write_table(rows, folder / f"{number}.parquet", row_group_size=100, compression=None)
    return folder


def noisy(batch: dict[str, Any]) -> dict[str, Any]:
    return {"id": batch["id"], "x": batch["wide"][:, :2] + np.random.rand(len(batch["id"]), 2)}


# ------------------------------------------------------------------- trainers


def fit(function: Any, storage: Path, *, name: str = "run", **options: Any) -> Any:
    return TorchTrainer(
        function,
        scaling_config=train.ScalingConfig(num_workers=0),
        run_config=train.RunConfig(storage_path=storage, name=name),
        **options,
    ).fit()


def in_steps(config: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = prepare_model(nn.Linear(2, 1))
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    ids: list[int] = []
    tested = []
    for _ in train.epochs(2):
        shard = train.get_dataset_shard("train")
        for batch in shard.iter_torch_batches(batch_size=16, dtypes=config.get("dtypes")):
            ids += batch["id"].tolist()
            (model(batch["x"].float()) - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            found = [
                batch["id"]
                for batch in train.get_dataset_shard("valid").iter_torch_batches(batch_size=64)
            ]
        tested = sorted(train.gather_for_metrics(found).tolist())
    half = len(ids) // 2
    return {
        "once": [sorted(ids[:half]) == sorted(ids[half:]), len(set(ids)), half],
        "other_order": ids[:half] != ids[half:],
        "tested": tested,
        "weights": model.module.weight.tolist(),
    }


def test_steps_see_each_row_once_and_feeders_change_no_bit(table: Path, tmp_path: Path) -> None:
    ds = data.read_parquet(table).limit(203).map_batches(noisy)
    first, last = ds.train_test_split(40)
    given = {"train": first.random_shuffle(seed=4), "valid": last}
    told = fit(in_steps, tmp_path, datasets=given, train_loop_config={}).return_value
    assert told["once"] == [True, 163, 163]
    assert told["other_order"]
    assert told["tested"] == list(range(163, 203))
    fed = fit(
        in_steps, tmp_path, datasets=given, train_loop_config={}, name="fed",
        dataset_config=train.DataConfig(num_feeders=1),
    ).return_value  # fmt: skip
    assert fed == told


def by_rank() -> list[int]:
    ids = []
    for _ in range(2):
        for batch in train.get_dataset_shard().iter_torch_batches(batch_size=50):
            ids += batch["y"].tolist()
    return ids


def test_what_cannot_be_read_by_number_is_kept_with_the_run(tmp_path: Path) -> None:
    rows = data.from_items([{"y": one} for one in range(90)])
    kept = rows.flat_map(lambda row: [row, {"y": row["y"] + 0.5}]).filter(lambda row: row["y"] < 80)
    ids = fit(by_rank, tmp_path, datasets={"train": kept}).return_value
    assert ids == 2 * [one / 2 for one in range(160)]
    saved = json.loads((tmp_path / "run" / "data" / "train.json").read_text())
    assert saved["rows"] == 160
    assert list((tmp_path / "run" / "data" / "train-0").glob("*.parquet"))


def test_no_rows_behind_a_limit_are_kept() -> None:
    kept: list[int] = []

    def keep(node: Node) -> Part:
        part = in_memory(node)
        kept.append(Table((part,)).rows)
        return part

    ds = data.range(90).filter(lambda row: row["id"] % 2)
    assert table_of(ds.union(ds).map(lambda row: row).limit(50).limit(48).node, keep).rows == 48
    assert kept == [45, 45]
    assert table_of(ds.union(ds).limit(20).node, keep).rows == 20
    assert kept[2:] == [20, 20]


@pytest.mark.parametrize(
    "cut",
    [
        lambda ds: ds.split_at_indices([10])[1].limit(25),
        lambda ds: ds.split_at_indices([5, 15])[1].limit(8),
        lambda ds: ds.train_test_split(0.2, shuffle=True)[1].train_test_split(0.5)[0],
        lambda ds: ds.limit(30).split_at_indices([10])[1].limit(0),
    ],
)
def test_a_cut_of_a_cut_has_all_its_rows(cut: Callable[[data.Dataset], data.Dataset]) -> None:
    ds = cut(data.range(90).filter(lambda row: row["id"] % 2))
    assert table_of(ds.node, in_memory).rows == ds.count()


def stops_once(config: dict[str, Any]) -> None:
    ids = by_rank()
    if not Path(config["mark"]).exists():
        Path(config["mark"]).touch()
        raise ValueError(f"stopped behind {len(ids)}")


def test_a_run_goes_on_with_the_same_files_only(tmp_path: Path) -> None:
    for number in range(2):
        rows = pa.table({"y": np.arange(30)})
        pq.write_table(rows, tmp_path / f"{number}.parquet")
    config = {"mark": str(tmp_path / "mark")}
    given = {"train": data.read_parquet(str(tmp_path / "*.parquet"))}
    with pytest.raises(TrainingFailed, match="stopped behind 120"):
        fit(stops_once, tmp_path, datasets=given, train_loop_config=config)
    changed = tmp_path / "1.parquet"
    pq.write_table(pa.table({"y": np.arange(31)}), changed)
    given = {"train": data.read_parquet(str(tmp_path / "*.parquet"))}
    with pytest.raises(TrainingFailed, match=r"'train': the run has begun with other .*1.parquet"):
        fit(stops_once, tmp_path, datasets=given, train_loop_config=config)
    changed.unlink()
    given = {"train": data.read_parquet(str(tmp_path / "*.parquet"))}
    with pytest.raises(TrainingFailed, match=r"1.parquet is gone"):
        fit(stops_once, tmp_path, datasets=given, train_loop_config=config)


def test_wrong_datasets_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"datasets\['train'\] is a list: expected what"):
        TorchTrainer(by_rank, datasets={"train": [1]})  # type: ignore[dict-item]
    with pytest.raises(TrainingFailed, match=r"no such dataset: .*which are none"):
        fit(by_rank, tmp_path)


def test_a_script_can_ask_for_a_dataset_that_may_be_missing_and_one_may_be_made_late(
    tmp_path: Path,
) -> None:
    def asks() -> int:
        with pytest.raises(KeyError, match=r"'val'\): the trainer has no such dataset"):
            train.get_dataset_shard("val")
        return sum(1 for _ in train.get_dataset_shard(train.TRAIN_DATASET_KEY).iter_rows())

    assert fit(asks, tmp_path, datasets={"train": lambda: data.range(3)}).return_value == 3


def test_functions_have_the_settings_of_the_driver_wherever_they_are_called() -> None:
    def setting(config: dict[str, Any]) -> Any:
        return data.DataContext.get_current().get_config("pool"), config

    given = data.DataContext.get_current()
    with data.DataContext.current(given.copy(pool="mine")):
        packed = cloudpickle.dumps(with_context(setting))
    sent = pickle.loads(packed)
    assert takes_config(sent)
    assert sent({"lr": 1}) == ("mine", {"lr": 1})
    assert data.DataContext.get_current() is given


def test_settings_of_rays_data_context_are_taken_also_for_a_while() -> None:
    given = data.DataContext.get_current()
    own = given.copy()
    assert data.DataContext().execution_options == own.execution_options
    own.set_config("pool", "validation")
    assert (own.get_config("pool"), given.get_config("pool", "none")) == ("validation", "none")
    options = own.execution_options
    options.label_selector = {"pool": "validation"}
    options.resource_limits = options.resource_limits.copy(cpu=10)
    with data.DataContext.current(own):
        assert data.DataContext.get_current() is own
        data.range(3).set_name("validation")
    assert data.DataContext.get_current() is given
    assert given.execution_options == train.DataConfig.default_ingest_options()
    assert data.ExecutionResources.for_limits(cpu=1).copy(gpu=2) == data.ExecutionResources(1, 2)
    assert data.ExecutionOptions(data.ExecutionResources.zero()) != given.execution_options


def in_arrays(config: dict[str, Any]) -> list[list[int]]:
    model = prepare_model(nn.Linear(1, 1))
    prepare = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    epochs: list[list[int]] = []
    for _ in train.epochs(2):
        epochs.append([])
        shard = train.get_dataset_shard("train")
        for batch in shard.iter_batches(batch_size=8, batch_format=config["format"]):
            epochs[-1] += list(batch["y"])
            model(torch.as_tensor(np.array(batch["y"], np.float32))[:, None]).sum().backward()
            prepare.step()
            prepare.zero_grad()
    return epochs


@pytest.mark.parametrize("form", ["numpy", "pandas"])
def test_steps_read_arrays_and_frames_too(tmp_path: Path, form: str) -> None:
    given = {"train": data.range(20).rename_columns({"id": "y"})}
    config = {"format": form}
    epochs = fit(in_arrays, tmp_path, datasets=given, train_loop_config=config).return_value
    assert epochs == [list(range(20))] * 2


# ------------------------------------------------------------------- orders of epochs


def orders(ds: Dataset, epochs: int = 4) -> list[list[int]]:
    iterator = ds.iterator()
    return [[row["id"] for row in iterator.iter_rows()] for _ in range(epochs)]


@pytest.fixture(scope="module")
def small_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Parquet and CSV files of the same rows: 10 in each of 8; one more CSV file is empty."""
    folder = tmp_path_factory.mktemp("files")
    for number in range(8):
        rows = pa.table({"id": np.arange(number * 10, number * 10 + 10)})
        pq.write_table(rows, folder / f"{number}.parquet", row_group_size=5)
        pyarrow.csv.write_csv(rows, folder / f"{number}.csv")
    (folder / "9.csv").write_text("id\n")
    return folder


def over_ten(row: dict[str, Any]) -> bool:
    return row["id"] >= 10


@pytest.mark.parametrize("kind", ["parquet", "csv", "filtered", "binary"])
def test_each_epoch_has_another_order_of_files(small_files: Path, kind: str) -> None:
    def read(config: Any) -> Dataset:
        if kind == "parquet":
            return data.read_parquet(small_files, shuffle=config)
        if kind == "binary":
            files = data.read_binary_files(f"{small_files}/*.csv", shuffle=config)
            return files.map(lambda row: {"id": sum(row["bytes"])})
        ds = data.read_csv(f"{small_files}/*.csv", shuffle=config)
        return ds.filter(over_ten) if kind == "filtered" else ds

    found = orders(read(data.FileShuffleConfig(seed=42)))
    assert len({tuple(order) for order in found}) == 4
    assert found == orders(read(data.FileShuffleConfig(seed=42)))
    for order in found:
        assert sorted(order) == sorted(found[0])
        if kind != "binary":  # The rows of a file stay together.
            assert [one // 10 for one in order[::10]] == [one // 10 for one in order[9::10]]
    fixed = orders(read(data.FileShuffleConfig(seed=42, reseed_after_execution=False)))
    assert len({tuple(order) for order in fixed}) == 1
    assert orders(read(None))[3] == sorted(found[0]) or kind == "binary"


def test_what_is_left_of_shuffled_rows_is_shuffled_in_each_epoch() -> None:
    shuffled = data.range(50).random_shuffle(seed=3)
    for ds in (
        shuffled.filter(over_ten), shuffled.flat_map(lambda row: [row, row]).map(lambda row: row),
        shuffled.random_sample(0.5), shuffled.limit(20), shuffled.train_test_split(0.5)[1],
        shuffled.limit(20).union(shuffled.map(lambda row: row)),
    ):  # fmt: skip
        found = orders(ds)
        assert len({tuple(order) for order in found}) == 4
        assert all(sorted(order) == sorted(ids_of(ds)) for order in found)
    fixed = data.RandomSeedConfig(seed=3, reseed_after_execution=False)
    held = data.range(50).random_shuffle(seed=fixed)
    for ds in (held, held.limit(20), shuffled.union(held), shuffled.union(data.range(50))):
        assert len({tuple(order) for order in orders(ds)}) == 1


def test_a_union_of_shuffled_files_is_read_from_them(small_files: Path) -> None:
    one, two = (data.read_parquet(small_files / f"{n}.parquet").random_shuffle() for n in (0, 1))
    table = table_of(one.union(two).map(lambda row: row).node, lambda node: pytest.fail("kept"))
    assert (table.shuffle, table.rows) == (True, 20)


def ids_of(ds: Dataset) -> list[int]:
    return [row["id"] for row in ds.take_all()]


def test_a_run_with_shuffled_files_goes_on_and_another_dataset_is_refused(
    small_files: Path, tmp_path: Path
) -> None:
    run = Files(str(tmp_path))

    def table(ds: Dataset, name: str = "train", *, writes: bool = False) -> Table | None:
        return table_of_run(ds.node, name, run, writes=writes)

    ds = data.read_csv(
        f"{small_files}/*.csv", shuffle=data.FileShuffleConfig(seed=1)
    ).map(lambda row: {**row, "none": None})  # fmt: skip
    first, again = table(ds, writes=True), table(ds)
    assert first is not None
    assert again is not None
    assert first.lanes(2, 3) == again.lanes(2, 3)
    assert len(first.lanes(2, 3).files[0][1]) == 8
    whole = data.read_parquet(small_files)
    table(whole, "valid", writes=True)
    with pytest.raises(DataError, match="the run has begun with another dataset"):
        table(whole.filter(over_ten), "valid")


def refuse(row: dict[str, Any]) -> dict[str, Any]:
    pytest.fail(f"called with {row}")


@pytest.mark.parametrize(
    "behind",
    [
        lambda ds: ds,
        lambda ds: ds.map(lambda row: row),
        lambda ds: ds.map_batches(lambda batch: batch, batch_format="pyarrow"),
    ],
)
def test_all_batches_of_a_union_have_the_columns_of_all(tmp_path: Path, behind: Any) -> None:
    for name, columns in (("a", {"id": [0, 1]}), ("b", {"id": [2, 3], "x": [1, 2]})):
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    old, new = (data.read_parquet(tmp_path / f"{name}.parquet") for name in "ab")
    ds = behind(old).union(behind(new), new.filter(over_ten)).map_batches(lambda batch: batch)
    assert old.map(refuse).union(new).count() == 4  # No function is tried for that.
    batches = list(ds.iterator().iter_torch_batches(batch_size=2))
    assert [batch["x"].nan_to_num(-1).tolist() for batch in batches] == [[-1, -1], [1, 2]]
    assert [batch["id"].tolist() for batch in batches] == [[0, 1], [2, 3]]


# ---------------------------------------------------------- what is read, and from where


def shares(table: Path, world_size: int, lanes: int) -> tuple[list[list[int]], int]:
    """Return the ids that each rank reads in an epoch of steps, and the bytes of all."""
    rows_of_all, total = [], 0
    for rank in range(world_size):
        rows = reader_of(table, lanes)
        steps, ids = rows._steps, []
        for step in range(steps.steps):
            for number in range(rank * lanes // world_size, (rank + 1) * lanes // world_size):
                first, last = steps.positions(step, number)
                if first < last:
                    ids += rows.__getitems__(range(first, last))["id"].to_pylist()
        rows_of_all.append(ids)
        total += rows.bytes_read
        rows.close()
    return rows_of_all, total


def reader_of(table: Path, lanes: int) -> Rows:
    whole = table_of(data.read_parquet(table).random_shuffle(seed=1).node, in_memory)
    # As for a large table: windows of two row groups.
    object.__setattr__(whole, "is_small", False)
    return Rows(whole, whole.lanes(lanes, 25, memory=2 * lanes * 2 * 210_000))


@pytest.mark.parametrize("world_size", [1, 3])
def test_an_epoch_reads_the_table_once(table: Path, world_size: int) -> None:
    rows, read = shares(table, world_size, lanes=3)
    assert sorted(one for some in rows for one in some) == list(range(ROWS))
    size = sum(os.path.getsize(one) for one in table.glob("*.parquet"))
    # Blocks at the ends of lanes are read by both.
    assert read <= (1 + (world_size - 1) / 60 + 0.02 * world_size) * size


def test_who_begins_late_in_an_epoch_reads_two_windows_and_holds_no_more(table: Path) -> None:
    rows = reader_of(table, lanes=2)
    begin = int(0.9 * ROWS / 50) * 50
    rows.__getitems__(range(begin, begin + 25))
    reader: Any = rows._reader
    for coming in list(reader._coming.values()):
        coming.result()
    assert len(reader._held) + len(reader._coming) <= 4
    assert rows.bytes_read <= 6 * 210_000
    most = 0
    for step in range(int(begin / 50), int(ROWS / 50)):
        for number in range(2):
            first = step * 50 + number * 25
            rows.__getitems__(range(first, first + 25))
            most = max(most, len(reader._held))
    assert most <= 8
    rows.close()


def test_a_plain_pass_goes_on_elsewhere_at_another_size(table: Path) -> None:
    node = data.read_parquet(table).select_columns(["id"]).random_shuffle(seed=3).node
    whole = table_of(node, in_memory)

    def member(rank: int, world_size: int) -> DataIterator:
        return DataIterator(lambda: whole, lambda: (rank, world_size), Dataset)

    seen: list[int] = []
    states = []
    for rank in range(3):
        iterator = member(rank, 3)
        batches: Iterator[Any] = iter(iterator.iter_torch_batches(batch_size=70))
        for _ in range(11):
            seen += next(batches)["id"].tolist()
        states.append(json.loads(json.dumps(iterator.state_dict())))
    assert states[0] == states[1] == states[2]
    for rank in range(2):
        iterator = member(rank, 2)
        iterator.load_state_dict(states[0])
        for batch in iterator.iter_batches(batch_size=64):
            seen += batch["id"].tolist()
        assert iterator.state_dict() == {"epoch": 1, "left": None}
        assert sum(1 for _ in iterator.iter_rows()) == ROWS // 2
    assert sorted(seen) == list(range(ROWS))


def test_a_plain_pass_goes_on_with_other_workers_and_another_memory(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_module, "SMALL_ROWS", 100)
    monkeypatch.setattr(iterator_module, "SHARES", 4)
    node = data.read_parquet(table).select_columns(["id"]).random_shuffle(seed=3).node
    whole = table_of(node, in_memory)

    def member(rank: int, world_size: int, **options: Any) -> DataIterator:
        return DataIterator(lambda: whole, lambda: (rank, world_size), Dataset, **options)

    seen: list[int] = []
    for rank in range(3):
        iterator = member(rank, 3, max_ranks=3)
        batches = iter(iterator.iter_batches(batch_size=70))
        seen += np.concatenate([next(batches)["id"] for _ in range(11)]).tolist()
    state = json.loads(json.dumps(iterator.state_dict()))
    iterator = member(0, 1, memory=2**20)
    iterator.load_state_dict(state)
    assert iterator.state_dict() == state
    seen += [row["id"] for row in iterator.iter_rows()]
    assert sorted(seen) == list(range(ROWS))
    fresh = member(0, 1, memory=2**20)
    fresh.load_state_dict({"epoch": 1, "left": None})
    assert [*iterator.iter_rows()] == [*fresh.iter_rows()]


def test_parts_of_a_split_have_each_row_once_and_equal_ones_as_many_batches() -> None:
    for rows in (3, 10):
        parts = data.range(rows).streaming_split(4)
        assert sorted(row["id"] for part in parts for row in part.iter_rows()) == [*range(rows)]
        batches = [[*part.iter_batches(batch_size=1)] for part in parts]
        assert sorted(one["id"][0] for part in batches for one in part) == [*range(rows)]
    equal = data.range(10).streaming_split(4, equal=True)
    assert [len([*part.iter_batches(batch_size=1)]) for part in equal] == [3] * 4


def test_a_pass_goes_on_at_a_batch_that_could_not_be_computed() -> None:
    is_broken = True

    def once(batch: dict[str, Any]) -> dict[str, Any]:
        if is_broken and 4 in batch["id"]:
            raise OSError("no connection")
        return batch

    iterator = data.range(9).map_batches(once).iterator()
    batches = iter(iterator.iter_batches(batch_size=2))
    seen = [*next(batches)["id"], *next(batches)["id"]]
    with pytest.raises(OSError, match="no connection"):
        next(batches)
    is_broken = False
    again = data.range(9).map_batches(once).iterator()
    again.load_state_dict(iterator.state_dict())
    assert [*seen, *(row["id"] for row in again.iter_rows())] == [*range(9)]


class Projection:
    def __init__(self) -> None:
        self.weights = np.random.rand(3)
        self.layer = nn.Linear(1, 1)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        drawn = np.random.rand(len(batch["id"]), 3)
        return {"x": batch["id"][:, None] * self.weights + self.layer.bias.item() + drawn}


def test_what_a_class_draws_does_not_depend_on_the_batch_that_comes_first() -> None:
    whole = table_of(data.range(90).map_batches(Projection).node, in_memory)

    def batch_of(*firsts: int) -> list[Any]:
        process = pickle.loads(cloudpickle.dumps(whole))
        rows = Rows(process, process.lanes(1, 10))
        found = [rows.get(0, np.arange(first, first + 10))["x"].tolist() for first in firsts]
        rows.close()
        return found[-1]

    state = torch.random.get_rng_state()
    assert batch_of(0, 40, 20) == batch_of(20)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_what_was_left_out_is_counted_in_a_run_that_goes_on(tmp_path: Path) -> None:
    def inverse(row: dict[str, Any]) -> dict[str, Any]:
        return {"x": 1 / row["id"]}

    for _ in range(2):
        ds = data.range(5).map(inverse, on_error="skip")
        found = table_of_run(ds.node, "train", Files(str(tmp_path)), writes=True)
        assert found is not None
        assert found.rows == 4
        assert "map(inverse): 1 rows left out" in ds.stats()


@pytest.mark.parametrize(
    ("rows", "passes"),
    [
        (1501, [(3, 300), (2, 100), (1, 1501)]),
        # Where the batches behind the rows differ by one between the ranks.
        (1501, [(3, 500), (1, 1501)]),
        (513, [(2, 255), (2, 1), (1, 513)]),
        (513, [(2, 256), (2, 1)]),
    ],
)
def test_a_pass_over_rows_goes_on_at_any_row(rows: int, passes: list[tuple[int, int]]) -> None:
    whole = table_of(data.range(rows).random_shuffle(seed=3).node, in_memory)

    def member(rank: int, world_size: int) -> DataIterator:
        return DataIterator(lambda: whole, lambda: (rank, world_size), Dataset)

    seen: list[int] = []
    state = {"epoch": 0, "left": None}
    for world_size, read in passes:
        states = []
        for rank in range(world_size):
            iterator = member(rank, world_size)
            iterator.load_state_dict(state)
            with torch.no_grad():
                seen += [row["id"] for row in itertools.islice(iterator.iter_rows(), read)]
            states.append(iterator.state_dict())
        assert all(one == states[0] for one in states)
        state = states[0]
    assert sorted(seen) == list(range(rows))
    assert state == {"epoch": 1, "left": None}


@pytest.mark.parametrize("rows", [64, 65, 66, 127, 130])
def test_without_a_last_batch_all_ranks_have_equally_many_full_ones(rows: int) -> None:
    whole = table_of(data.from_items([{"id": one} for one in range(rows)]).node, in_memory)
    ranks = [DataIterator(lambda: whole, lambda rank=rank: (rank, 2), Dataset) for rank in range(2)]
    sizes = []
    for iterator in ranks:
        batches = list(iterator.iter_batches(batch_size=32, drop_last=True))
        sizes.append([len(batch["id"]) for batch in batches])
        assert iterator.state_dict() == {"epoch": 1, "left": None}
    assert sizes == 2 * [[32] * (rows // 64)]


def test_a_pass_after_one_that_was_left_early_has_all_rows() -> None:
    whole = table_of(data.range(100).node, in_memory)
    iterator = DataIterator(lambda: whole, lambda: (0, 1), Dataset)
    next(iter(iterator.iter_torch_batches(batch_size=10)))
    assert iterator.state_dict() == {"epoch": 0, "left": [[10, 100]], "window": 1}
    assert sum(1 for _ in iterator.iter_rows()) == 100
    assert iterator.state_dict() == {"epoch": 2, "left": None}


def test_a_function_behind_repartition_may_make_one_row_of_each_block() -> None:
    def count(batch: dict[str, Any]) -> dict[str, Any]:
        return {"first": batch["id"][:1], "rows": [len(batch["id"])]}

    def repeat(batch: dict[str, Any]) -> dict[str, Any]:
        return batch | {"rows": np.full(len(batch["id"]), len(batch["id"]))}

    blocks = data.range(10).repartition(target_num_rows_per_block=4)
    for fn, sizes in ((count, [4, 4, 2]), (repeat, [1] * 10)):
        whole = table_of(blocks.map_batches(fn, batch_size=4).node, in_memory)
        iterator = DataIterator(lambda whole=whole: whole, lambda: (0, 1), Dataset)
        assert [one["rows"].tolist() for one in iterator.iter_batches(batch_size=1)] == [
            [size] for size in sizes
        ]


def test_a_file_that_changes_while_it_is_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": np.arange(100)}), path, row_group_size=10)
    whole = table_of(data.read_parquet(path).node, in_memory)
    pq.write_table(pa.table({"id": np.arange(101)}), path, row_group_size=10)
    iterator = DataIterator(lambda: whole, lambda: (0, 1), Dataset)
    with pytest.raises(DataError, match=r"changed since it was listed: .*a.parquet had"):
        next(iter(iterator.iter_rows()))


# ----------------------------------------------------------------------------- feeders


def test_feeders_that_die_or_raise_lose_nothing(table: Path) -> None:
    def picky(batch: dict[str, Any]) -> dict[str, Any]:
        import torch  # Here: a feeder begins without it, and draws as we do all the same.

        ids = batch["id"]
        if 777 in ids:
            raise ValueError("777 is odd")
        pids = np.full(len(ids), os.getpid())
        return {"id": ids, "pid": pids, "drawn": torch.rand(len(ids)).numpy()}

    ds = data.read_parquet(table).limit(900).map_batches(picky, batch_size=None)
    whole = table_of(ds.node, in_memory)
    source = Processes(2, 2)
    rows = Rows(whole, whole.lanes(1, 25), feeders=lambda: source)
    feeders = rows._feeders
    assert isinstance(feeders, Feeders)
    wait_for(lambda: feeders.num_ready == 2 * CONNECTIONS, "two feeders")
    order = LaneOrder(rows).of(0)
    ids, pids = [], set()
    for first in range(0, 775, 25):
        batch = rows.__getitems__(order[first : first + 25])
        here = rows.compute(0, np.arange(first, first + 25))
        assert batch["drawn"].tolist() == here["drawn"].tolist()
        ids += batch["id"].tolist()
        pids.update(batch["pid"].tolist())
        if first < 100:  # Else this process may be ahead of them all the time.
            wait_for(lambda: feeders._requests._answers, "a reply")
        if first == 250:
            for one in source.present.values():
                os.kill(one.process.pid, 9)
    assert ids == list(range(775))
    assert pids - {os.getpid()}
    with pytest.raises(ValueError, match="777 is odd"):
        rows.__getitems__(order[775:800])
    rows.close()


class Silent:
    """A source of a feeder that accepts requests, and replies to none."""

    highest = 1

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()

    def names(self) -> list[str]:
        return ["silent"]

    def start(self, name: str) -> Silent:
        MessageConnection(self.theirs).send(pickle.dumps((True, None)))
        return self

    @contextlib.contextmanager
    def connect(self, number: int) -> Iterator[MessageConnection]:
        with self.ours:
            yield MessageConnection(self.ours)

    def grow(self) -> None: ...

    def close(self) -> None:
        self.theirs.close()


def test_a_begun_batch_is_waited_for_no_longer_than_it_takes_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feeders_module, "TIMEOUT_S", float("inf"))
    monkeypatch.setattr(feeders_module, "CONNECTIONS", 1)
    feeders = Feeders([()], Silent())
    wait_for(lambda: feeders.num_ready, "the feeder")
    feeders.request(1, [], (0, 0))
    wait_for(lambda: feeders._requests._begun, "the request's begin")
    feeders.note_own(0.01)
    assert feeders.take(1, (0, 0)) is None
    feeders.close()


def test_one_more_process_runs_while_training_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeders_module, "SETTLE_S", 0.0)
    source = Processes(1, 2)
    feeders = Feeders([()], source)
    wait_for(lambda: feeders.num_ready == CONNECTIONS, "the first")
    assert source.names() == ["process 0"]
    wait_for(lambda: feeders.note_wait(DEADLINE_S) or len(source.names()) == 2, "a second one")
    wait_for(lambda: feeders.num_ready == 2 * CONNECTIONS, "the second")
    feeders.close()


SERVE = """
import sys
from elastic.data.feeder_network import FeederServer
print(FeederServer("127.0.0.1", "secret").address, flush=True)
sys.stdin.read()
"""


def listed(run: Path, *addresses: str) -> None:
    """Write the addresses of feeders into the run directory, as one of them would."""
    path = run / addresses_file("j1")
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(addresses))


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeder_network, "LOOK_S", 0.0)


@pytest.mark.usefixtures("quick_looks")
def test_batches_of_feeders_on_nodes_have_the_same_bits_whichever_is_lost(
    table: Path, tmp_path: Path
) -> None:
    whole = table_of(data.read_parquet(table).limit(900).map_batches(noisy).node, in_memory)
    lanes, command = whole.lanes(1, 25), [sys.executable, "-c", SERVE]
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(subprocess.Popen(command, stdin=PIPE, stdout=PIPE))
            for _ in range(2)
        ]
        addresses = [one.stdout.readline().decode().strip() for one in servers if one.stdout]
        listed(tmp_path, *addresses)
        source = FeedersOnNodes(str(tmp_path), "j1", "secret", highest=2)
        alone, rows = Rows(whole, lanes), Rows(whole, lanes, feeders=lambda: source)
        stack.callback(rows.close)
        feeders = rows._feeders
        assert feeders is not None
        wait_for(lambda: feeders.num_ready == 2 * CONNECTIONS, "two feeders")
        order = LaneOrder(rows).of(0)
        for first in range(0, 900, 25):
            numbers = order[first : first + 25]
            assert (rows.__getitems__(numbers)["x"] == alone.__getitems__(numbers)["x"]).all()
            if first < 100:  # Else this process may be ahead of them all the time.
                wait_for(lambda: feeders._requests._answers, "a reply")
            if first == 300:
                servers[0].kill()
        servers[1].kill()


def sent_with(key: bytes) -> bytes:
    """What a client with this key sends as its first message."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        MessageConnection(ours, key, is_client=True).send(b"right")
        return theirs.recv(1 << 10)


def received(sent: bytes, *, times: int = 1, is_client: bool = False) -> bytearray:
    """The last of so many messages that one side takes from these bytes."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(sent)
        ours.shutdown(socket.SHUT_WR)
        line = MessageConnection(theirs, b"key", is_client=is_client)
        return [line.receive() for _ in range(times)][-1]


def test_a_message_that_was_not_sent_by_the_other_side_in_its_turn_is_refused() -> None:
    """By its length already: for another one no memory is reserved, and nothing awaited."""
    sent = sent_with(b"key")
    assert received(sent) == b"right"
    longer = LENGTH.pack(1 << 28) + sent[LENGTH.size :]
    for wrong in (sent_with(b"of another"), sent.replace(b"right", b"wrong"), longer):
        with pytest.raises(ValueError, match="changed on its way"):
            received(wrong)
    with pytest.raises(ValueError, match="changed on its way"):
        received(sent + sent, times=2)
    with pytest.raises(ValueError, match="changed on its way"):
        received(sent, is_client=True)


def test_a_message_is_sent_by_one_call() -> None:
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with ours, theirs:
        MessageConnection(ours, b"key").send(b"right")
        assert len(theirs.recv(1 << 10)) == LENGTH.size + len(b"right") + 2 * TAG_BYTES


def test_a_message_that_is_taken_in_parts_arrives_whole() -> None:
    """As one that is larger than what the kernel takes at once."""
    ours, theirs = socket.socketpair()
    value = bytes(range(256)) * (1 << 14)
    with ours, theirs, ThreadPoolExecutor(1) as thread:
        ours.settimeout(DEADLINE_S)
        sending = thread.submit(MessageConnection(ours, b"key").send, value)
        assert MessageConnection(theirs, b"key", is_client=True).receive() == value
        sending.result()


@pytest.mark.usefixtures("quick_looks")
def test_who_lacks_the_secret_or_has_other_packages_is_not_fed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = FeederServer("127.0.0.1", "secret")
    listed(tmp_path, server.address)
    unpickled: list[Any] = []
    monkeypatch.setattr(BatchServer, "serve", lambda self, line: unpickled.append(line))
    stranger = Feeders([()], FeedersOnNodes(str(tmp_path), "j1", "guess", highest=1))
    wait_for(lambda: "does not know this job" in caplog.text, "the refusal of a stranger")
    stranger.close()
    monkeypatch.setattr(feeder_network, "versions", lambda: {"torch": "1.0"})
    server.packages = {"torch": "2.0"}
    other = Feeders([()], FeedersOnNodes(str(tmp_path), "j1", "secret", highest=1))
    wait_for(lambda: "torch 2.0 here and 1.0 there" in caplog.text, "the refusal by name")
    other.close()
    server.close()
    assert not unpickled


def test_names_of_datasets_and_metadata_are_checked_before_anything_starts(tmp_path: Path) -> None:
    for options, message in (
        (
            {"dataset_config": train.DataConfig(datasets_to_split=["trian"])},
            "'trian' is no dataset",
        ),
        ({"metadata": {"classes": {1, 2}}}, "metadata is not JSON-serializable"),
    ):
        with pytest.raises(ElasticError, match=message):
            fit(lambda: None, tmp_path, datasets={"train": data.range(4)}, **options)


def test_reported_checkpoints_have_the_trainers_metadata(tmp_path: Path) -> None:
    def reports() -> None:
        for number in range(2):
            folder = tmp_path / f"model-{number}"
            folder.mkdir()
            checkpoint = train.Checkpoint.from_directory(folder)
            if number:
                checkpoint.set_metadata({"kind": "its own"})
            train.report({"n": number}, checkpoint=checkpoint)

    given = {"kind": "digits", "preprocessor_pkl": "text"}
    result = fit(reports, tmp_path, metadata=given)
    found = [checkpoint.get_metadata() for checkpoint, _ in result.best_checkpoints]
    assert found == [given, given | {"kind": "its own"}]
    assert not [*(tmp_path / "model-0").iterdir()]  # The script's folder is left alone.
    missing = train.Checkpoint(str(tmp_path / "mdoel"))
    with pytest.raises(ElasticError, match="mdoel"):
        fit(lambda: train.report({}, checkpoint=missing), tmp_path, name="2", metadata=given)
