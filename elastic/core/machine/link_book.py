"""What the coordinator knows of the links between the nodes of one job.

Rule: as `jobs`: this module keeps books; what follows is in `links`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.core.policy.links import Pair
from elastic.core.world import NodeId


@dataclass
class LinkBook:
    """What nodes said of their links, in this coordinator's life; empty in a healthy job.

    Attributes:
        failed: of who tried and whom, how many times in a row that failed.
        cut: links that are cut.
        out: nodes of which no group is formed, and for each one that it does not reach.
        again_ns: links that are cut are not tried before.
        cuts: of each link that was, how many times it was found cut, and when last.
        whole_ns: of those that are cut, since when they were reached at each try.
        since_ns, rounds: the group has got nowhere since then, and was asked so often for that.
        check_ns: and is not asked before.
        nowhere_ns: when the first of those groups was announced that never trained, and broke.
    """

    failed: dict[Pair, int] = field(default_factory=dict)
    cut: tuple[Pair, ...] = ()
    out: dict[NodeId, NodeId] = field(default_factory=dict)
    again_ns: int = 0
    cuts: dict[Pair, tuple[int, int]] = field(default_factory=dict)
    whole_ns: dict[Pair, int] = field(default_factory=dict)
    since_ns: int = 0
    rounds: int = 0
    check_ns: int = 0
    nowhere_ns: int = 0
