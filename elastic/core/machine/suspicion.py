"""What the coordinator does while members wait for each other: probes nodes, ends hung workers.

Rule: a healthy run causes none of it. It begins with the first member that reports to wait for its
peers, and ends when none waits any more. Nobody is given up without being asked first: a node by a
probe, a hung worker for its stacks.

Members of a group that forms cannot report that they wait. When forming takes longer than expected,
silent nodes are probed as well, with a longer timeout, because forming is hard work. Otherwise the
group would wait for the keepalive of a silent host, which may take ten seconds.
"""

from __future__ import annotations

from elastic.core.config import NS_PER_S, ns
from elastic.core.events.coordinator import SendAgent
from elastic.core.machine import links
from elastic.core.machine import timeouts as lateness
from elastic.core.machine.jobs import ClusterState, JobState
from elastic.core.machine.nodes import NodeState
from elastic.core.machine.reconcile import stop_worker
from elastic.core.messages import Probe, Pulse
from elastic.core.policy import hang
from elastic.core.policy.hang import MainThreadState, WatchedMember
from elastic.core.policy.pacing import forming_is_long_after_ns
from elastic.core.world import ExitCause, ExitKind, WorkerPhase

POLL_NS = NS_PER_S // 10
QUIET_NS = NS_PER_S // 2
"""A node that said anything within this time is not probed."""
FORMING_PROBES = 3
"""While a group forms, a node has so many times longer to answer."""
LATE_NS = NS_PER_S // 10
"""If the coordinator itself comes so much later than it wanted, what was said to it meanwhile may
still be on its way."""


def received(cluster: ClusterState, state: NodeState) -> None:
    """An agent said something: it is there."""
    state.received_ns = cluster.now_ns
    cluster.probes.pop(state.node.node_id, None)


def take_pulse(cluster: ClusterState, state: NodeState, pulse: Pulse) -> None:
    """Remember what a worker says of its main thread in the group that it is in."""
    job = cluster.job_of(pulse.worker_id)
    worker = job.workers[pulse.worker_id] if job else None
    if job is None or worker is None or worker.node_id != state.node.node_id:
        return
    if pulse.generation != worker.report.generation:
        return
    now_ns = cluster.now_ns
    worker.sight = MainThreadState(
        generation=pulse.generation,
        reported_ns=now_ns,
        waiting_since_ns=now_ns - pulse.waiting_ns if pulse.waiting_ns > 0 else None,
        still_since_ns=now_ns - pulse.still_ns if pulse.still_ns > 0 else None,
        epoch=pulse.epoch,
        step=pulse.step,
        begun=pulse.begun,
        longest_ns=pulse.longest_ns,
        has_stepped=pulse.has_stepped,
        working_since_ns=now_ns - pulse.working_ns if pulse.working_ns > 0 else None,
        work=pulse.work,
    )
    if pulse.generation < job.generation:
        # Others wait for it in forming the next group, and do not say so.
        cluster.touch(job)
    elif job.is_open and lateness.may_wait(cluster, job, worker):
        due_ns = cluster.polls.get(job.job_id)
        if due_ns is None or due_ns > now_ns + POLL_NS:
            cluster.polls[job.job_id] = now_ns


def look(cluster: ClusterState) -> None:
    """Look at the jobs that are due."""
    for job_id in [j for j, due_ns in cluster.polls.items() if due_ns <= cluster.now_ns]:
        job = cluster.jobs.get(job_id)
        if job is not None and lateness.does_somebody_wait(cluster, job):
            cluster.polls[job_id] = cluster.now_ns + POLL_NS
            _probe(cluster, job, QUIET_NS, ns(cluster.config.probe_timeout_s))
            _judge(cluster, job)
        elif job is not None and _is_forming(job):
            long_ns = forming_is_long_after_ns(len(job.member_ids()))
            cluster.polls[job_id] = cluster.now_ns + long_ns
            _probe(cluster, job, long_ns, FORMING_PROBES * ns(cluster.config.probe_timeout_s))
            links.check_into(cluster, job, job.links.nowhere_ns)
        else:
            del cluster.polls[job_id]
            if job is not None:
                job.hung.clear()
                job.works = ""


def silent(cluster: ClusterState) -> list[tuple[NodeState, str]]:
    """Return the nodes that did not answer a probe in time, and why; to be called at a `Tick`.

    A tick comes behind all that was said before it was due: an answer that is there counts.
    """
    found = []
    for node_id, (asked_ns, timeout_ns) in list(cluster.probes.items()):
        state = cluster.book.nodes.get(node_id)
        if state is None or state.session is None:
            del cluster.probes[node_id]
        elif cluster.now_ns - asked_ns >= timeout_ns:
            del cluster.probes[node_id]
            limit = f"{timeout_ns / NS_PER_S:g} s"
            why = f"its agent did not answer a probe within {limit} while members waited"
            last = (cluster.now_ns - state.received_ns) / NS_PER_S
            cluster.note("node_silent", node=node_id, last_heard_s=f"{last:.2f}")
            found.append((state, why))
    return found


def plan_check(cluster: ClusterState) -> None:
    """Note when the next look or the end of a probe is due."""
    moments = [*cluster.polls.values(), *map(sum, cluster.probes.values())]
    cluster.check_by_ns = min(moments, default=None)


