"""The agent's stream to a coordinator: connecting, the next endpoint, refusals, output, the end."""

from __future__ import annotations

import random
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import pytest

from elastic.agent.link import Link, LinkCallbacks
from elastic.core.events.agent import Connected, ConnectionLost, CoordinatorMessageReceived
from elastic.core.facts import Node, NodeId, SessionId, WorkerId
from elastic.core.messages import (
    Coordinators,
    DrainNotice,
    FollowLogs,
    Hello,
    LogLines,
    Refusal,
    Release,
    Welcome,
)
from elastic.errors import ElasticError, NotLeading, Unavailable, VersionMismatch
from elastic.runtime.access import Access
from elastic.runtime.clock import SystemClock
from tests.integration.small_coordinator import (
    Heard,
    SmallCoordinator,
    free_port,
    serving,
)
from tests.patience import DEADLINE_S

pytestmark = pytest.mark.anyio
NODE = Node(NodeId("n1"), 1, "127.0.0.1", 2)
S1, S2 = SessionId("s1"), SessionId("s2")


@asynccontextmanager
async def linked(
    *endpoints: str,
    token: str = "",
    before: Sequence[str] = (),
    learned: list[tuple[str, ...]] | None = None,
) -> AsyncIterator[tuple[Link, Heard]]:
    """A link without a machine, and what it posts."""
    received = Heard()
    callbacks = LinkCallbacks(
        post=received.add,
        on_follow=received.add,
        on_end=lambda: None,
        draw=random.Random(1).random,
        on_learned=learned.append if learned is not None else lambda endpoints: None,
    )
    link = Link(
        endpoints, learned=before, access=Access(token), callbacks=callbacks, clock=SystemClock()
    )
    try:
        yield link, received
    finally:
        with anyio.CancelScope(shield=True):
            await link.close(1.0)


async def welcomed(link: Link, received: Heard, coordinator: SmallCoordinator) -> None:
    """Connect, introduce the node, and be taken in."""
    link.connect(S1)
    await received.wait_for(Connected)
    link.send(S1, Hello(NODE))
    assert await coordinator.received.wait_for(Hello) == Hello(NODE)
    coordinator.say(Welcome("c1"))
    assert await received.wait_for(CoordinatorMessageReceived) == CoordinatorMessageReceived(
        S1, Welcome("c1")
    )


async def test_messages_go_both_ways_in_order() -> None:
    coordinator = SmallCoordinator()
    async with serving(coordinator) as endpoint, linked(endpoint) as (link, received):
        await welcomed(link, received, coordinator)
        for number in range(200):
            link.send(S1, DrainNotice(str(number), number))
            coordinator.say(Release(str(number)))
        await received.wait_for(CoordinatorMessageReceived, lambda e: e.message == Release("199"))
        last = await coordinator.received.wait_for(DrainNotice, lambda m: m.timeout_ns == 199)
        assert last.reason == "199"


@pytest.mark.parametrize(("silence_ms", "dials"), [("", 1), ("1500", 1), ("6000", 2), ("x", 1)])
async def test_a_coordinator_that_wants_fewer_pings_is_dialled_anew_once_and_remembered(
    silence_ms: str, dials: int
) -> None:
    coordinator = SmallCoordinator(silence_ms=silence_ms)
    async with serving(coordinator) as endpoint, linked(endpoint) as (link, received):
        await welcomed(link, received, coordinator)
        assert len(set(coordinator.peers)) == len(coordinator.peers) == dials
        link.disconnect(S1)
        link.connect(S2)
        await received.wait_for(Connected, lambda event: event.session == S2)
        assert len(coordinator.peers) == dials + 1


async def test_a_message_for_another_session_is_dropped() -> None:
    coordinator = SmallCoordinator()
    async with serving(coordinator) as endpoint, linked(endpoint) as (link, received):
        await welcomed(link, received, coordinator)
        link.send(S2, DrainNotice("old", 1))
        link.send(S1, DrainNotice("new", 1))
        assert (await coordinator.received.wait_for(DrainNotice)).reason == "new"


