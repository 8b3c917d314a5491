"""Failure detection while members wait for each other: probes nodes, has members judged.

Rule: a healthy run causes none of it. It begins with the first member that reports to wait for its
peers, and ends when none waits any more. A node is given up only after a probe, a hung worker only
after a request for its stacks.

Members of a forming group cannot report that they wait. When forming takes longer than expected,
silent nodes are probed as well, with a longer timeout, because forming is hard work. Otherwise the
group would wait for the keepalive of a silent host, which may take ten seconds.
"""

from __future__ import annotations

from elastic.core.config import NS_PER_S, ns
from elastic.core.events.coordinator import SendAgent
from elastic.core.machine import node_links, timeouts
from elastic.core.machine.jobs import ClusterState, JobState
from elastic.core.machine.nodes import NodeState
from elastic.core.messages import Probe, Pulse
from elastic.core.policy.hang import MainThreadState
from elastic.core.policy.pacing import forming_is_long_after_ns

POLL_NS = NS_PER_S // 10
QUIET_NS = NS_PER_S // 2
"""A node that sent a message within this time is not probed."""
FORMING_PROBES = 3
"""Factor on the probe timeout while a group forms."""
LATE_NS = NS_PER_S // 10
"""If the coordinator itself is so late for a deadline, messages to it may still be queued."""


def received(cluster: ClusterState, state: NodeState) -> None:
    """Record that an agent sent a message: it is alive."""
    state.received_ns = cluster.now_ns
    cluster.probes.sent.pop(state.node.node_id, None)


def take_pulse(cluster: ClusterState, state: NodeState, pulse: Pulse) -> None:
    """Record a worker's pulse: the state of its main thread in its group."""
    job = cluster.job_of(pulse.worker_id)
    worker = job.workers[pulse.worker_id] if job else None
    if job is None or worker is None or worker.node_id != state.node.node_id:
        return
    if pulse.generation != worker.report.generation:
        return
    now_ns = cluster.now_ns
    worker.main_thread = MainThreadState.of(pulse, now_ns)
    if pulse.generation < job.generation:
        # Others wait for it while they form the next group, and cannot report that.
        cluster.touch(job)
    elif job.is_open and timeouts.may_wait(cluster, job, worker):
        due_ns = cluster.probes.polls.get(job.job_id)
        if due_ns is None or due_ns > now_ns + POLL_NS:
            cluster.probes.polls[job.job_id] = now_ns


def check(cluster: ClusterState) -> None:
    """Check the jobs that are due: probe their nodes, judge their members."""
    for job_id in [j for j, due_ns in cluster.probes.polls.items() if due_ns <= cluster.now_ns]:
        job = cluster.jobs.get(job_id)
        if job is not None and timeouts.does_somebody_wait(cluster, job):
            cluster.probes.polls[job_id] = cluster.now_ns + POLL_NS
            _probe(cluster, job, QUIET_NS, ns(cluster.config.probe_timeout_s))
            _check_members(cluster, job)
        elif job is not None and _is_forming(job):
            long_ns = forming_is_long_after_ns(len(job.member_ids()))
            cluster.probes.polls[job_id] = cluster.now_ns + long_ns
            _probe(cluster, job, long_ns, FORMING_PROBES * ns(cluster.config.probe_timeout_s))
            node_links.check_into(cluster, job, job.node_links.nowhere_ns)
        else:
            del cluster.probes.polls[job_id]
            if job is not None:
                job.newest.hang.culprits.clear()
                job.newest.hang.works = ""


