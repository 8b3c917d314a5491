"""The promise, a test for each of its rows: what is struck, training goes on to the same bits.

One job trains on one cluster while test after test strikes it. After each strike the state after
every step of every rank so far must be that of a run that nobody disturbed: parameters, buffers,
optimizers, scheduler, scaler, random state, what was logged, and the ledger of samples inside the
model.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.core.facts import ENDED, JobPhase
from elastic.core.view import JobView
from elastic.testing.local_cluster import LocalCluster, start_of
from tests.chaos.struck import PLACES, WORKERS, Run, assert_kept
from tests.harness.chaos import check_logs
from tests.harness.chaos_jobs import chaos_job, with_arguments
from tests.harness.traces import lines_of, reference_of
from tests.patience import wait_for

HANG_TIMEOUT_S = 3.0
OPTIONS = ("--model", "cnn", "--scaler")
PACE_S = 0.06
"""Of a micro-batch: the undisturbed run, which has all of them to do alone, is to stay ahead."""


@pytest.fixture(scope="module")
def runs(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """Give the runs of this module; there is a second one only if a test has ended the first."""
    return [make_run(cluster, tmp_path_factory.mktemp("promise"))]


def make_run(cluster: LocalCluster, directory: Path) -> Run:
    """Describe a run in this folder."""
    (directory / "orders").mkdir(parents=True)
    job = chaos_job("steps", "promise", workers=WORKERS, directory=directory, save_every=5)
    job = with_arguments(job, *OPTIONS)
    reference = reference_of(job.spec.entry.target, job.options)
    # What is only for the run that is disturbed.
    more = ("--orders", str(directory / "orders"), "--pace", str(PACE_S))
    entry = replace(job.spec.entry, args=(*job.spec.entry.args, *more))
    spec = replace(job.spec, entry=entry, hang_timeout_s=HANG_TIMEOUT_S)
    return Run(cluster, replace(job, spec=spec), reference)


@pytest.fixture
def run(runs: list[Run], cluster: LocalCluster, tmp_path: Path) -> Run:
    """Give a run with three workers that train, whatever the test before has left."""
    one = runs[-1]
    if not one.job_id or cluster.job(one.job_id).record.phase in ENDED:
        one = make_run(cluster, tmp_path / "run")
        one.job_id = cluster.submit(replace(one.job.spec, name=tmp_path.name))
        runs.append(one)
    one.full()
    return one


@pytest.mark.parametrize("place", PLACES)
def test_a_worker_is_killed(run: Run, place: str) -> None:
    before, generation = run.pids(), run.full().record.generation
    run.order(f"kill-{place}")
    run.full(after=generation)
    assert_kept(before, run.pids(), lost=1)
    run.check()


def test_two_workers_are_killed_at_once(run: Run) -> None:
    before, generation = run.pids(), run.full().record.generation
    for pid in sorted(before.values())[:2]:
        os.kill(pid, signal.SIGKILL)
    run.full(after=generation)
    assert_kept(before, run.pids(), lost=2)
    run.check()


def test_a_worker_hangs(run: Run) -> None:
    before, generation = run.pids(), run.full().record.generation
    run.order("hang-forward")
    run.cluster.wait_note("worker_hung", run.job_id, after=len(run.cluster.notes))
    run.full(after=generation)
    assert_kept(before, run.pids(), lost=1)
    run.check()


def test_a_worker_is_stopped(run: Run) -> None:
    before, generation = run.pids(), run.full().record.generation
    os.kill(max(before.values()), signal.SIGSTOP)
    run.full(after=generation)
    assert_kept(before, run.pids(), lost=1)
    run.check()


def test_a_node_dies_and_another_one_joins(run: Run) -> None:
    before, generation = run.pids(), run.full().record.generation
    run.cluster.kill_node("n2")
    view = run.full(after=generation, size=2)
    assert_kept(before, run.pids(), lost=1)
    run.cluster.start_node("n2")
    run.full(after=view.record.generation)
    run.check()


def test_an_agent_dies_and_its_worker_with_it(run: Run) -> None:
    view = run.full()
    orphan = next(w.report.pid for w in view.workers if w.node_id == "n3")
    started = start_of(orphan)
    run.cluster.signal_node("n3", signal.SIGKILL)
    run.cluster.agents["n3"].wait()
    view = run.full(after=view.record.generation, size=2)
    wait_for(lambda: start_of(orphan) != started, "the end of the worker")
    run.cluster.start_node("n3")
    run.full(after=view.record.generation)
    run.check()


@pytest.mark.parametrize("what", ["agent", "node"])
def test_what_stands_still_is_given_up_and_comes_back(run: Run, what: str) -> None:
    """Its worker has the state of an old step then, and must take all of the newer one."""
    generation = run.full().record.generation

    def stop(is_stopped: bool) -> None:
        if what == "node":
            run.cluster.stop_node("n1", stopped=is_stopped)
        else:
            run.cluster.signal_node("n1", signal.SIGSTOP if is_stopped else signal.SIGCONT)

    stop(True)
    try:
        view = run.full(after=generation, size=2)
    finally:
        stop(False)
    run.cluster.wait_nodes(WORKERS)
    run.full(after=view.record.generation)
    run.check()


def test_a_node_is_drained(run: Run) -> None:
    before, view = run.pids(), run.full()
    run.cluster.signal_node("n1", signal.SIGTERM)
    view = run.full(after=view.record.generation, size=2)
    assert_kept(before, run.pids(), lost=1)
    wait_for(lambda: run.cluster.agents["n1"].poll() is not None, "the end of the agent")
    assert run.cluster.agents["n1"].returncode == 75
    run.cluster.start_node("n1")
    run.full(after=view.record.generation)
    run.check()
    assert_nothing_done_twice(run, set(before.values()))


def assert_nothing_done_twice(run: Run, pids: set[int]) -> None:
    """No process has committed a step that it had committed before."""
    for process, line in lines_of(run.job.trace):
        if int(process) in pids:
            steps = [(o["epoch"], o["step"]) for p, o in lines_of(run.job.trace) if p == process]
            assert len(steps) == len(set(steps)), (process, line)
            pids.discard(int(process))


def test_the_coordinator_is_killed_and_nobody_notices(run: Run) -> None:
    before, generation = run.pids(), run.full().record.generation
    run.cluster.kill_coordinator()
    run.cluster.start_coordinator()
    run.cluster.wait_nodes(WORKERS)
    view = run.full()
    assert view.record.generation == generation
    assert run.pids() == before
    run.check()


def test_all_workers_die_and_new_ones_go_on_from_the_nodes_memory(run: Run) -> None:
    generation = run.full().record.generation
    for pid in run.pids().values():
        os.kill(pid, signal.SIGKILL)
    run.full(after=generation)
    run.check()


def test_all_nodes_die_and_new_ones_go_on_from_storage(run: Run) -> None:
    def saved(view: JobView) -> bool:
        return any(record.automatic for record in view.record.checkpoints)

    generation = run.cluster.wait(run.job_id, saved, "a checkpoint").record.generation
    names = ("n1", "n2", "n3")
    for name in names:
        run.cluster.kill_node(name)
    for name in names:
        run.cluster.start_node(name)
    run.full(after=generation)
    run.check()


def test_a_job_is_scaled_and_paused(run: Run) -> None:
    client, view = run.cluster.client, run.full()
    client.scale(run.job_id, max_workers=2)
    view = run.full(after=view.record.generation, size=2)
    client.pause(run.job_id)
    run.cluster.wait(
        run.job_id, lambda v: v.record.phase is JobPhase.PAUSED and not v.workers, "a pause"
    )
    client.scale(run.job_id, max_workers=WORKERS)
    client.resume(run.job_id)
    run.full(after=view.record.generation)
    run.check()


def test_a_stopped_job_is_resumed_by_its_run_and_ends_with_nothing_left(run: Run) -> None:
    cluster = run.cluster
    cluster.client.stop(run.job_id, "to be resumed")
    view = cluster.wait(run.job_id, lambda v: v.record.phase in ENDED and not v.workers, "its end")
    # It was saved where it ended: no step is done again.
    about = json.loads(view.record.checkpoints[-1].metrics)
    assert about["steps"] == run.reference.compare(run.job.trace)
    run.job_id = cluster.submit(replace(run.job.spec, name="resumed"))
    run.full()
    pids = {pid: start_of(pid) for pid in run.pids().values()}
    run.job.finish.touch()
    view = cluster.wait(run.job_id, lambda v: v.record.phase in ENDED, "the end")
    assert view.record.phase is JobPhase.SUCCEEDED, view.reason
    cluster.wait(run.job_id, lambda v: not v.workers, "the end of its workers")
    wait_for(lambda: all(start_of(pid) != start for pid, start in pids.items()), "their end")
    run.check()
    check_logs(cluster)
