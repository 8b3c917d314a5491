"""A run whose nodes die goes on from the memory of another one: real processes, real signals.

The script of `elastic.testing.jobs.steps_job` ends with the hash of weights and optimizer state,
which must be that of a run in one process that nobody disturbed.
"""

from __future__ import annotations

import datetime
import re
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from elastic.coord.certs import Wanted, init_authority, issue
from elastic.coord.roles import Role
from elastic.core.view import JobView
from elastic.core.world import ENDED, WorkerPhase
from elastic.testing.chaos_jobs import ChaosJob, chaos_job, with_arguments
from elastic.testing.local_cluster import LocalCluster
from tests.chaos.scripts import until
from tests.chaos.three_nodes import NEVER, NODES, STOPPED_S, cluster, members, running

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
        until(lambda: len(self.logged(node, "copy_taken")) >= count, f"a copy on {node}")
        return self.logged(node, "copy_taken")[-1]

    def wait_holder(self, *among: str) -> str:
        """Wait until one of these nodes has taken a copy, and return it."""
        until(lambda: any(self.logged(n, "copy_taken") for n in among), "a copy")
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


def test_if_both_die_the_run_goes_on_from_storage(cluster: LocalCluster, tmp_path: Path) -> None:
    story = story_of(cluster, tmp_path, save_every=7)
    source, *others = story.begin()
    holder = story.wait_holder(*others)
    cluster.wait(
        story.job_id, lambda v: any(c.automatic for c in v.record.checkpoints), "a checkpoint"
    )
    cluster.kill_node(holder)
    cluster.kill_node(source)
    story.wait_trains_without(source, holder)
    story.check()


@pytest.mark.slow
def test_a_node_that_dies_in_the_middle_of_a_push_leaves_the_copy_before(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """The receiver stands still for a moment, so that the sockets are full when the sender dies."""
    story = story_of(cluster, tmp_path, "--width", "20000", copy_every=1)
    source, *others = story.begin()
    holder = story.wait_holder(*others)
    story.wait_copy(holder)
    cluster.signal_node(holder, 19)
    time.sleep(STOPPED_S)
    cluster.kill_node(source)
    cluster.signal_node(holder, 18)
    story.wait_trains_without(source)
    taken = story.logged(holder, "copy_taken")
    assert min(story.came_from("copy_fetched")) == taken[-1]
    assert "copy_not_served" in cluster.log_of(holder)
    story.check()


@pytest.mark.slow
def test_all_nodes_of_a_group_die_and_the_third_has_the_copy(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    story = story_of(cluster, tmp_path, workers=2)
    *training, holder = story.begin()
    steps = story.wait_copy(holder, more=3)
    for name in training:
        cluster.kill_node(name)
    story.wait_trains_without(*training)
    assert min(story.came_from("copy_fetched")) >= steps
    story.check()


@pytest.mark.slow
def test_a_copy_outlives_the_coordinator(cluster: LocalCluster, tmp_path: Path) -> None:
    """Its successor knows from the nodes where copies lie, and gives them new keys."""
    story = story_of(cluster, tmp_path)
    source, *others = story.begin()
    holder = story.wait_holder(*others)
    cluster.kill_coordinator()
    cluster.start_coordinator()
    cluster.wait_nodes(3)
    steps = story.wait_copy(holder, more=3)
    cluster.kill_node(source)
    story.wait_trains_without(source)
    assert min(story.came_from("copy_fetched")) >= steps
    story.check()


@pytest.mark.slow
def test_over_tls_a_run_goes_on_from_a_copy_too(tmp_path: Path) -> None:
    """Agents bring copies, and a worker fetches one, with the certificates of their nodes."""
    pki = tmp_path / "pki"
    now = datetime.datetime.now(datetime.timezone.utc)
    init_authority(pki, ("127.0.0.1",), now)
    for name in NODES[:2]:
        issue(pki, Wanted(name=name, role=Role.NODE), now)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ELASTIC_LOG_LEVEL", "info")
        with LocalCluster(nodes=2, directory=tmp_path / "cluster", tls_dir=pki) as cluster:
            story = story_of(cluster, tmp_path)
            source = story.begin()[0]
            (holder,) = set(NODES[:2]) - {source}
            steps = story.wait_copy(holder)
            cluster.kill_node(source)
            story.wait_trains_without(source)
            assert min(story.came_from("copy_fetched")) >= steps
            story.check()
