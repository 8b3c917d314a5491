"""What a member is told of the group that it is in.

Rule: what all members are told alike is found once for a group of ten thousand, and what one of
them is told does not grow with their number.
"""

from __future__ import annotations

from collections.abc import Callable

from elastic.core.machine import copies
from elastic.core.machine.jobs import Cluster, JobState
from elastic.core.messages import Announce
from elastic.core.policy.ranks import Place
from elastic.core.world import Assignment, WorkerId
from elastic.errors import InvariantViolation


def announcement(cluster: Cluster, job: JobState, worker_id: WorkerId) -> Announce:
    """Return what this member must know of the newest group."""
    return announcer(cluster, job)(job.places()[job.rank_of(worker_id)])


def announcer(cluster: Cluster, job: JobState) -> Callable[[Place], Announce]:
    """Return what makes a member's announcement of its place; what all must know is found once."""
    group = job.group
    if group is None:
        raise InvariantViolation(f"job {job.job_id} has no group to announce")
    places = job.places()
    world_size, num_nodes = len(places), places[-1].node_rank + 1
    leader_address, checkpoint = group.members[0].store_address, job.latest_checkpoint()
    addresses = copies.addresses(cluster, job)
    key = copies.key_of(cluster, job.job_id) if job.copies.held else ""

    def announce(place: Place) -> Announce:
        return Announce(
            Assignment(
                job_id=job.job_id,
                worker_id=place.worker_id,
                generation=group.generation,
                rank=place.rank,
                world_size=world_size,
                local_rank=place.local_rank,
                local_world_size=place.local_world_size,
                node_rank=place.node_rank,
                num_nodes=num_nodes,
                leader_address=leader_address,
                checkpoint=checkpoint,
                cause=group.reason,
                copies=addresses,
                copies_key=key,
            )
        )

    return announce
