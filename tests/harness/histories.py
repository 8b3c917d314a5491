"""Random histories of runs over a dataset: any size, any kills, each row once and the same bits.

    python -m tests.harness.histories --number 1000

A history is drawn by a seed: micro-batches in a step, workers, feeders beside each worker, and when
a worker is killed; a feeder is killed every two seconds. All train with one table for an epoch.
After every step the state must be that of an undisturbed run with as many micro-batches in a step,
and DuckDB counts the rows in the ledger that the workers wrote.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import click
import duckdb
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from elastic.core.world import ENDED
from elastic.testing.local_cluster import LocalCluster
from tests.harness.breaking import Breaker
from tests.harness.chaos_jobs import ChaosFailed, chaos_job, with_arguments, with_script
from tests.harness.traces import end_references

SCRIPT = Path(__file__).with_name("jobs") / "data_job.py"
ROWS = 1000
ROW_S = 0.003
"""Seconds of training for each row: an epoch of three seconds at any number of workers."""
MICRO_BATCHES = (2, 3, 5, 8)
FEEDERS_MAX = 8
FEEDER_KILL_S = 2.0


@dataclass(frozen=True)
class History:
    """What is done to one run.

    Attributes:
        micro_batches: of a step.
        workers: at most, and as many as can be there at once.
        feeders: beside each worker.
        kills: (seconds since the group was formed, who: from 0 to 1) of workers.
    """

    micro_batches: int
    workers: int
    feeders: int
    kills: tuple[tuple[float, float], ...]


def draw_history(rng: random.Random, nodes: int) -> History:
    """Draw a history for a cluster of so many nodes of one slot each."""
    workers = rng.randint(1, nodes)
    kills = sorted((rng.uniform(0, 3), rng.random()) for _ in range(rng.randint(0, 2)))
    return History(
        micro_batches=rng.choice([one for one in MICRO_BATCHES if one >= workers]),
        workers=workers,
        feeders=rng.randint(0, FEEDERS_MAX) // workers,
        # The only worker's end is the end of the run, which has no checkpoint.
        kills=tuple(kills) if workers > 1 else (),
    )


def write_table(folder: Path) -> None:
    """Write 1,000 rows in four files."""
    folder.mkdir()
    for number in range(4):
        ids = np.arange(number * 250, number * 250 + 250)
        pq.write_table(pa.table({"id": ids}), folder / f"{number}.parquet", row_group_size=20)


def _feeders_of(pid: int) -> list[psutil.Process]:
    """Return the feeders beside a worker."""
    children = psutil.Process(pid).children()
    return [one for one in children if "elastic.data.feeder" in one.cmdline()]


def check_each_row_once(ledger: Path, epochs: int) -> None:
    """Count the rows; a step that is done again has the same ones.

    Raises:
        ChaosFailed: says what was counted.
    """
    found = duckdb.sql(
        f"""select epoch, count(*), count(distinct id), min(id), max(id) from (
            select distinct * from read_csv('{ledger}/*.csv', auto_detect=false,
                columns={{'epoch': 'int', 'step': 'int', 'id': 'int'}})
        ) group by epoch order by epoch"""
    ).fetchall()
    if found != [(epoch, ROWS, ROWS, 0, ROWS - 1) for epoch in range(epochs)]:
        raise ChaosFailed(f"each of {ROWS} rows was to count once, and (epoch, rows, ...) {found}")


def run_history(cluster: LocalCluster, history: History, table: Path, directory: Path) -> str:
    """Train one epoch under this history.

    Args:
        cluster: is up, with all its nodes.
        history: what is done.
        table: of `write_table`.
        directory: for files of this run.

    Returns:
        What was found and killed, for people.

    Raises:
        ChaosFailed: some state is not the undisturbed run's, or some row did not count once.
    """
    ledger = directory / "ledger"
    ledger.mkdir()
    job = chaos_job("steps", "history", workers=history.workers, directory=directory)
    micro_batches = ("--micro-batches", str(history.micro_batches))
    job = with_arguments(with_script(job, SCRIPT), "--table", str(table), *micro_batches)
    more = (
        *("--ledger", str(ledger), "--feeders", str(history.feeders)),
        *("--pace", str(4 * ROW_S * history.workers)),
    )
    job.finish.touch()
    entry = replace(job.spec.entry, args=(*job.spec.entry.args, *more))
    job_id = cluster.submit(replace(job.spec, entry=entry))
    cluster.wait(job_id, lambda v: v.record.generation > 0, "a group")
    breaker = Breaker(cluster, job_id)
    began_s, kills, feeder_kills, worker_kills = time.monotonic(), list(history.kills), 0, 0
    while (view := cluster.job(job_id)).record.phase not in ENDED:
        passed_s = time.monotonic() - began_s
        if kills and passed_s > kills[0][0]:
            _, draw = kills.pop(0)
            worker_kills += breaker.size > 1 and breaker.strike("kill_worker", draw)
        if passed_s > FEEDER_KILL_S * (feeder_kills + 1):
            feeder_kills += _kill_a_feeder(cluster.worker_pids(job_id).values())
        time.sleep(0.05)
    verdict = job.check(view)
    check_each_row_once(ledger, verdict.metrics["epochs"])
    killed = f"{worker_kills} workers and {feeder_kills} feeders killed"
    return f"{history}: {killed}, {view.record.generation} generations"


def _kill_a_feeder(workers: Iterable[int]) -> bool:
    for worker in workers:
        with contextlib.suppress(psutil.Error):  # It may have ended.
            for feeder in _feeders_of(worker):
                feeder.send_signal(signal.SIGKILL)
                return True
    return False


@click.command()
@click.option("--number", default=100, show_default=True, help="Histories to run.")
@click.option("--seed", default=0, show_default=True, help="The first one's seed.")
@click.option("--nodes", default=3, show_default=True)
def main(number: int, seed: int, nodes: int) -> None:
    """Run random histories one after another; end at the first that is wrong."""
    with LocalCluster(nodes=nodes, spares=2) as cluster:
        table = cluster.directory / "table"
        write_table(table)
        try:
            for one in range(seed, seed + number):
                directory = cluster.directory / f"history-{one}"
                directory.mkdir()
                history = draw_history(random.Random(one), nodes)
                click.echo(f"seed {one}: {run_history(cluster, history, table, directory)}")
                shutil.rmtree(directory)
        finally:
            end_references()


if __name__ == "__main__":
    main()
