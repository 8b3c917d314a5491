"""Resolves a user's reference to a job: its id, a unique prefix of its id, or its name.

Rule: an id beats a name. A name means the job that has not ended, else the one submitted last. A
prefix counts only if it matches exactly one id.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic.core.facts import Generation, NodeId, WorkerId, WorkerPhase
from elastic.core.view import ClusterView, JobView
from elastic.errors import NotFound

PREFIX_CHARS_MIN = 3
SHOWN_MAX = 10
NAME_CHARS = 100
"""An unknown name is cut to this in an error: no name is longer."""


def find_job(view: ClusterView, wanted: str) -> JobView:
    """Return the job that `wanted` names.

    Raises:
        NotFound: no job or several match; the text lists the candidates.
    """
    for job in view.jobs:
        if job.record.spec.job_id == wanted:
            return job
    named = [job for job in view.jobs if job.record.spec.name == wanted]
    if named:
        # View order is that of submission, and at most one of a name has not ended.
        return next((job for job in named if not job.has_ended()), named[-1])
    if len(wanted) >= PREFIX_CHARS_MIN:
        begin = [job for job in view.jobs if job.record.spec.job_id.startswith(wanted)]
        if len(begin) == 1:
            return begin[0]
        if begin:
            raise NotFound(f"{wanted!r} begins several job ids: {_shown(begin)}; give more of it")
    known = _shown(view.jobs) if view.jobs else "none"
    raise NotFound(f"no job has the id or name {wanted[:NAME_CHARS]!r}; known jobs: {known}")


def _shown(jobs: tuple[JobView, ...] | list[JobView]) -> str:
    names = [f"{job.record.spec.job_id} ({job.record.spec.name})" for job in jobs[-SHOWN_MAX:]]
    more = f" and {len(jobs) - SHOWN_MAX} older" if len(jobs) > SHOWN_MAX else ""
    return ", ".join(names) + more


@dataclass(frozen=True)
class WorkerOrigin:
    """A worker whose output may be shown, and the node that runs or ran it."""

    worker_id: WorkerId
    node_id: NodeId
    rank: int
    generation: Generation


def origins_of(job: JobView, ranks: frozenset[int]) -> tuple[WorkerOrigin, ...]:
    """Return the workers of a job by rank, those without a rank last.

    A worker that has no process yet has no output either, and is left out. A worker that is gone
    is still listed if it was a member of the newest group, or the one that failed: its agent
    still has its output.

    Args:
        job: the job.
        ranks: only workers with these ranks in the newest group; all if empty.
    """
    record = job.record
    found: dict[WorkerId, WorkerOrigin] = {}
    for view in job.workers:
        report = view.report
        if report.phase is WorkerPhase.STARTING and not report.pid:
            continue
        found[report.worker_id] = WorkerOrigin(
            report.worker_id, view.node_id, view.rank, report.generation
        )
    for former in record.former:
        node_id = NodeId(former.worker_id.rpartition("/")[0])
        origin = WorkerOrigin(former.worker_id, node_id, former.rank, former.generation)
        found.setdefault(former.worker_id, origin)
    for member in record.group.members if record.group is not None else ():
        origin = WorkerOrigin(member.worker_id, member.node_id, member.rank, record.generation)
        found.setdefault(member.worker_id, origin)
    if record.failed_worker:
        worker_id = WorkerId(record.failed_worker.partition(" ")[0])
        node_id = NodeId(worker_id.rpartition("/")[0])
        found.setdefault(worker_id, WorkerOrigin(worker_id, node_id, -1, record.generation))
    chosen = [origin for origin in found.values() if not ranks or origin.rank in ranks]
    return tuple(sorted(chosen, key=lambda o: (o.rank < 0, o.rank, o.worker_id)))
