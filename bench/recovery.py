"""What a kill and a join cost, ours beside the peers: the same model, data and kill in one run.

    python -m bench.recovery --kills 10

Ours are three nodes with one worker each on this machine, SQLite store, gloo, in
`tests/harness/jobs/steps_job.py`; torchrun is one node with three workers, with a plain DDP
script and checkpoints. Ray Train and torchft are measured where they are installed: Ray with the
same script as torchrun, torchft with its own wrappers. Victims and moments are drawn. All write a
line after each optimizer step, from which all is computed (`bench/marks.py`). Prints one table, and
of our workers' kills another, of where the milliseconds go, from the logs of our processes.
"""

from __future__ import annotations

import os
import platform
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import click
import torch
from rich.console import Console
from rich.table import Table

from bench.marks import Marks, Row
from bench.peers import ray_train, torchft_replicas, torchrun
from elastic.core.facts import ENDED, Entry, JobPhase
from elastic.core.view import JobView, WorkerView
from elastic.errors import Unavailable
from elastic.testing.local_cluster import TIMEOUT_S, LocalCluster
from tests.harness.chaos_jobs import ChaosJob, chaos_job

OURS = "ours"
WORLD = 3
WIDTH = 64
MICRO_BATCHES = 8
"""Of a step of steps_job."""
SCRIPT = Path(__file__).with_name("peers") / "our_job.py"
KILL = "worker SIGKILL"
EVENTS = (
    f"{KILL}: next step",
    f"{KILL}: full group",
    "node SIGKILL: next step",
    "node joins: planned to step",
    "node joins: members' pause",
    "worker SIGSTOP: next step",
)
"""What is measured of ours; the peers have rows for the first two."""
PEERS = {"torchrun": "torch", "Ray Train": "ray", "torchft": "torchft"}
"""Beside which we are put, and the package that must be there."""
HOPS = {
    "the process has ended, and its agent knows": ("agent", "worker_exited"),
    "the next group is decided and durable": ("coord", "group_formed"),
    "its members have connected": ("worker", "group_formed"),
    "all have the state": ("worker", "recovered"),
}
"""What ends each part of a recovery: the process that logs it, and its line."""
STEP_DONE = "the step is done again"
LINE = re.compile(r"^(\S+Z) \w+ elastic-(\w+) (\w+)(?:.*? generation=(\d+))?", re.MULTILINE)


class _LogLine(NamedTuple):
    """One line of a process of ours; generation 0 if it names none."""

    unix_ns: int
    process: str
    event: str
    generation: int


@dataclass(frozen=True)
class _Kill:
    """A kill, the generation that trained after it, and when its first step was done."""

    unix_ns: int
    after: int
    stepped_ns: int


def log_lines(directory: Path) -> Iterator[_LogLine]:
    """Yield the lines of all logs, each file's in order."""
    for path in sorted(directory.rglob("*.log")):
        for found in LINE.finditer(path.read_text(errors="replace")):
            moment = datetime.fromisoformat(found[1].replace("Z", "+00:00"))
            unix_ns = round(moment.timestamp() * 1e3) * 1_000_000
            yield _LogLine(unix_ns, found[2], found[3], int(found[4] or 0))


def hop_ends_ms(kill: _Kill, lines: list[_LogLine]) -> list[float]:
    """Return how long after a kill each of the `HOPS` had ended, on all members, and the step."""
    ends = []
    for process, event in HOPS.values():
        moments = [
            one.unix_ns
            for one in lines
            if (one.process, one.event) == (process, event)
            and one.generation in (0, kill.after)
            and kill.unix_ns - 1_000_000 <= one.unix_ns <= kill.stepped_ns
        ]
        # A line's time is cut to milliseconds.
        ends.append(max(moments, default=kill.unix_ns) - kill.unix_ns)
    return [one / 1e6 for one in (*ends, kill.stepped_ns - kill.unix_ns)]


def job_of(directory: Path, pace_s: float, width: int) -> ChaosJob:
    """Return steps_job with marks, which trains until its finish file is there."""
    job = chaos_job("steps", "bench", workers=WORLD, directory=directory)
    ours = ("--pace", str(pace_s), "--width", str(width), "--marks", str(directory / "marks"))
    args = (*job.spec.entry.args, *ours)
    entry = Entry(job.spec.entry.kind, str(SCRIPT), args=args)
    return replace(job, spec=replace(job.spec, entry=entry))


def is_whole(view: JobView) -> bool:
    """Return whether the full group trains."""
    group = view.record.group
    is_full = group is not None and len(group.members) == WORLD
    return view.record.phase is JobPhase.RUNNING and is_full


