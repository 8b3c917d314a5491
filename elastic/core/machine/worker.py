"""The worker's state machine: the decisions of a training process's control thread.

Rule: the main thread has one order at a time (set up, form, train), and gets the next one after its
reply. Orders in between are remembered; the newest generation wins. Errors of a group that the main
thread was ordered to leave are expected, and ignored. A process runs a script once; then it is
spent, and the agent ends it instead of running the script again.
"""

from __future__ import annotations

from elastic.core.config import NS_PER_S
from elastic.core.events.worker import (
    AbortGroup,
    ActivitySampled,
    CheckpointWritten,
    CloseGroup,
    CopiesRequested,
    EnterTrain,
    ExitWorker,
    FormGroup,
    GroupFailed,
    GroupFormed,
    InterruptTrain,
    LoopStateChanged,
    MicroBatchesDeclared,
    NotifyPreemption,
    OrderReceived,
    PipeClosed,
    RequestCheckpoint,
    RequestLeave,
    SendPipe,
    Setup,
    SetupFailed,
    SignalScript,
    Started,
    StoreOpened,
    TrainLeft,
    TrainRaised,
    TrainReturned,
    UserReported,
    Validated,
    WorkerEffect,
    WorkerEvent,
)
from elastic.core.facts import (
    NO_GENERATION,
    Assignment,
    Failure,
    Generation,
    WorkerPhase,
    WorkerReport,
)
from elastic.core.machine.event_history import EventHistory, note
from elastic.core.machine.transitions import MAIN, WORKER, MainPhase, check_move
from elastic.core.machine.worker_parts import GroupOrders, LoopState, MemberState
from elastic.core.machine.worker_reports import refused
from elastic.core.messages import (
    Announce,
    Assign,
    LeaveGroup,
    Ping,
    PipeToWorker,
    Pong,
    Preemption,
    ReportAck,
    Reported,
    SaveState,
    Stop,
    Warm,
    WorkerUpdate,
)
from elastic.core.policy.failure import TERMINATED
from elastic.core.policy.hang import ActivityMonitor
from elastic.errors import InvariantViolation, check

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_AGENT_GONE = 70
NO_RESULT = "null"
"""The result of a train function that ended with `sys.exit(0)`."""
END_NS = 5 * NS_PER_S
"""Time limit for the main thread to leave after the order to end."""
CLOSE_GROUP_NS = 2 * NS_PER_S
"""A finished worker stays connected for so long: the others usually finish within moments, and
exchange how they ended through the group."""


