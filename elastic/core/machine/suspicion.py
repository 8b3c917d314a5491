"""What the coordinator does while members wait for each other: probes the silent, ends the hung.

Rule: nothing here happens in a healthy run. The first member that says that it waits for its
peers starts looks at its job, and they end when nobody waits any more. Before anyone is given up,
it was asked: a node by a probe, a hung worker for its stacks.
"""

from __future__ import annotations

from elastic.core.config import NS_PER_S, ns
from elastic.core.events.coordinator import SendAgent
from elastic.core.machine.jobs import Cluster, JobState
from elastic.core.machine.nodes import NodeState
from elastic.core.machine.settle import stop_worker, tell
from elastic.core.messages import DumpStacks, Probe, Pulse
from elastic.core.policy import hang
from elastic.core.policy.hang import Sight, Watched
from elastic.core.world import ExitCause, ExitKind, WorkerPhase

LOOK_NS = NS_PER_S // 10
QUIET_NS = NS_PER_S // 2
"""A node that said anything within this time is not probed."""
DUMP_NS = 3 * NS_PER_S // 10
"""Between asking for stacks and killing: writing them takes some milliseconds, more when the
machine is loaded."""
LATE_NS = NS_PER_S // 10
"""If the coordinator itself comes so much later than it wanted, what was said to it meanwhile may
still be on its way."""


def heard(cluster: Cluster, state: NodeState) -> None:
    """An agent said something: it is there."""
    state.heard_ns = cluster.now_ns
    cluster.probes.pop(state.node.node_id, None)


def take_pulse(cluster: Cluster, state: NodeState, pulse: Pulse) -> None:
    """Remember what a worker says of its main thread in the group that it is in."""
    job = cluster.job_of(pulse.worker_id)
    worker = job.workers[pulse.worker_id] if job else None
    if job is None or worker is None or worker.node_id != state.node.node_id:
        return
    if pulse.generation != worker.report.generation:
        return
    now_ns = cluster.now_ns
    worker.sight = Sight(
        generation=pulse.generation,
        said_ns=now_ns,
        waiting_since_ns=now_ns - pulse.waiting_ns if pulse.waiting_ns > 0 else None,
        still_since_ns=now_ns - pulse.still_ns if pulse.still_ns > 0 else None,
        epoch=pulse.epoch,
        step=pulse.step,
        begun=pulse.begun,
    )
    if pulse.generation < job.generation:
        # Others wait for it in forming the next group, and do not say so.
        cluster.touch(job)
    elif pulse.waiting_ns > 0 and job.is_open:
        cluster.looks.setdefault(job.job_id, now_ns)


def look(cluster: Cluster) -> None:
    """Look at the jobs that are due."""
    for job_id in [j for j, due_ns in cluster.looks.items() if due_ns <= cluster.now_ns]:
        job = cluster.jobs.get(job_id)
        if job is not None and _waits(cluster, job):
            cluster.looks[job_id] = cluster.now_ns + LOOK_NS
            _probe(cluster, job)
            _judge(cluster, job)
        else:
            del cluster.looks[job_id]
            if job is not None:
                job.hung.clear()


def silent(cluster: Cluster) -> list[tuple[NodeState, str]]:
    """Return the nodes that did not answer a probe in time, and why; to be called at a `Tick`.

    A tick comes behind all that was said before it was due: an answer that is there counts.
    """
    timeout_ns = ns(cluster.config.probe_timeout_s)
    found = []
    for node_id, asked_ns in list(cluster.probes.items()):
        state = cluster.book.nodes.get(node_id)
        if state is None or state.session is None:
            del cluster.probes[node_id]
        elif cluster.now_ns - asked_ns >= timeout_ns:
            del cluster.probes[node_id]
            limit = f"{cluster.config.probe_timeout_s:g} s"
            why = f"its agent did not answer a probe within {limit} while members waited"
            last = (cluster.now_ns - state.heard_ns) / NS_PER_S
            cluster.note("node_silent", node=node_id, last_heard_s=f"{last:.2f}")
            found.append((state, why))
    return found


def plan_look(cluster: Cluster) -> None:
    """Note when the next look or the end of a probe is due."""
    timeout_ns = ns(cluster.config.probe_timeout_s)
    moments = [*cluster.looks.values(), *(asked + timeout_ns for asked in cluster.probes.values())]
    cluster.look_by_ns = min(moments, default=None)


def forgive_own_sleep(cluster: Cluster) -> None:
    """If the coordinator was stopped, or its store was slow, probes begin anew."""
    if cluster.look_by_ns is not None and cluster.now_ns > cluster.look_by_ns + LATE_NS:
        for node_id in cluster.probes:
            cluster.probes[node_id] = cluster.now_ns


def _waits(cluster: Cluster, job: JobState) -> bool:
    """Return whether a member says that it waits for its peers."""
    if not job.is_open:
        return False
    members = [job.workers[w] for w in job.member_ids() if w in job.workers]
    return any(w.sight and w.sight.waits(job.generation, cluster.now_ns) for w in members)


# ---------------------------------------------------------------- silent nodes


def _probe(cluster: Cluster, job: JobState) -> None:
    """Ask all nodes of the group for a sign of life that have not given one for a while.

    Also those of members that wait: they may have stopped after they said so.
    """
    for worker_id in job.member_ids():
        worker = job.workers.get(worker_id)
        node = cluster.node_of(worker) if worker is not None else None
        if node is None or node.session is None or node.node.node_id in cluster.probes:
            continue
        if cluster.now_ns - node.heard_ns >= QUIET_NS:
            cluster.num_probes += 1
            cluster.probes[node.node.node_id] = cluster.now_ns
            cluster.do(SendAgent(node.session, Probe(cluster.num_probes)))


# ---------------------------------------------------------------- hung members


def _judge(cluster: Cluster, job: JobState) -> None:
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
        members.append(Watched(worker_id, trains, worker.sight if worker else None))
    timeout_ns = ns(job.spec.hang_timeout_s)
    decision = hang.judge(job.generation, members, cluster.now_ns, timeout_ns)
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
        for worker_id in job.member_ids():
            tell(cluster, job.workers[worker_id], DumpStacks(worker_id, decision.reason))
    for worker_id in culprits:
        if cluster.now_ns - job.hung[worker_id] >= DUMP_NS:
            detail = f"did not move for {seconds} s: {decision.reason}"
            stop_worker(cluster, job, worker_id, ExitCause(ExitKind.HUNG, detail=detail))
            cluster.touch(job)
