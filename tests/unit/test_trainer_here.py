"""TorchTrainer with num_workers=0: in this process, with the files and errors of any other run."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist

from elastic import train
from elastic.errors import StorageError, TrainingFailed, UsageError
from elastic.storage.files import Files
from elastic.storage.run_record import RunPhase, read_run, write_run
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
    assert result.goodput is not None
    assert result.goodput.checkpoint_stall_ns > 0
    assert result.path == str(tmp_path / "here")
    assert result.metrics == {"epoch": -1}
    assert result.return_value == {"epochs": 4}
    assert [row["metrics"]["epoch"] for row in result.history] == [0, 1, 2, 3, -1] == told
    assert math.isnan(result.history[0]["metrics"]["odd"])
    assert [metrics["epoch"] for _, metrics in result.best_checkpoints] == [2, 3]
    assert result.checkpoint == result.best_checkpoints[-1][0]
    assert len(list((tmp_path / "here" / "checkpoints").iterdir())) == 2
    with result.checkpoint.as_directory() as directory:
        assert (Path(directory) / "epoch").read_text() == "3"
    assert result.error is None
    assert train.is_driver()
    assert not dist.is_initialized()


def test_numbers_that_json_lacks_come_back_as_numbers_from_files_that_lack_them(
    tmp_path: Path,
) -> None:
    received: list[dict[str, Any]] = []
    listed: list[dict[str, Any]] = []

    class Callback:
        def after_report(self, metrics: dict[str, Any]) -> None:
            received.append(metrics)

    def diverge() -> None:
        metrics = {"loss": float("nan"), "best": torch.tensor(-math.inf), "deep": {"x": [math.inf]}}
        train.report({**metrics, "said": "nano"}, checkpoint=train.Checkpoint.from_dict({}))
        listed.extend(c.metrics for c in train.get_all_reported_checkpoints())

    result = trainer(diverge, tmp_path, name="odd", callbacks=[Callback()]).fit()
    kept = [metrics for _, metrics in result.best_checkpoints]
    again = train.Result.from_path(tmp_path / "odd").metrics
    told = [result.metrics, again, result.history[0]["metrics"], *kept, *received, *listed]
    assert len(told) == 6
    for metrics in told:
        assert metrics is not None
        assert math.isnan(metrics["loss"])
        assert (metrics["best"], metrics["deep"]) == (-math.inf, {"x": [math.inf]})
        assert metrics["said"] == "nano"
    run = tmp_path / "odd"
    (marker,) = run.glob("checkpoints/*/_COMMITTED")

    def refuse(word: str) -> None:
        pytest.fail(f"{word} is no JSON")

    for text in (marker.read_text(), *(run / "metrics.jsonl").read_text().splitlines()):
        assert '"nan"' in text
        json.loads(text, parse_constant=refuse)


def test_the_workers_environment_is_this_ones_while_the_function_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WAS_SET", "before")
    monkeypatch.delenv("WAS_NOT", raising=False)
    environment = {"WAS_SET": "during", "WAS_NOT": "during", "RANK": "7"}

    def look() -> list[str | None]:
        return [os.environ.get(name) for name in environment]

    def check_and_fail() -> None:
        raise ValueError(str(look()))

    result = trainer(look, tmp_path, worker_env=environment).fit()
    assert result.return_value == ["during", "during", None]
    assert look() == ["before", None, None]
    with pytest.raises(TrainingFailed, match=r"ValueError: .'during', 'during', None"):
        trainer(check_and_fail, tmp_path, worker_env=environment).fit()
    assert look() == ["before", None, None]


def test_failures_that_nothing_survives_here_are_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer(lambda: None, tmp_path).fit()
    assert "max_failures" not in capfd.readouterr().err
    trainer(lambda: None, tmp_path, failure_config=train.FailureConfig(max_failures=3)).fit()
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "max_failures" in line]
    assert line.startswith("max_failures=3 has no effect with num_workers=0")


def test_two_runs_within_a_second_have_directories_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/x/my script é.py"])
    paths = [trainer(lambda: train.report({}), tmp_path).fit().path for _ in range(3)]
    assert len({Path(path).name for path in paths}) == 3
    assert all(Path(path).name.startswith("my_script__-") for path in paths)


def test_the_same_name_after_success_finds_nothing_left_to_do(tmp_path: Path) -> None:
    trained = []

    def to_three() -> None:
        found = train.get_checkpoint()
        for epoch in range(found.to_dict()["epoch"] + 1 if found else 0, 3):
            trained.append(epoch)
            train.report({"epoch": epoch}, checkpoint=train.Checkpoint.from_dict({"epoch": epoch}))

    for _ in range(2):
        result = trainer(to_three, tmp_path, name="twice").fit()
        assert result.metrics == {"epoch": 2}
        assert [metrics["epoch"] for _, metrics in result.best_checkpoints] == [0, 1, 2]
    assert trained == [0, 1, 2]


@pytest.mark.parametrize(("order", "left"), [("min", [5, 3]), ("max", [5, 7])])
def test_the_last_of_the_best_checkpoints_is_the_best(
    tmp_path: Path, order: str, left: list[int]
) -> None:
    def report_losses() -> None:
        for loss in (math.nan, 3, 7, 5):
            train.report({"loss": loss}, train.Checkpoint.from_dict({"loss": loss}))
        if order == "max":
            raise ValueError("as planned")

    config = train.CheckpointConfig(
        num_to_keep=2, checkpoint_score_attribute="loss", checkpoint_score_order=order
    )
    try:
        result = trainer(report_losses, tmp_path, name="r", checkpoint_config=config).fit()
    except TrainingFailed as error:
        result = error.result
    assert [metrics["loss"] for _, metrics in result.best_checkpoints] == left
    assert result.checkpoint is not None
    assert result.checkpoint.to_dict() == {"loss": 5}


def test_a_directory_is_not_copied_into_itself(tmp_path: Path) -> None:
    def save_all() -> None:
        context = train.get_context()
        inside = Path(context.get_trial_dir())
        (inside / "model").write_text("x")
        for _ in range(2):
            train.report({}, checkpoint=train.Checkpoint(str(inside)))
        for reported in train.get_all_reported_checkpoints():
            assert (Path(reported.checkpoint.path) / "model").read_text() == "x"
            assert not list(Path(reported.checkpoint.path).glob("**/checkpoints"))
        assert context.get_storage().build_checkpoint_path_from_name("c").endswith("/checkpoints/c")
        train.report({}, checkpoint=train.Checkpoint(context.get_storage()))

    with pytest.raises(TrainingFailed, match="copied into itself"):
        trainer(save_all, tmp_path, name="inside").fit()


def test_storage_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"file/.*cannot be made"):
        trainer(lambda: None, tmp_path / "file").fit()


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


def count_on(config: dict[str, Any]) -> int:
    """Count from the newest checkpoint on, and fail once on the way."""
    begun = train.get_checkpoint()
    first = begun.to_dict()["epoch"] + 1 if begun is not None else 0
    for epoch in range(first, config["epochs"]):
        if epoch == config.get("fails_at") and not Path(config["once"]).exists():
            Path(config["once"]).touch()
            raise ValueError("the machine is on fire")
        train.report({"epoch": epoch}, checkpoint=train.Checkpoint.from_dict({"epoch": epoch}))
    return first


class Unpicklable:
    """A callback that cannot be stored."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def after_report(self, metrics: dict[str, Any]) -> None:
        """Take it."""


