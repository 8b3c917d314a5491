"""What a `UserCallback` hears, and criteria that end a run: in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastic import train
from elastic.storage.marker import MARKER
from elastic.storage.run_directory import RunDirectory
from elastic.train.callbacks import CallbackRunner
from elastic.train.config import TrainRunContext
from elastic.train.torch import TorchTrainer


class Heard(train.UserCallback):
    def __init__(self) -> None:
        self.reports: list[tuple[list[dict[str, Any]], str]] = []
        self.errors: list[dict[int, Exception]] = []
        self.ends: list[Any] = []

    def before_run(self, run_context: Any) -> None:
        assert not self.reports
        self.ends.append(run_context.run_name)

    def after_run(self, run_context: Any, result: Any) -> None:
        self.ends.append((len(self.reports), len(self.errors), result))

    def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None:
        self.reports.append((metrics, checkpoint.path.rpartition("/")[2] if checkpoint else ""))

    def after_exception(self, run_context: Any, worker_exceptions: Any) -> None:
        assert run_context.get_run_config().name == run_context.run_name
        self.errors.append(worker_exceptions)


def count(config: dict[str, Any]) -> None:
    for number in range(config["reports"]):
        checkpoint = train.Checkpoint.from_dict({"n": number})
        train.report({"n": number}, checkpoint, f"checkpoint-{number}")
    if config["fails"]:
        raise ValueError("as planned")


def test_reports_checkpoints_and_the_failure_are_heard_in_order(tmp_path: Path) -> None:
    received = Heard()
    with pytest.raises(train.WorkerGroupError) as caught:
        TorchTrainer(
            count,
            train_loop_config={"reports": 3, "fails": True},
            scaling_config=train.ScalingConfig(num_workers=0),
            run_config=train.RunConfig(name="r", storage_path=tmp_path, callbacks=[received]),
        ).fit()
    assert [metrics for metrics, _ in received.reports] == [[{"n": 0}], [{"n": 1}], [{"n": 2}]]
    assert all(name.startswith("checkpoint-") for _, name in received.reports)
    (error,) = received.errors
    assert error == caught.value.worker_failures
    assert isinstance(error[0], ValueError)
    assert isinstance(caught.value, train.TrainingFailedError)
    assert received.ends == ["r", (3, 1, caught.value.result)]
    assert caught.value.result.error is caught.value


def test_after_run_gets_the_result_once_all_reports_were_delivered(tmp_path: Path) -> None:
    received = Heard()
    result = TorchTrainer(
        count,
        train_loop_config={"reports": 1, "fails": False},
        scaling_config=train.ScalingConfig(num_workers=0),
        run_config=train.RunConfig(name="r", storage_path=tmp_path, callbacks=[received]),
    ).fit()
    assert received.ends == ["r", (1, 0, result)]


def test_a_report_is_told_once_all_ranks_have_made_it_and_its_checkpoint_counts(
    tmp_path: Path,
) -> None:
    received = Heard()
    scaling = train.ScalingConfig(num_workers=2)
    context = TrainRunContext("r", "j", str(tmp_path), train.RunConfig(name="r"), scaling)
    run = RunDirectory(str(tmp_path))

    def line(rank: int, index: int, generation: int = 2, **more: Any) -> None:
        row = {"generation": generation, "index": index, "world_size": 2, "metrics": {"r": rank}}
        run.metrics.add(rank, {**row, **more})
        run.metrics.flush()

    line(0, 0, generation=1)
    line(1, 0, generation=1)
    telling = CallbackRunner([received], context)
    telling.begin()  # What was there before this attempt is nobody's news.
    line(0, 0)
    telling.poll()
    assert not received.reports
    line(1, 0)
    telling.poll()
    line(0, 1, checkpoint="c")
    line(1, 1)
    telling.poll()
    assert received.reports == [([{"r": 0}, {"r": 1}], "")]
    (tmp_path / "checkpoints" / "c").mkdir(parents=True)
    (tmp_path / "checkpoints" / "c" / MARKER).write_text(json.dumps({}))
    line(0, 2)
    telling.poll()
    assert received.reports[1:] == [([{"r": 0}, {"r": 1}], "c")]
    telling.finish()
    assert received.reports[2:] == [([{"r": 0}, {}], "")]


@pytest.mark.parametrize(
    "stop", [{"n": 2}, {"training_iteration": 3}, lambda trial_id, result: result["n"] == 2]
)
def test_a_run_that_has_reached_enough_is_a_success(tmp_path: Path, stop: Any) -> None:
    result = TorchTrainer(
        count,
        train_loop_config={"reports": 9, "fails": True},
        scaling_config=train.ScalingConfig(num_workers=0),
        run_config=train.RunConfig(name="r", storage_path=tmp_path, stop=stop),
    ).fit()
    assert result.metrics == {"n": 2}
