"""Broken links between nodes of a job while all of them reach the coordinator.

Rule: nothing here happens in a healthy run. When a group makes no progress, its nodes probe their
links to the others. As few nodes as possible are excluded from the next group, with their workers
kept, until the link works again: both ends probe it every few seconds. Otherwise such a group would
be formed again and again, and break each time.
"""

from __future__ import annotations

from collections import Counter

from elastic.core.config import NS_PER_S
from elastic.core.facts import NodeId
from elastic.core.machine import timeouts
from elastic.core.machine.jobs import ClusterState, JobState
from elastic.core.machine.nodes import PRESENT, NodeState
from elastic.core.messages import Link, LinksTried, TryLinks
from elastic.core.policy import node_links as policy

AFTER_NS = 3 * NS_PER_S
"""The links of a group without progress are probed after this."""
EVERY_NS = 2 * NS_PER_S
DOUBLINGS_MAX = 4
"""A group that waits for something else, maybe for an hour, is probed less and less often."""
AGAIN_NS = 5 * NS_PER_S
"""Interval of probes of broken links."""
NODES_MAX = 128
"""Larger groups are not probed: each node probes all others, which would be too much traffic."""


def check_into(
    cluster: ClusterState, job: JobState, since_ns: int, *, after_ns: int = AFTER_NS
) -> None:
    """Have the nodes of a group probe their links, after so long without progress."""
    now_ns, links = cluster.now_ns, job.node_links
    if abs(since_ns - links.since_ns) >= AFTER_NS:  # Each pulse of a member moves it a little.
        links.since_ns, links.rounds = since_ns, 0
        links.check_ns = min(links.check_ns, now_ns + EVERY_NS)
        # A failure of an hour ago without another probe does not count as one in a row.
        links.failed = {p: n for p, n in links.failed.items() if _pair(*p) in links.cut}
    if now_ns < max(since_ns + after_ns, links.check_ns):
        return
    nodes = [*_nodes(job)]
    if 2 <= len(nodes) <= NODES_MAX:
        doublings = min(max(0, links.rounds - policy.ROUNDS), DOUBLINGS_MAX)
        links.check_ns = now_ns + (EVERY_NS << doublings)
        links.rounds += 1
        ways = _ways(job)
        for node_id in nodes:
            _request_probe(
                cluster, job, node_id, [ways[n] for n in nodes if n != node_id and n in ways]
            )


def check_into_broken(cluster: ClusterState, job: JobState) -> None:
    """Do so at once for a group that broke while forming: there may be ten within seconds."""
    if job.newest.training_since_ns is None:
        check_into(cluster, job, job.node_links.nowhere_ns, after_ns=0)


def take_tried(cluster: ClusterState, state: NodeState, tried: LinksTried) -> None:
    """Record the result of a node's link probe, for nodes of the job."""
    job, asker = cluster.jobs.get(tried.job_id), state.node.node_id
    if job is None or job.has_ended():
        return
    known = {w.node_id for w in job.workers.values()}.union(job.node_links.out)
    if asker not in known:
        return
    failed = job.node_links.failed
    for node_id in tried.reached:
        if not _is_on_trial(cluster, job, asker, node_id):
            failed.pop((asker, node_id), None)
            failed.pop((node_id, asker), None)
    # Failures between members of a group that has formed meanwhile are obsolete.
    well = set(_nodes(job)) if _gets_on(cluster, job) else set()
    for node_id in known.intersection(tried.unreachable) - {asker}:
        job.node_links.whole_ns.pop(_pair(asker, node_id), None)
        if not {asker, node_id} <= well:
            failed[asker, node_id] = failed.get((asker, node_id), 0) + 1
    _judge(cluster, job)


def settle(cluster: ClusterState, job: JobState) -> int | None:
    """Have broken links probed again; return when to do that next."""
    links = job.node_links
    if not links.failed:
        return None
    hosts = {w.node_id for w in job.workers.values()}
    for one, other in list(links.failed):
        is_known = {one, other} & hosts
        if not is_known or not _is_there(cluster, one) or not _is_there(cluster, other):
            del links.failed[one, other]
    _judge(cluster, job)
    _keep_out(cluster, job)
    if not links.cut:
        return None
    if cluster.now_ns >= links.again_ns:
        links.again_ns = cluster.now_ns + AGAIN_NS
        ways = _ways(job)
        wanted: dict[NodeId, list[Link]] = {}
        for one, other in [*links.cut, *((b, a) for a, b in links.cut)]:
            if other in ways:
                wanted.setdefault(one, []).append(ways[other])
        for node_id, targets in wanted.items():
            _request_probe(cluster, job, node_id, targets)
    return links.again_ns


