"""The parts of the cluster's state: the term, what the queue has allocated, probes that are due.

Rule: each has what one module decides by: `coordinator` begins the term, `queueing` plans the
queue, `suspicion` probes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.core.facts import JobId, NodeId
from elastic.core.policy.demands import Allocation

NUMBERS_PER_TERM = 1_000_000
"""Worker n1/2000007 is the seventh that node n1 started under the third coordinator, and checkpoint
request 2000007 the seventh of its term. More than are used in a term: the next coordinator does not
know which numbers this one has used."""


@dataclass(frozen=True)
class Term:
    """What a coordinator knows once it leads, until it ends.

    Attributes:
        number, history: the term, and the id of its store; see `Welcome`.
        secret: the keys of groups and of copies are derived from it.
        unix_ahead_ns: the wall clock minus the machine's, at the start; None if unknown.
        hold_until_ns: no worker is started before, so that after a restart agents can report what
            already runs.
    """

    number: int = 1
    history: str = ""
    secret: bytes = field(default=b"", repr=False)
    unix_ahead_ns: int | None = None
    hold_until_ns: int = 0

    @property
    def first_number(self) -> int:
        """Return where the numbers of workers and of checkpoint requests begin in this term."""
        return (self.number - 1) * NUMBERS_PER_TERM


@dataclass
class QueuePlan:
    """What the queue has allocated, and when it is planned again.

    Attributes:
        grants: the allocation for each job; a job that is not in it has no rival.
        is_outdated: something changed that it depends on.
        outdated_at_ns: when time alone changes its result, None for never.
    """

    grants: dict[JobId, Allocation] = field(default_factory=dict)
    is_outdated: bool = False
    outdated_at_ns: int | None = None


@dataclass
class ProbeBook:
    """Which groups and nodes are watched because somebody waits.

    Attributes:
        polls: jobs whose members wait for each other, and when to check each again.
        sent: nodes with an unanswered probe: when it was sent, its timeout.
        check_by_ns: the deadline that the machine returned for a check or probe, None for never.
    """

    polls: dict[JobId, int] = field(default_factory=dict)
    sent: dict[NodeId, tuple[int, int]] = field(default_factory=dict)
    num_sent: int = 0
    check_by_ns: int | None = None
