"""The coordinator's records of the links between the nodes of one job.

Rule: like `jobs`, this module only records; decisions and orders are in `node_links`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.core.facts import NodeId
from elastic.core.policy.node_links import Pair


@dataclass
class LinkBook:
    """Results of link probes in this term; empty in a healthy job.

    Attributes:
        failed: by prober and target, how many probes in a row failed.
        cut: broken links.
        out: nodes excluded from groups, and for each one that it does not reach.
        again_ns: broken links are not probed before.
        cuts: by link, how many times it was found broken, and when last.
        whole_ns: for broken links, since when every probe succeeded.
        since_ns, rounds: since when the group has made no progress; probes since then.
        check_ns: the group's links are not probed before.
        nowhere_ns: when the first of the successive groups that broke without training was
            announced.
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
