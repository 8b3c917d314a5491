"""All that an agent's machine knows, and the few changes that concern more than one part of it.

Rule: the parts agree on who has whom; `check_books` says so after every step.
"""

from __future__ import annotations

from dataclasses import replace

from elastic.core.config import AgentConfig
from elastic.core.copy_messages import CopiesHeld, CopyEndpoint, CopyFailed
from elastic.core.events.agent import AgentEffect
from elastic.core.link_messages import LinksTried
from elastic.core.machine.agent_connection import Connection, Unacknowledged
from elastic.core.machine.agent_copies import HeldCopies
from elastic.core.machine.agent_departure import Departure
from elastic.core.machine.agent_pacing import Pacer
from elastic.core.machine.agent_processes import ProcessBook
from elastic.core.machine.agent_workers import AgentWorker, WorkerBook
from elastic.core.machine.event_history import note
from elastic.core.messages import (
    DrainNotice,
    Hello,
    NodeHealth,
    Progress,
    Pulse,
    Reported,
    Stop,
    WorkerUpdate,
)
from elastic.core.world import (
    MILLI,
    ExitCause,
    ExitKind,
    Node,
    WorkerPhase,
    WorkerReport,
)
from elastic.errors import check


class AgentBooks:
    """The parts of an agent, which keep books and ask for effects, all into one list.

    Attributes:
        out: effects of the current step.
        now_ns: moment of the current step.
        connection: the stream to the coordinator.
        reports: what the coordinator has not acknowledged yet.
        processes: spares and workers' processes.
        workers: what is told of each worker.
        departure: whether and when this agent ends.
        spreading: which of what workers say waits.
        copies: what it holds for other nodes.
        copy_endpoint: where those reach it for that.
        problems: what is wrong with this node now.
        health_is_reported: the coordinator knows of it.
    """

    def __init__(
        self, node: Node, config: AgentConfig, devices: tuple[str, ...], copy_endpoint: CopyEndpoint
    ) -> None:
        """Begin with empty books."""
        self.node = node
        self.config = config
        self.now_ns = 0
        self.out: list[AgentEffect] = []
        self.connection = Connection(node, config, self.out)
        self.reports = Unacknowledged(self.out)
        self.processes = ProcessBook(config, self.out)
        self.workers = WorkerBook(devices)
        self.departure = Departure(config)
        self.spreading = Pacer(config)
        self.copies, self.copy_endpoint = HeldCopies(self.out), copy_endpoint
        self.problems: tuple[str, ...] = ()
        self.health_is_reported = True

    def is_leaving(self) -> bool:
        """Return whether this node takes no new workers any more."""
        return self.departure.is_draining() or self.departure.is_ending()

    def note(self, worker: AgentWorker, name: str, **fields: object) -> None:
        """Ask for a line in the event log about a worker."""
        self.out.append(note(name, worker.report.job_id, worker=worker.worker_id, **fields))

    def exit_worker(self, worker: AgentWorker, cause: ExitCause) -> None:
        """A worker is no more, for the reason given."""
        process_id = worker.process_id
        self.spreading.forget(worker.worker_id)
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
        """Leave in time; the coordinator lets the workers go at a boundary if there is time."""
        if self.departure.drain(reason, timeout_ns, self.now_ns):
            seconds = f"{timeout_ns / 1e9:g}"
            self.out.append(note("drain_started", reason=reason, timeout_s=seconds))
            if self.departure.code is not None:
                self.begin_end(self.departure.code, reason)

    def begin_end(self, code: int, why: str) -> None:
        """Ask all workers to end, and the agent after them; a second time may only hasten it."""
        if self.departure.end(code, why, self.now_ns):
            self.out.append(note("agent_ending", code=code, reason=why))
            for worker in self.workers.without_process():
                self.exit_worker(worker, ExitCause(ExitKind.STOPPED, detail=why))
        order = Stop(why, self.departure.kill_at_ns - self.now_ns, asks=True)
        for process in self.processes.working():
            self.processes.stop(process, order, self.now_ns)

    # ------------------------------------------------------------ what the coordinator is told

    def hello(self) -> Hello:
        """Return all that the coordinator must know of us; it counts as told."""
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
            copies_at=self.copy_endpoint.at,
            copies_fingerprint=self.copy_endpoint.fingerprint,
            problems=self.problems,
        )

    def _as_of_its_reports(self, worker: AgentWorker) -> WorkerReport:
        """Return what to say of a worker in a hello, before its waiting reports are sent.

        A worker that reported and then left its group, while we were cut off, must not be said
        to have left before the coordinator has those reports: it would form the next group, or
        end the job, without the checkpoint in them. The truth follows them.
        """
        report = worker.report
        has_left = report.phase is not WorkerPhase.TRAINING
        if has_left and self.reports.has_any_of(report.worker_id, report.generation):
            self.workers.tell(worker)
            return replace(report, phase=WorkerPhase.TRAINING, exit=None)
        return report

    def tell(self, message: Reported | Progress | Pulse | CopyFailed | LinksTried) -> None:
        """Pass on what is said; while the coordinator is away only reports are kept."""
        if self.connection.is_registered():
            self.connection.send(message)

    def next_deadline_ns(self) -> int | None:
        """Return when something that workers said is to be passed on; never while nobody hears."""
        if not self.connection.is_registered():
            return None
        moments = (self.workers.next_deadline_ns(), self.spreading.next_deadline_ns())
        return min((moment for moment in moments if moment is not None), default=None)

    def report_changes(self) -> None:
        """Tell the coordinator what it does not know yet; while it is away, hello does later."""
        if not self.connection.is_registered():
            return
        for worker in self.workers.take_changed(self.now_ns):
            self.connection.send(WorkerUpdate(worker.report))
        for progress in self.spreading.take_due(self.now_ns):
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

    # ------------------------------------------------------------ what must hold

    def check_books(self) -> None:
        """Hold the books of workers, processes and devices against each other.

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