class Bench:
    """One cluster, many kills.

    Attributes:
        rows: what was measured, in the order of the table.
        kills: of workers.
    """

    def __init__(self, cluster: LocalCluster, job: ChaosJob, rng: random.Random) -> None:
        """Submit the job."""
        self._cluster = cluster
        self._job = job
        self._rng = rng
        self._id = cluster.submit(job.spec)
        self.marks = Marks(job.finish.with_name("marks"))
        self.rows = {event: Row(event, OURS) for event in EVENTS}
        self.kills: list[_Kill] = []

    def kill_worker(self) -> None:
        """SIGKILL a worker; wait until its successor trains."""
        self._strike(KILL, lambda victim: os.kill(victim.report.pid, signal.SIGKILL))

    def stop_worker(self) -> None:
        """SIGSTOP a worker; its agent kills it."""
        self._strike("worker SIGSTOP", lambda victim: os.kill(victim.report.pid, signal.SIGSTOP))

    def kill_node(self) -> None:
        """SIGKILL an agent and its worker, and once the others train let the node come back."""
        name = self._strike(
            "node SIGKILL", lambda victim: self._cluster.kill_node(str(victim.node_id))
        )
        first_note = len(self._cluster.notes)
        before = self.marks.newest()
        self._cluster.start_node(name)
        after = self._wait(before, WORLD)
        planned = self._cluster.wait_note(
            "change_planned", self._id, after=first_note, generation=before
        )
        began_ns, members = self.marks.lives[after].began_ns, self.marks.lives[before].pids
        for event, seconds in (
            ("node joins: planned to step", (began_ns - planned.unix_ns) / 1e9),
            ("node joins: members' pause", self.marks.pause_s(before, after)),
        ):
            self._note(event, seconds, before)
            self.rows[event].count_pids(members, self.marks.lives[after].pids)

    def finish(self) -> None:
        """Let the job end; its script checks that each sample was trained with once an epoch."""
        self._job.finish.touch()
        view = self._cluster.wait(self._id, lambda v: v.record.phase in ENDED, "the end")
        if view.record.phase is not JobPhase.SUCCEEDED:
            raise Unavailable(f"the job is {view.record.phase.value}: {view.reason}")

    def _strike(self, what: str, action: Callable[[WorkerView], None]) -> str:
        """Strike once the full group trains; note all that follows; return the victim's node."""
        victim, before = self._ready()
        pids = self.marks.lives[before].pids
        began_ns = time.time_ns()
        action(victim)
        after = self._wait(before)
        event, stepped_ns = f"{what}: next step", self.marks.lives[after].began_ns
        self._note(event, (stepped_ns - began_ns) / 1e9, before)
        if what == KILL:
            self.kills.append(_Kill(began_ns, after, stepped_ns))
        survivors = pids - {victim.report.pid}
        self.rows[event].count_pids(survivors, self.marks.lives[after].pids)
        full = self.rows.get(f"{what}: full group")
        if full is not None:
            after = self._wait(before, WORLD)
            self._note(full.event, (self.marks.lives[after].began_ns - began_ns) / 1e9, before)
            full.count_pids(survivors, self.marks.lives[after].pids)
        return str(victim.node_id)

    def _ready(self) -> tuple[WorkerView, int]:
        """Wait until the full group trains, and a moment more; draw a victim.

        Returns:
            Who, and the generation that trains.
        """
        self._cluster.wait(self._id, is_whole, "the full group")
        self._cluster.wait_nodes(WORLD)
        view = self._cluster.job(self._id)
        self._wait(view.record.generation - 1, WORLD)
        time.sleep(self._rng.uniform(2.0, 3.0))
        view = self._cluster.wait(self._id, is_whole, "the full group")
        generation = self._wait(view.record.generation - 1, WORLD)
        members = [w for w in view.workers if w.rank >= 0]
        return self._rng.choice(sorted(members, key=lambda w: w.rank)), generation

    def _wait(self, after: int, world: int = 0) -> int:
        life = self.marks.wait(after, world=world, timeout_s=TIMEOUT_S)
        if life is None:
            raise Unavailable(f"no group after generation {after} trained in {TIMEOUT_S:g} s")
        return life

    def _note(self, event: str, seconds: float, before: int) -> None:
        self.rows[event].seconds.append(seconds)
        self.rows[event].again.append(self.marks.steps_again(before))
        print(f"{OURS}: {event}: {seconds:.3f} s", file=sys.stderr)


def measure_ours(
    directory: Path, kills: int, pace_s: float, seed: int, width: int
) -> tuple[list[Row], float, list[list[float]]]:
    """Return the rows, the milliseconds of a step, and for each kill when its hops had ended."""
    run = directory / "job"
    run.mkdir(parents=True)
    os.environ["ELASTIC_LOG_LEVEL"] = "info"  # Of workers too.
    with LocalCluster(nodes=WORLD, directory=directory / "cluster") as cluster:
        bench = Bench(cluster, job_of(run, pace_s, width), random.Random(seed))
        for strike in (bench.kill_worker, bench.kill_node, bench.stop_worker):
            for _ in range(kills):
                strike()
        bench.finish()
        lines = list(log_lines(directory / "cluster"))
        hops = [hop_ends_ms(one, lines) for one in bench.kills]
        return list(bench.rows.values()), bench.marks.step_ms(WORLD), hops


