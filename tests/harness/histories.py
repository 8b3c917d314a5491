"""Random histories of runs over a dataset: any size, any kills, each row once and the same bits.

    python -m tests.harness.histories --number 1000 --parallel 4

A history is drawn by a seed: micro-batches in a step, workers, feeders beside each worker, and when
a worker is killed; a feeder is killed with each quarter of the rows, every 0.4 s on a machine with
idle cores. All train with one table for an epoch.
After every step the state must be that of an undisturbed run with as many micro-batches in a step,
and DuckDB counts the rows in the ledger that the workers wrote.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path

import click
import duckdb
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from elastic.core.facts import ENDED
from elastic.errors import ElasticError
from elastic.testing.local_cluster import LocalCluster
from tests.harness.breaking import Breaker
from tests.harness.chaos_jobs import ChaosFailed, chaos_job, with_arguments, with_script
from tests.harness.traces import end_references

SCRIPT = Path(__file__).with_name("jobs") / "data_job.py"
FILES = 4
ROWS = 400
ROW_S = 0.004
"""Seconds of training for each row."""
MICRO_BATCHES = (2, 3, 5, 8)
FEEDERS_MAX = 8
FEEDER_KILLS = 3
HISTORY_S_MAX = 300.0
"""A history that takes longer hangs."""

_comparing = threading.Lock()
"""Histories share the undisturbed runs, which one thread at a time may ask for steps."""


@dataclass(frozen=True)
class History:
    """What is done to one run.

    Attributes:
        micro_batches: of a step.
        workers: at most, and as many as can be there at once.
        feeders: beside each worker.
        kills: (share of the rows that are trained with by then, who: from 0 to 1) of workers.
    """

    micro_batches: int
    workers: int
    feeders: int
    kills: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Played:
    """A history that ended right.

    Attributes:
        history: it.
        worker_kills: how many there were.
        feeder_kills: how many there were.
        generations: groups that were formed.
        fed: share of the rows that feeders computed.
        weights: SHA-256 of them in the end.
    """

    history: History
    worker_kills: int
    feeder_kills: int
    generations: int
    fed: float
    weights: str


def draw_history(rng: random.Random, workers_max: int) -> History:
    """Draw a history for a cluster that has room for so many workers."""
    workers = rng.randint(1, workers_max)
    kills = sorted((rng.uniform(-0.1, 1), rng.random()) for _ in range(rng.randint(0, 2)))
    return History(
        micro_batches=rng.choice([one for one in MICRO_BATCHES if one >= workers]),
        workers=workers,
        feeders=rng.randint(0, FEEDERS_MAX) // workers,
        # The only worker's end is the end of the run, which has no checkpoint.
        kills=tuple(kills) if workers > 1 else (),
    )


def write_table(folder: Path) -> None:
    """Write all rows, in several files."""
    folder.mkdir()
    for number, ids in enumerate(np.split(np.arange(ROWS), FILES)):
        pq.write_table(pa.table({"id": ids}), folder / f"{number}.parquet", row_group_size=20)


def _feeders_of(pid: int) -> list[psutil.Process]:
    """Return the feeders beside a worker."""
    children = psutil.Process(pid).children()
    return [one for one in children if "elastic.data.feeder" in one.cmdline()]


def check_each_row_once(ledger: Path, epochs: int) -> float:
    """Count the rows; a step that is done again has the same ones.

    Returns:
        The share of the rows in the ledger that feeders computed.

    Raises:
        ChaosFailed: says what was counted.
    """
    columns = "{'epoch': 'int', 'step': 'int', 'id': 'int', 'fed': 'int'}"
    rows = f"read_csv('{ledger}/*.csv', auto_detect=false, columns={columns})"
    with duckdb.connect() as database:
        found = database.sql(
            f"""select epoch, count(*), count(distinct id), min(id), max(id) from (
                select distinct epoch, step, id from {rows}
            ) group by epoch order by epoch"""
        ).fetchall()
        if found != [(epoch, ROWS, ROWS, 0, ROWS - 1) for epoch in range(epochs)]:
            raise ChaosFailed(
                f"each of {ROWS} rows was to count once, and (epoch, rows, ...) {found}"
            )
        [(fed,)] = database.sql(f"select avg(fed) from {rows}").fetchall()
    return float(fed)


def run_history(cluster: LocalCluster, history: History, table: Path, directory: Path) -> Played:
    """Train one epoch under this history; several threads may do so at once.

    Args:
        cluster: is up, with all its nodes, and has a slot for each worker.
        history: what is done.
        table: of `write_table`.
        directory: for files of this run.

    Raises:
        ChaosFailed: some state is not the undisturbed run's, or some row did not count once, or it
            hangs.
    """
    ledger = directory / "ledger"
    ledger.mkdir()
    job = chaos_job("steps", directory.name, workers=history.workers, directory=directory)
    micro_batches = ("--micro-batches", str(history.micro_batches))
    job = with_arguments(with_script(job, SCRIPT), "--table", str(table), *micro_batches)
    more = (
        *("--ledger", str(ledger), "--feeders", str(history.feeders)),
        *("--pace", str(4 * ROW_S * history.workers)),
    )
    job.finish.touch()
    entry = replace(job.spec.entry, args=(*job.spec.entry.args, *more))
    job_id = cluster.submit(replace(job.spec, entry=entry))
    breaker = Breaker(cluster, job_id)
    submitted_s = time.monotonic()
    kills = list(history.kills)
    feeder_kills = 0
    worker_kills = 0
    while (view := cluster.job(job_id)).record.phase not in ENDED:
        share = sum(one.read_bytes().count(b"\n") for one in ledger.iterdir()) / ROWS
        if kills and share >= kills[0][0] and breaker.size > 1:
            worker_kills += breaker.strike("kill_worker", kills.pop(0)[1])
        if feeder_kills < FEEDER_KILLS and share > (feeder_kills + 1) / (FEEDER_KILLS + 1):
            feeder_kills += _kill_a_feeder(cluster.worker_pids(job_id).values())
        if time.monotonic() - submitted_s > HISTORY_S_MAX:
            cluster.client.stop(job_id, "it hangs", now=True)
            raise ChaosFailed(f"not over after {HISTORY_S_MAX:g} s: {view}")
        time.sleep(0.05)
    with _comparing:
        verdict = job.check(view)
    fed = check_each_row_once(ledger, verdict.metrics["epochs"])
    weights = verdict.metrics["weights"]
    generations = view.record.generation
    return Played(history, worker_kills, feeder_kills, generations, fed, weights)


def _kill_a_feeder(workers: Iterable[int]) -> bool:
    for worker in workers:
        with contextlib.suppress(psutil.Error):  # It may have ended.
            for feeder in _feeders_of(worker):
                feeder.send_signal(signal.SIGKILL)
                return True
    return False


@dataclass
class Tally:
    """What the histories came to.

    Attributes:
        right: those that ended right.
        wrong: the seeds of all others.
    """

    right: list[Played] = field(default_factory=list)
    wrong: list[int] = field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        """Return a table: a line for each number of micro-batches in a step."""
        groups: dict[int, list[Played]] = defaultdict(list)
        for one in self.right:
            groups[one.history.micro_batches].append(one)
        return [
            "micro-batches | histories of 1, 2, 3, ... workers | workers killed | feeders killed | "
            "groups | rows fed | SHA-256 of the weights",
            *(_line_of(number, groups[number]) for number in sorted(groups)),
        ]


def _line_of(micro_batches: int, played: list[Played]) -> str:
    sizes = Counter(one.history.workers for one in played)
    shares = [one.fed for one in played if one.history.feeders]
    cells = (
        micro_batches,
        " + ".join(str(sizes[size]) for size in sorted(sizes)),
        sum(one.worker_kills for one in played),
        sum(one.feeder_kills for one in played),
        sum(one.generations for one in played),
        f"{sum(shares) / max(1, len(shares)):.0%}",
        " ".join(sorted({one.weights for one in played})),
    )
    return " | ".join(map(str, cells))


@click.command()
@click.option("--number", default=100, show_default=True, help="Histories to run.")
@click.option("--seed", default=0, show_default=True, help="The first one's seed.")
@click.option("--nodes", default=3, show_default=True, help="Workers of a history, at most.")
@click.option("--parallel", default=1, show_default=True, help="Histories at once.")
@click.option("--limit-s", default=float("inf"), help="Begin none after so many seconds.")
def main(number: int, seed: int, nodes: int, parallel: int, limit_s: float) -> None:
    """Run random histories on one cluster; say which are wrong, and keep their files."""
    tally = Tally()
    began_s = time.monotonic()
    with (
        LocalCluster(nodes=nodes, workers_per_node=parallel, spares=2) as cluster,
        ThreadPoolExecutor(parallel) as pool,
    ):
        table = cluster.directory / "table"
        write_table(table)

        def play(one: int) -> Played | None:
            if time.monotonic() - began_s > limit_s:
                return None
            directory = cluster.directory / f"history-{one}"
            directory.mkdir()
            found = run_history(cluster, draw_history(random.Random(one), nodes), table, directory)
            shutil.rmtree(directory)
            return found

        try:
            seeds = {pool.submit(play, one): one for one in range(seed, seed + number)}
            for future in as_completed(seeds):
                try:
                    played = future.result()
                except (ElasticError, duckdb.Error) as error:
                    tally.wrong.append(seeds[future])
                    click.echo(f"seed {seeds[future]} is WRONG: {error}")
                    continue
                if played is None:
                    continue
                tally.right.append(played)
                count = len(tally.right) + len(tally.wrong)
                each_s = (time.monotonic() - began_s) / count
                click.echo(f"{count} ({each_s:.2f} s each), seed {seeds[future]}: {played}")
        finally:
            pool.shutdown(cancel_futures=True)
            end_references()
            for line in tally.lines:
                click.echo(line)
        click.echo(f"{len(tally.right)} right, {len(tally.wrong)} wrong: {sorted(tally.wrong)}")
        if tally.wrong:
            raise ChaosFailed(f"histories of these seeds are wrong: {sorted(tally.wrong)}")


if __name__ == "__main__":
    main()
