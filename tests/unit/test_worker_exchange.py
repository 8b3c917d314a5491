"""What passes between the two threads of a worker, and how it is counted and answered."""

from __future__ import annotations

import select
import threading

from elastic.core.events.worker import (
    GroupFormed,
    NotifyPreemption,
    RequestCheckpoint,
    RequestLeave,
    ResolveReport,
)
from elastic.core.facts import LeavingNode, NodeId, ReportKind, WorkerId
from elastic.core.messages import Progress
from elastic.worker.base.mailboxes import Mailboxes
from elastic.worker.base.timing import INTERVAL_NS, Timing
from tests.patience import DEADLINE_S


class HandClock:
    """Stands still until a test moves it."""

    def __init__(self) -> None:
        self.now_ns = 5

    def monotonic_ns(self) -> int:
        return self.now_ns

    def unix_ns(self) -> int:
        return self.now_ns + 1_000


def readable(exchange: Mailboxes) -> bool:
    poll = select.poll()
    poll.register(exchange, select.POLLIN)
    return bool(poll.poll(0))


def test_what_is_posted_wakes_the_control_thread_once_and_keeps_its_order() -> None:
    exchange = Mailboxes()
    assert not readable(exchange)
    assert exchange.take_posted() == []
    events = [GroupFormed(1), GroupFormed(2), GroupFormed(3)]
    for event in events:
        exchange.post(event)
    assert readable(exchange)
    assert exchange.take_posted() == events
    assert not readable(exchange)


def test_a_job_goes_on_after_all_only_if_it_was_told_to_rest_before() -> None:
    exchange, found = Mailboxes(), []
    for saves in (False, True, False, True):  # A node joins, a pause, its end, another pause.
        exchange.set_request(RequestLeave(2, "", saves=saves))
        found.append(exchange.is_called_off(2))
    assert found == [False, False, True, False]
    exchange.set_request(RequestLeave(3, ""))
    assert not exchange.is_called_off(3)


def test_a_wish_for_a_checkpoint_holds_for_its_generation_only() -> None:
    exchange = Mailboxes()
    assert exchange.save_request(2) == 0
    exchange.set_save_request(RequestCheckpoint(2, 7))
    assert [exchange.save_request(generation) for generation in (1, 2, 3)] == [0, 7, 0]


def test_an_abort_holds_for_its_generation_and_all_before() -> None:
    exchange = Mailboxes()
    exchange.set_aborted(3)
    exchange.set_aborted(2)
    assert [exchange.was_aborted(generation) for generation in (2, 3, 4)] == [True, True, False]


def test_a_report_is_answered_by_its_generation_and_index() -> None:
    exchange = Mailboxes()
    answer = exchange.expect_answer(2, ReportKind.SCRIPT, 7)
    exchange.resolve(ResolveReport(2, 6, True, ""))
    assert not answer.wait(0.01)
    teller = threading.Thread(target=exchange.resolve, args=(ResolveReport(2, 7, False, "old"),))
    teller.start()
    assert answer.wait(DEADLINE_S)
    teller.join()
    assert (answer.accepted, answer.reason) == (False, "old")


def test_the_first_step_is_told_at_once_and_others_once_a_second() -> None:
    told: list[Progress] = []
    clock = HandClock()
    timing = Timing(clock)
    timing.enter(WorkerId("n1/1"), 3, told.append)
    timing.note_step()
    assert told == [Progress(WorkerId("n1/1"), 3, 1, 1_005)]
    for _ in range(10):
        timing.note_step()
    assert len(told) == 1
    clock.now_ns += INTERVAL_NS
    timing.note_step()
    timing.note_step()
    assert [progress.steps for progress in told] == [1, 12]
    assert {progress.first_step_unix_ns for progress in told} == {1_005}


def told(generation: int, deadline_ns: int = 100) -> NotifyPreemption:
    return NotifyPreemption(generation, deadline_ns, "spot", (LeavingNode(NodeId("n2"), (1,)),))


def test_nodes_that_leave_are_told_for_as_long_as_their_group_stands() -> None:
    exchange = Mailboxes()
    assert exchange.preemption(2, 0) is None
    exchange.set_preemption(told(2))
    assert exchange.preemption(1, 0) is None, "an older group knows nothing of it"
    assert [exchange.preemption(2, now) for now in (0, 500)] == [told(2), told(2)]
    assert exchange.preemption(3, 0) is None, "it has been seen, and that group is over"
