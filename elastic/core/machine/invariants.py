"""Invariants that must hold after every step of the coordinator's machine.

A violation is a bug of ours; it is raised with the events that led to it.
"""

from __future__ import annotations

from itertools import islice

from elastic.core.facts import JobPhase
from elastic.core.machine.jobs import ClusterState, JobState
from elastic.core.machine.nodes import LIVE
from elastic.errors import check

SESSIONS_PER_STEP = 256
"""In a large cluster a step for one message of one agent must not check all sessions."""


def check_cluster(cluster: ClusterState) -> None:
    """Check that the records agree; of many sessions some at each step, in turn.

    Raises:
        InvariantViolation: naming the entry that contradicts another.
    """
    nodes, sessions = cluster.book.nodes, cluster.book.sessions
    first = cluster.num_checked if cluster.num_checked < len(sessions) else 0
    cluster.num_checked = first + SESSIONS_PER_STEP
    for session, node_id in islice(sessions.items(), first, first + SESSIONS_PER_STEP):
        state = nodes[node_id]
        # The texts are not made for each of ten thousand nodes at every step.
        if state.session != session:
            check(False, f"session {session} of node {node_id} is not its own")
        if state.phase not in LIVE:
            check(False, f"node {node_id} has a session and is {state.phase.value}")
    for job_id in cluster.dirty:
        check(False, f"job {job_id} was left unsettled")


def check_job(cluster: ClusterState, job: JobState) -> None:
    who = f"job {job.job_id}"
    check(job.is_open == (job.phase is JobPhase.RUNNING), f"{who}: open group, {job.phase.value}")
    nodes = cluster.book.nodes
    for worker_id, worker in job.workers.items():
        node = nodes.get(worker.node_id)
        if node is None:
            check(False, f"{who}: worker {worker_id} is on unknown node {worker.node_id}")
        elif worker_id not in node.held:
            check(False, f"{who}: worker {worker_id} is not in the books of node {worker.node_id}")
    members = job.member_ids()
    check(bool(members) or not job.is_open, f"{who}: its open group has no members")
    # Texts about ten thousand members are made only when they are needed.
    if len(set(members)) != len(members):
        check(False, f"{who}: a worker is a member twice: {members}")
    ranks = [member.rank for member in job.members]
    if ranks != list(range(len(ranks))):
        check(False, f"{who}: ranks {ranks} are no permutation")


def check_bounds(job: JobState) -> None:
    """Check the size of a group that was just formed; its bounds may change later."""
    spec, size = job.limits, len(job.member_ids())
    check(
        spec.min_workers <= size <= spec.max_workers and size % spec.workers_per_replica == 0,
        f"job {job.job_id}: {size} members, allowed {spec.min_workers} to {spec.max_workers} in "
        f"replicas of {spec.workers_per_replica}",
    )
