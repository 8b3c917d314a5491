"""The driver: order, barriers, limits, and ends that are told once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import pytest

from elastic.coord.driver import Driver
from elastic.coord.journal import Journal
from elastic.coord.leadership import Leadership
from elastic.coord.sessions import Session, Sessions
from elastic.coord.watchers import Watchers
from elastic.core.config import NS_PER_S
from elastic.core.events.coordinator import (
    AgentConnected,
    AgentDisconnected,
    AgentMessageReceived,
    CloseSession,
    CoordinatorEffect,
    CoordinatorEvent,
    EventBatch,
    Persist,
    Recovered,
    Reply,
    SendAgent,
    StopRequested,
)
from elastic.core.events.shared import Note, Tick
from elastic.core.facts import JobId, Member, Node, NodeId, WorkerId
from elastic.core.messages import (
    CoordinatorMessage,
    DrainNotice,
    ForgetWorker,
    Hello,
    Release,
    Welcome,
)
from elastic.core.view import ClusterView, JobSample
from elastic.errors import InvariantViolation
from elastic.runtime.clock import SystemClock
from tests.patience import DEADLINE_S, wait_for_async
from tests.unit.journal_under_test import Weak, holder, record

pytestmark = pytest.mark.anyio

Script = Callable[[CoordinatorEvent], tuple[CoordinatorEffect, ...]]


class ScriptedMachine:
    """Keeps what happened to it and answers from a script."""

    def __init__(self, script: Script = lambda event: ()) -> None:
        self.events: list[CoordinatorEvent] = []
        self.deadline_ns: int | None = None
        self._script = script

    def step(self, event: CoordinatorEvent, now_ns: int) -> tuple[CoordinatorEffect, ...]:
        events = event.events if isinstance(event, EventBatch) else (event,)
        self.events.extend(events)
        return tuple(effect for one in events for effect in self._script(one))

    def next_deadline_ns(self) -> int | None:
        return self.deadline_ns

    def view(self, now_ns: int) -> ClusterView:
        return ClusterView(now_ns, (), ())

    def samples(self) -> tuple[JobSample, ...]:
        return ()

    def first_member(self, job_id: JobId) -> Member | None:
        return None


async def stopped(machine: ScriptedMachine, *, events_max: int = 100) -> tuple[Driver, Weak]:
    """A driver that may write and does not run yet."""
    weak = Weak()
    clock = SystemClock()
    leadership = Leadership(weak, "test", holder("a"), clock)
    await leadership.acquire(lambda _: None)
    journal = Journal(weak, "test", leadership)  # type: ignore[arg-type]
    return Driver(machine, journal, clock, events_max=events_max), weak


@asynccontextmanager
async def running(
    machine: ScriptedMachine, *, events_max: int = 100
) -> AsyncIterator[tuple[Driver, Weak]]:
    driver, weak = await stopped(machine, events_max=events_max)
    with anyio.fail_after(DEADLINE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(driver.run)
            await driver.wait_recovered()
            yield driver, weak
            tasks.cancel_scope.cancel()


def hello(node_id: str = "n1") -> Hello:
    return Hello(Node(NodeId(node_id), 1, "127.0.0.1", 1))


def stop(request_id: str) -> StopRequested:
    return StopRequested(request_id, JobId("j-1"), "why")


async def next_message(session: Session) -> CoordinatorMessage | None:
    """Return what is to be written to an agent next, None at the end."""
    news = asyncio.Event()
    session.on_news(news.set)
    with anyio.fail_after(DEADLINE_S):
        while (message := session.next_message()) is None and not session.is_over():
            news.clear()
            await news.wait()
    return message


async def test_nothing_behind_a_persist_happens_before_it_is_durable() -> None:
    def script(event: CoordinatorEvent) -> tuple[CoordinatorEffect, ...]:
        if not isinstance(event, AgentConnected):
            return ()
        before = SendAgent(event.session, ForgetWorker(WorkerId("n1/1")))
        after = SendAgent(event.session, Release("durable"))
        return (before, Persist((record(),)), after)

    async with running(ScriptedMachine(script)) as (driver, weak):
        session = driver.sessions.open("peer")
        weak.fail_before = 7
        await driver.connect(session, hello())
        assert await next_message(session) == ForgetWorker(WorkerId("n1/1"))
        await wait_for_async(lambda: driver.waits_for_store())
        assert driver.waits_for_store() == "waiting for the store since 1 s"
        assert not weak.commits[1:]  # The first one is the leader key.
        assert await next_message(session) == Release("durable")
        assert len(weak.commits) == 2
        assert driver.waits_for_store() == ""


async def test_requests_are_answered_in_the_order_of_effects() -> None:
    def script(event: CoordinatorEvent) -> tuple[CoordinatorEffect, ...]:
        if isinstance(event, StopRequested):
            return (Persist((record(),)), Reply(event.request_id, "", event.job_id))
        return ()

    async with running(ScriptedMachine(script)) as (driver, weak):
        weak.fail_before = 1
        assert (await driver.request(stop)).text == "j-1"


async def test_the_machine_gets_a_tick_when_its_deadline_comes() -> None:
    machine = ScriptedMachine()
    async with running(machine) as (driver, _):
        machine.deadline_ns = SystemClock().monotonic_ns() + NS_PER_S // 20
        await driver.connect(driver.sessions.open("peer"), hello())
        await wait_for_async(lambda: Tick() in machine.events)
        machine.deadline_ns = None


async def test_a_tick_comes_behind_what_was_said_before_its_deadline() -> None:
    machine = ScriptedMachine()
    driver, _ = await stopped(machine)
    session = driver.sessions.open("peer")
    said = [DrainNotice("in time", index) for index in range(20)]
    for message in said:
        await driver.receive(session, message)
    machine.deadline_ns = 1
    with anyio.fail_after(DEADLINE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(driver.run)
            await wait_for_async(lambda: Tick() in machine.events)
            tasks.cancel_scope.cancel()
    before = machine.events[: machine.events.index(Tick())]
    assert [event.message for event in before if isinstance(event, AgentMessageReceived)] == said


async def test_the_end_of_a_session_is_told_once_and_after_all_that_was_said() -> None:
    machine = ScriptedMachine()
    async with running(machine) as (driver, _):
        session = driver.sessions.open("peer")
        await driver.connect(session, hello())
        await driver.receive(session, DrainNotice("bye", 0))
        for reason in ("first", "second", "third"):
            driver.disconnect(session, reason)
        other = driver.sessions.open("peer")
        await driver.connect(other, hello())
        await wait_for_async(
            lambda: machine.events[-1] == AgentConnected(other.session_id, hello())
        )
        number = session.session_id
        first = machine.events[0]
        assert isinstance(first, Recovered)
        assert machine.events == [
            Recovered((), 1, first.history),
            AgentConnected(number, hello()),
            AgentMessageReceived(number, DrainNotice("bye", 0)),
            AgentDisconnected(number, "first"),
            AgentConnected(other.session_id, hello()),
        ]


async def test_agents_wait_when_the_machine_is_behind_but_ends_do_not() -> None:
    machine = ScriptedMachine(
        lambda event: (Persist((record(),)),) if isinstance(event, AgentConnected) else ()
    )
    async with running(machine, events_max=2) as (driver, weak):
        weak.fail_before = 1_000
        session = driver.sessions.open("peer")
        await driver.connect(session, hello())
        await wait_for_async(lambda: weak.fail_before < 1_000)
        with anyio.move_on_after(0.05) as waiting:
            for _ in range(3):
                await driver.receive(session, DrainNotice("now", 0))
        assert waiting.cancelled_caught
        driver.disconnect(session, "gone")
        weak.fail_before = 0
        gone = AgentDisconnected(session.session_id, "gone")
        await wait_for_async(lambda: gone in machine.events)
        assert sum(isinstance(event, AgentMessageReceived) for event in machine.events) == 2


async def test_a_welcome_makes_the_session_the_node_s_own_and_a_close_ends_it() -> None:
    def script(event: CoordinatorEvent) -> tuple[CoordinatorEffect, ...]:
        if isinstance(event, AgentConnected):
            return (SendAgent(event.session, Welcome("c")), CloseSession(event.session, "enough"))
        return ()

    async with running(ScriptedMachine(script)) as (driver, _):
        session = driver.sessions.open("peer")
        await driver.connect(session, hello("n7"))
        assert await next_message(session) == Welcome("c")
        assert await next_message(session) is None
        assert session.reason == "enough"
        assert driver.sessions.of_node(NodeId("n7")) is session
        driver.disconnect(session, "gone")
        assert driver.sessions.of_node(NodeId("n7")) is None


async def test_a_bug_of_the_machine_ends_the_driver() -> None:
    def script(event: CoordinatorEvent) -> tuple[CoordinatorEffect, ...]:
        raise InvariantViolation("a bug", ["what led here"])

    driver, _ = await stopped(ScriptedMachine(script))
    with pytest.raises(InvariantViolation, match="what led here"):
        await driver.run()


# ------------------------------------------------------------------------------ sessions, watchers


async def test_an_agent_that_does_not_read_is_cut_off() -> None:
    session = Sessions(limit=3).open("peer")
    for number in range(5):
        session.send(ForgetWorker(WorkerId(f"n1/{number}")))
    with anyio.fail_after(DEADLINE_S):
        await session.wait_cut()
        assert await next_message(session) is None
    assert "does not read" in session.reason


async def test_a_slow_watcher_loses_the_oldest_notes_and_is_told_how_many() -> None:
    watchers = Watchers(SystemClock())
    with watchers.subscribe(JobId("j-1")) as watcher:
        for number in range(1_010):
            watchers.publish(Note("step", "j-1", (("number", str(number)),)))
        watchers.publish(Note("other", "j-2"))
        notes = [timed.note for timed in watcher.take()]
    assert notes[0] == Note("notes_dropped", "j-1", (("number", "10"),))
    assert notes[1].fields == (("number", "10"),)
    assert len(notes) == 1_001
    watchers.publish(Note("step", "j-1"))
    assert not watcher.take()
