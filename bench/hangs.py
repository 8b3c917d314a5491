"""How long what stands still interrupts training: from the signal to the next group's first step.

    python bench/hangs.py --times 10

Three nodes with one worker each on this machine, SQLite store, gloo; a step takes some
milliseconds. A whole node is stopped (SIGSTOP of its agent and its worker, whose streams and
sockets stand); and the main thread of a rank hangs, with a
timeout of 2 s, which is part of what is printed.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from elastic.core.facts import JobPhase, NodePhase
from elastic.core.view import JobView, NodeView
from elastic.testing.local_cluster import LocalCluster
from tests.harness.chaos_jobs import chaos_job

HANG_TIMEOUT_S = 2.0


def whole(view: JobView) -> bool:
    """Return whether three workers train."""
    group = view.record.group
    return view.record.phase is JobPhase.RUNNING and group is not None and len(group.members) == 3


class Bench:
    """One cluster, many strikes."""

    def __init__(self, cluster: LocalCluster, orders: Path) -> None:
        self.cluster = cluster
        self.orders = orders
        self.runs = 0

    def measure(self, strike: Callable[[JobView], Callable[[], None]]) -> float:
        """Strike once; return the seconds until the next group's first step is over."""
        job_id, view = self.begin()
        generation = view.record.generation
        self.cluster.wait_note("first_step", job_id, generation=generation)
        time.sleep(1.0 + (self.runs * 0.37) % 1.0)  # Steps and telemetry are under way.
        began_ns = time.time_ns()
        undo = strike(view)
        try:
            note = self.cluster.wait_note("first_step", job_id, generation=generation + 1)
        finally:
            undo()
        self.end(job_id)
        return (int(dict(note.note.fields)["unix_ns"]) - began_ns) / 1e9

    def begin(self) -> tuple[str, JobView]:
        """Start a job, again until it starts on all three nodes."""
        while True:
            # The worker that stood still is ended only after its node has come back.
            while sum(n.phase is NodePhase.READY and n.free_slots == 1 for n in self.nodes()) < 3:
                time.sleep(0.1)
            job_id = self.submit()
            view = self.cluster.wait(
                job_id, lambda view: view.record.phase is not JobPhase.PENDING, "the start"
            )
            if whole(view):
                return job_id, view
            self.end(job_id)

    def end(self, job_id: str) -> None:
        """Stop a job, and wait until nothing of it is left."""
        self.cluster.client.stop(job_id)
        self.cluster.wait(job_id, lambda view: not view.workers, "the end")

    def nodes(self) -> tuple[NodeView, ...]:
        """Return all nodes."""
        return self.cluster.view().nodes

    def submit(self) -> str:
        """Submit another job."""
        self.runs += 1
        folder = self.orders.parent / f"job-{self.runs}"
        folder.mkdir()
        spec = chaos_job("steps", folder.name, workers=3, directory=folder).spec
        entry = replace(spec.entry, args=(*spec.entry.args, "--orders", str(self.orders)))
        return self.cluster.submit(replace(spec, entry=entry, hang_timeout_s=HANG_TIMEOUT_S))

    def stop_node(self, view: JobView) -> Callable[[], None]:
        """SIGSTOP everything on the last rank's node."""
        victim = str(max(view.workers, key=lambda w: w.rank).node_id)
        self.cluster.stop_node(victim)
        return lambda: self.cluster.stop_node(victim, stopped=False)

    def hang(self, view: JobView) -> Callable[[], None]:
        """Hang the main thread of a rank, in its forward."""
        (self.orders / "hang-forward").touch()
        return lambda: None


def main() -> None:
    """Run the bench and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--times", type=int, default=10, help="of each kind")
    args = parser.parse_args()
    rows: list[tuple[str, list[float]]] = []
    with tempfile.TemporaryDirectory(prefix="elastic-bench-") as scratch:
        directory = Path(scratch)
        (directory / "orders").mkdir()
        with LocalCluster(nodes=3, directory=directory / "cluster") as cluster:
            bench = Bench(cluster, directory / "orders")
            for name, strike in (
                ("node SIGSTOP (agent and worker)", bench.stop_node),
                (f"main thread hangs (timeout {HANG_TIMEOUT_S:g} s)", bench.hang),
            ):
                seconds = []
                for index in range(args.times):
                    seconds.append(bench.measure(strike))
                    print(f"{name} {index + 1}: {seconds[-1]:.3f} s", file=sys.stderr)
                rows.append((name, seconds))
    table = Table(
        title=f"stand-still to the next step, seconds (torch {torch.__version__}, "
        f"{os.cpu_count()} cores, {platform.machine()}, gloo, 3 nodes x 1 worker)"
    )
    for column in ("event", "n", "median", "min", "max"):
        table.add_column(column)
    for name, seconds in rows:
        table.add_row(
            name, str(len(seconds)), f"{statistics.median(seconds):.3f}",
            f"{min(seconds):.3f}", f"{max(seconds):.3f}",
        )  # fmt: skip
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
