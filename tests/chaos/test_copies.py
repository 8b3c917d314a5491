"""A run whose nodes die goes on from the memory of another one: real processes, real signals.

The script of `tests.harness.jobs.steps_job` ends with the hash of weights and optimizer state,
which must be that of a run in one process that nobody disturbed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from elastic.core.facts import ENDED, WorkerPhase
from elastic.core.view import JobView
from elastic.testing.local_cluster import LocalCluster
from tests.chaos.three_nodes import NEVER, NODES, cluster, members, running
from tests.harness.chaos_jobs import ChaosJob, chaos_job, with_arguments
from tests.patience import wait_for

__all__ = ["cluster", "running"]

COPY_EVERY = 5


@dataclass
class Story:
    """A run that keeps copies, and what became of them."""

    cluster: LocalCluster
    job: ChaosJob
    job_id: str = ""

    def begin(self) -> list[str]:
        """Submit; return the nodes that train, by rank, and those that do not."""
        self.job_id = self.cluster.submit(self.job.spec)
        size = self.job.spec.max_workers
        view = self.cluster.wait(self.job_id, lambda v: len(members(v)) == size, "a group")
        return [*members(view), *[name for name in NODES if name not in members(view)]]

    def logged(self, node: str, event: str) -> list[int]:
        """Return the steps of the copies that a node's agent has logged with an event."""
        found = rf"{event} job={self.job_id} .*?steps=(\d+)"
        return [int(steps) for steps in re.findall(found, self.cluster.log_of(node))]

    def wait_copy(self, node: str, more: int = 1) -> int:
        """Wait until this node has taken so many more copies; returns the newest one's steps."""
        count = len(self.logged(node, "copy_taken")) + more
        wait_for(lambda: len(self.logged(node, "copy_taken")) >= count, f"a copy on {node}")
        return self.logged(node, "copy_taken")[-1]

    def wait_holder(self, *among: str) -> str:
        """Wait until one of these nodes has taken a copy, and return it."""
        wait_for(lambda: any(self.logged(n, "copy_taken") for n in among), "a copy")
        return next(name for name in among if self.logged(name, "copy_taken"))

    def wait_trains_without(self, *dead: str) -> None:
        """Wait until a group without these nodes has done a step."""

        def trains(view: JobView) -> bool:
            group = view.record.group
            return (
                group is not None
                and not set(members(view)) & set(dead)
                and any(w.steps for w in view.workers if w.report.phase is WorkerPhase.TRAINING)
            )

        self.cluster.wait(self.job_id, trains, f"training without {dead}")

    def came_from(self, event: str) -> list[int]:
        """Return the steps that workers have gone on from, copies or checkpoints."""
        logs = (self.cluster.directory / "logs" / self.job.spec.name).glob("*.log")
        text = "".join(path.read_text(errors="replace") for path in logs)
        return [int(steps) for steps in re.findall(rf"{event} .*?steps?=(\d+)", text)]

    def check(self) -> None:
        """Let the run end, and hold what it came to against an undisturbed one."""
        self.job.finish.touch()
        view = self.cluster.wait(self.job_id, lambda v: v.record.phase in ENDED, "the end")
        assert self.job.check(view)


def story_of(
    cluster: LocalCluster,
    directory: Path,
    *options: str,
    workers: int = 1,
    save_every: int = NEVER,
    copy_every: int = COPY_EVERY,
) -> Story:
    """Describe a run; without checkpoints it would begin anew where it has no copy."""
    job = chaos_job(
        "steps", directory.name, workers=workers, directory=directory, save_every=save_every
    )
    return Story(cluster, with_arguments(job, "--copy-every", str(copy_every), *options))


@pytest.mark.slow
def test_the_only_node_dies_and_the_run_goes_on_from_a_copy(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """Also if the node that held it first has died before."""
    story = story_of(cluster, tmp_path)
    source, *others = story.begin()
    first = story.wait_holder(*others)
    cluster.kill_node(first)
    second = next(name for name in others if name != first)
    story.wait_copy(second)
    cluster.start_node(first)
    cluster.wait_nodes(3)
    steps = story.wait_copy(second)
    cluster.kill_node(source)
    story.wait_trains_without(source)
    assert min(story.came_from("copy_fetched")) >= steps
    story.check()
