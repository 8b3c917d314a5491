"""A study whose driver and one of whose nodes are killed: each trial once, and the same results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import elastic
from elastic import tune
from elastic.core.study import TrialState
from elastic.storage.study_log import StudyLog
from elastic.testing.local_cluster import LocalCluster
from tests.chaos.study import TRIALS, fit_a_trainer, objective
from tests.patience import DEADLINE_S, wait_for

REPORTED_APART = ["time_total_s", "logdir"]
"""Columns in which two runs of one study differ."""


def drive(cluster: LocalCluster, storage: Path, *more: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.chaos.study", str(storage), "mystudy", *more],
        env={**os.environ, "ELASTIC_COORD": cluster.address},
    )


def results(storage: Path) -> tuple[Any, tune.ResultGrid]:
    grid = tune.Tuner.restore(storage / "mystudy", objective).get_results()
    frame = grid.get_dataframe().drop(columns=REPORTED_APART)
    return frame, grid


def test_driver_and_node_are_killed_and_every_trial_runs_once(tmp_path: Path) -> None:
    killed, calm = tmp_path / "killed", tmp_path / "calm"
    with LocalCluster(nodes=3) as cluster:
        driver = drive(cluster, killed)
        path = str(killed / "mystudy")

        def has_come(count: int) -> bool:
            return sum(one.is_over for one in StudyLog(path).study.trials) >= count

        wait_for(lambda: has_come(3) or driver.poll() is not None, "three trials to end")
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        running = [t for t in StudyLog(path).study.trials if t.state is TrialState.RUNNING]
        assert running
        cluster.kill_node("n2")
        assert drive(cluster, killed, "restore").wait(DEADLINE_S) == 0
        assert drive(cluster, calm).wait(DEADLINE_S) == 0
        known = {job.record.spec.job_id for job in cluster.client.list()}

    frame, grid = results(killed)
    calm_frame, calm_grid = results(calm)
    assert len(grid) == TRIALS
    assert frame.to_dict() == calm_frame.to_dict()
    assert grid.get_best_result().config == calm_grid.get_best_result().config
    assert set(frame["state"]) == {"succeeded", "stopped"}
    # One job each, and each report once: the runs that the node took with it went on. A trial that
    # was about to be submitted when the driver died is in the log once more, for the job it has.
    study = StudyLog(path).study
    lines = map(json.loads, Path(path, "study.jsonl").read_text().splitlines())
    jobs = Counter(
        line["trial"] for line in lines if line["e"] == "started" and line["job"] in known
    )
    assert jobs == dict.fromkeys(range(TRIALS), 1)
    for trial in study.trials:
        assert [r.number for r in trial.reports] == list(range(1, trial.iteration + 1))
    best = grid.get_best_result()
    assert best.checkpoint is not None
    assert best.metrics is not None
    assert len(best.best_checkpoints) == best.metrics["training_iteration"]


def test_a_trial_gets_the_workers_that_the_trainer_in_its_function_asks_for(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    tuner = tune.Tuner(
        fit_a_trainer,
        param_space={"rate": 2.0, "workers": tune.grid_search([1, 2, 3])},
        tune_config=tune.TuneConfig(metric="total", mode="max"),
        run_config=tune.RunConfig(name="nested", storage_path=str(tmp_path), verbose=0),
    )
    with elastic.init(cluster.address):
        grid = tuner.fit()
    found = {one.config["workers"]: one.metrics for one in grid if one.config and one.metrics}
    for workers in (1, 2, 3):
        assert found[workers]["total"] == 2.0 * workers
        assert found[workers]["is_fitted"]
        assert found[workers]["training_iteration"] == 2
    assert grid.get_best_result().config == {"rate": 2.0, "workers": 3}
    lines = map(json.loads, (tmp_path / "nested" / "study.jsonl").read_text().splitlines())
    assert sorted(line["trial"] for line in lines if line["e"] == "resized") == [1, 2]
