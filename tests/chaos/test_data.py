"""Datasets of elastic.data under kills: each row once, and the bits of an undisturbed run.

Two oracles know nothing of us: DuckDB counts the rows that were trained with, and the undisturbed
run is one process without feeders.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest

from elastic.core.facts import ENDED
from elastic.core.view import JobView
from elastic.testing.local_cluster import LocalCluster
from tests.chaos.conftest import NODES
from tests.chaos.scripts import ROOT
from tests.harness.chaos_jobs import chaos_job, with_arguments, with_script
from tests.harness.histories import (
    SCRIPT,
    check_each_row_once,
    draw_history,
    run_history,
    write_table,
)
from tests.patience import DEADLINE_S, wait_for

HISTORIES = 10


@pytest.fixture
def table(tmp_path: Path) -> Path:
    folder = tmp_path / "table"
    write_table(folder)
    return folder


@pytest.mark.slow
def test_random_histories_train_the_same_rows_to_the_same_bits(
    cluster: LocalCluster, table: Path, tmp_path: Path, fresh_seed: int
) -> None:
    rng = random.Random(fresh_seed)
    for number in range(HISTORIES):
        directory = tmp_path / str(number)
        directory.mkdir()
        run_history(cluster, draw_history(rng, len(NODES)), table, directory)


def steps_with(workers: int, view: JobView) -> bool:
    """Return whether so many train in a later generation than the first."""
    group = view.record.group
    is_whole = group is not None and group.generation > 1 and len(group.members) == workers
    return view.record.phase in ENDED or (is_whole and all(w.steps for w in view.workers))


def feeding(run: Path, pids: Iterable[int]) -> set[int]:
    """Return those of these processes that are feeders to which a trainer is connected."""
    lists = [json.loads(path.read_text()) for path in run.glob("feeders/*.json")]
    ports = {int(one.rpartition(":")[2]) for listed in lists for one in listed}
    found = set()
    for pid in pids:
        with contextlib.suppress(psutil.Error):  # It may be gone by now.
            open_ones = psutil.Process(pid).net_connections()
            if any(o.status == "ESTABLISHED" and o.laddr.port in ports for o in open_ones):
                found.add(pid)
    return found


@pytest.mark.parametrize(("workers", "kills"), [(2, 1), pytest.param(1, 3, marks=pytest.mark.slow)])
def test_workers_and_feeders_on_other_nodes_that_are_killed_cost_no_row_and_no_bit(
    cluster: LocalCluster, table: Path, tmp_path: Path, workers: int, kills: int
) -> None:
    """Each node that has no trainer has a feeder."""
    ledger, storage = tmp_path / "ledger", tmp_path / "storage"
    ledger.mkdir()
    job = chaos_job("steps", "fed", workers=workers, directory=tmp_path)
    job = with_arguments(with_script(job, SCRIPT), "--table", str(table))
    more = (
        *("--ledger", str(ledger), "--storage", str(storage), "--workers", str(workers)),
        *("--placed", "--feeders", str(len(NODES) - workers)),
    )
    driver = subprocess.Popen(
        [sys.executable, str(SCRIPT), *job.spec.entry.args, *more],
        env={**os.environ, "ELASTIC_COORD": cluster.address, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
    )

    def jobs() -> list[JobView]:
        """Return the job that trains, and that of its feeders."""
        views = cluster.client.list()
        trains = [one for one in views if one.record.spec.run_path == str(storage / "fed")]
        ids = [one.record.spec.job_id for one in trains]
        return [*trains, *(one for one in views if one.record.spec.feeds in ids)]

    try:
        wait_for(lambda: len(jobs()) == 2, "both jobs")
        fed, feeders = (one.record.spec.job_id for one in jobs())
        killed: set[int] = set()
        for _ in range(kills):
            found = wait_for(
                lambda: feeding(storage / "fed", cluster.worker_pids(feeders).values()) - killed,
                "a feeder that feeds",
            )
            killed.add(min(found))
            os.kill(min(found), signal.SIGKILL)
        assert cluster.job(fed).record.generation == 1
        os.kill(min(cluster.worker_pids(fed).values()), signal.SIGKILL)
        cluster.wait(fed, lambda v: steps_with(workers, v), "a worker that goes on")
    finally:
        job.finish.touch()
        assert driver.wait(DEADLINE_S) == 0
    check_each_row_once(ledger, job.check(cluster.job(fed)).metrics["epochs"])
    assert cluster.wait(feeders, lambda v: not v.workers, "their end").record.phase in ENDED
