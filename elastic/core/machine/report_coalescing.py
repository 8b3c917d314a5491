"""Reports that all workers of a job send one after the other, and of which only the last matters.

Rule: a report may be held back only if no decision depends on it while others are missing, and only
for a limited time. In a group of ten thousand each decision costs tens of milliseconds, and each
member reports twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from elastic.core.config import NS_PER_S
from elastic.core.facts import NO_GENERATION, WorkerId, WorkerPhase, WorkerReport
from elastic.core.machine.job_parts import ReportWave, WaveKind
from elastic.core.machine.jobs import ClusterState, JobState, WorkerState
from elastic.core.machine.timeouts import wake
from elastic.core.policy.membership import FORMABLE_PHASES

POLL_NS, POLL_NS_PER_WORKER = NS_PER_S // 10, 50_000
"""Longest delay of a wave's reports, the larger of the two: half a second with ten thousand."""
UNDER_WAY = (WorkerPhase.FORMING, WorkerPhase.TRAINING)


def may_wait(
    cluster: ClusterState, job: JobState, worker: WorkerState, before: WorkerReport
) -> bool:
    """Return whether a report can wait for those of others, and schedule the next evaluation."""
    kind = _kind(cluster, job, worker, before)
    if kind is None:
        return False
    wave = job.newest.wave
    if wave is None or (wave.kind, wave.generation) != (kind, job.generation):
        ids: Iterable[WorkerId] = job.workers if kind is WaveKind.START else job.member_ids()
        wave = job.newest.wave = ReportWave(kind, job.generation, list(ids))
        if kind is not WaveKind.COME_UP:
            return False  # Time counts from the first one.
    holds_back = _HOLDS_BACK[kind]
    while wave.left:
        other = job.workers.get(wave.left[-1])
        if other is not None and holds_back(cluster, job, other):
            pause_ns = max(POLL_NS, POLL_NS_PER_WORKER * len(job.workers))
            wake(job, cluster.now_ns + pause_ns)
            return True
        wave.left.pop()
    job.newest.wave = None
    return False


def _kind(
    cluster: ClusterState, job: JobState, worker: WorkerState, before: WorkerReport
) -> WaveKind | None:
    """Return the kind of wave that a report belongs to, None if a decision may depend on it."""
    report, generation = worker.report, job.generation
    if (
        worker.stop_cause is not None
        or job.must_release_workers()
        or cluster.node_of(worker).drain.is_on
    ):
        return None
    if not job.is_open:
        is_first = generation == NO_GENERATION and before.phase is WorkerPhase.STARTING
        return WaveKind.START if is_first and report.phase is WorkerPhase.READY else None
    if report.generation != generation or not job.is_member(report.worker_id):
        return None
    is_fresh = before.generation < generation or before.phase in UNDER_WAY
    if not is_fresh or report.copies_every != job.copies.every_n_steps:
        return None
    if report.phase in UNDER_WAY and job.newest.training_since_ns is None:
        return WaveKind.COME_UP
    return (
        WaveKind.LEAVE
        if report.phase is WorkerPhase.READY and job.newest.is_asked_to_leave
        else None
    )


def _is_behind(cluster: ClusterState, job: JobState, worker: WorkerState) -> bool:
    report = worker.report
    # A member known from the journal only is no evidence that it trains.
    return (
        report.generation != job.generation
        or report.phase in (WorkerPhase.FORMING, WorkerPhase.READY)
        or cluster.node_of(worker).absence.is_unconfirmed
    )


def _is_inside(_: ClusterState, job: JobState, worker: WorkerState) -> bool:
    report = worker.report
    return report.generation != job.generation or report.phase not in FORMABLE_PHASES


def _is_starting(_: ClusterState, job: JobState, worker: WorkerState) -> bool:
    return worker.report.phase is WorkerPhase.STARTING and worker.stop_cause is None


_HOLDS_BACK: dict[WaveKind, Callable[[ClusterState, JobState, WorkerState], bool]] = {
    WaveKind.COME_UP: _is_behind,
    WaveKind.LEAVE: _is_inside,
    WaveKind.START: _is_starting,
}
