"""A simulated worker process: the real worker state machine with a simulated main thread.

Rule: the machine is the control thread; `training` simulates the main thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from elastic.core.events.shared import Note
from elastic.core.events.worker import (
    AbortGroup,
    ActivitySampled,
    CloseGroup,
    EnterTrain,
    ExitWorker,
    FormGroup,
    GroupFailed,
    InterruptTrain,
    NotifyPreemption,
    OrderReceived,
    PipeClosed,
    RequestCheckpoint,
    RequestLeave,
    ResolveReport,
    SendPipe,
    Setup,
    Started,
    StoreOpened,
    TrainLeft,
    TrainRaised,
    WorkerEffect,
    WorkerEvent,
)
from elastic.core.facts import (
    ExitCause,
    ExitKind,
    Failure,
    Generation,
    JobId,
    NodeId,
    WorkerId,
)
from elastic.core.machine.worker import WorkerMachine
from elastic.core.messages import PipeToAgent, PipeToWorker
from tests.simulation import parts
from tests.simulation.world import MS, Timeline

if TYPE_CHECKING:
    from tests.simulation.training import DataPlane

PIDS_OF_A_LIFE = 100_000
"""Each life of an agent numbers its processes from the next multiple of this."""


class SimProcess:
    """One process that an agent started: a spare, and later perhaps a worker."""

    def __init__(
        self,
        timeline: Timeline,
        plane: DataPlane,
        *,
        node_id: NodeId,
        pid: int,
        say: Callable[[PipeToAgent], None],
        exited: Callable[[ExitCause], None],
    ) -> None:
        """Start the process, which first imports torch.

        Args:
            timeline: virtual time.
            plane: the data plane, in which groups form.
            node_id: its node.
            pid: its process id.
            say: delivers its messages to the agent's end of the pipe.
            exited: called once, when it has ended.
        """
        self.timeline = timeline
        self.plane = plane
        self.node_id = node_id
        self.pid = pid
        self.say = say
        self.exited = exited
        self.machine = WorkerMachine()
        self.worker_id = WorkerId("")
        self.job_id = JobId("")
        self.is_alive = True
        self.is_stopped = False
        self.is_hung = False
        self.slow_until_ns = 0
        self.starts_until_ns = 0
        self.has_stepped = True
        self.beats = 0
        self.held_step = 0
        self.has_begun = False
        self.waiting_since_ns = 0
        self.spot = parts.OPEN
        self.wish, self.rests = Generation(0), Generation(0)
        self.save_request: RequestCheckpoint | None = None
        self.busy_with: FormGroup | EnterTrain | None = None
        self._pending: list[WorkerEvent] = []
        timeline.after(timeline.between(20 * MS, 1500 * MS), self.report_machine, Started(pid))

    @property
    def life(self) -> int:
        """Return the life of its agent that started it."""
        return self.pid // PIDS_OF_A_LIFE

    def can_run(self) -> bool:
        """Return whether it is alive and not stopped."""
        return self.is_alive and not self.is_stopped

    def moves(self) -> bool:
        """Return whether its main thread makes progress, however slowly."""
        return self.can_run() and not self.is_hung

    def is_slow(self) -> bool:
        """Return whether its step takes longer than the others'."""
        return self.timeline.now_ns < max(self.slow_until_ns, self.starts_until_ns)

    def start(self, duration_ns: int) -> None:
        """Make its first step take so long, without visible progress; only once per process."""
        if not self.starts_until_ns:
            self.starts_until_ns = self.timeline.now_ns + duration_ns
            self.has_stepped = False

    def is_starting(self) -> bool:
        """Return whether it is in its first step, without visible progress."""
        return self.timeline.now_ns < self.starts_until_ns

    def is_in(self, generation: Generation) -> bool:
        """Return whether its main thread is in the train function in this generation."""
        busy = self.busy_with if self.is_alive else None
        return isinstance(busy, EnterTrain) and busy.assignment.generation == generation

    def linger(self) -> None:
        """Spend time while its group makes no step: it waits for others, or others for it."""
        if not self.moves() or self.is_starting():
            pass
        elif self.is_slow():
            self.beats += 1
        elif not self.waiting_since_ns and not self.spot.is_hidden:
            self.waiting_since_ns = self.timeline.now_ns
        self.take_time()

    def take_time(self) -> None:
        """Run the control thread if its deadline is due."""
        due_ns = self.machine.next_deadline_ns()
        if self.can_run() and due_ns is not None and due_ns <= self.timeline.now_ns:
            self._check()

    def go_on(self) -> None:
        """Note that its group makes steps again."""
        self.beats += 1
        self.waiting_since_ns, self.spot, self.has_stepped = 0, parts.OPEN, True
        self._check()

    def _check(self) -> None:
        since_ns = self.waiting_since_ns
        waiting_ns = self.timeline.now_ns - since_ns + 1 if since_ns else 0
        seen = ActivitySampled(
            self.beats, waiting_ns, begun=self.spot.begun, has_stepped=self.has_stepped
        )
        self.report_machine(seen)

    def receive(self, message: PipeToWorker) -> None:
        """Receive a message that the agent wrote to the pipe."""
        self.report_machine(OrderReceived(message))

    def agent_died(self) -> None:
        """End the process as the kernel does when its agent dies."""
        self.die(ExitCause(ExitKind.SIGNAL, 9))

    def report_machine(self, event: WorkerEvent) -> None:
        """Pass an event to the control thread; a stopped process handles it later."""
        if not self.is_alive:
            return
        if self.is_stopped:
            self._pending.append(event)
            return
        for effect in self.machine.step(event, self.timeline.now_ns):
            self._perform(effect)
            if not self.is_alive:
                return

    def set_stopped(self, stopped: bool) -> None:
        """Simulate SIGSTOP or SIGCONT."""
        self.is_stopped = stopped
        if not stopped:
            pending, self._pending = self._pending, []
            for event in pending:
                self.report_machine(event)
            for group in list(self.plane.groups.values()):
                if self in group.waiting.values():
                    self.plane.try_form(group)

    def die(self, cause: ExitCause) -> None:
        """End the process."""
        if not self.is_alive:
            return
        self.is_alive = False
        self.plane.lost(self)
        self.timeline.after(self.timeline.between(0, 2 * MS), self.exited, cause)

    def answer_main(self, event: WorkerEvent) -> None:
        """Pass the main thread's reply to its order; only one per order counts."""
        generation = getattr(event, "generation", 0)
        if self.busy_with is None or self.busy_with.assignment.generation != generation:
            return
        if self.is_hung:
            return
        self.busy_with = None
        self.report_machine(event)

    def break_out(self, generation: Generation) -> None:
        """Make a collective of this generation fail in the main thread."""
        if isinstance(self.busy_with, EnterTrain):
            failure = Failure("DistBackendError", "Connection closed by peer")
            self.answer_main(TrainRaised(generation, failure, group_broken=True))
        else:
            self.answer_main(GroupFailed(generation, "Connection closed by peer"))

    # ------------------------------------------------------------ effects

    def _perform(self, effect: WorkerEffect) -> None:
        if isinstance(effect, SendPipe):
            self.say(effect.message)
        elif isinstance(effect, Setup):
            self.worker_id = effect.assign.worker_id
            self.job_id = effect.assign.spec.job_id
            address = f"{effect.assign.host}:{self.pid}"
            self.timeline.after(
                self.timeline.between(MS, 300 * MS),
                self.report_machine,
                StoreOpened(address),
            )
        elif isinstance(effect, FormGroup):
            self.busy_with = effect
            self.plane.checkers.announced(self.worker_id, effect.assignment)
            self.plane.arrive(self, effect.assignment)
        elif isinstance(effect, EnterTrain):
            self.busy_with = effect
            self.beats, self.waiting_since_ns, self.spot = 1, 0, parts.OPEN
            self.plane.enter(self, effect.assignment)
        elif isinstance(effect, AbortGroup):
            self._abort(effect.generation)
        elif isinstance(effect, CloseGroup):
            self.plane.let_go(self, effect.generation)
        elif isinstance(effect, InterruptTrain):
            event = TrainLeft(effect.generation, at_boundary=False)
            self._later(self.answer_main, event)
        elif isinstance(effect, RequestLeave):
            is_called_off = self.rests == effect.generation and not effect.saves
            self.wish, self.rests = effect.generation, effect.generation * effect.saves
            if is_called_off:
                self.plane.loops.called_off(self.job_id, self)
        elif isinstance(effect, RequestCheckpoint):
            self.save_request = effect
        elif isinstance(effect, NotifyPreemption):
            self.plane.checkers.reported_of_preemption(self.worker_id, effect.reason)
        elif isinstance(effect, ExitWorker):
            self.die(ExitCause(ExitKind.CODE, effect.code))
        else:
            known = isinstance(effect, (ResolveReport, Note))
            self.plane.checkers.require(known, f"unknown worker effect {effect}")

    def _abort(self, generation: Generation) -> None:
        """Release the main thread if it blocks in this generation; peers see closed sockets."""
        group = self.plane.groups.get((self.job_id, generation))
        if group is None:
            return
        group.is_over = True
        busy = self.busy_with
        if isinstance(busy, FormGroup) and busy.assignment.generation == generation:
            self._later(self.answer_main, GroupFailed(generation, "aborted"))
        for process in group.members.values():
            if process is not self:
                self._later(process.break_out, generation)

    def _later(self, action: Callable[..., None], *args: object) -> None:
        self.timeline.after(self.timeline.between(MS, 10 * MS), action, *args)

    def pipe_closed(self) -> None:
        """Handle that the agent closed the pipe without dying."""
        self.report_machine(PipeClosed())