def table_of(rows: list[Row], paces: dict[str, float]) -> Table:
    """Return the table: what was measured by event, systems below each other."""
    table = Table(
        title=f"seconds until all ranks have done a step (torch {torch.__version__}, "
        f"{os.cpu_count()} cores, {platform.machine()}, gloo, {WORLD} workers; a step takes "
        + ", ".join(f"{ms:.0f} ms: {name}" for name, ms in paces.items())
        + ")"
    )
    most = max(len(row.seconds) for row in rows)
    high = "p99" if most >= 100 else "max"
    for column in ("event", "system", "n", "median", high, "steps again", "pids changed"):
        table.add_column(column, justify="left" if column in ("event", "system") else "right")
    first_of = {row.event: index for index, row in reversed(list(enumerate(rows)))}
    for row in sorted(rows, key=lambda row: first_of[row.event]):
        ordered = sorted(row.seconds)
        top = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
        again = f"{statistics.median(row.again):g}" if row.again else "-"
        table.add_row(
            row.event, row.system, str(len(ordered)), f"{statistics.median(ordered):.3f}",
            f"{top if high == 'p99' else ordered[-1]:.3f}", again,
            f"{row.changed} of {row.survivors}",
        )  # fmt: skip
    return table


def table_of_hops(hops: list[list[float]]) -> Table:
    """Return the table of where the milliseconds go between a kill and the next step."""
    table = Table(title=f"{KILL}: medians of {len(hops)}, in milliseconds")
    for column in ("until", "since the hop before", "since the signal"):
        table.add_column(column, justify="left" if column == "until" else "right")
    for number, name in enumerate((*HOPS, STEP_DONE)):
        took = statistics.median(one[number] - (one[number - 1] if number else 0) for one in hops)
        since = statistics.median(one[number] for one in hops)
        table.add_row(name, f"{took:.0f}", f"{since:.0f}")
    return table


def notes() -> str:
    """Return what a reader of the table has to know."""
    left_out = [name for name, module in PEERS.items() if not find_spec(module)]
    return (
        "seconds: the one step that was done is part of each; the pace is sleep in all.\n"
        "steps again: complete ones, median; the step under way is lost besides. pids changed: "
        "survivors that ended up in another process.\n"
        f"torchrun, Ray Train: tuned, a checkpoint every {torchrun.EVERY} steps; they go on only "
        "with the full group, ours and torchft with two and then with the successor.\n"
        "torchft: tuned; it changes the batch with the group, and skips or repeats samples.\n"
        "node joins: from the plan to a step of all, and the longest time between two steps of "
        "a member."
    ) + "".join(
        f"\n{name} is not installed (pip install -r bench/requirements-peers.txt)."
        for name in left_out
    )


@click.command()
@click.option("--kills", default=10, show_default=True, help="Of each kind.")
@click.option("--only", type=click.Choice([OURS, *PEERS]), help="One system.")
@click.option("--pace", default=0.01, show_default=True, help="Seconds of sleep a micro-batch.")
@click.option("--seed", default=0, show_default=True, help="Draws victims and moments.")
@click.option(
    "--width",
    default=WIDTH,
    show_default=True,
    help="Of the model, with --only ours: 100000 makes 7.5 million parameters.",
)
def main(kills: int, only: str | None, pace: float, seed: int, width: int) -> None:
    """Kill workers and nodes of ours, and workers of the peers, and print one table."""
    if width != WIDTH and only != OURS:
        raise click.UsageError(f"--width {width} is for --only {OURS}: the peers have {WIDTH}")
    rows: list[Row] = []
    paces: dict[str, float] = {}
    hops: list[list[float]] = []
    # Kept if something fails: the logs of the cluster are in it.
    directory = Path(tempfile.mkdtemp(prefix="elastic-bench-"))
    if only in (None, OURS):
        measured, paces[OURS], hops = measure_ours(directory / OURS, kills, pace, seed, width)
        rows += measured
    for peer in (torchrun.PEER, ray_train.PEER, torchft_replicas.PEER):
        if only in (None, peer.name) and find_spec(PEERS[peer.name]):
            # The busiest rank of ours has so many micro-batches in a step.
            step_s = pace * -(-MICRO_BATCHES // WORLD)
            measured, paces[peer.name] = peer.measure(
                directory / peer.name.replace(" ", ""), kills, step_s=step_s, world=WORLD,
                rng=random.Random(seed),
            )  # fmt: skip
            rows += measured
    shutil.rmtree(directory)
    console = Console(width=120, highlight=False)
    console.print(table_of(rows, paces))
    print(notes())
    if hops:
        console.print(table_of_hops(hops))


if __name__ == "__main__":
    main()
