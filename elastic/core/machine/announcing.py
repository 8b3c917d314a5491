"""The messages to workers: to each member about its group, and to those that must end.

Rule: what is the same for all members is computed once per group, and no message grows with the
number of members: groups may have ten thousand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from elastic.core.config import ns
from elastic.core.facts import (
    Assignment,
    ExitCause,
    ExitKind,
    JobPhase,
    WorkerId,
    WorkerPhase,
)
from elastic.core.machine import copies
from elastic.core.machine.jobs import ClusterState, JobState, WorkerState
from elastic.core.messages import Announce, CoordinatorMessage, LeaveGroup, StopWorker
from elastic.core.policy import replication
from elastic.core.policy.ranks import RankPlace
from elastic.errors import InvariantViolation

EACH = -1
"""Key for the ranks without a share of their own."""


def send_worker(cluster: ClusterState, worker: WorkerState, message: CoordinatorMessage) -> None:
    cluster.send(cluster.node_of(worker), message)


def stop_worker(
    cluster: ClusterState, job: JobState, worker_id: WorkerId, cause: ExitCause
) -> None:
    """Order a worker to end, once; from here on it counts as absent."""
    worker = job.workers[worker_id]
    if worker.stop_cause is not None:
        return
    worker.stop_cause = cause
    cluster.book_time(job, worker)
    cluster.queue.is_outdated = True
    send_worker(cluster, worker, stop_order(cluster, job, worker))


def stop_order(cluster: ClusterState, job: JobState | None, worker: WorkerState) -> StopWorker:
    """Return the message for a worker that must end.

    If a user stops the job, its script is asked first: by SIGTERM, if it has its own handler.
    """
    cause = worker.stop_cause or ExitCause(ExitKind.STOPPED)
    asks_script = job is not None and job.phase is JobPhase.STOPPED and not job.release.hurries
    grace_s = 0.0 if cause.kind is ExitKind.HUNG else cluster.config.stop_grace_s
    if asks_script and job is not None:
        grace_s = max(grace_s, job.spec.grace_s)
    return StopWorker(worker.report.worker_id, ns(grace_s), cause.detail, asks_script)


def announce_end_early(cluster: ClusterState, job: JobState) -> bool:
    """Notify the members of a large group that lost one that it is over; return whether it did.

    Computing, persisting and announcing the next group takes as long as this does. Meanwhile the
    members can do their first work (NCCL's abort).
    """
    if not (job.is_open and is_large(cluster, job)) or job.is_end_announced():
        return False
    members = job.member_ids()
    here = [w for w in map(job.workers.get, members) if w is not None and w.stop_cause is None]
    if len(here) == len(members) or any(_may_keep_it(cluster, worker) for worker in here):
        return False
    job.newest.ends_announced = job.generation
    reason = f"lost {len(members) - len(here)} of {len(members)} members"
    for worker in here:
        order = LeaveGroup(worker.report.worker_id, job.generation, False, reason, follows=True)
        send_worker(cluster, worker, order)
    return True


def _may_keep_it(cluster: ClusterState, worker: WorkerState) -> bool:
    """Return whether a group that lost a member may be kept because of this one.

    It is kept while reports of a member are awaited, and when all remaining ones have finished.
    """
    is_finished = worker.report.phase is WorkerPhase.FINISHED
    return is_finished or cluster.node_of(worker).is_awaited()


def is_large(cluster: ClusterState, job: JobState) -> bool:
    """Return whether the newest group is so large that its announcement takes long."""
    return len(job.member_ids()) >= cluster.config.announce_end_early_min


def announcement(cluster: ClusterState, job: JobState, worker_id: WorkerId) -> Announce:
    """Return the announcement of the newest group for this member."""
    return announcer(cluster, job)(job.places()[job.rank_of(worker_id)])


def announcer(cluster: ClusterState, job: JobState) -> Callable[[RankPlace], Announce]:
    """Return a function from a place to its announcement; shared fields are computed once."""
    group = job.newest.group
    if group is None:
        raise InvariantViolation(f"job {job.job_id} has no group to announce")
    places = job.places()
    world_size, num_nodes = len(places), places[-1].node_rank + 1
    leader_address, checkpoint = group.members[0].store_address, job.latest_checkpoint()
    found = copies.addresses(cluster, job)
    copied = copies.newest(job, found)
    key = copies.key_of(cluster, job.job_id) if found else ""
    shares = _shares(found, places)

    def alike(querying: int) -> Assignment:
        """Return the assignment for all ranks that query the same agents, without a place."""
        return Assignment(
            job_id=job.job_id,
            worker_id=WorkerId(""),
            generation=group.generation,
            rank=0,
            world_size=world_size,
            local_rank=0,
            local_world_size=0,
            node_rank=0,
            num_nodes=num_nodes,
            leader_address=leader_address,
            reported_checkpoint=checkpoint,
            cause=group.reason,
            group_key=group.key,
            automatic_checkpoint=job.latest_saved(),
            holders=len(job.newest.holders.intersection(job.member_ids())),
            copies=shares[querying],
            copies_key=key,
            copied=copied,
        )

    known: dict[int, Assignment] = {}

    def announce(place: RankPlace) -> Announce:
        querying = place.rank if place.rank in shares else EACH
        shared = known.get(querying) or known.setdefault(querying, alike(querying))
        return Announce(_at(place, shared))

    return announce


def _at(place: RankPlace, shared: Assignment) -> Assignment:
    """Return `replace(shared, ...)` for a place, without `__init__`: ten thousand have one each."""
    own = object.__new__(Assignment)
    own.__dict__.update(
        shared.__dict__,
        worker_id=place.worker_id,
        rank=place.rank,
        local_rank=place.local_rank,
        local_world_size=place.local_world_size,
        node_rank=place.node_rank,
    )
    return own


def _shares(
    found: Sequence[copies.StateLocation], places: Sequence[RankPlace]
) -> dict[int, tuple[str, ...]]:
    """Return the addresses for copies that each rank queries; `EACH` for the ranks not listed.

    A node with rows of a sharded model is queried by one member, which informs the others; there
    may be as many such nodes as members. Unsharded state is on few nodes, and all members get
    these.
    """
    first_ranks = {place.node_id: place.rank for place in places if not place.local_rank}
    alike = tuple(one.address for one in found if not one.is_sharded)
    shares = {EACH: alike}
    for one in found:
        if one.is_sharded:
            rank = replication.querying_rank(one.node_id, first_ranks, len(places))
            shares[rank] = (*shares.get(rank, alike), one.address)
    return shares