def forgive_own_sleep(cluster: ClusterState) -> None:
    """If the coordinator was stopped, or its store was slow, probes begin anew.

    So does the time of groups that were decided on before: nobody had heard of them, maybe.
    """
    for job_id, due_ns in cluster.polls.items():
        job = cluster.jobs.get(job_id) if cluster.now_ns > due_ns + LATE_NS else None
        if job is not None and job.is_open:
            long_ns = forming_is_long_after_ns(len(job.member_ids()))
            if due_ns == job.announced_ns + long_ns:  # There was no look at it yet.
                _begin_anew(cluster, job)
    if cluster.check_by_ns is not None and cluster.now_ns > cluster.check_by_ns + LATE_NS:
        for node_id, (_, timeout_ns) in cluster.probes.items():
            cluster.probes[node_id] = cluster.now_ns, timeout_ns


def _begin_anew(cluster: ClusterState, job: JobState) -> None:
    """The newest group is told only now, and its members are late from now on."""
    for worker_id in job.member_ids():
        worker = job.workers.get(worker_id)
        since_ns = worker.lingers_since_ns if worker is not None else None
        if worker is not None and since_ns is not None and since_ns >= job.announced_ns:
            worker.lingers_since_ns = None
    job.announced_ns = cluster.now_ns


def _is_forming(job: JobState) -> bool:
    """Return whether a group was announced and does not train yet, in this coordinator's life."""
    return job.is_open and not job.has_ended() and job.training_since_ns is None


# ---------------------------------------------------------------- silent nodes


def _probe(cluster: ClusterState, job: JobState, quiet_ns: int, timeout_ns: int) -> None:
    """Ask all nodes of the group for a sign of life that have not given one for a while.

    Also those of members that wait: they may have stopped after they said so. Whoever was asked
    already, and has longer to answer than it would have now, is asked again.
    """
    for worker_id in job.member_ids():
        worker = job.workers.get(worker_id)
        node = cluster.node_of(worker) if worker is not None else None
        if node is None or node.session is None or cluster.now_ns - node.received_ns < quiet_ns:
            continue
        asked_ns, has_ns = cluster.probes.get(node.node.node_id, (0, 0))
        if not has_ns or asked_ns + has_ns > cluster.now_ns + timeout_ns:
            cluster.num_probes += 1
            cluster.probes[node.node.node_id] = cluster.now_ns, timeout_ns
            cluster.do(SendAgent(node.session, Probe(cluster.num_probes)))


# ---------------------------------------------------------------- hung members


def _judge(cluster: ClusterState, job: JobState) -> None:
    """Have the stacks of all members written when one hangs, and kill it a moment later."""
    members = []
    for worker_id in job.member_ids():
        worker = job.workers.get(worker_id)
        trains = (
            worker is not None
            and worker.stop_cause is None
            and worker.report.phase is WorkerPhase.TRAINING
            and worker.report.generation == job.generation
            and cluster.node_of(worker).is_live()
        )
        members.append(WatchedMember(worker_id, trains, worker.sight if worker else None))
    timeout_ns = ns(job.spec.hang_timeout_s)
    decision = hang.judge(job.generation, members, cluster.now_ns, timeout_ns)
    waiting = sum(1 for m in members if m.sight and m.sight.waits(job.generation, cluster.now_ns))
    works = decision.value.works
    job.works = f"{works}; {waiting} of {len(members)} wait for it" if works else ""
    # Also before somebody is accused: who waits out of sight, over a link that is cut, stands. And
    # while a group forms: who has reached all others trains, and waits for those two that do not.
    since_ns = job.links.nowhere_ns if _is_forming(job) else decision.value.since_ns
    if since_ns:
        links.check_into(cluster, job, since_ns)
    if decision.value.is_stuck:
        _unstick(cluster, job, decision.reason)
    culprits = decision.value.culprits
    seconds = f"{(cluster.now_ns - decision.value.since_ns) / NS_PER_S:.1f}"
    # Whoever moves after all is forgiven, however late.
    job.hung = {worker_id: at for worker_id, at in job.hung.items() if worker_id in culprits}
    fresh = [worker_id for worker_id in culprits if worker_id not in job.hung]
    for worker_id in fresh:
        job.hung[worker_id] = cluster.now_ns
        worker = job.workers[worker_id]
        sight = worker.sight
        cluster.note(
            "worker_hung",
            job.job_id,
            worker=worker_id,
            node=worker.node_id,
            rank=job.rank_of(worker_id),
            epoch=sight.epoch if sight else "",
            step=sight.step if sight else "",
            seconds=seconds,
        )
    if fresh:
        lateness.show_all(cluster, job, decision.reason)
    for worker_id in culprits:
        if cluster.now_ns - job.hung[worker_id] >= lateness.DUMP_NS:
            detail = f"did not move for {seconds} s: {decision.reason}"
            stop_worker(cluster, job, worker_id, ExitCause(ExitKind.HUNG, detail=detail))
            cluster.touch(job)


def _unstick(cluster: ClusterState, job: JobState, why: str) -> None:
    """Have the stacks of all members written, and the next group formed."""
    if job.stuck:
        return
    job.stuck = why
    cluster.note("group_stuck", job.job_id, generation=job.generation, reason=why)
    lateness.show_all(cluster, job, why)
    cluster.touch(job)
