"""A job that is struck again and again while it trains, and compared with one that is not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic.core.facts import ENDED, JobPhase, WorkerPhase
from elastic.core.view import JobView
from elastic.errors import Unavailable
from elastic.testing.local_cluster import LocalCluster
from tests.harness.chaos_jobs import ChaosJob
from tests.harness.traces import Reference
from tests.patience import wait_for

ELASTIC = ("-m", "elastic.client.cli")
WORKERS = 3
PLACES = ("forward", "backward", "step", "commit", "between")


@dataclass
class Run:
    """A job that is struck again and again."""

    cluster: LocalCluster
    job: ChaosJob
    reference: Reference
    job_id: str = ""

    @property
    def orders(self) -> Path:
        return self.job.finish.with_name("orders")

    def full(self, *, after: int = 0, size: int = WORKERS) -> JobView:
        """Wait until a group of this size, later than that one, has made a step."""

        def trains(view: JobView) -> bool:
            group = view.record.group
            assert view.record.phase not in ENDED, (view.reason, view.record.failure)
            if group is None or group.generation <= after or len(group.members) != size:
                return False
            inside = [w for w in view.workers if w.report.generation == group.generation]
            training = [w for w in inside if w.report.phase is WorkerPhase.TRAINING]
            return len(training) == size and all(w.steps > 0 for w in training)

        # Imports of large libraries take a slow machine longer than the cluster's patience.
        wait_for(lambda: trains(self.cluster.job(self.job_id)), f"{size} workers that train")
        return self.cluster.wait(self.job_id, trains, f"{size} workers that train")

    def order(self, what: str) -> None:
        """Strike whoever comes to a place first, and wait until it has happened."""
        order = self.orders / what
        order.touch()
        try:
            self.cluster.wait(
                self.job_id, lambda _: not order.exists(), f"a rank that obeys {what}"
            )
        except Unavailable as error:
            raise AssertionError(f"{error}\n{self.stacks()}") from error

    def stacks(self) -> str:
        """Return where all threads of all workers are, for the report of a job that hangs."""
        command = (*ELASTIC, "-c", self.cluster.address, "stack", "--all", self.job_id)
        done = subprocess.run(
            [sys.executable, *command], check=False, capture_output=True, text=True
        )
        return done.stdout + done.stderr

    def pids(self) -> dict[str, int]:
        """Return the processes of the group's members."""
        workers = self.cluster.job(self.job_id).workers
        return {str(w.report.worker_id): w.report.pid for w in workers if w.rank >= 0}

    def kill_at_every_place(self, places: Sequence[str] = PLACES, *, size: int = WORKERS) -> None:
        """Kill a worker at each, one after the other, and go on as if it had not been."""
        view = self.full(size=size)
        for place in places:
            before, generation = self.pids(), view.record.generation
            self.order(f"kill-{place}")
            view = self.full(after=generation, size=size)
            assert_kept(before, self.pids(), lost=1)

    def end(self) -> JobView:
        """Let it end, as it must."""
        self.job.finish.touch()
        view = self.cluster.wait(self.job_id, lambda v: v.record.phase in ENDED, "the end")
        assert view.record.phase is JobPhase.SUCCEEDED, view.record.failure
        self.check()
        return view

    def check(self) -> None:
        """Compare every step of every rank so far with the undisturbed run's."""
        self.reference.compare(self.job.trace)


def assert_kept(before: dict[str, int], after: dict[str, int], *, lost: int) -> None:
    """So many processes were replaced, and the others are the same ones as before."""
    assert len(set(before.values()) - set(after.values())) == lost, (before, after)
