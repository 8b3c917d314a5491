"""The agent's state machine: runs workers for the coordinator, also while it is disconnected.

Rule: each event first updates the state; then one turn derives the effects: connect, leave, give
waiting workers a process, kill, ping, spawn, send. Training never depends on the connection. A
worker that was accepted is reported until the coordinator acknowledges that it may be forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic.core.config import AgentConfig, ns
from elastic.core.copy_messages import CopyFailed
from elastic.core.events.agent import (
    AgentEffect,
    AgentEvent,
    Connected,
    ConnectionLost,
    CoordinatorMessageReceived,
    CopiesChanged,
    DrainSignalled,
    ExitAgent,
    HealthChanged,
    LinksProbed,
    ProcessExited,
    ProcessMessageReceived,
    ProcessStarted,
    ProcessStopped,
    PushFailed,
    SpawnFailed,
)
from elastic.core.events.shared import Tick
from elastic.core.facts import ExitCause, ExitKind, Node
from elastic.core.machine import agent_orders
from elastic.core.machine.agent_departure import EXIT_DRAINED
from elastic.core.machine.agent_parts import AgentBooks
from elastic.core.machine.agent_processes import (
    KILLABLE,
    ProcessState,
    cause_of_exit,
)
from elastic.core.machine.agent_workers import AgentWorker
from elastic.core.machine.event_history import EventHistory, note
from elastic.core.machine.transitions import ConnectionPhase, ProcessPhase
from elastic.core.messages import (
    PipeToAgent,
    Pong,
    Probe,
    Progress,
    Pulse,
    Reported,
    Warm,
    WorkerUpdate,
)
from elastic.core.policy.failure import describe
from elastic.errors import InvariantViolation, check

OVER = ExitCause(ExitKind.STOPPED, detail="its group is over; its script runs in a new process")


class AgentMachine:
    """Events in, effects out; owned by one task of the agent.

    `AgentBooks` holds the state, `agent_orders` applies the coordinator's messages. Messages of
    processes, and the turn after every event, are handled here.
    """

    def __init__(
        self,
        node: Node,
        config: AgentConfig,
        devices: tuple[str, ...] = (),
        *,
        copies_at: str = "",
    ) -> None:
        """Start disconnected, with no process; the first `step` connects and spawns.

        Args:
            node: the node as this agent describes it to the coordinator.
            config: times and limits.
            devices: accelerators, as CUDA_VISIBLE_DEVICES entries; empty on CPU.
            copies_at: "host:port" where it receives copies for other nodes, "" if nowhere.
        """
        self._books = AgentBooks(node, config, devices, copies_at)
        self._history = EventHistory()
        self._due_ns: int | None = None
        self._is_over = False
        # The number of failed spawns in a row at the last decision about waiting workers.
        self._row_judged = 0

    def step(self, event: AgentEvent, now_ns: int) -> tuple[AgentEffect, ...]:
        """Process one event.

        Args:
            event: to process.
            now_ns: monotonic; never decreases.

        Returns:
            Effects, to be performed in this order; none once `ExitAgent` was returned.

        Raises:
            InvariantViolation: a bug; includes the last events.
        """
        if self._is_over:
            return ()
        books = self._books
        books.out.clear()
        if not _is_chatter(event):
            self._history.add(now_ns, event)
        try:
            check(now_ns >= books.now_ns, f"time fell from {books.now_ns} to {now_ns}")
            books.now_ns = now_ns
            self._forgive_own_sleep()
            self._take(event)
            self._turn()
            books.check_books()
        except InvariantViolation as violation:
            raise InvariantViolation(str(violation), self._history.lines()) from violation
        self._due_ns = self._find_deadline_ns()
        return tuple(books.out)

    @property
    def leave_by_ns(self) -> int | None:
        """Return the deadline for leaving, None while this node stays."""
        return self._books.departure.deadline_ns

    @property
    def is_registered(self) -> bool:
        """Return whether this node is registered at a coordinator, over an open stream."""
        return self._books.connection.is_registered()

    def next_deadline_ns(self) -> int | None:
        """Return when to call `step(Tick)` at the latest, None if nothing waits for time."""
        return self._find_deadline_ns() if self._due_ns is None else self._due_ns

    def _find_deadline_ns(self) -> int | None:
        if self._is_over:
            return None
        books = self._books
        parts = (books, books.connection, books.processes, books.departure, books.copies)
        moments = [part.next_deadline_ns() for part in parts]
        return min((moment for moment in moments if moment is not None), default=None)

    def _take(self, event: AgentEvent) -> None:
        if isinstance(event, CoordinatorMessageReceived):
            if self._books.connection.is_current(event.session):
                agent_orders.on_message(self._books, event.message)
        elif isinstance(event, (Connected, ConnectionLost)):
            self._connection_changed(event)
        elif isinstance(event, DrainSignalled):
            self._books.drain(event.reason, event.timeout_ns)
        elif isinstance(event, CopiesChanged):
            self._books.copies.changed(event.copies)
        elif isinstance(event, PushFailed):
            self._books.send(CopyFailed(event.job_id, event.node_id, event.reason))
        elif isinstance(event, LinksProbed):
            self._books.send(event.answer)
        elif isinstance(event, HealthChanged):
            self._health(event)
        elif not isinstance(event, Tick):
            process = self._books.processes.get(event.process_id)
            if process is not None:
                self._process_changed(process, event)

    def _forgive_own_sleep(self) -> None:
        """If this agent itself was stopped, do not count its workers' silence meanwhile.

        Their replies wait in the pipes then, and are read after this step.
        """
        late_ns = self._books.now_ns - self._due_ns if self._due_ns is not None else 0
        if late_ns > ns(self._books.config.ping_interval_s):
            self._books.processes.forgive(late_ns)

    def _connection_changed(self, event: Connected | ConnectionLost) -> None:
        connection = self._books.connection
        if not connection.is_current(event.session):
            return
        if isinstance(event, ConnectionLost):
            connection.lost(event.reason, event.jitter, self._books.now_ns)
        elif connection.phase is ConnectionPhase.CONNECTING:
            connection.greet(self._books.hello())

    def _health(self, event: HealthChanged) -> None:
        """Record changed faults of this node, to be reported."""
        books = self._books
        if event.problems != books.problems:
            books.problems, books.health_is_reported = event.problems, False
            what = "; ".join(event.problems) or "all is well"
            books.out.append(note("node_health", problems=what))

    # ------------------------------------------------------------ processes

    def _process_changed(
        self,
        process: ProcessState,
        event: ProcessStarted
        | SpawnFailed
        | ProcessMessageReceived
        | ProcessExited
        | ProcessStopped,
    ) -> None:
        processes, now_ns = self._books.processes, self._books.now_ns
        if isinstance(event, ProcessMessageReceived):
            self._process_reported(process, event.message)
        elif isinstance(event, ProcessStarted):
            processes.started(process, event.pid, now_ns)
        elif isinstance(event, ProcessStopped):
            processes.halted(process, event.stopped, now_ns)
        elif isinstance(event, ProcessExited):
            self._process_exited(process, event.cause)
        elif process.phase is ProcessPhase.SPAWNING:
            processes.exited(process)
            processes.failed(process, event.detail, now_ns)

    def _process_reported(self, process: ProcessState, message: PipeToAgent) -> None:
        """Process a message of a process; a worker may report only about itself."""
        books = self._books
        if isinstance(message, Warm):
            books.processes.warmed(process, message.pid)
            return
        if isinstance(message, Pong):
            books.processes.ponged(process, message, books.now_ns)
            return
        worker = books.workers.get(process.worker_id)
        if worker is None:
            return
        if isinstance(message, WorkerUpdate):
            report = message.report
            at_ns = books.pacer.answer_at_ns(report)
            is_own = report.worker_id == worker.worker_id
            if not is_own or not books.workers.update(worker, report, report_at_ns=at_ns):
                what = f"{report.worker_id} {report.phase.value} in {report.generation}"
                books.note(worker, "worker_update_ignored", said=what)
        elif isinstance(message, Reported):
            if message.report.worker_id == worker.worker_id and books.reports.add(message):
                books.send(message)
        elif message.worker_id == worker.worker_id:
            self._telemetry(worker, message)

    def _telemetry(self, worker: AgentWorker, message: Progress | Pulse) -> None:
        books = self._books
        if isinstance(message, Progress):
            if message.steps:
                worker.has_state = True
            if message.steps and message.generation >= worker.wanted_in:
                worker.holders = 0  # Its group made a step, so all members have the state.
            if books.pacer.hold(message, books.now_ns):
                return
        elif books.workers.is_changed(worker):
            # A pulse counts only after the report that the worker is in that group.
            books.workers.schedule_report(worker)
            books.report_changes()
        books.send(message)

    def _process_exited(self, process: ProcessState, cause: ExitCause) -> None:
        books = self._books
        books.processes.exited(process)
        worker = books.workers.get(process.worker_id)
        if worker is not None:
            cause = cause_of_exit(process, cause)
            if books.workers.finished_by(worker, cause):
                books.note(worker, "worker_ended_itself", process=process.process_id)
            else:
                books.exit_worker(worker, books.workers.judged(worker, cause))
        elif process.end is None:
            books.processes.failed(process, f"a spare: {describe(cause)}", books.now_ns)

    # ------------------------------------------------------------ the turn

    def _turn(self) -> None:
        """Derive all effects from the current state."""
        books = self._books
        books.connection.turn(books.now_ns)
        self._leave()
        self._end_spent()
        self._assign_waiting()
        self._spare_holders()
        books.processes.turn(
            books.now_ns,
            waiting=[worker.spec for worker in books.workers.waiting()],
            spares=[] if books.is_leaving() else [books.workers.newest] * books.config.num_spares,
        )
        self._give_up_waiting()
        books.copies.turn(books.now_ns, is_registered=books.connection.is_registered())
        books.report_changes()
        self._finish()

    def _end_spent(self) -> None:
        """Kill processes that would start their script a second time: new ones replace them.

        So nothing of the first run remains: no library that remembers its rank, no port, thread
        or child. The script runs no more code in a group that is over, and neither it nor its
        worker counts as failed.
        """
        books = self._books
        for worker in books.workers.all():
            process = books.processes.get(worker.process_id)
            if process is not None and worker.is_over():
                books.processes.kill(process, OVER)

    def _spare_holders(self) -> None:
        """Do not kill stopped workers that may be the only ones with their job's newest state.

        These are members of a group whose state holders are all on this node, and all stopped: to
        kill them would lose committed steps. Members that have not received the state yet do not
        count. While no coordinator is connected no stopped worker is killed: none can be replaced.
        """
        books = self._books
        is_connected = books.connection.is_registered()
        held = []
        for worker in books.workers.all():
            process = books.processes.get(worker.process_id)
            if process is not None and worker.group_size:
                held.append((worker, process))
        for worker, process in held:
            is_last = process.stopped_since_ns is not None and _is_last(worker, process, held)
            is_spared = is_last or not is_connected
            if process.stopped_since_ns is not None and is_spared is not process.is_spared:
                if is_spared:
                    why = "no other has its state" if is_last else "no coordinator is connected"
                    books.note(worker, "stopped_worker_kept", why=why)
                else:  # Another one runs again; this one may, too, in a moment.
                    process.stopped_since_ns = books.now_ns
            process.is_spared = is_spared

    def _leave(self) -> None:
        """Begin the end of a drain, at its deadline or when there is nothing left to wait for."""
        books, departure = self._books, self._books.departure
        if not departure.is_draining() or departure.is_ending():
            return
        # A coordinator that has our Hello counts on this node: it must be notified that we leave.
        is_connected = books.connection.phase is ConnectionPhase.GREETED
        is_known = is_connected or books.connection.is_registered()
        is_alone = not is_known and books.reports.are_received()
        if books.now_ns >= departure.stop_at_ns:
            books.begin_end(EXIT_DRAINED, f"the time to drain is over: {departure.reason}")
        elif is_alone and books.workers.are_gone():
            books.begin_end(EXIT_DRAINED, departure.reason)

    def _assign_waiting(self) -> None:
        """Give each warm spare to the worker that has waited longest."""
        books = self._books
        for worker in books.workers.waiting():
            process = books.processes.take_warm(worker.spec)
            if process is None:
                continue
            held, worker.held = worker.held, ()
            assign = books.workers.assign(worker, process.process_id, process.pid, books.node.host)
            books.processes.assign(process, assign, books.now_ns)
            for message in held:
                books.processes.send(process, message)
            books.note(
                worker,
                "worker_assigned",
                process=process.process_id,
                pid=process.pid,
                devices=",".join(assign.devices),
            )

    def _give_up_waiting(self) -> None:
        """After too many failed spawns in a row, report workers without a process as failed."""
        books, spawning = self._books, self._books.processes.spawning
        is_judged = spawning.num_failures == self._row_judged
        self._row_judged = spawning.num_failures
        if is_judged or not spawning.has_given_up():
            return
        detail = f"{spawning.num_failures} processes in a row did not start: {spawning.detail}"
        for worker in books.workers.waiting()[books.processes.num_unassigned() :]:
            books.exit_worker(worker, ExitCause(ExitKind.SPAWN_FAILED, detail=detail))

    def _finish(self) -> None:
        """Exit once no worker runs, or when the time for it is over."""
        books, departure = self._books, self._books.departure
        if departure.code is None:
            return
        if books.processes.working() and books.now_ns < departure.kill_at_ns:
            return
        left = [p.process_id for p in books.processes.all() if p.phase in KILLABLE]
        check(not left, f"the agent ends, but processes {left} were not killed")
        self._is_over = True
        books.out.append(ExitAgent(departure.code, departure.why))


def _is_chatter(event: AgentEvent) -> bool:
    """Return whether an event is too frequent and trivial for the history of events."""
    if isinstance(event, ProcessMessageReceived):
        return isinstance(event.message, (Pong, Progress, Pulse))
    if isinstance(event, CoordinatorMessageReceived):
        return isinstance(event.message, Probe)
    return isinstance(event, (Tick, CopiesChanged))


def _is_last(
    worker: AgentWorker, process: ProcessState, held: Sequence[tuple[AgentWorker, ProcessState]]
) -> bool:
    """Return whether only this stopped worker, and others stopped here, have the state."""
    holders = [
        other_process
        for other, other_process in held
        if other.report.job_id == worker.report.job_id and (other.has_state or not worker.holders)
    ]
    return (
        process in holders
        and len(holders) >= (worker.holders or worker.group_size)
        and all(holder.stopped_since_ns is not None for holder in holders)
    )
