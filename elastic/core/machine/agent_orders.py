"""Orders of the coordinator, applied to the agent's state.

Rule: an order describes the wanted state, not an action. A repeated order, or one for a worker that
is gone, has no effect, and is answered with the present state.
"""

from __future__ import annotations

from dataclasses import replace

from elastic.core.copy_messages import DropCopy, KeepCopy, Replicate
from elastic.core.events.agent import HandleCopy, ProbeLinks, ShowStacks
from elastic.core.facts import (
    MILLI,
    NO_GENERATION,
    ExitCause,
    ExitKind,
    Generation,
    JobId,
    WorkerId,
    WorkerPhase,
    WorkerReport,
)
from elastic.core.machine.agent_departure import EXIT_DRAINED, EXIT_REFUSED
from elastic.core.machine.agent_parts import AgentBooks
from elastic.core.machine.agent_workers import ENDED_ITSELF, GPU
from elastic.core.machine.transitions import ConnectionPhase, ProcessPhase
from elastic.core.messages import (
    Announce,
    CoordinatorMessage,
    Drain,
    DumpStacks,
    ForgetWorker,
    LeaveGroup,
    Preemption,
    Probe,
    ProbeAck,
    Profile,
    Refusal,
    Release,
    ReportAck,
    RunEvents,
    SaveState,
    StartWorker,
    Stop,
    StopWorker,
    TryLinks,
    Welcome,
    WorkerUpdate,
)


def on_message(books: AgentBooks, message: CoordinatorMessage) -> None:
    """Process one message of the current session; before `Welcome` only the reply counts."""
    if isinstance(message, Refusal):
        books.connection.refused(message.reason, books.now_ns, final=message.final)
        if message.final:
            books.begin_end(EXIT_REFUSED, message.reason)
    elif isinstance(message, Welcome):
        _welcomed(books, message)
    elif not books.connection.is_registered():
        return
    elif isinstance(message, StartWorker):
        _start(books, message)
    elif isinstance(message, StopWorker):
        _stop(books, message)
    elif isinstance(message, ForgetWorker):
        worker = books.workers.get(message.worker_id)
        if worker is not None and worker.has_exited():
            books.workers.forget(worker)
            books.reports.forget(worker.worker_id)
    elif isinstance(message, Announce):
        _forward(books, message.assignment.worker_id, message)
    elif isinstance(message, (LeaveGroup, SaveState, Preemption, RunEvents, Profile)):
        _forward(books, message.worker_id, message)
    elif isinstance(message, ReportAck):
        books.reports.ack(message)
        _forward(books, message.worker_id, message)
    elif isinstance(message, Release):
        books.begin_end(EXIT_DRAINED, message.reason)
    elif isinstance(message, Drain):
        books.drain(message.reason, message.timeout_ns)
    elif isinstance(message, Probe):
        books.connection.send(ProbeAck(message.number))
    elif isinstance(message, DumpStacks):
        _dump(books, message)
    elif isinstance(message, TryLinks):
        books.out.append(ProbeLinks(message))
    elif isinstance(message, (KeepCopy, DropCopy, Replicate)):
        books.out.append(HandleCopy(message))


def _welcomed(books: AgentBooks, message: Welcome) -> None:
    """Handle the registration: send unacknowledged reports first, then their workers' state."""
    if books.connection.phase is ConnectionPhase.GREETED:
        if not books.connection.welcomed(message, books.now_ns):
            return
        for reported in books.reports.all():
            books.connection.send(reported)
        books.pacer.reconnected(books.now_ns)


def _start(books: AgentBooks, message: StartWorker) -> None:
    """Accept a worker; report a known one again."""
    known = books.workers.get(message.worker_id)
    if known is not None:
        books.workers.schedule_report(known)
        return
    node_id = books.node.node_id
    worker = books.workers.enter(message)
    books.note(worker, "worker_accepted")
    if books.is_leaving():
        why = books.departure.reason or books.departure.why
        detail = f"node {node_id} is about to leave: {why}"
        books.exit_worker(worker, ExitCause(ExitKind.STOPPED, detail=detail))
    elif not books.workers.equip(worker):
        wanted = message.spec.resources_per_worker.amount(GPU)
        free = ", ".join(f"{milli / MILLI:g}" for milli in books.workers.devices.free_milli())
        detail = f"wants {GPU}={wanted:g}; free on the devices of node {node_id}: {free or 'none'}"
        books.exit_worker(worker, ExitCause(ExitKind.SPAWN_FAILED, detail=detail))


def _stop(books: AgentBooks, message: StopWorker) -> None:
    """End a worker; report one that does not run here as ended."""
    worker = books.workers.get(message.worker_id)
    cause = ExitCause(ExitKind.STOPPED, detail=message.reason)
    if worker is None:
        cause = replace(cause, detail=f"does not run on node {books.node.node_id}")
        report = WorkerReport(message.worker_id, JobId(""), WorkerPhase.EXITED, exit=cause)
        books.connection.send(WorkerUpdate(report))
        return
    process = books.processes.get(worker.process_id)
    if process is not None:
        books.note(worker, "worker_stopping", reason=message.reason)
        order = Stop(message.reason, message.grace_ns, message.asks)
        books.processes.stop(process, order, books.now_ns)
    elif worker.has_exited():
        books.workers.schedule_report(worker)
    else:
        books.exit_worker(worker, cause)


def _forward(
    books: AgentBooks,
    worker_id: WorkerId,
    message: Announce | LeaveGroup | ReportAck | SaveState | Preemption | RunEvents | Profile,
) -> None:
    """Forward a message to one worker; hold it if the worker has no process yet."""
    worker = books.workers.get(worker_id)
    if worker is None or worker.has_exited():
        return
    if isinstance(message, Announce):
        worker.group_size = message.assignment.world_size
        worker.holders = message.assignment.holders
        if worker.devices:
            devices = books.workers.devices_of(worker.report.job_id)
            message = Announce(replace(message.assignment, node_devices=devices))
        books.pacer.announced(message.assignment, books.now_ns)
    elif isinstance(message, LeaveGroup) and not message.at_boundary:
        books.pacer.leave_requested(message, books.now_ns)
        if not message.follows and books.workers.is_changed(worker):
            books.workers.schedule_report(worker)  # No later report will replace this one.
    process = books.processes.get(worker.process_id)
    if process is not None:
        worker.wanted_in = max(worker.wanted_in, _wanted_in(message))
        if not worker.is_over():
            books.processes.send(process, message)
    elif worker.ended_itself:
        if _wanted_in(message) > worker.report.generation:
            # The others run again; this worker would need a process for that.
            books.exit_worker(worker, ENDED_ITSELF)
    elif isinstance(message, (Announce, LeaveGroup)):
        worker.hold(message)


def _wanted_in(message: object) -> Generation:
    """Return the generation that a worker must join or wait for at once; 0 for none.

    An order to leave at a boundary does not count: the worker takes part in choosing it.
    """
    if isinstance(message, Announce):
        return message.assignment.generation
    if isinstance(message, LeaveGroup) and not message.at_boundary:
        return message.generation + 1
    return NO_GENERATION


def _dump(books: AgentBooks, message: DumpStacks) -> None:
    """Make a worker's process write its stacks, unless it is ending."""
    worker = books.workers.get(message.worker_id)
    process = books.processes.get(worker.process_id) if worker is not None else None
    if worker is not None and process is not None and process.phase is ProcessPhase.ASSIGNED:
        books.note(worker, "stacks_asked_for", pid=process.pid, reason=message.reason)
        books.out.append(ShowStacks(process.process_id))