async def test_nobody_there_is_told_with_the_address_and_what_to_do() -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    async with linked(endpoint) as (link, received):
        link.connect(S1)
        lost = await received.wait_for(ConnectionLost)
        assert lost.session == S1
        assert 0.0 <= lost.jitter <= 1.0
        assert f"no coordinator answers at {endpoint}" in lost.reason
        assert f"elastic-coord serve --listen {endpoint}" in lost.reason


async def test_the_next_endpoint_is_tried_when_one_does_not_answer() -> None:
    coordinator = SmallCoordinator()
    async with (
        serving(coordinator) as endpoint,
        linked(f"127.0.0.1:{free_port()}", endpoint) as (link, received),
    ):
        await welcomed(link, received, coordinator)


async def test_an_endpoint_that_answers_and_does_not_lead_is_passed_over() -> None:
    standby = SmallCoordinator(refusal=Unavailable("c2 leads"))
    leader = SmallCoordinator()
    async with (
        serving(standby) as first,
        serving(leader) as second,
        linked(first, second) as (link, received),
    ):
        await welcomed(link, received, leader)


async def test_a_standby_points_to_a_leader_that_the_agent_was_not_told_of() -> None:
    leader = SmallCoordinator()
    async with serving(leader) as second:
        standby = SmallCoordinator(refusal=NotLeading("b leads", leader=second, term=3))
        async with serving(standby) as first, linked(first) as (link, received):
            await welcomed(link, received, leader)
            leader.say(None)
            await received.wait_for(ConnectionLost)
        # It is remembered: the standby is not needed to find it again.
        async with linked(first, second) as (link, received):
            await welcomed(link, received, leader)


async def wait_reported(caplog: pytest.LogCaptureFixture, text: str) -> None:
    with anyio.fail_after(DEADLINE_S):
        while True:
            if text in caplog.text:
                return
            await anyio.sleep(0.02)


async def test_an_agent_that_cannot_reach_the_leader_says_so_while_it_waits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gone = f"127.0.0.1:{free_port()}"
    standby = SmallCoordinator(refusal=NotLeading("it leads", leader=gone, term=3))
    async with serving(standby) as first, linked(first) as (link, received):
        link.connect(S1)
        await wait_reported(caplog, "waiting_for_coordinator")
        assert not received.all
    said = caplog.text
    assert f"the standby at {first} names {gone} as the leader" in said
    assert f"no coordinator answers at {gone}" in said


async def test_an_agent_waits_at_a_standbys_door_until_that_one_leads() -> None:
    gone = f"127.0.0.1:{free_port()}"
    standby = SmallCoordinator(refusal=NotLeading("it led", leader=gone, term=3))
    async with serving(standby) as first, linked(gone, first) as (link, received):
        link.connect(S1)
        with anyio.fail_after(DEADLINE_S):
            await standby.probed_again.wait()
        assert not received.all
        standby.admit()
        await received.wait_for(Connected)


async def test_the_next_endpoint_comes_first_after_a_refusal() -> None:
    first, second = SmallCoordinator(), SmallCoordinator()
    async with (
        serving(first) as one,
        serving(second) as two,
        linked(one, two) as (link, received),
    ):
        link.connect(S2)
        await received.wait_for(Connected)
        # On a slow machine the second one may have been quicker to answer.
        is_first = link._endpoints[0] == one
        refusing, other = (first, second) if is_first else (second, first)
        refusing.say(Refusal("the other one leads", final=False))
        await received.wait_for(CoordinatorMessageReceived)
        link.disconnect(S2)
        await welcomed(link, received, other)


async def test_an_endpoint_that_accepts_and_says_nothing_is_given_up() -> None:
    coordinator = SmallCoordinator()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        mute = f"127.0.0.1:{silent.getsockname()[1]}"
        async with serving(coordinator) as endpoint, linked(mute, endpoint) as (link, received):
            await welcomed(link, received, coordinator)


