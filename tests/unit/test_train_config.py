"""Configurations of a run: what is refused, and in which words; results and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest

from elastic.errors import ConfigError, StorageError, UsageError
from elastic.train import (
    Checkpoint,
    CheckpointConfig,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
)
from elastic.train.config import TorchConfig


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ScalingConfig(num_workers=(3, 2)), r"\(3, 2\).*1 <= min <= max"),
        (lambda: ScalingConfig(num_workers=-1), "-1.*1 <= min <= max"),
        (lambda: ScalingConfig(num_workers=(0, 2)), r"\(0, 2\).*1 <= min"),
        (lambda: ScalingConfig(num_workers=True), "True.*an int"),
        (lambda: ScalingConfig(num_workers="2"), "'2'.*an int"),  # type: ignore[arg-type]
        (lambda: ScalingConfig(num_workers=2.0), "2.0.*an int"),  # type: ignore[arg-type]
        (lambda: ScalingConfig(num_workers=()), r"\(\).*or \(min, max\)"),  # type: ignore[arg-type]
        (lambda: ScalingConfig(num_workers=(1, 2, 3)), "min, max"),  # type: ignore[arg-type]
        (lambda: ScalingConfig(placement_strategy="pack"), "'pack'.*PACK, "),
        (lambda: ScalingConfig(resources_per_worker={"CPU": -1}), "CPU=-1.*>= 0"),
        (lambda: ScalingConfig(resources_per_worker={"CPU": float("nan")}), "CPU=nan"),
        (lambda: ScalingConfig(use_gpu=True, resources_per_worker={"CPU": 1}), "has no GPU"),
        (lambda: ScalingConfig(num_workers=3, workers_per_replica=2), "replica=2.*divides"),
        (lambda: ScalingConfig(workers_per_replica=0), "workers_per_replica=0"),
        (lambda: FailureConfig(max_failures=-2), "-2.*for ever"),
        (lambda: FailureConfig(max_failures=None), "None.*an int"),  # type: ignore[arg-type]
        (lambda: CheckpointConfig(num_to_keep=0), "num_to_keep=0.*>= 1"),
        (lambda: CheckpointConfig(every_n_steps=0), "every_n_steps=0.*>= 1"),
        (lambda: CheckpointConfig(every_n_steps=2.5), "every_n_steps=2.5.*int"),
        (lambda: CheckpointConfig(every_s=0), "every_s=0.*> 0"),
        (lambda: CheckpointConfig(every_s="60"), "every_s='60'.*seconds"),
        (lambda: CheckpointConfig(checkpoint_score_order="best"), "'best'.*max or min"),
        (lambda: RunConfig(name="a/b"), "'a/b'.*letters"),
        (lambda: RunConfig(storage_path=Path("s3://bucket")), "pathlib takes a slash"),
        (lambda: RunConfig(name=""), "''.*1 to 100"),
        (lambda: RunConfig(priority=1001), "priority=1001: expected an int, -1000 to 1000"),
        (lambda: RunConfig(priority=0.5), "priority=0.5"),  # type: ignore[arg-type]
        (lambda: RunConfig(project=None), "project=None"),  # type: ignore[arg-type]
        (lambda: RunConfig(worker_env={"A": 1}), r"worker_env\['A'\]=1"),  # type: ignore[dict-item]
        (lambda: TorchConfig(backend="mpi"), "'mpi'.*gloo or nccl"),
        (lambda: TorchConfig(timeout_s=0), "timeout_s=0"),
        (lambda: TorchConfig(timeout_s=float("nan")), "timeout_s=nan"),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_name(make: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


def test_a_range_of_workers_is_elastic_and_a_number_is_not() -> None:
    assert ScalingConfig(num_workers=(2, 8)).elasticity_enabled
    fixed = ScalingConfig(num_workers=3)
    assert (fixed.min_workers, fixed.max_workers, fixed.elasticity_enabled) == (3, 3, False)
    assert ScalingConfig(use_gpu=True).resources().as_dict() == {"GPU": 1.0}
    assert ScalingConfig(num_workers=0).max_workers == 0


# ---------------------------------------------------------------------------------- checkpoints


def test_a_checkpoint_is_a_directory_that_can_be_copied_or_used_in_place(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "file").write_text("x")
    checkpoint = Checkpoint.from_directory(source)
    with checkpoint.as_directory() as directory:
        assert directory == str(source)
    copy = Path(checkpoint.to_directory(tmp_path / "copy"))
    assert (copy / "deep" / "file").read_text() == "x"
    assert checkpoint.to_directory(source) == str(source)
    fresh = Path(checkpoint.to_directory())
    assert (fresh / "deep" / "file").read_text() == "x"
    assert checkpoint == Checkpoint(str(source))
    assert hash(checkpoint) == hash(Checkpoint(str(source)))
    assert checkpoint != Checkpoint(str(copy))


def test_a_checkpoint_in_other_storage_is_copied_and_the_copy_deleted() -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe({"/run/c1/a": b"1", "/run/c1/sub/b": b"2"})
    checkpoint = Checkpoint("memory://run/c1")
    assert not checkpoint.is_local
    with checkpoint.as_directory() as directory:
        assert (Path(directory) / "a").read_bytes() == b"1"
        assert (Path(directory) / "sub" / "b").read_bytes() == b"2"
    assert not Path(directory).exists()
    assert checkpoint != Checkpoint("/run/c1")


def test_a_checkpoint_that_is_not_there_is_an_error_that_names_it(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    with pytest.raises(UsageError, match=f"{gone}.*no such directory"):
        Checkpoint.from_directory(gone)
    with pytest.raises(StorageError, match=str(gone)):
        Checkpoint(str(gone)).to_directory()
    with pytest.raises(StorageError, match=str(gone)), Checkpoint(str(gone)).as_directory():
        pass
    with pytest.raises(StorageError, match="/nothing"):
        Checkpoint("memory://nothing").to_directory()
    (tmp_path / "file").touch()
    (tmp_path / "source").mkdir()
    with pytest.raises(StorageError, match="file/x"):
        Checkpoint.from_directory(tmp_path / "source").to_directory(tmp_path / "file" / "x")


# -------------------------------------------------------------------------------------- results


def result(*scores: Any) -> Result:
    kept = [(Checkpoint(f"/c{i}"), {"score": s}) for i, s in enumerate(scores)]
    return Result(metrics=None, checkpoint=None, path="", best_checkpoints=kept)


@pytest.mark.parametrize(
    ("scores", "mode", "best"),
    [
        ((1, 3, 2), "max", "/c1"),
        ((1, 3, 2), "min", "/c0"),
        ((2, 2), "max", "/c0"),
        (("nan", 0.5, "inf"), "max", "/c1"),
        ((float("nan"), 1), "min", "/c1"),
        ((None, [1], -1), "max", "/c2"),
    ],
)
def test_the_best_checkpoint_has_the_best_number(scores: Any, mode: str, best: str) -> None:
    assert result(*scores).get_best_checkpoint("score", mode) == Checkpoint(best)


def test_without_a_number_there_is_no_best_checkpoint() -> None:
    assert result("nan").get_best_checkpoint("score") is None
    assert result(1).get_best_checkpoint("loss") is None
    with pytest.raises(UsageError, match="mode='low'"):
        result(1).get_best_checkpoint("score", "low")
