"""How long a kill interrupts training: from the signal to the end of the next group's first step.

    python bench/recovery.py --kills 10

Three nodes with one worker each on this machine, SQLite store, gloo; the script counts epochs of
20 small all-reduces (a step takes about a millisecond). After each kill the group is whole again
before the next one. Prints a table with medians, and how often a survivor changed its process
(which must be never).
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from elastic.core.config import JobSpec
from elastic.core.view import JobView
from elastic.core.world import Entry, EntryKind, JobId, JobPhase
from elastic.testing.local_cluster import LocalCluster

SCRIPT = Path(__file__).resolve().parents[1] / "tests" / "chaos" / "epochs.py"


def job(run_path: Path) -> JobSpec:
    """Return a job that trains for longer than the bench takes."""
    entry = Entry(EntryKind.SCRIPT, str(SCRIPT), args=("--epochs", "1000000"))
    return JobSpec(
        job_id=JobId(""), name="bench", entry=entry, min_workers=1, max_workers=3,
        run_path=str(run_path), num_to_keep=2,
    )  # fmt: skip


def whole(view: JobView) -> bool:
    """Return whether three workers train."""
    group = view.record.group
    return view.record.phase is JobPhase.RUNNING and group is not None and len(group.members) == 3


class Bench:
    """One cluster, many kills."""

    def __init__(self, cluster: LocalCluster, job_id: str) -> None:
        self.cluster = cluster
        self.job_id = job_id
        self.changed_pids = 0

    def measure(self, strike: Callable[[JobView], str]) -> float:
        """Strike once; return the seconds until the next group's first step is over."""
        view = self.cluster.wait(self.job_id, whole, "three workers")
        generation = view.record.generation
        self.cluster.wait_note("first_step", self.job_id, generation=generation)
        before = {str(w.report.worker_id): w.report.pid for w in view.workers}
        began_ns = time.time_ns()
        lost_node = strike(view)
        note = self.cluster.wait_note("first_step", self.job_id, generation=generation + 1)
        after = self.cluster.worker_pids(self.job_id)
        group = self.cluster.job(self.job_id).record.group
        for worker_id, pid in before.items():
            is_member = group is not None and worker_id in group.worker_ids()
            if not worker_id.startswith(f"{lost_node}/") and is_member:
                self.changed_pids += after.get(worker_id) != pid
        return (int(dict(note.note.fields)["unix_ns"]) - began_ns) / 1e9

    def kill_worker(self, view: JobView) -> str:
        """SIGKILL the last rank; return its node."""
        victim = max(view.workers, key=lambda w: w.rank)
        os.kill(victim.report.pid, signal.SIGKILL)
        return str(victim.node_id)

    def stop_worker(self, view: JobView) -> str:
        """SIGSTOP the last rank."""
        victim = max(view.workers, key=lambda w: w.rank)
        os.kill(victim.report.pid, signal.SIGSTOP)
        return str(victim.node_id)

    def kill_node(self, view: JobView) -> str:
        """SIGKILL the agent of the last rank and all that it started; another one starts."""
        victim = str(max(view.workers, key=lambda w: w.rank).node_id)
        self.cluster.kill_node(victim)
        self.cluster.start_node(victim)
        return victim


def main() -> None:
    """Run the bench and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=10, help="of each kind")
    args = parser.parse_args()
    rows: list[tuple[str, list[float]]] = []
    with tempfile.TemporaryDirectory(prefix="elastic-bench-") as scratch:
        directory = Path(scratch)
        with LocalCluster(nodes=3, directory=directory / "cluster") as cluster:
            bench = Bench(cluster, cluster.submit(job(directory / "run")))
            for name, strike in (
                ("worker SIGKILL", bench.kill_worker),
                ("node SIGKILL (agent and worker)", bench.kill_node),
                ("worker SIGSTOP", bench.stop_worker),
            ):
                seconds = []
                for index in range(args.kills):
                    seconds.append(bench.measure(strike))
                    print(f"{name} {index + 1}: {seconds[-1]:.3f} s", file=sys.stderr)
                rows.append((name, seconds))
            cluster.client.stop(bench.job_id)
    table = Table(
        title=f"kill to the next step, seconds (torch {torch.__version__}, {os.cpu_count()} cores, "
        f"{platform.machine()}, gloo, 3 nodes x 1 worker)"
    )
    for column in ("event", "n", "median", "min", "max"):
        table.add_column(column)
    for name, seconds in rows:
        table.add_row(
            name, str(len(seconds)), f"{statistics.median(seconds):.3f}",
            f"{min(seconds):.3f}", f"{max(seconds):.3f}",
        )  # fmt: skip
    Console(width=110).print(table)
    print(f"survivors that changed their process: {bench.changed_pids}")


if __name__ == "__main__":
    main()
