"""Pacing: what all members of a large group report alike is sent by one after another.

Rule: only reports that nothing waits for are paced: that a member forms or trains, and its
progress. Errors and requests are sent at once. Receiving a report takes a coordinator about as long
as sending an announcement, and members that report at once delay the announcements of the others.
"""

from __future__ import annotations

from elastic.core.config import NS_PER_S

LEAST_NS = NS_PER_S // 50
"""A group that needs less time in all sends at once."""
MOST_NS = 2 * NS_PER_S
"""The largest group is done after twice this: a member silent for too long counts as hung."""
TELEMETRY_SPREADS = 300
"""Telemetry of a large group takes a few hundredths of the coordinator's time."""
TELEMETRY_MOST_NS = 30 * NS_PER_S
"""In the largest groups it takes more, so that what people see is not older."""
WAITING_NS = NS_PER_S // 4
FORMING_NS, FORMING_NS_PER_MEMBER = NS_PER_S // 2, NS_PER_S // 1000
WAITING_NS_PER_MEMBER = NS_PER_S // 5000
"""Announcing a group to ten thousand members takes a second, during which the first ones wait."""


def answer_after_ns(rank: int, world_size: int, member_ns: int) -> int:
    """Return how long after the announcement a member reports that it forms its group, or trains.

    The first half of the time is for announcing to the others: a coordinator that sends and
    receives at the same time does both more slowly.
    """
    all_ns = min(world_size * member_ns, MOST_NS)
    return all_ns + all_ns * rank // world_size if all_ns >= LEAST_NS else 0


def telemetry_every_ns(rank: int, world_size: int, member_ns: int) -> int:
    """Return the least time between two progress messages of a member, 0 for no limit.

    There is none for rank 0, whose progress users see, and in a small group: workers send one a
    second.
    """
    is_small = world_size * member_ns < LEAST_NS
    if is_small or rank == 0:
        return 0
    return min(world_size * member_ns * TELEMETRY_SPREADS, TELEMETRY_MOST_NS)


def telemetry_offset_ns(rank: int, world_size: int, every_ns: int) -> int:
    """Return when in the interval a member sends its progress.

    Once a second some neighbours do, all at the same time: a coordinator that is woken for each
    message alone takes several times as long.
    """
    seconds = every_ns // NS_PER_S
    return NS_PER_S * (rank * seconds // world_size)


def waiting_is_long_after_ns(world_size: int) -> int:
    """Return how long a member waits for its peers before it reports it.

    Ranks of a healthy run differ by less.
    """
    return max(WAITING_NS, world_size * WAITING_NS_PER_MEMBER)


def forming_is_long_after_ns(world_size: int) -> int:
    """Return how long a group forms before its silent nodes are probed.

    A healthy group forms within some milliseconds, and one of ten thousand, whose members reply
    one after another, within half of this.
    """
    return FORMING_NS + world_size * FORMING_NS_PER_MEMBER