def failing_once(tmp_path: Path) -> TorchTrainer:
    once = str(tmp_path / "once")
    run_config = train.RunConfig(
        name="r",
        storage_path=tmp_path,
        checkpoint_config=train.CheckpointConfig(num_to_keep=2),
        callbacks=(Unpicklable(),),
    )
    return TorchTrainer(
        count_on,
        train_loop_config={"epochs": 4, "fails_at": 3, "once": once},
        scaling_config=train.ScalingConfig(num_workers=0),
        run_config=run_config,
    )


def test_a_trainer_is_restored_from_its_run(tmp_path: Path) -> None:
    failing = failing_once(tmp_path)
    assert not TorchTrainer.can_restore(tmp_path / "r")
    with pytest.raises(UsageError, match=r"no run is there \(it has no run.json\)"):
        TorchTrainer.restore(tmp_path / "r")
    with pytest.raises(TrainingFailed):
        failing.fit()
    assert TorchTrainer.can_restore(tmp_path / "r")
    half_begun = tmp_path / "half"
    half_begun.mkdir()
    (half_begun / "run.json").write_bytes((tmp_path / "r" / "run.json").read_bytes())
    assert not TorchTrainer.can_restore(half_begun)
    moved = tmp_path / "moved"
    (tmp_path / "r").rename(moved)
    restored = TorchTrainer.restore(moved, train_loop_config={"epochs": 5})
    assert restored.scaling_config.num_workers == 0
    assert restored.run_config.checkpoint_config.num_to_keep == 2
    result = restored.fit()
    assert (result.path, result.return_value) == (str(moved), 3)
    assert not TorchTrainer.can_restore(moved)
    with pytest.raises(UsageError, match="it has succeeded"):
        TorchTrainer.restore(moved)


