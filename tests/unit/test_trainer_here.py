"""TorchTrainer with num_workers=0: in this process, with the files and errors of any other run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist

from elastic import train
from elastic.errors import NameTaken, StorageError, TrainingFailed, UsageError
from elastic.train.torch import TorchTrainer


def trainer(function: Any, storage: Path, **run: Any) -> TorchTrainer:
    return TorchTrainer(
        function,
        train_loop_config={"epochs": 4},
        scaling_config=train.ScalingConfig(num_workers=0),
        run_config=train.RunConfig(storage_path=storage, **run),
    )


def save_epochs(config: dict[str, int]) -> dict[str, int]:
    files = Path(train.get_context().get_trial_dir()).parent / "files"
    files.mkdir(exist_ok=True)
    for epoch in range(config["epochs"]):
        (files / "epoch").write_text(str(epoch))
        metrics = {"epoch": epoch, "loss": torch.tensor(1.0), "odd": float("nan")}
        train.report(metrics, checkpoint=train.Checkpoint.from_directory(files))
    train.report({"epoch": -1})
    return {"epochs": config["epochs"]}


def test_a_run_leaves_metrics_checkpoints_and_a_value(tmp_path: Path) -> None:
    told: list[int] = []

    class Callback:
        def after_report(self, metrics: dict[str, Any]) -> None:
            told.append(metrics["epoch"])

    result = trainer(
        save_epochs,
        tmp_path,
        name="here",
        callbacks=(Callback(),),
        checkpoint_config=train.CheckpointConfig(num_to_keep=2),
    ).fit()
    assert result.path == str(tmp_path / "here")
    assert result.metrics == {"epoch": -1}
    assert result.return_value == {"epochs": 4}
    assert [row["metrics"]["epoch"] for row in result.history] == [0, 1, 2, 3, -1] == told
    assert result.history[0]["metrics"]["odd"] == "nan"
    assert [metrics["epoch"] for _, metrics in result.best_checkpoints] == [2, 3]
    assert result.checkpoint == result.best_checkpoints[-1][0]
    assert len(list((tmp_path / "here" / "checkpoints").iterdir())) == 2
    with result.checkpoint.as_directory() as directory:
        assert (Path(directory) / "epoch").read_text() == "3"
    assert result.error is None
    assert train.is_driver()
    assert not dist.is_initialized()


def test_two_runs_within_a_second_have_directories_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/x/my script é.py"])
    paths = [trainer(lambda: train.report({}), tmp_path).fit().path for _ in range(3)]
    assert len({Path(path).name for path in paths}) == 3
    assert all(Path(path).name.startswith("my_script__-") for path in paths)


def test_a_name_with_a_run_is_refused(tmp_path: Path) -> None:
    trainer(lambda: train.report({}), tmp_path, name="twice").fit()
    with pytest.raises(NameTaken, match="twice exists already"):
        trainer(lambda: None, tmp_path, name="twice").fit()


def test_storage_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"file/.*cannot be made"):
        trainer(lambda: None, tmp_path / "file").fit()


def test_what_the_function_raises_fails_the_run_and_keeps_what_there_is(tmp_path: Path) -> None:
    def fail_late() -> None:
        train.report({"step": 6}, checkpoint=train.Checkpoint.from_directory(str(tmp_path / "c")))
        raise ValueError("bad batch at step 7")

    (tmp_path / "c").mkdir()
    with pytest.raises(TrainingFailed, match=r"run .* failed: ValueError: bad batch") as caught:
        trainer(fail_late, tmp_path).fit()
    assert str(caught.value).count("Traceback") == 1
    assert str(caught.value).endswith("ValueError: bad batch at step 7")
    assert "in fail_late" in caught.value.traceback.splitlines()[1]
    result = caught.value.result
    assert isinstance(result, train.Result)
    assert result.metrics == {"step": 6}
    assert result.checkpoint is not None
    assert result.error is caught.value


@pytest.mark.parametrize("code", [3, "no data"])
def test_an_exit_code_fails_the_run(tmp_path: Path, code: Any) -> None:
    with pytest.raises(TrainingFailed, match=f"SystemExit: {code}"):
        trainer(lambda: sys.exit(code), tmp_path).fit()


def test_an_exit_with_code_zero_ends_the_run_well(tmp_path: Path) -> None:
    assert trainer(lambda: sys.exit(0), tmp_path).fit().return_value is None


def test_an_interrupt_goes_through(tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer(interrupt, tmp_path).fit()
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: TorchTrainer(5), "is a int, expected a function"),  # type: ignore[arg-type]
        (lambda: TorchTrainer(lambda a, b: None), "takes a, b: expected one argument"),
        (lambda: TorchTrainer(lambda *, lr: None), "takes lr"),
        (
            lambda: TorchTrainer(print, scaling_config={"num_workers": 2}),  # type: ignore[arg-type]
            "scaling_config is a dict, expected a ScalingConfig",
        ),
        (lambda: train.report({"loss": 1}), "outside a train function"),
        (lambda: train.get_checkpoint(), "outside a train function"),
        (lambda: train.get_context(), "outside a train function"),
    ],
)
def test_a_call_that_cannot_work_is_refused(call: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        call()


@pytest.mark.parametrize(
    ("metrics", "checkpoint", "says"),
    [
        ({"loss": torch.ones(2)}, None, "'loss' is a Tensor.*tensor.mean"),
        ({"model": object()}, None, "'model' is a object"),
        ([1], None, "metrics is a list"),
        (None, None, "metrics is a NoneType"),
        ({}, "/some/path", "checkpoint is a str.*from_directory"),
    ],
)
def test_a_report_that_cannot_be_kept_is_refused(
    tmp_path: Path, metrics: Any, checkpoint: Any, says: str
) -> None:
    def report() -> str:
        with pytest.raises(UsageError, match=says):
            train.report(metrics, checkpoint=checkpoint)
        train.report({"fine": True})
        return "went on"

    result = trainer(report, tmp_path).fit()
    assert (result.return_value, result.metrics) == ("went on", {"fine": True})


def test_a_run_and_its_checkpoints_may_be_in_other_storage(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/elsewhere/c/file", b"x")

    def hand_on() -> None:
        train.report({"n": 1}, checkpoint=train.Checkpoint("memory://elsewhere/c"))
        begun = train.get_checkpoint()
        assert begun is not None
        with begun.as_directory() as directory:
            assert (Path(directory) / "file").read_bytes() == b"x"

    run_config = train.RunConfig(name="far", storage_path="memory://runs")
    scaling = train.ScalingConfig(num_workers=0)
    result = TorchTrainer(hand_on, scaling_config=scaling, run_config=run_config).fit()
    assert result.path == "memory://runs/far"
    assert json.loads(memory.cat_file("/runs/far/metrics.jsonl"))["metrics"] == {"n": 1}
    assert result.checkpoint is not None
