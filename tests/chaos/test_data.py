"""Datasets of elastic.data under kills: each row once, and the bits of an undisturbed run.

Two oracles know nothing of us: DuckDB counts the rows that were trained with, and the undisturbed
run is one process without feeders.
"""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import duckdb
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from elastic.core.world import ENDED
from elastic.testing.local_cluster import LocalCluster
from tests.chaos.test_streams import trains_in
from tests.harness.chaos_jobs import chaos_job, with_arguments, with_script
from tests.patience import wait_for

SCRIPT = Path(__file__).with_name("data_job.py")
ROWS = 1000


def feeders_of(pid: int) -> list[psutil.Process]:
    children = psutil.Process(pid).children()
    return [one for one in children if "elastic.data.feeder" in one.cmdline()]


def test_killed_workers_and_feeders_cost_no_row_and_no_bit(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    table, ledger = tmp_path / "table", tmp_path / "ledger"
    table.mkdir()
    ledger.mkdir()
    for number in range(4):
        ids = np.arange(number * 250, number * 250 + 250)
        pq.write_table(pa.table({"id": ids}), table / f"{number}.parquet", row_group_size=20)
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
    # A step that is done again has the same rows.
    found = duckdb.sql(
        f"""select epoch, count(*), count(distinct id), min(id), max(id) from (
            select distinct * from read_csv('{ledger}/*.csv', header=false,
                columns={{'epoch': 'int', 'step': 'int', 'id': 'int'}})
        ) group by epoch order by epoch"""
    ).fetchall()
    epochs = verdict.metrics["epochs"]
    assert found == [(epoch, ROWS, ROWS, 0, ROWS - 1) for epoch in range(epochs)]
