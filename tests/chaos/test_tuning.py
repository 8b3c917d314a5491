"""A study whose driver and one of whose nodes are killed: each trial once, and the same results."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import elastic
from elastic import tune
from elastic.core.study import TrialState
from elastic.storage.study_log import StudyLog
from elastic.testing.local_cluster import LocalCluster
from tests.chaos.study import NAME, fit_a_trainer, objective
from tests.patience import DEADLINE_S, wait_for

KILL_EVERY_S = 5.0
REPORTED_APART = ["time_total_s", "logdir", "checkpoint_path"]
"""Columns in which two runs of one study differ."""


def drive(cluster: LocalCluster, storage: Path, trials: int, *more: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.chaos.study", str(storage), str(trials), *more],
        env={**os.environ, "ELASTIC_COORD": cluster.address},
    )


def results(storage: Path) -> tuple[Any, tune.ResultGrid]:
    grid = tune.Tuner.restore(storage / NAME, objective).get_results()
    frame = grid.get_dataframe().drop(columns=REPORTED_APART)
    return frame, grid


def assert_undisturbed(killed: Path, calm: Path, trials: int, known: set[str]) -> None:
    """Check that each trial has run once, with the results of a study that nobody disturbed."""
    frame, grid = results(killed)
    calm_frame, calm_grid = results(calm)
    assert len(grid) == trials
    assert frame.to_dict() == calm_frame.to_dict()
    assert grid.get_best_result().config == calm_grid.get_best_result().config
    assert set(frame["state"]) == {"succeeded", "stopped"}
    # One job each, and each report once: the runs that the node took with it went on. A trial that
    # was about to be submitted when the driver died is in the log once more, for the job it has.
    study = StudyLog(str(killed / NAME)).study
    lines = map(json.loads, (killed / NAME / "study.jsonl").read_text().splitlines())
    jobs = Counter(
        line["trial"] for line in lines if line["e"] == "started" and line["job"] in known
    )
    assert jobs == dict.fromkeys(range(trials), 1)
    for trial in study.trials:
        assert [r.number for r in trial.reports] == list(range(1, trial.iteration + 1))
    best = grid.get_best_result()
    assert best.checkpoint is not None
    assert best.metrics is not None
    assert len(best.best_checkpoints) == best.metrics["training_iteration"]


def test_driver_and_node_are_killed_and_every_trial_runs_once(tmp_path: Path) -> None:
    killed, calm, trials = tmp_path / "killed", tmp_path / "calm", 8
    with LocalCluster(nodes=3) as cluster:
        driver = drive(cluster, killed, trials)
        path = str(killed / NAME)

        def has_come(count: int) -> bool:
            return sum(one.is_over for one in StudyLog(path).study.trials) >= count

        wait_for(lambda: has_come(3) or driver.poll() is not None, "three trials to end")
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        running = [t for t in StudyLog(path).study.trials if t.state is TrialState.RUNNING]
        assert running
        cluster.kill_node("n2")
        assert drive(cluster, killed, trials, "restore").wait(DEADLINE_S) == 0
        assert drive(cluster, calm, trials).wait(DEADLINE_S) == 0
        known = {job.record.spec.job_id for job in cluster.client.list()}
    assert_undisturbed(killed, calm, trials, known)


@pytest.mark.slow
def test_driver_coordinator_and_nodes_are_killed_every_five_seconds(
    tmp_path: Path, fresh_seed: int
) -> None:
    killed, calm, trials, dice = (
        tmp_path / "killed",
        tmp_path / "calm",
        64,
        random.Random(fresh_seed),
    )
    kills: Counter[str] = Counter()
    with LocalCluster(nodes=3) as cluster:
        driver = drive(cluster, killed, trials)
        while driver.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                driver.wait(KILL_EVERY_S)
                break
            victim = dice.choice(("driver", "coordinator", "n1", "n2", "n3"))
            kills[victim] += 1
            if victim == "driver":
                driver.kill()
                driver.wait()
                driver = drive(cluster, killed, trials, "restore")
            elif victim == "coordinator":
                cluster.kill_coordinator()
                cluster.start_coordinator()
            else:
                cluster.kill_node(victim)
                cluster.start_node(victim)
        assert driver.returncode == 0
        assert drive(cluster, calm, trials).wait(DEADLINE_S) == 0
        known = {job.record.spec.job_id for job in cluster.client.list()}
    print(f"killed {dict(kills)}")
    assert len(kills) > 2
    assert_undisturbed(killed, calm, trials, known)


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
        assert found[workers]["resumes"] == (workers > 1)  # From what it saved at another size.
        assert found[workers]["training_iteration"] == 3
    assert grid.get_best_result().config == {"rate": 2.0, "workers": 3}
    lines = map(json.loads, (tmp_path / "nested" / "study.jsonl").read_text().splitlines())
    assert sorted(line["trial"] for line in lines if line["e"] == "resized") == [1, 2]
