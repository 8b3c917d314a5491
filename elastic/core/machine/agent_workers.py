"""The workers of an agent, and the accelerators of each.

Rule: a worker is kept, exited or not, until the coordinator sends `ForgetWorker`. Changes are sent
once per machine step as a complete report, or slightly later if the report may be delayed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from elastic.core.config import JobSpec
from elastic.core.facts import (
    MILLI,
    NO_GENERATION,
    EntryKind,
    ExitCause,
    ExitKind,
    Generation,
    JobId,
    WorkerId,
    WorkerPhase,
    WorkerReport,
)
from elastic.core.machine.transitions import WORKER_SEEN, check_move
from elastic.core.machine.worker import NO_RESULT
from elastic.core.messages import Announce, Assign, LeaveGroup, StartWorker

ENDED_ITSELF = ExitCause(ExitKind.STOPPED, detail="its script had ended its process")
GPU = "GPU"
"""Name of the accelerator resource."""


@dataclass
class AgentWorker:
    """One worker.

    Attributes:
        report: its state, as sent to the coordinator.
        ahead: it calls its train function before it has a group.
        devices: positions of its accelerators; empty on CPU and once it exited.
        device_milli: thousandths that it uses of each of them.
        process_id: its process, None while it waits for one, and after the exit.
        held: orders for it that came before it had a process.
        ended_itself: its script ended its process with success; it has finished, and must not get
            another one.
        wanted_in: the newest generation that it was ordered to join, or to wait for; its process
            may not have received that yet.
        group_size: number of members of the newest group announced to it.
        holders: how many of them have the state of the run; 0 if all do, or if unknown.
        has_state: it has taken part in a step.
    """

    spec: JobSpec
    report: WorkerReport
    ahead: bool = False
    devices: tuple[int, ...] = ()
    device_milli: int = 0
    process_id: int | None = None
    held: tuple[Announce | LeaveGroup, ...] = ()
    ended_itself: bool = False
    wanted_in: Generation = NO_GENERATION
    group_size: int = 0
    holders: int = 0
    has_state: bool = False

    @property
    def worker_id(self) -> WorkerId:
        return self.report.worker_id

    def is_over(self) -> bool:
        """Return whether its process would have to begin its script a second time."""
        return self.report.spent and self.wanted_in > self.report.generation

    def is_waiting(self) -> bool:
        """Return whether it still needs a process."""
        return self.has_no_process() and not self.ended_itself

    def has_no_process(self) -> bool:
        """Return whether it has not exited and has no process: not yet, or not any more."""
        return self.process_id is None and not self.has_exited()

    def has_exited(self) -> bool:
        return self.report.phase is WorkerPhase.EXITED

    def hold(self, message: Announce | LeaveGroup) -> None:
        """Keep the newest announcement, and the order to leave it if there is one."""
        if isinstance(message, Announce):
            first = self.held[0] if self.held else None
            generation = message.assignment.generation
            if not isinstance(first, Announce) or first.assignment.generation < generation:
                self.held = (message,)
        elif self.held:
            self.held = (self.held[0], message)


class DeviceBook:
    """Assigns accelerators to workers.

    A worker that takes whole ones has them exclusively; workers that take less than one share a
    device as long as the sum fits.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._free_milli = [MILLI] * len(names)

    def take(self, milli: int) -> tuple[tuple[int, ...], int] | None:
        """Take the lowest free devices for an amount in thousandths.

        Returns:
            Positions and the thousandths taken of each; None if there are not enough.
        """
        if milli <= 0:
            return (), 0
        count = -(-milli // MILLI)
        each = MILLI if milli > MILLI else milli
        fitting = [at for at, free in enumerate(self._free_milli) if free >= each]
        if len(fitting) < count:
            return None
        taken = tuple(fitting[:count])
        for at in taken:
            self._free_milli[at] -= each
        return taken, each

    def give_back(self, taken: tuple[int, ...], each: int) -> None:
        for at in taken:
            self._free_milli[at] += each

    def names(self, taken: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(self._names[at] for at in taken)

    def free_milli(self) -> tuple[int, ...]:
        return tuple(self._free_milli)


class WorkerBook:
    """The agent's workers, in the order of their arrival.

    Attributes:
        newest: the job of the last worker; the next one is likely to be of the same job.
    """

    def __init__(self, devices: tuple[str, ...]) -> None:
        self.newest: JobSpec | None = None
        self.devices = DeviceBook(devices)
        self._book: dict[WorkerId, AgentWorker] = {}
        # Changed workers -> the latest time to report each.
        self._changed: dict[WorkerId, int] = {}

    def get(self, worker_id: WorkerId | None) -> AgentWorker | None:
        """Return a worker, None if it is not known (any more)."""
        return self._book.get(worker_id) if worker_id is not None else None

    def all(self) -> tuple[AgentWorker, ...]:
        """Return all, also the exited ones."""
        return tuple(self._book.values())

    def waiting(self) -> list[AgentWorker]:
        """Return those that need a process, oldest first."""
        return [worker for worker in self._book.values() if worker.is_waiting()]

    def without_process(self) -> list[AgentWorker]:
        """Return those that have not exited and have no process, oldest first."""
        return [worker for worker in self._book.values() if worker.has_no_process()]

    def are_gone(self) -> bool:
        return all(worker.has_exited() for worker in self._book.values())

    def enter(self, order: StartWorker) -> AgentWorker:
        report = WorkerReport(order.worker_id, order.spec.job_id, WorkerPhase.STARTING)
        self.newest = order.spec
        worker = self._book[order.worker_id] = AgentWorker(order.spec, report, order.ahead)
        self.schedule_report(worker)
        return worker

    def equip(self, worker: AgentWorker) -> bool:
        """Reserve the accelerators that the job requires; return False if too few are free."""
        amounts = dict(worker.spec.resources_per_worker.milli)
        taken = self.devices.take(amounts.get(GPU, 0))
        if taken is None:
            return False
        worker.devices, worker.device_milli = taken
        return True

    def assign(self, worker: AgentWorker, process_id: int, pid: int, host: str) -> Assign:
        """Give a waiting worker its process; return the message for the process."""
        worker.process_id = process_id
        worker.report = replace(worker.report, pid=pid)
        self.schedule_report(worker)
        return Assign(
            worker.worker_id,
            worker.spec,
            host,
            self.devices.names(worker.devices),
            ahead=worker.ahead,
            node_devices=self.devices_of(worker.report.job_id),
        )

    def devices_of(self, job_id: JobId) -> tuple[str, ...]:
        """Return the accelerators of a job's workers, in the order of the workers' arrival."""
        own = (worker for worker in self._book.values() if worker.report.job_id == job_id)
        taken = tuple(device for worker in own for device in worker.devices)
        return tuple(dict.fromkeys(self.devices.names(taken)))

    def update(self, worker: AgentWorker, report: WorkerReport, *, report_at_ns: int = 0) -> bool:
        """Merge a report of the worker's process; return False if it is stale or not legal.

        Only the agent knows the pid and the exit. A reported failure is kept.

        Args:
            worker: whose process sent it.
            report: the complete report.
            report_at_ns: when the coordinator must get it at the latest.
        """
        known = worker.report
        is_stale = report.generation < known.generation
        is_legal = report.phase in WORKER_SEEN.moves[known.phase]
        if is_stale or not is_legal or report.phase is WorkerPhase.EXITED:
            return False
        worker.report = replace(
            known,
            phase=report.phase,
            generation=report.generation,
            store_address=report.store_address,
            failure=report.failure or known.failure,
            result=report.result,
            in_place=report.in_place,
            copies_every=report.copies_every,
            copies_sharded=report.copies_sharded,
            micro_batches=report.micro_batches,
            left=report.left,
            spent=report.spent,
        )
        if worker.report != known:
            self.schedule_report(worker, at_ns=report_at_ns)
        return True

    def finished_by(self, worker: AgentWorker, cause: ExitCause) -> bool:
        """Return whether an exit is the regular end of a script, and record that it finished.

        Scripts may end their process (`os._exit`), or become another program (`exec`): as elsewhere
        the exit code decides. A train function must return, or it has failed.
        """
        is_in_place = worker.wanted_in <= worker.report.generation
        is_training = worker.report.phase is WorkerPhase.TRAINING
        if not (_is_end_of_script(worker, cause) and is_training and is_in_place):
            return False
        worker.report = replace(
            worker.report,
            phase=WorkerPhase.FINISHED,
            result=NO_RESULT,
            left="ended its process (exit 0)",
        )
        worker.process_id, worker.held, worker.ended_itself = None, (), True
        self.schedule_report(worker)
        return True

    def judged(self, worker: AgentWorker, cause: ExitCause) -> ExitCause:
        """Return the cause to record for the exit of a worker that has not finished.

        A script that ends with success because its group broke, or because it should continue in
        another group, has not failed: it is started again.
        """
        is_left = worker.report.phase in (WorkerPhase.TRAINING, WorkerPhase.BROKEN)
        return ENDED_ITSELF if is_left and _is_end_of_script(worker, cause) else cause

    def exited(self, worker: AgentWorker, cause: ExitCause) -> None:
        """Record the exit of a worker: free its accelerators, report the cause."""
        who = f"worker {worker.worker_id}"
        check_move(WORKER_SEEN, who, worker.report.phase, WorkerPhase.EXITED)
        worker.report = replace(
            worker.report, phase=WorkerPhase.EXITED, exit=cause, store_address=""
        )
        self.devices.give_back(worker.devices, worker.device_milli)
        worker.devices, worker.device_milli = (), 0
        worker.process_id, worker.held = None, ()
        self.schedule_report(worker)

    def forget(self, worker: AgentWorker) -> None:
        del self._book[worker.worker_id]
        self._changed.pop(worker.worker_id, None)

    def schedule_report(self, worker: AgentWorker, *, at_ns: int = 0) -> None:
        """Schedule a report of this worker, even if it did not change."""
        waits_ns = self._changed.get(worker.worker_id, at_ns)
        self._changed[worker.worker_id] = min(waits_ns, at_ns)

    def is_changed(self, worker: AgentWorker) -> bool:
        return worker.worker_id in self._changed

    def next_deadline_ns(self) -> int | None:
        """Return when the next report is due, None for none."""
        return min(self._changed.values(), default=None)

    def take_changed(self, now_ns: int | None = None) -> list[AgentWorker]:
        """Return the workers whose report is due, and mark them as reported.

        Args:
            now_ns: the time; None for all pending ones.
        """
        due = [
            worker_id
            for worker_id, at_ns in self._changed.items()
            if now_ns is None or at_ns <= now_ns
        ]
        for worker_id in due:
            del self._changed[worker_id]
        return [self._book[worker_id] for worker_id in due]


def _is_end_of_script(worker: AgentWorker, cause: ExitCause) -> bool:
    is_script = worker.spec.entry.kind is not EntryKind.FUNCTION
    return is_script and cause.kind is ExitKind.CODE and cause.code == 0