class WorkerMachine:
    """Events in, effects out; owned by the control thread.

    A spare has no job: it answers pings and stops. From `Assign` on it is a worker. Its phase
    follows `transitions.WORKER`, and that of its main thread `transitions.MAIN`.
    """

    def __init__(self) -> None:
        self._out: list[WorkerEffect] = []
        self._history = EventHistory()
        self._now_ns = 0
        self._main = MainPhase.IDLE
        self._phase = WorkerPhase.STARTING
        self._pid = 0
        self._assign: Assign | None = None
        self._store_address = ""
        self._member = MemberState()
        self._orders = GroupOrders()
        self._stop: Stop | None = None
        # When this process ends whatever its main thread does, None for never.
        self._end_by_ns: int | None = None
        # The script's handler of SIGTERM was called because its node leaves.
        self._is_warned = False
        self._pulses = ActivityMonitor()
        self._loop = LoopState()

    def step(self, event: WorkerEvent, now_ns: int) -> tuple[WorkerEffect, ...]:
        """Process one event.

        Args:
            event: to process.
            now_ns: monotonic; never decreases.

        Returns:
            Effects, to be performed in this order; none once `ExitWorker` was returned.

        Raises:
            InvariantViolation: a bug; includes the last events.
        """
        if self._main is MainPhase.OVER:
            return ()
        self._out = []
        if not isinstance(event, ActivitySampled):
            self._history.add(now_ns, event)
        try:
            check(now_ns >= self._now_ns, f"time fell from {self._now_ns} to {now_ns}")
            self._now_ns = now_ns
            self._take(event)
        except InvariantViolation as violation:
            raise InvariantViolation(str(violation), self._history.lines()) from violation
        return tuple(self._out)

    def next_deadline_ns(self) -> int | None:
        """Return when to step with `ActivitySampled`, None for no deadline.

        Only a worker that trains, has just finished, or must end has one: otherwise it waits for
        its agent and its main thread, never for time.
        """
        if self._main is MainPhase.OVER:
            return None
        is_training = self._main is MainPhase.TRAINING
        polls = self._pulses.check_at_ns if is_training else self._member.close_at_ns
        return min((at for at in (polls, self._end_by_ns) if at is not None), default=None)

    def _take(self, event: WorkerEvent) -> None:
        if isinstance(event, OrderReceived):
            self._ordered(event)
        elif isinstance(event, Started):
            self._started(event)
        elif isinstance(event, PipeClosed):
            self._exit(EXIT_AGENT_GONE, "the agent is gone")
        elif isinstance(event, StoreOpened):
            self._opened(event)
        elif isinstance(event, SetupFailed):
            self._setup_failed(event)
        elif isinstance(event, (LoopStateChanged, CopiesRequested, MicroBatchesDeclared)):
            self._loop_reported(event)
        elif isinstance(event, (GroupFormed, GroupFailed)):
            if self._is_at(MainPhase.FORMING, event.generation):
                self._formed(event)
        elif isinstance(event, (TrainReturned, TrainRaised, TrainLeft)):
            if self._is_at(MainPhase.TRAINING, event.generation):
                self._left_train(event)
        elif isinstance(event, (UserReported, CheckpointWritten, Validated)):
            self._reported(event)
        elif isinstance(event, ActivitySampled) and self._is_late():
            self._exit(EXIT_FAILED, "its main thread did not leave its group in time")
        elif isinstance(event, ActivitySampled) and self._main is MainPhase.TRAINING:
            self._checked(event)
        elif isinstance(event, ActivitySampled):
            self._close_group()

    # ------------------------------------------------------------ orders of the agent

    def _ordered(self, event: OrderReceived) -> None:
        message: PipeToWorker = event.message
        if isinstance(message, Ping):
            self._out.append(SendPipe(Pong(message.number, event.silent_times)))
        elif isinstance(message, Assign):
            self._assigned(message)
        elif isinstance(message, Stop):
            self._stop_ordered(message, event.is_handled)
        elif isinstance(message, ReportAck):
            self._acked(message)
        elif isinstance(message, Announce):
            self._announced(message.assignment)
        elif isinstance(message, SaveState):
            self._save_ordered(message)
        elif isinstance(message, Preemption):
            self._preemption_reported(message, event.is_handled)
        elif isinstance(message, LeaveGroup):
            self._leave_ordered(message)

    def _assigned(self, assign: Assign) -> None:
        if self._assign is not None:
            if assign.worker_id != self._assign.worker_id:
                self._out.append(note("assign_ignored", worker=assign.worker_id))
            return
        self._assign = assign
        self._update()
        self._set_main(MainPhase.SETTING_UP)
        self._out.append(Setup(assign))

    def _announced(self, assignment: Assignment) -> None:
        """Join this group as soon as the main thread is free, and interrupt it for that."""
        if not self._is_mine(assignment.worker_id) or assignment.generation <= self._orders.newest:
            return
        self._orders = GroupOrders(assignment.generation, assignment)
        if self._main is MainPhase.IDLE:
            self._begin()
        elif self._main is not MainPhase.SETTING_UP:
            reason = f"generation {assignment.generation} was announced: {assignment.cause}"
            self._cut(reason)

    def _leave_ordered(self, order: LeaveGroup) -> None:
        """Leave the newest group, at a boundary or now.

        An order to leave at once a group that was never announced here means that the previous
        one is over as well; if its announcement comes later, it is stale.
        """
        if not self._is_mine(order.worker_id) or order.generation < self._orders.newest:
            return
        if order.generation > self._orders.newest:
            if order.at_boundary:
                return
            self._orders = GroupOrders(order.generation)
        before = self._orders.leave
        if before is None or (before.at_boundary and not order.at_boundary):
            self._orders.leave = order
        elif order.at_boundary and before.at_boundary and order.saves != before.saves:
            # It must now save and pause, not only change groups, or need not any more.
            self._orders.leave, self._member.has_requested = order, False
        if order.at_boundary:
            self._request()
        elif self._main in (MainPhase.FORMING, MainPhase.TRAINING):
            self._cut(order.reason)

    def _save_ordered(self, order: SaveState) -> None:
        """Pass on a checkpoint request; one for another group than the newest is stale."""
        if self._is_mine(order.worker_id) and order.generation == self._orders.newest:
            self._orders.save = order
            self._request_save()

    def _preemption_reported(self, order: Preemption, is_handled: bool) -> None:
        """Notify user code of nodes that leave its group; for an older group it is stale.

        If its own node leaves, a script with a SIGTERM handler gets that signal once: it has no
        other way to save. A loop that continues in place loses nothing with a node.
        """
        if not self._is_mine(order.worker_id) or order.generation != self._orders.newest:
            return
        self._orders.has_leavers = True
        deadline_ns = self._now_ns + order.timeout_ns
        self._out.append(NotifyPreemption(order.generation, deadline_ns, order.reason, order.nodes))
        if self._is_warned or self._loop.in_place or not is_handled:
            return
        if self._is_at(MainPhase.TRAINING, order.generation):
            rank = self._assignment().rank
            if any(rank in node.ranks for node in order.nodes):
                self._is_warned = True
                self._out.append(SignalScript(order.reason))

    def _stop_ordered(self, stop: Stop, is_handled: bool) -> None:
        """End after the main thread left its group; at once if it is in none.

        A script with its own SIGTERM handler ends by itself, within the grace period.
        """
        is_asked = self._stop is not None and self._stop.asks and not stop.asks
        if self._stop is not None and not is_asked:
            return
        self._stop = stop
        if self._main is MainPhase.TRAINING and stop.asks and is_handled:
            self._out.append(SignalScript(stop.reason))
            return
        self._end_by_ns = self._end_by_ns or self._now_ns + END_NS
        if self._main in (MainPhase.FORMING, MainPhase.TRAINING):
            self._cut(stop.reason, final=True)
        else:
            self._exit(EXIT_DONE, stop.reason)

    def _acked(self, ack: ReportAck) -> None:
        """Release the waiting `report` call; each is answered once."""
        is_current = self._is_at(MainPhase.TRAINING, ack.generation)
        if self._is_mine(ack.worker_id) and is_current:
            self._out += self._member.reports.acked(ack)

    # ------------------------------------------------------------ replies of the main thread

    def _started(self, event: Started) -> None:
        if self._pid == 0:
            self._pid = event.pid
            self._out.append(SendPipe(Warm(event.pid)))

    def _opened(self, event: StoreOpened) -> None:
        if self._main is not MainPhase.SETTING_UP:
            return
        self._store_address = event.address
        self._set_main(MainPhase.IDLE)
        self._become(WorkerPhase.READY)
        if self._orders.next is not None:
            self._begin()

    def _setup_failed(self, event: SetupFailed) -> None:
        if self._main is MainPhase.SETTING_UP:
            self._fail(event.failure, EXIT_FAILED)

    def _loop_reported(
        self, event: LoopStateChanged | CopiesRequested | MicroBatchesDeclared
    ) -> None:
        """Record and report how the next group is entered, and what is copied."""
        before, self._loop = self._loop, self._loop.after(event)
        if before != self._loop and self._main is MainPhase.TRAINING:
            self._update()

    def _formed(self, event: GroupFormed | GroupFailed) -> None:
        """Enter the train function if the group was formed, unless it is already obsolete."""
        generation = event.generation
        if isinstance(event, GroupFailed):
            self._note("group_failed", generation=generation, detail=event.detail)
            self._settle(WorkerPhase.BROKEN)
        elif self._is_ordered_out():
            self._out.append(AbortGroup(generation))
            self._settle(WorkerPhase.READY)
        else:
            self._set_main(MainPhase.TRAINING)
            self._become(WorkerPhase.TRAINING)
            self._out.append(EnterTrain(self._assignment()))
            self._request()
            self._request_save()

    def _left_train(self, event: TrainReturned | TrainRaised | TrainLeft) -> None:
        """Handle that the main thread left the train function, by the reason."""
        if isinstance(event, TrainLeft):
            self._settle(WorkerPhase.READY)
        elif isinstance(event, TrainReturned):
            self._finished(event.result, event.left)
        elif self._is_ordered_out():
            # An error of user code cannot be distinguished from one that the abort caused. The
            # group is over in any case; a real fault repeats in the next one.
            self._note_fallout(event)
            self._settle(WorkerPhase.READY)
        elif event.group_broken:
            self._note_fallout(event)
            self._settle(WorkerPhase.BROKEN)
        elif self._was_asked_to_end(event.exit_code):
            # It, or another rank that passed this on, was asked to end: not a failure of user code.
            self._exit(TERMINATED, "its script has ended, as a node of its group is to leave")
        elif event.exit_code == EXIT_DONE:
            self._finished(NO_RESULT, "left (exit 0)")
        else:
            self._fail(event.failure, event.exit_code or EXIT_FAILED)

    def _finished(self, result: str, left: str) -> None:
        """Record that the train function returned, unless a newer group needs it again."""
        if self._orders.next is None:
            self._member.result, self._member.left = result, left
            self._member.close_at_ns = self._now_ns + CLOSE_GROUP_NS
            self._set_main(MainPhase.IDLE)
            self._become(WorkerPhase.FINISHED)
            if self._stop is not None:
                self._exit(EXIT_DONE, self._stop.reason)
        else:
            self._note("finish_superseded", generation=self._generation())
            self._settle(WorkerPhase.READY)

    def _was_asked_to_end(self, exit_code: int | None) -> bool:
        """Return whether a script ends because it, or another rank, was asked to."""
        is_reported = exit_code == TERMINATED and self._orders.has_leavers
        return is_reported or bool(exit_code and self._is_warned)

    def _is_late(self) -> bool:
        return self._end_by_ns is not None and self._now_ns >= self._end_by_ns

    def _close_group(self) -> None:
        """Close the group in which we have finished, so that peers stop waiting for us."""
        if self._member.close_at_ns is not None and self._now_ns >= self._member.close_at_ns:
            self._member.close_at_ns = None
            self._out.append(CloseGroup(self._generation()))

    def _reported(self, event: UserReported | CheckpointWritten | Validated) -> None:
        assign = self._assign
        if assign is not None and self._is_at(MainPhase.TRAINING, event.generation):
            report = self._member.reports.reported(event, assign, self._assignment().rank)
            self._out.append(SendPipe(Reported(report)))
        elif event.checkpoint:
            self._out.append(refused(event))

    def _checked(self, event: ActivitySampled) -> None:
        pulse = self._pulses.sample(event, self._assignment(), self._now_ns)
        if pulse is not None:
            self._out.append(SendPipe(pulse))

    # ------------------------------------------------------------ transitions

    def _begin(self) -> None:
        """Form the newest announced group, unless this process is spent."""
        if self._loop.is_spent:
            return
        self._out += self._member.reports.close(self._generation())
        self._member, self._orders.next = MemberState(self._orders.next), None
        self._become(WorkerPhase.FORMING)
        if self._must_leave_now():
            self._become(WorkerPhase.READY)
        else:
            self._set_main(MainPhase.FORMING)
            self._out.append(FormGroup(self._assignment()))

    def _settle(self, otherwise: WorkerPhase) -> None:
        """Follow the orders that came while the main thread was busy, else enter `otherwise`."""
        self._set_main(MainPhase.IDLE)
        if self._stop is not None:
            self._exit(EXIT_DONE, self._stop.reason)
        elif self._orders.next is not None and not self._loop.is_spent:
            self._begin()
        else:
            self._become(WorkerPhase.READY if self._must_leave_now() else otherwise)

    def _cut(self, reason: str, *, final: bool = False) -> None:
        """Abort the main thread's group: once, and once more if the process must end."""
        if self._member.is_cut and not final:
            return
        was_cut, self._member.is_cut = self._member.is_cut, True
        # Interrupted first: after its abort an NCCL collective may return garbage without an error,
        # which user code must not see.
        if self._main is MainPhase.TRAINING:
            self._out.append(InterruptTrain(self._generation(), reason, final))
        if not was_cut:
            self._out.append(AbortGroup(self._generation()))

    def _request(self) -> None:
        """Request once that the next boundary is the last, if that is ordered and we train."""
        order, member = self._orders.leave, self._member
        if order is None or not order.at_boundary or member.has_requested or member.is_cut:
            return
        if self._is_at(MainPhase.TRAINING, order.generation):
            member.has_requested = True
            self._out.append(RequestLeave(order.generation, order.reason, order.saves))

    def _request_save(self) -> None:
        """Request a checkpoint of the main thread, once it trains."""
        order = self._orders.save
        if order is not None and self._is_at(MainPhase.TRAINING, order.generation):
            self._orders.save = None
            self._out.append(RequestCheckpoint(order.generation, order.request))

    def _fail(self, failure: Failure, code: int) -> None:
        """Report the failure of user code, then exit; the agent adds how the process ended."""
        self._update(failure)
        self._exit(code, f"{failure.error_type}: {failure.message}")

    def _exit(self, code: int, reason: str) -> None:
        self._set_main(MainPhase.OVER)
        self._out.append(ExitWorker(code, reason))

    def _become(self, phase: WorkerPhase) -> None:
        """Enter a phase and report it to the agent."""
        check_move(WORKER, self._name(), self._phase, phase)
        self._phase = phase
        self._update()

    def _set_main(self, phase: MainPhase) -> None:
        check_move(MAIN, f"main thread of {self._name()}", self._main, phase)
        self._main = phase
        if phase is MainPhase.TRAINING:
            self._loop = self._loop.entered()
            self._pulses.begin(self._now_ns, self._assignment().world_size)

    # ------------------------------------------------------------ queries

    def _is_at(self, main: MainPhase, generation: Generation) -> bool:
        """Return whether the main thread is in this phase and generation; else it is stale."""
        return self._main is main and self._generation() == generation

    def _is_mine(self, worker_id: str) -> bool:
        return self._assign is not None and worker_id == self._assign.worker_id

    def _must_leave_now(self) -> bool:
        return self._orders.leave is not None and not self._orders.leave.at_boundary

    def _is_ordered_out(self) -> bool:
        """Return whether the group that the main thread is in is over for us."""
        return self._stop is not None or self._orders.next is not None or self._must_leave_now()

    def _generation(self) -> Generation:
        assignment = self._member.assignment
        return assignment.generation if assignment is not None else NO_GENERATION

    def _assignment(self) -> Assignment:
        if self._member.assignment is None:
            raise InvariantViolation(f"{self._name()}: no group was announced")
        return self._member.assignment

    def _name(self) -> str:
        return f"worker {self._assign.worker_id}" if self._assign else f"spare {self._pid}"

    def _update(self, failure: Failure | None = None) -> None:
        """Send the complete state of this worker; a later report replaces this one."""
        assign = self._assign
        if assign is None:
            raise InvariantViolation(f"{self._name()} has nothing to report")
        report = WorkerReport(
            worker_id=assign.worker_id,
            job_id=assign.spec.job_id,
            phase=self._phase,
            generation=self._generation(),
            store_address=self._store_address,
            pid=self._pid,
            failure=failure,
            result=self._member.result,
            in_place=self._loop.in_place,
            copies_every=self._loop.copies.every_n_steps,
            copies_sharded=self._loop.copies.is_sharded,
            micro_batches=self._loop.micro_batches,
            left=self._member.left,
            spent=self._loop.is_spent,
        )
        self._out.append(SendPipe(WorkerUpdate(report)))

    def _note(self, name: str, **fields: object) -> None:
        job_id = self._assign.spec.job_id if self._assign else ""
        worker_id = self._assign.worker_id if self._assign else ""
        self._out.append(note(name, job_id, worker=worker_id, **fields))

    def _note_fallout(self, event: TrainRaised) -> None:
        """Log an error that does not count as a failure."""
        self._note(
            "train_error_ignored", generation=event.generation, error=event.failure.error_type,
            message=event.failure.message, exit_code=event.exit_code,
            traceback=event.failure.traceback,
        )  # fmt: skip