def silent(cluster: ClusterState) -> list[tuple[NodeState, str]]:
    """Return the nodes that did not answer a probe in time, and why; called at a `Tick`.

    A tick comes after all messages queued before it was due, so a reply in the queue counts.
    """
    found = []
    for node_id, (sent_ns, timeout_ns) in list(cluster.probes.sent.items()):
        state = cluster.book.nodes.get(node_id)
        if state is None or state.session is None:
            del cluster.probes.sent[node_id]
        elif cluster.now_ns - sent_ns >= timeout_ns:
            del cluster.probes.sent[node_id]
            limit = f"{timeout_ns / NS_PER_S:g} s"
            why = f"its agent did not answer a probe within {limit} while members waited"
            last = (cluster.now_ns - state.received_ns) / NS_PER_S
            cluster.note("node_silent", node=node_id, silent_s=f"{last:.2f}")
            found.append((state, why))
    return found


def plan_check(cluster: ClusterState) -> None:
    """Record when the next check or the timeout of a probe is due."""
    moments = [*cluster.probes.polls.values(), *map(sum, cluster.probes.sent.values())]
    cluster.probes.check_by_ns = min(moments, default=None)


def forgive_own_sleep(cluster: ClusterState) -> None:
    """If the coordinator was stopped, or its store was slow, restart the timeouts of probes.

    Also those of groups decided before: their announcements may not have been sent.
    """
    for job_id, due_ns in cluster.probes.polls.items():
        job = cluster.jobs.get(job_id) if cluster.now_ns > due_ns + LATE_NS else None
        if job is not None and job.is_open:
            long_ns = forming_is_long_after_ns(len(job.member_ids()))
            if due_ns == job.newest.announced_ns + long_ns:  # It was not checked yet.
                _begin_anew(cluster, job)
    check_by_ns = cluster.probes.check_by_ns
    if check_by_ns is not None and cluster.now_ns > check_by_ns + LATE_NS:
        for node_id, (_, timeout_ns) in cluster.probes.sent.items():
            cluster.probes.sent[node_id] = cluster.now_ns, timeout_ns


def _begin_anew(cluster: ClusterState, job: JobState) -> None:
    """Count the time for joining the newest group from now."""
    for worker_id in job.member_ids():
        worker = job.workers.get(worker_id)
        since_ns = worker.lingers_since_ns if worker is not None else None
        if worker is not None and since_ns is not None and since_ns >= job.newest.announced_ns:
            worker.lingers_since_ns = None
    job.newest.announced_ns = cluster.now_ns


def _is_forming(job: JobState) -> bool:
    """Return whether a group was announced and does not train yet, in this term."""
    return job.is_open and not job.has_ended() and job.newest.training_since_ns is None


# ---------------------------------------------------------------- silent nodes


def _probe(cluster: ClusterState, job: JobState, quiet_ns: int, timeout_ns: int) -> None:
    """Probe all nodes of the group that have been silent for a while.

    Also those of members that wait: they may have stopped after they reported it. A pending probe
    with a longer timeout is replaced.
    """
    for worker_id in job.member_ids():
        worker = job.workers.get(worker_id)
        node = cluster.node_of(worker) if worker is not None else None
        if node is None or node.session is None or cluster.now_ns - node.received_ns < quiet_ns:
            continue
        sent_ns, has_ns = cluster.probes.sent.get(node.node.node_id, (0, 0))
        if not has_ns or sent_ns + has_ns > cluster.now_ns + timeout_ns:
            cluster.probes.num_sent += 1
            cluster.probes.sent[node.node.node_id] = cluster.now_ns, timeout_ns
            cluster.do(SendAgent(node.session, Probe(cluster.probes.num_sent)))


def _check_members(cluster: ClusterState, job: JobState) -> None:
    """Judge members that do not move, and have nodes probe their links to each other meanwhile."""
    decision = timeouts.judge_members(cluster, job)
    # Also before a member is judged hung: one that waits over a cut link, undetected, makes no
    # progress. And while a group forms: members with all their links already train, and wait for
    # the two without.
    since_ns = job.node_links.nowhere_ns if _is_forming(job) else decision.value.since_ns
    if since_ns:
        node_links.check_into(cluster, job, since_ns)
    timeouts.end_hung(cluster, job, decision)