def explain(job: JobState, reason: str = "") -> str:
    """Return a reason, followed by the excluded nodes and why, if there are any."""
    out = job.node_links.out.items()
    parts = [f"{node_id} and {other} do not reach each other" for node_id, other in out]
    return "; ".join([reason] * bool(reason) + parts)


def _is_on_trial(cluster: ClusterState, job: JobState, asker: NodeId, node_id: NodeId) -> bool:
    """Return whether a link that works again has broken too often to be trusted yet."""
    links, pair = job.node_links, _pair(asker, node_id)
    if pair not in links.cut:
        return False
    since_ns = links.whole_ns.setdefault(pair, cluster.now_ns)
    return cluster.now_ns - since_ns < policy.trial_ns(links.cuts[pair][0])


def _pair(one: NodeId, other: NodeId) -> policy.Pair:
    return min(one, other), max(one, other)


def _judge(cluster: ClusterState, job: JobState) -> None:
    """Determine the broken links and the nodes to exclude."""
    links = job.node_links
    before, links.cut = links.cut, policy.cut_pairs(links.failed)
    if links.cut == before:
        return
    if not before:
        links.again_ns = cluster.now_ns + AGAIN_NS
    for one, other in links.cut:
        if (one, other) not in before:
            times, last_ns = links.cuts.get((one, other), (0, 0))
            is_old = cluster.now_ns - last_ns >= policy.FORGET_NS
            links.cuts[one, other] = 1 if is_old else times + 1, cluster.now_ns
            cluster.note("link_cut", job.job_id, nodes=f"{one} {other}")
    for one, other in before:
        if (one, other) not in links.cut:
            links.whole_ns.pop((one, other), None)
            cluster.note("link_back", job.job_id, nodes=f"{one} {other}")
    _keep_out(cluster, job)


def _keep_out(cluster: ClusterState, job: JobState) -> None:
    """Choose the nodes to exclude: first those without workers of the job."""
    links, workers = job.node_links, _nodes(job)
    hosts = {worker.node_id for worker in job.workers.values()}
    between = [pair for pair in links.cut if hosts.issuperset(pair)]
    out = policy.who_stays_out(between, links.out, workers)
    for one, other in links.cut:
        if not hosts.issuperset((one, other)):
            out.update({one: other} if one not in hosts else {other: one})
    if out == links.out:
        return
    links.out = out
    if job.is_open and not workers.keys().isdisjoint(links.out):
        job.newest.hang.stuck = job.newest.hang.stuck or explain(job)
    cluster.queue.is_outdated = True
    cluster.touch(job)


def _nodes(job: JobState) -> dict[NodeId, int]:
    """Return the nodes of the newest group by rank, with the number of its workers on each."""
    return dict(Counter(worker.node_id for worker in job.present_members()))


def _gets_on(cluster: ClusterState, job: JobState) -> bool:
    """Return whether its group trains, and no member waits in it."""
    is_formed = job.is_open and job.newest.training_since_ns is not None
    return is_formed and not timeouts.does_somebody_wait(cluster, job)


def _ways(job: JobState) -> dict[NodeId, Link]:
    """Return the address of a listening worker of the job, for each node with one."""
    return {
        worker.node_id: Link(worker.node_id, worker.report.store_address)
        for _, worker in sorted(job.workers.items(), reverse=True)
        if worker.report.store_address and worker.stop_cause is None
    }


def _request_probe(
    cluster: ClusterState, job: JobState, node_id: NodeId, targets: list[Link]
) -> None:
    if targets:
        cluster.send(cluster.book.nodes[node_id], TryLinks(job.job_id, tuple(targets)))


def _is_there(cluster: ClusterState, node_id: NodeId) -> bool:
    """Return whether a node is not lost; a broken stream does not mean that other links are."""
    state = cluster.book.nodes.get(node_id)
    return state is not None and state.phase in PRESENT
