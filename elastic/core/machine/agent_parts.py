"""The whole state of an agent's machine, and the few changes that concern several of its parts.

Rule: the parts agree on which worker has which process; `check_books` checks that after each step.
"""

from __future__ import annotations

from dataclasses import replace

from elastic.core.config import AgentConfig
from elastic.core.copy_messages import CopiesHeld, CopyFailed
from elastic.core.events.agent import AgentEffect
from elastic.core.facts import (
    MILLI,
    ExitCause,
    ExitKind,
    Node,
    WorkerId,
    WorkerPhase,
    WorkerReport,
)
from elastic.core.machine.agent_connection import Connection, UnacknowledgedReports
from elastic.core.machine.agent_copies import HeldCopies
from elastic.core.machine.agent_departure import Departure
from elastic.core.machine.agent_pacing import Pacer
from elastic.core.machine.agent_processes import ProcessBook
from elastic.core.machine.agent_workers import AgentWorker, WorkerBook
from elastic.core.machine.event_history import note
from elastic.core.messages import (
    DrainNotice,
    Hello,
    LinksTried,
    NodeHealth,
    Progress,
    Pulse,
    Reported,
    Stop,
    WorkerUpdate,
)
from elastic.errors import check


class AgentBooks:
    """The parts of an agent's state, which add their effects to one list.

    Attributes:
        out: effects of the current step.
        now_ns: moment of the current step.
        connection: the stream to the coordinator.
        reports: what the coordinator has not acknowledged yet.
        processes: spares and workers' processes.
        pacer: which reports of workers are delayed.
        copies: the copies that it holds for other nodes.
        copies_at: where other nodes reach it for that.
        problems: faults of this node now.
        health_is_reported: they were sent to the coordinator.
    """

    def __init__(
        self, node: Node, config: AgentConfig, devices: tuple[str, ...], copies_at: str
    ) -> None:
        self.node = node
        self.config = config
        self.now_ns = 0
        self.out: list[AgentEffect] = []
        self.connection = Connection(node, config, self.out)
        self.reports = UnacknowledgedReports(self.out)
        self.processes = ProcessBook(config, self.out)
        self.workers = WorkerBook(devices)
        self.departure = Departure(config)
        self.pacer = Pacer(config)
        self.copies = HeldCopies(self.out)
        self.copies_at = copies_at
        self.problems: tuple[str, ...] = ()
        self.health_is_reported = True

    def is_leaving(self) -> bool:
        """Return whether this node takes no new workers any more."""
        return self.departure.is_draining() or self.departure.is_ending()

    def note(self, worker: AgentWorker, name: str, **fields: object) -> None:
        """Add a line about a worker for the event log."""
        self.out.append(note(name, worker.report.job_id, worker=worker.worker_id, **fields))

    def exit_worker(self, worker: AgentWorker, cause: ExitCause) -> None:
        """Record and report that a worker is gone."""
        process_id = worker.process_id
        self._send_held(worker.worker_id)
        self.pacer.forget(worker.worker_id)
        self.workers.exited(worker, cause)
        self.note(
            worker,
            "worker_exited",
            process=process_id,
            kind=cause.kind.value,
            code=cause.code,
            detail=cause.detail,
        )

    def drain(self, reason: str, timeout_ns: int) -> None:
        """Begin a drain; if there is time, the coordinator has the workers leave at a boundary."""
        if self.departure.drain(reason, timeout_ns, self.now_ns):
            seconds = f"{timeout_ns / 1e9:g}"
            self.out.append(note("drain_started", reason=reason, timeout_s=seconds))
            if self.departure.code is not None:
                self.begin_end(self.departure.code, reason)

    def begin_end(self, code: int, why: str) -> None:
        """Order all workers to end, then the agent; a second call may only shorten the time."""
        if self.departure.end(code, why, self.now_ns):
            self.out.append(note("agent_ending", code=code, reason=why))
            for worker in self.workers.without_process():
                self.exit_worker(worker, ExitCause(ExitKind.STOPPED, detail=why))
        order = Stop(why, self.departure.kill_at_ns - self.now_ns, asks=True)
        for process in self.processes.working():
            self.processes.stop(process, order, self.now_ns)

    # ------------------------------------------------------------ reports to the coordinator

    def hello(self) -> Hello:
        """Return the complete state for the coordinator, and mark it as reported."""
        self.workers.take_changed()
        generations = {one.worker_id: one.report.generation for one in self.workers.all()}
        self.reports.reconnect(generations)
        self.departure.is_reported = self.copies.is_reported = self.health_is_reported = True
        return Hello(
            node=self.node,
            workers=tuple(self._as_of_its_reports(worker) for worker in self.workers.all()),
            draining=self.departure.is_draining(),
            drain_reason=self.departure.reason,
            drain_timeout_ns=self.departure.remaining_ns(self.now_ns),
            reports_due=len(self.reports),
            copies=self.copies.held,
            copies_at=self.copies_at,
            problems=self.problems,
        )

    def _as_of_its_reports(self, worker: AgentWorker) -> WorkerReport:
        """Return a worker's state for a Hello, as it was before its unacknowledged reports.

        A worker may have reported and then left its group while the agent was disconnected. The
        coordinator must get those reports first: otherwise it would form the next group, or end
        the job, without the checkpoint in them. The actual state follows them.
        """
        report = worker.report
        has_left = report.phase is not WorkerPhase.TRAINING
        if has_left and self.reports.has_any_of(report.worker_id, report.generation):
            self.workers.schedule_report(worker)
            return replace(report, phase=WorkerPhase.TRAINING, exit=None)
        return report

    def send(self, message: Reported | Progress | Pulse | CopyFailed | LinksTried) -> None:
        """Send to the coordinator; while it is disconnected only reports are kept."""
        if self.connection.is_registered():
            self.connection.send(message)

    def _send_held(self, worker_id: WorkerId) -> None:
        """Send the delayed progress of a worker that trains no more: soon it counts no more."""
        progress = self.pacer.take_held(worker_id)
        if progress is not None:
            self.send(progress)

    def next_deadline_ns(self) -> int | None:
        """Return when the next delayed report is due; None while disconnected."""
        if not self.connection.is_registered():
            return None
        moments = (self.workers.next_deadline_ns(), self.pacer.next_deadline_ns())
        return min((moment for moment in moments if moment is not None), default=None)

    def report_changes(self) -> None:
        """Send all unreported changes; while disconnected, the next Hello does that."""
        if not self.connection.is_registered():
            return
        for worker in self.workers.take_changed(self.now_ns):
            if worker.report.phase not in (WorkerPhase.FORMING, WorkerPhase.TRAINING):
                self._send_held(worker.worker_id)
            self.connection.send(WorkerUpdate(worker.report))
        for progress in self.pacer.take_due(self.now_ns):
            self.connection.send(progress)
        if not self.health_is_reported:
            self.health_is_reported = True
            self.connection.send(NodeHealth(self.problems))
        if not self.departure.is_reported:
            self.departure.is_reported = True
            remaining_ns = self.departure.remaining_ns(self.now_ns)
            self.connection.send(DrainNotice(self.departure.reason, remaining_ns))
        if not self.copies.is_reported:
            self.copies.is_reported = True
            self.connection.send(CopiesHeld(self.copies.held))

    # ------------------------------------------------------------ invariants

    def check_books(self) -> None:
        """Check that the records of workers, processes and devices agree.

        Raises:
            InvariantViolation: they disagree.
        """
        # The text of a report costs more than the check: it is made for one that fails.
        for process in self.processes.working():
            worker = self.workers.get(process.worker_id)
            if worker is None or worker.process_id != process.process_id:
                text = f"{process.worker_id} does not know it"
                check(False, f"process {process.process_id}: {text}")
        taken = 0
        for worker in self.workers.all():
            if worker.process_id is not None and self.processes.get(worker.process_id) is None:
                text = f"process {worker.process_id} is gone"
                check(False, f"worker {worker.worker_id}: {text}")
            if worker.has_exited() != (worker.report.exit is not None):
                check(False, f"worker {worker.worker_id}: {worker.report}")
            taken += len(worker.devices) * worker.device_milli
        free = self.workers.devices.free_milli()
        if sum(free) + taken != MILLI * len(free) or not all(0 <= each <= MILLI for each in free):
            text = f"{free} thousandths free and {taken} taken of {len(free)} devices"
            check(False, f"devices: {text}")
