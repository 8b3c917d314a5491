"""Pacing: what all members of a large group report alike is sent by one after another.

Rule: only reports that nothing waits for are paced: that a member forms or trains, and its
progress. Errors and requests are sent at once. Receiving a report takes a coordinator about as long
as sending an announcement, and members that report at once delay the announcements of the others.
"""

from __future__ import annotations

from elastic.core.config import NS_PER_S

LEAST_NS = NS_PER_S // 50
"""A group that would be done sooner speaks at once."""
MOST_NS = 2 * NS_PER_S
"""The largest group is done after twice this: who is silent too long counts as hung."""
TELEMETRY_SPREADS = 10
"""Telemetry may take a tenth of the coordinator's time."""
WAITING_NS = NS_PER_S // 4
FORMING_NS, FORMING_NS_PER_MEMBER = NS_PER_S // 2, NS_PER_S // 1000
WAITING_NS_PER_MEMBER = NS_PER_S // 5000
"""Members of ten thousand learn of a group within a second, and the first ones wait."""


def answer_after_ns(rank: int, world_size: int, member_ns: int) -> int:
    """Return how long after the announcement a member says that it forms its group, or trains.

    The first half of the time is for telling the others: a coordinator that hears and tells at once
    does both more slowly.

    Args:
        rank: of the member.
        world_size: members of the group.
        member_ns: for each of them.
    """
    all_ns = min(world_size * member_ns, MOST_NS)
    return all_ns + all_ns * rank // world_size if all_ns >= LEAST_NS else 0


def telemetry_every_ns(rank: int, world_size: int, member_ns: int) -> int:
    """Return the least time between two messages of how far a member is, 0 for none.

    Of rank 0, whose progress users see, as of a small group: workers keep to a second.
    """
    is_small = world_size * member_ns < LEAST_NS
    return 0 if is_small or rank == 0 else world_size * member_ns * TELEMETRY_SPREADS


def waiting_is_long_after_ns(world_size: int) -> int:
    """Return how long a member waits for its peers before it says so.

    Ranks of a healthy run differ by less.
    """
    return max(WAITING_NS, world_size * WAITING_NS_PER_MEMBER)


def forming_is_long_after_ns(world_size: int) -> int:
    """Return how long a group forms before nodes that say nothing are asked whether they live.

    A healthy group stands after some milliseconds, and one of ten thousand, whose members answer
    one after another, within half of this.
    """
    return FORMING_NS + world_size * FORMING_NS_PER_MEMBER
