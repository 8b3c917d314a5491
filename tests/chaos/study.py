"""Runs a study: `study.py STORAGE TRIALS [restore]`; its trials go on from their checkpoints."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from elastic import train, tune
from elastic.train.torch import TorchTrainer
from elastic.tune.integration.ray_train import TuneReportCallback

NAME = "mystudy"
REPORTS = 4
REPORT_S = 0.15


def objective(config: dict[str, Any]) -> None:
    done, total = 0, 0.0
    checkpoint = tune.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            done, total = json.loads((Path(folder) / "state.json").read_text())
    for number in range(done, REPORTS):
        time.sleep(REPORT_S)
        total += config["rate"] * (number + 1)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "state.json").write_text(json.dumps([number + 1, total]))
            tune.report({"total": total}, checkpoint=tune.Checkpoint.from_directory(folder))


def report_size(config: dict[str, Any]) -> None:
    size = train.get_context().get_world_size()
    train.report({"total": config["rate"] * size, "size": size})


def fit_a_trainer(config: dict[str, Any]) -> None:
    name = f"of-{tune.get_context().get_trial_id()}"
    resumes = tune.get_checkpoint() is not None
    if not resumes:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "state.json").write_text("[]")
            tune.report({"total": 0.0}, checkpoint=tune.Checkpoint.from_directory(folder))
    trainer = TorchTrainer(
        report_size,
        train_loop_config=config,
        scaling_config=train.ScalingConfig(num_workers=config["workers"]),
        run_config=train.RunConfig(name=name, callbacks=[TuneReportCallback()]),
    )
    result = trainer.fit()
    assert result.metrics is not None
    tune.report({**result.metrics, "is_fitted": True, "resumes": resumes})


def main() -> None:
    storage, trials = sys.argv[1:3]
    if sys.argv[3:] == ["restore"]:
        tuner = tune.Tuner.restore(f"{storage}/{NAME}", objective)
    else:
        tuner = tune.Tuner(
            objective,
            param_space={"rate": tune.uniform(0.0, 1.0), "half": tune.grid_search([0, 1])},
            tune_config=tune.TuneConfig(
                metric="total", mode="max", num_samples=int(trials) // 2, seed=11
            ),
            run_config=tune.RunConfig(
                name=NAME, storage_path=storage, stop=lambda trial, result: result["total"] > 8
            ),
        )
    tuner.fit()


if __name__ == "__main__":
    main()