async def test_a_stream_that_ends_is_told_once_and_another_can_be_opened() -> None:
    coordinator = SmallCoordinator()
    async with serving(coordinator) as endpoint, linked(endpoint) as (link, received):
        await welcomed(link, received, coordinator)
        coordinator.say(None)
        lost = await received.wait_for(ConnectionLost)
        assert lost.reason == f"the coordinator at {endpoint} ended the stream"
        await welcomed(link, received, coordinator)
        assert not [event for event in received.all if isinstance(event, ConnectionLost)]


async def test_a_dropped_stream_is_told_to_the_coordinator_and_not_to_the_machine() -> None:
    coordinator = SmallCoordinator()
    async with serving(coordinator) as endpoint, linked(endpoint) as (link, received):
        await welcomed(link, received, coordinator)
        link.disconnect(S1)
        with anyio.fail_after(DEADLINE_S):
            await coordinator.ended.wait()
        assert received.all == []


@pytest.mark.parametrize(
    ("mine", "theirs", "refusal", "told"),
    [
        ("", "word", None, "without a token"),
        ("wrong", "word", None, "wrong token"),
        ("", "", VersionMismatch("agent", theirs="1.0", ours="9.0"), "install the same version"),
    ],
    ids=["no-token", "wrong-token", "other-version"],
)
async def test_a_first_refusal_at_the_door_is_final(
    mine: str, theirs: str, refusal: ElasticError | None, told: str
) -> None:
    coordinator = SmallCoordinator(token=theirs, refusal=refusal)
    async with serving(coordinator) as endpoint, linked(endpoint, token=mine) as (link, received):
        link.connect(S1)
        said = await received.wait_for(CoordinatorMessageReceived)
        assert isinstance(said.message, Refusal)
        assert said.message.final
        assert told in said.message.reason


async def test_a_refusal_at_the_door_after_a_welcome_is_not_final() -> None:
    """A coordinator restarted with a wrong token file must not end running workers."""
    port = free_port()
    first = SmallCoordinator(token="word")
    async with linked(f"127.0.0.1:{port}", token="word") as (link, received):
        async with serving(first, port):
            await welcomed(link, received, first)
        await received.wait_for(ConnectionLost)
        async with serving(SmallCoordinator(token="other"), port):
            link.connect(S2)
            lost = await received.wait_for(ConnectionLost)
            assert "wrong token" in lost.reason


async def test_output_waits_for_room_and_ends_with_the_stream() -> None:
    coordinator = SmallCoordinator()
    lines = LogLines("f1", WorkerId("n1/1"), "text\n")
    async with serving(coordinator) as endpoint, linked(endpoint) as (link, received):
        assert not await link.send_lines(lines) or True
        await welcomed(link, received, coordinator)
        coordinator.say(FollowLogs("f1", WorkerId("n1/1")))
        assert (await received.wait_for(FollowLogs)).follow_id == "f1"
        for _ in range(100):
            assert await link.send_lines(lines)
        link.disconnect(S1)
        assert not await link.send_lines(lines)


async def test_an_agent_that_was_given_one_address_follows_to_one_that_it_was_told_of() -> None:
    port = free_port()
    first, second = SmallCoordinator(), SmallCoordinator()
    learned: list[tuple[str, ...]] = []
    async with (
        serving(second) as standby,
        linked(f"127.0.0.1:{port}", learned=learned) as (
            link,
            received,
        ),
    ):
        async with serving(first, port):
            await welcomed(link, received, first)
            first.say(Coordinators((f"127.0.0.1:{port}", "no address", standby)))
            first.say(Release("behind it"))
            await received.wait_for(CoordinatorMessageReceived)
        await received.wait_for(ConnectionLost)
        assert learned == [(standby,)]
        link.connect(S2)
        assert (await received.wait_for(Connected)).session == S2


async def test_what_was_learned_long_ago_cannot_end_an_agent() -> None:
    """Another cluster may answer there by now, and does not know our token."""
    other, port = SmallCoordinator(token="theirs"), free_port()
    async with (
        serving(other) as stranger,
        linked(f"127.0.0.1:{port}", token="ours", before=(stranger,)) as (link, received),
    ):
        link.connect(S1)
        lost = await received.wait_for(ConnectionLost)
        assert "wrong token" in lost.reason
        assert f"127.0.0.1:{port}" in lost.reason
