"""Datasets of elastic.data under kills: each row once, and the bits of an undisturbed run.

Two oracles know nothing of us: DuckDB counts the rows that were trained with, and the undisturbed
run is one process without feeders.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import duckdb
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic.core.view import JobView
from elastic.core.world import ENDED
from elastic.testing.local_cluster import LocalCluster
from tests.chaos.conftest import NODES
from tests.chaos.scripts import ROOT
from tests.chaos.test_streams import trains_in
from tests.harness.chaos_jobs import chaos_job, with_arguments, with_script
from tests.patience import DEADLINE_S, wait_for

SCRIPT = Path(__file__).with_name("data_job.py")
ROWS = 1000
KILLS = 3


def feeders_of(pid: int) -> list[psutil.Process]:
    children = psutil.Process(pid).children()
    return [one for one in children if "elastic.data.feeder" in one.cmdline()]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """1,000 rows in four files."""
    folder = tmp_path / "table"
    folder.mkdir()
    for number in range(4):
        ids = np.arange(number * 250, number * 250 + 250)
        pq.write_table(pa.table({"id": ids}), folder / f"{number}.parquet", row_group_size=20)
    return folder


def assert_each_row_once(ledger: Path, epochs: int) -> None:
    """Count the rows; a step that is done again has the same ones."""
    found = duckdb.sql(
        f"""select epoch, count(*), count(distinct id), min(id), max(id) from (
            select distinct * from read_csv('{ledger}/*.csv', header=false,
                columns={{'epoch': 'int', 'step': 'int', 'id': 'int'}})
        ) group by epoch order by epoch"""
    ).fetchall()
    assert found == [(epoch, ROWS, ROWS, 0, ROWS - 1) for epoch in range(epochs)]


@pytest.mark.slow
def test_killed_workers_and_feeders_cost_no_row_and_no_bit(
    cluster: LocalCluster, table: Path, tmp_path: Path
) -> None:
    ledger = tmp_path / "ledger"
    ledger.mkdir()
    job = chaos_job("steps", "data", workers=3, directory=tmp_path)
    job = with_arguments(with_script(job, SCRIPT), "--table", str(table))
    # What is only for the run that is disturbed.
    more = ("--ledger", str(ledger), "--feeders", "1")
    entry = replace(job.spec.entry, args=(*job.spec.entry.args, *more))
    job_id = cluster.submit(replace(job.spec, entry=entry))
    view = cluster.wait(job_id, lambda v: trains_in(1, v), "three workers")
    victim, other, _ = sorted(cluster.worker_pids(job_id).values())
    wait_for(lambda: feeders_of(other), "a feeder")
    for process in feeders_of(other):
        process.kill()
    generation = view.record.generation
    os.kill(victim, signal.SIGKILL)
    # One of two without the victim, and one with whoever replaces it.
    cluster.wait(job_id, lambda v: trains_in(generation + 2, v), "three again")
    job.finish.touch()
    view = cluster.wait(job_id, lambda v: v.record.phase in ENDED, "the end")
    cluster.wait(job_id, lambda v: not v.workers, "its processes' end")
    verdict = job.check(view)
    assert_each_row_once(ledger, verdict.metrics["epochs"])


def steps_with(workers: int, view: JobView) -> bool:
    """Return whether so many train in a later generation than the first."""
    group = view.record.group
    is_whole = group is not None and group.generation > 1 and len(group.members) == workers
    return view.record.phase in ENDED or (is_whole and all(w.steps for w in view.workers))


def feeding(run: Path, pids: Iterable[int]) -> set[int]:
    """Return those of these processes that are feeders to which a trainer is connected."""
    lists = [json.loads(path.read_text()) for path in run.glob("feeders/*.json")]
    ports = {int(one["address"].rpartition(":")[2]) for listed in lists for one in listed}
    found = set()
    for pid in pids:
        with contextlib.suppress(psutil.Error):  # It may be gone by now.
            open_ones = psutil.Process(pid).net_connections()
            if any(o.status == "ESTABLISHED" and o.laddr.port in ports for o in open_ones):
                found.add(pid)
    return found


@pytest.mark.parametrize("workers", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_workers_and_feeders_on_other_nodes_that_are_killed_cost_no_row_and_no_bit(
    cluster: LocalCluster, table: Path, tmp_path: Path, workers: int
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
        for _ in range(KILLS):
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
    assert_each_row_once(ledger, job.check(cluster.job(fed)).metrics["epochs"])
    assert cluster.wait(feeders, lambda v: not v.workers, "their end").record.phase in ENDED