def test_restoring_with_a_function_unpickles_nothing(tmp_path: Path) -> None:
    failing = failing_once(tmp_path)
    with pytest.raises(TrainingFailed):
        failing.fit()
    (tmp_path / "r" / "trainer.pkl").write_bytes(b"cos\nsystem\n(S'touch /dev/full'\ntR.")
    scaling = train.ScalingConfig(num_workers=0)
    config = {"epochs": 4}
    restored = TorchTrainer.restore(
        tmp_path / "r", count_on, train_loop_config=config, scaling_config=scaling
    )
    assert restored.fit().return_value == 3
    files = Files(str(tmp_path / "r"))
    record = read_run(files)
    assert record is not None
    write_run(files, replace(record, phase=RunPhase.FAILED))
    (tmp_path / "r" / "trainer.pkl").write_bytes(b"cos\nsystem\n(S'touch /dev/full'\ntR.")
    with pytest.raises(UsageError, match=r"version, or damaged, and was not read; pass the train"):
        TorchTrainer.restore(tmp_path / "r")
    (tmp_path / "r" / "trainer.pkl").unlink()
    with pytest.raises(UsageError, match=r"stored there .*submitted by.*pass the train function"):
        TorchTrainer.restore(tmp_path / "r")


def test_a_new_run_begins_with_another_runs_checkpoint(tmp_path: Path) -> None:
    first = trainer(count_on, tmp_path, name="first").fit()
    assert first.checkpoint is not None

    def look(config: dict[str, Any]) -> list[Any]:
        begun = train.get_checkpoint()
        assert begun == first.checkpoint
        assert train.get_all_reported_checkpoints() == []
        train.report({"n": 0}, checkpoint=train.Checkpoint.from_dict({"n": 0}))
        (reported,) = train.get_all_reported_checkpoints()
        assert reported.metrics == {"n": 0}
        assert reported.checkpoint == train.get_checkpoint()
        return [begun.to_dict()["epoch"], train.get_checkpoint() != begun]

    def begin(name: str) -> train.Result:
        return TorchTrainer(
            look,
            scaling_config=train.ScalingConfig(num_workers=0),
            run_config=train.RunConfig(
                name=name,
                storage_path=tmp_path,
                checkpoint_config=train.CheckpointConfig(num_to_keep=1),
            ),
            resume_from_checkpoint=first.checkpoint,
        ).fit()

    assert begin("second").return_value == [3, True]
    assert Path(first.checkpoint.path).is_dir()
    (Path(first.checkpoint.path) / "dict.pt").write_bytes(b"torn")
    with pytest.raises(StorageError, match=r"file dict.pt is truncated: 4 bytes"):
        begin("third")
    assert not (tmp_path / "third").exists()
    for folder in (tmp_path / "second", tmp_path / "second" / "checkpoints"):
        first = replace(first, checkpoint=train.Checkpoint(folder))
        with pytest.raises(UsageError, match=r"expected one of .*second/checkpoints/NAME"):
            begin("fourth")
    with pytest.raises(UsageError, match="resume_from_checkpoint is a str"):
        TorchTrainer(look, resume_from_checkpoint="/x")  # type: ignore[arg-type]


def test_uploads_in_the_background_are_told_in_the_callers_thread(tmp_path: Path) -> None:
    told: list[tuple[int, bool]] = []
    here = threading.get_ident()

    class Callback:
        def after_report(self, metrics: dict[str, Any]) -> None:
            told.append((metrics["n"], threading.get_ident() == here))

    def upload() -> None:
        for n in range(3):
            files = tmp_path / f"files{n}"
            files.mkdir()
            (files / "model").write_text("x")
            kept = None if n != 1 else False
            train.report(
                {"n": n},
                checkpoint=train.Checkpoint.from_directory(files),
                checkpoint_upload_mode=train.CheckpointUploadMode.ASYNC,
                delete_local_checkpoint_after_upload=kept,
            )

    result = trainer(upload, tmp_path, name="r", callbacks=(Callback(),)).fit()
    assert sorted(told) == [(0, True), (1, True), (2, True)]
    assert [metrics["n"] for _, metrics in result.best_checkpoints] == [0, 1, 2]
    assert [(tmp_path / f"files{n}").exists() for n in range(3)] == [False, True, False]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"checkpoint_upload_mode": "ASYNC"}, r"expected CheckpointUploadMode.SYNC, "),
        (
            {
                "checkpoint_upload_mode": train.CheckpointUploadMode.NO_UPLOAD,
                "checkpoint_upload_fn": lambda checkpoint, name: checkpoint,
            },
            "checkpoint_upload_fn with checkpoint_upload_mode=NO_UPLOAD",
        ),
        (
            {"checkpoint_upload_mode": train.CheckpointUploadMode.NO_UPLOAD},
            r"NO_UPLOAD for .*/files, expected a directory in .*/checkpoints",
        ),
    ],
)
def test_an_upload_that_contradicts_itself_is_refused(
    tmp_path: Path, more: dict[str, Any], says: str
) -> None:
    (tmp_path / "files").mkdir()

    def report() -> None:
        with pytest.raises(UsageError, match=says):
            train.report({}, checkpoint=train.Checkpoint.from_directory(tmp_path / "files"), **more)
        train.report({"fine": 1})

    assert trainer(report, tmp_path).fit().metrics == {"fine": 1}
