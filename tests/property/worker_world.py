"""A main thread and an agent around one worker, as a model that checks every effect.

Rule: the main thread has one order at a time and answers each once; the past may speak as well.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from elastic.core.events import worker as we
from elastic.core.events.shared import Tick
from elastic.core.facts import (
    WorkerId,
    WorkerReport,
)
from elastic.core.machine.transitions import WORKER, check_move
from elastic.core.machine.worker import WorkerMachine
from elastic.core.messages import (
    Assign,
    LeaveGroup,
    Ping,
    Pong,
    Pulse,
    ReportAck,
    Reported,
    SaveState,
    Stop,
    WorkerUpdate,
)
from tests.property.machine_facts import (
    BOOM,
    ME,
    WORKERS,
    S,
    announce,
    spec,
)


class WorkerWorld(RuleBasedStateMachine):
    """A main thread and an agent around one worker process."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = WorkerMachine()
        self.now_ns = 0
        self.main: Any = None  # the order that the main thread carries out
        self.formed: list[int] = []
        self.cut: set[int] = set()
        self.is_final = False
        self.aborted: set[int] = set()
        self.reports: list[WorkerReport] = []
        self.asked: set[tuple[int, int]] = set()
        self.num_reports: dict[int, int] = {}
        self.highest = 0
        self.exit: we.ExitWorker | None = None
        self.step(we.Started(77))

    def step(self, event: Any) -> tuple[Any, ...]:
        self.now_ns += 1
        was_over = self.exit is not None
        effects = self.machine.step(event, self.now_ns)
        assert not (was_over and effects), "the machine is over"
        for effect in effects:
            assert self.exit is None, f"{effect} after the exit"
            self.perform(effect)
        return effects

    def perform(self, effect: Any) -> None:
        if isinstance(effect, (we.Setup, we.FormGroup, we.EnterTrain)):
            assert self.main is None, f"{effect} while the main thread does {self.main}"
            if isinstance(effect, we.FormGroup):
                assert effect.assignment.generation > max(self.formed, default=0)
                self.formed.append(effect.assignment.generation)
            self.main = effect
        elif isinstance(effect, we.AbortGroup):
            assert self.formed[-1] == effect.generation
            self.aborted.add(effect.generation)
        elif isinstance(effect, we.InterruptTrain):
            assert self.trains_in(effect.generation)
            assert effect.generation not in self.cut or effect.final, "interrupted twice"
            assert not self.is_final, "interrupted after the end"
            self.is_final = effect.final
            self.cut.add(effect.generation)
        elif isinstance(effect, we.RequestLeave):
            assert self.trains_in(effect.generation)
        elif isinstance(effect, we.ResolveReport):
            self.asked.remove((effect.generation, effect.index))
        elif isinstance(effect, we.ExitWorker):
            self.exit = effect
        elif isinstance(effect, we.SendPipe):
            self.said(effect.message)

    def said(self, message: Any) -> None:
        if isinstance(message, WorkerUpdate):
            report = message.report
            if self.reports:
                before = self.reports[-1]
                assert report.generation >= before.generation
                if report.phase is not before.phase:
                    check_move(WORKER, "worker", before.phase, report.phase)
            self.reports.append(report)
        elif isinstance(message, Reported):
            generation = message.report.generation
            assert message.report.index == self.num_reports.get(generation, 0)
            self.num_reports[generation] = message.report.index + 1
            self.asked.add((generation, message.report.index))

    def trains_in(self, generation: int) -> bool:
        trains = isinstance(self.main, we.EnterTrain)
        return trains and self.main.assignment.generation == generation

    # ------------------------------------------------------------ the control thread

    @rule(beats=st.integers(0, 3), waiting_s=st.sampled_from([0, 1]), after_s=st.integers(0, 5))
    def the_control_thread_checks(self, beats: int, waiting_s: int, after_s: int) -> None:
        self.now_ns += after_s * S
        effects = self.step(we.ActivitySampled(beats, waiting_s * S))
        said = [effect.message for effect in effects if isinstance(effect, we.SendPipe)]
        assert len(said) <= 1
        for pulse in said:
            assert isinstance(pulse, Pulse)
            assert self.trains_in(pulse.generation)
            assert not (pulse.waiting_ns and pulse.still_ns)

    # ------------------------------------------------------------ the agent

    @rule()
    def the_agent_assigns(self) -> None:
        self.step(we.OrderReceived(Assign(ME, spec(0), "10.0.0.1")))

    @rule(ahead=st.integers(-2, 2), worker_id=st.sampled_from([ME, ME, ME, WORKERS[1]]))
    def the_agent_announces(self, ahead: int, worker_id: WorkerId) -> None:
        generation = max(1, self.highest + ahead)
        self.highest = max(self.highest, generation)
        self.step(we.OrderReceived(announce(worker_id, generation)))

    @rule(behind=st.integers(-1, 2), at_boundary=st.booleans())
    def the_agent_orders_to_leave(self, behind: int, at_boundary: bool) -> None:
        generation = max(1, self.highest - behind)
        self.highest = max(self.highest, generation)
        self.step(we.OrderReceived(LeaveGroup(ME, generation, at_boundary, "why")))

    @rule(behind=st.integers(-1, 2), request=st.integers(1, 3))
    def the_agent_passes_on_a_wish_for_a_checkpoint(self, behind: int, request: int) -> None:
        generation = max(1, self.highest - behind)
        self.step(we.OrderReceived(SaveState(ME, generation, request)))

    @rule(index=st.integers(0, 3), behind=st.integers(0, 1), accepted=st.booleans())
    def the_agent_acknowledges(self, index: int, behind: int, accepted: bool) -> None:
        generation = max(1, self.highest - behind)
        self.step(we.OrderReceived(ReportAck(ME, generation, index, accepted)))

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def the_agent_acknowledges_what_was_sent(self, data: st.DataObject) -> None:
        generation, index = data.draw(st.sampled_from(sorted(self.asked)))
        for _ in range(2):
            self.step(we.OrderReceived(ReportAck(ME, generation, index, True)))

    @rule(number=st.integers(1, 99))
    def the_agent_pings(self, number: int) -> None:
        if self.exit is None:
            assert self.step(we.OrderReceived(Ping(number))) == (we.SendPipe(Pong(number)),)

    @precondition(lambda self: len(self.formed) > 3)
    @rule()
    def the_agent_stops_it(self) -> None:
        self.step(we.OrderReceived(Stop("why", S)))

    @precondition(lambda self: len(self.formed) > 4)
    @rule()
    def the_agent_dies(self) -> None:
        self.step(we.PipeClosed())
        assert self.exit is not None

    # ------------------------------------------------------------ the main thread

    @precondition(lambda self: self.main is not None and self.exit is None)
    @rule(loops=st.sampled_from([True, True, False]))
    def the_main_thread_succeeds(self, loops: bool) -> None:
        """Setting up and forming work; a boundary is where training is left, if at all."""
        order = self.main
        if isinstance(order, we.EnterTrain):
            return
        self.main = None
        if isinstance(order, we.Setup):
            self.step(we.StoreOpened("h:1"))
            return
        generation = order.assignment.generation
        unwanted = generation in self.aborted
        effects = self.step(we.GroupFormed(generation))
        assert (we.AbortGroup(generation) in effects) == unwanted, "an unwanted group is dropped"
        assert self.trains_in(generation) != unwanted
        if loops and not unwanted:
            self.step(we.LoopStateChanged(inside=True))

    @precondition(lambda self: self.main is not None and self.exit is None)
    @rule(data=st.data())
    def the_main_thread_answers(self, data: st.DataObject) -> None:
        order, self.main = self.main, None
        if isinstance(order, we.Setup):
            self.step(we.StoreOpened("h:1"))
            return
        generation = order.assignment.generation
        if isinstance(order, we.FormGroup):
            answers: list[Any] = [we.GroupFormed(generation), we.GroupFailed(generation, "no")]
        else:
            answers = [
                we.TrainReturned(generation, "7"),
                we.TrainRaised(generation, BOOM, group_broken=True),
                we.TrainRaised(generation, BOOM, group_broken=True, exit_code=1),
                we.TrainRaised(generation, BOOM, group_broken=False, exit_code=0),
                we.TrainLeft(generation, at_boundary=False),
                we.TrainLeft(generation, at_boundary=True),
            ]
            if generation in self.cut:
                answers.append(we.TrainRaised(generation, BOOM, group_broken=False))
        self.step(data.draw(st.sampled_from(answers)))
        assert self.reports[-1].failure is None

    @precondition(lambda self: isinstance(self.main, we.EnterTrain) and self.exit is None)
    @rule()
    def the_user_reports(self) -> None:
        generation = self.main.assignment.generation
        (effect,) = self.step(we.UserReported(generation, 0, "{}", "/c"))
        assert effect.message.report.generation == generation

    @rule(behind=st.integers(1, 3), data=st.data())
    def the_main_thread_of_the_past_speaks(self, behind: int, data: st.DataObject) -> None:
        current = self.formed[-1] if self.formed else 0
        generation = current - behind
        stale = [
            we.GroupFormed(generation),
            we.GroupFailed(generation, "late"),
            we.TrainReturned(generation, "late"),
            we.TrainRaised(generation, BOOM, group_broken=False, exit_code=9),
            we.TrainLeft(generation, at_boundary=True),
            we.UserReported(generation, 0, "{}", ""),
            we.Started(99),
            Tick(),
        ]
        assert self.step(data.draw(st.sampled_from(stale))) == ()

    @invariant()
    def a_cut_group_is_never_trained_in_again(self) -> None:
        assert len(self.formed) == len(set(self.formed))

    def teardown(self) -> None:
        """From anywhere, a newer announcement is joined as soon as the main thread is free.

        Not by a script that has begun: its process is spent, and is ended from outside.
        """
        self.the_agent_assigns()
        self.highest += 3
        self.step(we.OrderReceived(announce(ME, self.highest)))
        for _ in range(3):
            if self.exit is not None or self.trains_in(self.highest):
                return
            order, self.main = self.main, None
            if isinstance(order, we.Setup):
                self.step(we.StoreOpened("h:1"))
            elif isinstance(order, we.FormGroup):
                self.step(we.GroupFormed(order.assignment.generation))
            elif isinstance(order, we.EnterTrain):
                assert order.assignment.generation in self.cut, "nobody freed the main thread"
                left = we.TrainLeft(order.assignment.generation, at_boundary=False)
                self.step(left)
        is_spent = bool(self.reports) and self.reports[-1].spent
        assert self.exit is not None or self.trains_in(self.highest) or is_spent
