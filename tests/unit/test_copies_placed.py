"""Which node holds the copy of a job's state, and who is told so, by the coordinator and agents."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.client.show import copies_line
from elastic.core.copy_messages import CopiesHeld, CopyFailed, Doors, DropCopy, KeepCopy, Replicate
from elastic.core.events.agent import (
    Connected,
    ConnectionLost,
    CopiesChanged,
    HandleCopy,
    PushFailed,
    SendCoordinator,
)
from elastic.core.events.coordinator import SendAgent
from elastic.core.events.shared import Tick
from elastic.core.machine import copies
from elastic.core.machine.agent import AgentMachine
from elastic.core.machine.agent_copies import ORPHANED_S
from elastic.core.machine.copies import REFUSED_S
from elastic.core.machine.transitions import ConnectionPhase
from elastic.core.messages import Hello, Welcome
from elastic.core.policy import replication
from elastic.core.policy.replication import NO_COPY, NO_NODE, Place, choose, is_fit
from elastic.core.view import CopyView
from elastic.core.world import HeldCopy, JobId, Node, NodeId, WorkerId, WorkerPhase
from tests.unit.agent_under_test import Agent
from tests.unit.coordinator_under_test import CONFIG, Coordinator

JOB = JobId("j")
Kind = TypeVar("Kind")


def place(name: str, **fields: Any) -> Place:
    return Place(NodeId(name), **{"host": name, **fields})


# ------------------------------------------------------------------- the policy

CASES = {
    "the only one that does not train": (
        [place("a", has_members=True), place("b")], "b",
    ),
    "who has one already": ([place("a"), place("b", copy=(1, 5))], "b"),
    "who has the newest": ([place("a", copy=(1, 9)), place("b", copy=(2, 5))], "b"),
    "who holds least": ([place("a", num_copies=2), place("b", num_copies=1)], "b"),
    "another machine than the members'": (
        [place("a", host="h"), place("b"), place("c", host="h", has_members=True)], "b",
    ),
    "the same machine, if there is no other": (
        [place("a", host="h"), place("c", host="h", has_members=True)], "a",
    ),
    "another zone, though the machine is another one anyway": (
        [place("a", zone="x"), place("b", zone="y", num_copies=1),
         place("c", zone="x", has_members=True)], "b",
    ),
    "a zone that is known to be another": (
        [place("a"), place("b", zone="y"), place("c", zone="x", has_members=True)], "b",
    ),
    "the same zone, if there is no other": (
        [place("a", zone="x"), place("c", zone="x", has_members=True)], "a",
    ),
    "of equals the first": ([place("b"), place("a")], "a"),
    "not one that leaves": ([place("a", is_leaving=True), place("b")], "b"),
    "not one that is away": ([place("a", is_live=False), place("b")], "b"),
    "not one that takes none": ([place("a", takes_copies=False), place("b")], "b"),
    "not one that could not": ([place("a", refused_until_ns=101), place("b")], "b"),
    "one that could not long ago": ([place("a", refused_until_ns=100)], "a"),
    "nobody": ([place("a", has_members=True)], NO_NODE),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_copy_goes_to(name: str) -> None:
    places, expected = CASES[name]
    assert choose(places, 100).value == expected


def test_if_there_is_nobody_it_says_why_and_when_to_ask_again() -> None:
    decision = choose([place("a", has_members=True), place("b", refused_until_ns=500)], 100)
    assert decision.value == NO_NODE
    assert "2 live, 1 of them train the job themselves, 1 cannot be reached" in decision.reason
    assert decision.wake_ns == 500


def test_one_that_is_away_for_a_moment_keeps_it() -> None:
    assert is_fit(place("a", is_live=False), 0)
    assert not is_fit(place("a", is_present=False, is_live=False), 0)


PLACES = st.lists(
    st.builds(
        Place,
        node_id=st.sampled_from([NodeId(name) for name in "abcdef"]),
        host=st.sampled_from("xyz"),
        zone=st.sampled_from(["", "r", "s"]),
        is_live=st.booleans(),
        is_leaving=st.booleans(),
        has_members=st.booleans(),
        copy=st.tuples(st.integers(0, 2), st.integers(-1, 3)),
        num_copies=st.integers(0, 2),
        refused_until_ns=st.integers(0, 2),
    ),
    unique_by=lambda one: one.node_id,
)


@given(PLACES, st.integers(0, 3), st.randoms())
def test_the_choice_may_hold_it_and_does_not_depend_on_the_order(
    places: list[Place], now_ns: int, rng: Any
) -> None:
    chosen = choose(places, now_ns).value
    able = [p for p in places if p.is_live and is_fit(p, now_ns)]
    assert (chosen == NO_NODE) == (not able)
    assert all(p.copy <= q.copy for p in able for q in able if q.node_id == chosen)
    rng.shuffle(places)
    assert choose(places, now_ns).value == chosen


def test_a_copy_is_superfluous_once_the_chosen_node_has_one_that_is_no_older() -> None:
    assert replication.is_superfluous((1, 5), (1, 5))
    assert not replication.is_superfluous((1, 6), (1, 5))
    assert not replication.is_superfluous((1, 6), NO_COPY)


# ------------------------------------------------------------------- the coordinator


class Cluster:
    """Nodes a, b, c with a slot each; a job of one worker that wants copies trains on a."""

    def __init__(self, nodes: str = "abc", trains: str = "a") -> None:
        self.played = Coordinator()
        for name in nodes:
            self.join(name)
        self.played.submit("j", len(trains))
        self.train(*[f"{name}/1" for name in trains])

    def join(self, name: str, *copies: HeldCopy) -> None:
        self.played.agent(name, copies=copies, copies_at=f"{name}:9")

    def train(self, *workers: str) -> None:
        self.played.ready(*workers)
        for worker in workers:
            self.played.update(worker, WorkerPhase.TRAINING, copies_every=5)

    def holds(self, name: str, steps: int, generation: int = 1) -> None:
        self.played.says(name, CopiesHeld((HeldCopy(JOB, generation, steps),)))

    def told(self, kind: type[Kind]) -> list[tuple[str, Kind]]:
        """Return what nodes were told of this kind in the last step, or the last while."""
        return [
            (self.played.names[e.session], e.message)
            for e in self.played.effects
            if isinstance(e, SendAgent) and isinstance(e.message, kind)
        ]

    def orders(self) -> list[tuple[str, str]]:
        """Return who was told to send copies, and where to."""
        return [(name, order.address) for name, order in self.told(Replicate)]


def test_one_node_is_told_to_hold_a_copy_and_one_to_send_it() -> None:
    cluster = Cluster()
    ((holder, keep),) = cluster.told(KeepCopy)
    ((source, order),) = cluster.told(Replicate)
    assert (holder, source) == ("b", "a")
    assert (order.node_id, order.address, order.every_n_steps) == ("b", "b:9", 5)
    assert keep.key == order.key
    assert len(keep.key) == 64
    assert keep.key not in repr(keep) + repr(order)


def test_nothing_is_said_twice() -> None:
    cluster = Cluster()
    cluster.holds("b", 5)
    cluster.holds("b", 10)
    cluster.played.advance(10)
    assert not cluster.played.effects or not cluster.told(Replicate) + cluster.told(KeepCopy)


def test_a_job_that_wants_no_copies_has_none() -> None:
    played = Coordinator()
    for name in "ab":
        played.agent(name, copies_at=f"{name}:9")
    played.submit("j", 1)
    played.ready("a/1")
    played.training("a/1")
    assert not played.sent(KeepCopy) + played.sent(Replicate)


def test_another_node_is_chosen_if_one_cannot_be_reached() -> None:
    cluster = Cluster()
    cluster.played.says("a", CopyFailed(JOB, NodeId("b"), "no room"))
    assert cluster.orders() == [("a", "c:9")]
    assert [name for name, _ in cluster.told(KeepCopy)] == ["c"]
    cluster.played.says("a", CopyFailed(JOB, NodeId("b"), "told late"))
    assert cluster.orders() == []
    cluster.played.says("a", CopyFailed(JOB, NodeId("c"), "no room"))
    assert cluster.orders() == [("a", "")]  # Nobody is left: stop.
    cluster.played.advance(REFUSED_S)
    assert cluster.orders() == [("a", "b:9")]


def test_what_others_than_the_sender_say_of_failures_does_not_count() -> None:
    cluster = Cluster()
    cluster.played.says("c", CopyFailed(JOB, NodeId("b"), "a lie"))
    assert cluster.orders() == []


def test_another_node_is_chosen_if_one_is_lost_but_not_if_it_is_away_for_a_moment() -> None:
    cluster = Cluster()
    cluster.played.disconnect("b")
    assert cluster.orders() == []
    cluster.join("b")
    assert [name for name, _ in cluster.told(KeepCopy)] == ["b"]  # It may have missed it.
    cluster.played.disconnect("b")
    cluster.played.advance(1)
    assert cluster.orders() == [("a", "c:9")]


def test_another_node_is_chosen_if_one_drains_and_the_old_copy_stays_until_then() -> None:
    cluster = Cluster()
    cluster.holds("b", 50)
    cluster.played.notice("b", 60)
    assert cluster.orders() == [("a", "c:9")]
    cluster.holds("c", 45)
    assert cluster.told(DropCopy) == []
    cluster.holds("c", 55)
    ((name, drop),) = cluster.told(DropCopy)
    # One that comes to b before it hears this is newer than what c has, and stays.
    assert (name, drop.spares(1, 50), drop.spares(1, 51)) == ("b", False, True)


def test_a_new_worker_learns_where_the_copy_is() -> None:
    cluster = Cluster()
    key = cluster.told(KeepCopy)[0][1].key
    cluster.holds("b", 50)
    cluster.played.disconnect("a")
    cluster.played.advance(1)
    cluster.played.ready("b/1")
    told = cluster.played.announced[WorkerId("b/1")].assignment
    assert told.generation == 2
    assert told.copies == ("b:9",)
    assert told.copies_key == key
    assert key not in repr(told)
    # It trains where the copy lies: another node is to hold the next, and that one stays till then.
    assert cluster.orders() == [("b", "c:9")]
    cluster.holds("c", 60, generation=2)
    assert [name for name, _ in cluster.told(DropCopy)] == ["b"]


def test_the_first_group_has_no_copies_to_go_on_from() -> None:
    told = Cluster().played.announced[WorkerId("a/1")].assignment
    assert told.copies == ()
    assert told.copies_key == ""


@pytest.mark.parametrize("how", ["stopped", "finished"])
def test_when_the_job_ends_nobody_holds_or_sends_any_more(how: str) -> None:
    cluster = Cluster()
    cluster.holds("b", 50)
    if how == "stopped":
        cluster.played.stop("j")
    else:
        cluster.played.finished("a/1")
    assert [name for name, _ in cluster.told(DropCopy)] == ["b"]
    assert cluster.orders() == [("a", "")]


def test_a_node_that_was_away_when_the_job_ended_is_told_when_it_is_back() -> None:
    cluster = Cluster()
    cluster.holds("b", 50)
    cluster.played.disconnect("b")
    cluster.played.stop("j")
    cluster.join("b", HeldCopy(JOB, 1, 50), HeldCopy(JobId("unknown"), 1, 5))
    assert {(name, drop.job_id) for name, drop in cluster.told(DropCopy)} == {
        ("b", "j"),
        ("b", "unknown"),
    }


def test_a_new_coordinator_learns_from_the_nodes_and_moves_nothing() -> None:
    cluster = Cluster()
    cluster.played.says("a", CopyFailed(JOB, NodeId("b"), "no room"))
    cluster.holds("c", 50)
    cluster.played.restart()
    cluster.join("a")
    cluster.join("b")
    assert cluster.orders() == []  # Who holds it is about to say so.
    cluster.played.advance(5)
    assert cluster.orders() == []
    cluster.join("c", HeldCopy(JOB, 1, 50))
    assert [name for name, _ in cluster.told(KeepCopy)] == ["c"]
    assert cluster.orders() == [("a", "c:9")]


def test_a_new_coordinator_does_not_wait_for_ever() -> None:
    cluster = Cluster()
    cluster.played.restart()
    cluster.join("a")
    cluster.join("b")
    cluster.played.advance(CONFIG.adoption_grace_s)
    assert cluster.orders() == [("a", "b:9")]


def test_the_keys_of_jobs_and_of_coordinators_differ() -> None:
    keys = set()
    for secret in (b"one", b"other"):
        cluster = Cluster("ab")
        cluster.played.machine._cluster.secret = secret
        for job in ("j", "k"):
            keys.add(copies.key_of(cluster.played.machine._cluster, JobId(job)))
    assert len(keys) == 4


# ------------------------------------------------------------------- the agent


def held_by(agent: Agent) -> list[CopiesHeld]:
    said = [e.message for e in agent.last if isinstance(e, SendCoordinator)]
    return [message for message in said if isinstance(message, CopiesHeld)]


def test_an_agent_tells_what_it_holds_when_it_changes_and_in_its_hello() -> None:
    agent = registered()
    copy = HeldCopy(JOB, 1, 5)
    agent.do(CopiesChanged((copy,)))
    assert held_by(agent) == [CopiesHeld((copy,))]
    agent.do(CopiesChanged((copy,)))
    assert held_by(agent) == []
    agent.do(ConnectionLost(agent.session, "cut", 0.0))
    agent.do(CopiesChanged((copy, HeldCopy(JobId("k"), 1, 2))))
    assert held_by(agent) == []
    hello = greet(agent)
    assert [one.job_id for one in hello.copies] == ["j", "k"]
    assert hello.copies_at == "10.0.0.1:99"


def test_an_agent_does_what_it_is_told_and_tells_what_failed() -> None:
    agent = registered()
    for order in (
        KeepCopy(JOB, "key"),
        DropCopy(JOB, "over"),
        Replicate(JOB, NodeId("b"), "b:9", "key", 5),
    ):
        assert agent.hear(order) == [HandleCopy(order)]
    agent.do(PushFailed(JOB, NodeId("b"), "no room"))
    said = [e.message for e in agent.last if isinstance(e, SendCoordinator)]
    assert said == [CopyFailed(JOB, NodeId("b"), "no room")]


def test_an_agent_that_hears_of_no_coordinator_for_long_frees_what_it_holds() -> None:
    agent = registered()
    agent.do(CopiesChanged((HeldCopy(JOB, 1, 5),)))
    agent.do(ConnectionLost(agent.session, "cut", 0.0))
    assert not dropped(agent.pass_time(ORPHANED_S - 1))
    greet(agent)
    agent.do(ConnectionLost(agent.session, "cut", 0.0))
    assert not dropped(agent.pass_time(ORPHANED_S - 1))
    assert [effect.order.job_id for effect in dropped(agent.pass_time(2))] == ["j"]


def dropped(effects: list[Any]) -> list[HandleCopy]:
    return [effect for effect in effects if isinstance(effect, HandleCopy)]


def registered() -> Agent:
    agent = Agent()
    agent.machine = AgentMachine(
        Node(NodeId("n"), 7, "10.0.0.1", 4), agent.machine._books.config, doors=Doors("10.0.0.1:99")
    )
    greet(agent)
    return agent


def greet(agent: Agent) -> Hello:
    """Bring the agent to where the coordinator knows it; returns what it said of itself."""
    agent.do(Tick())
    if agent.machine._books.connection.phase is ConnectionPhase.DISCONNECTED:
        agent.at_deadline()
    agent.do(Connected(agent.session))
    (hello,) = [e.message for e in agent.last if isinstance(e, SendCoordinator)]
    assert isinstance(hello, Hello)
    agent.hear(Welcome("c"))
    return hello


# ------------------------------------------------------------------- what status shows


def test_status_shows_where_a_copy_lies_and_since_when() -> None:
    cluster = Cluster()
    assert cluster.played.job("j").copies == ()
    cluster.holds("b", 5)
    told_ns = cluster.played.now_ns
    cluster.played.advance(3)
    cluster.holds("b", 5)
    shown = CopyView(NodeId("b"), NodeId("a"), 1, 5, told_ns)
    assert cluster.played.job("j").copies == (shown,), "the same is no news"
    cluster.holds("b", 10)
    assert cluster.played.job("j").copies[0].since_ns == cluster.played.now_ns
    cluster.played.says("b", CopiesHeld(()))
    assert cluster.played.job("j").copies == ()


def test_copies_are_one_line() -> None:
    cluster = Cluster()
    view = cluster.played.job("j")
    assert copies_line(view, 0) == ""
    lying = [CopyView(NodeId(f"n{n}"), NodeId("a"), 1, 400, 0) for n in range(6)]
    one = dataclasses.replace(view, copies=(lying[0],))
    assert copies_line(one, 3_000_000_000) == "a → n0 step 400 (3.0 s ago)"
    all_of_them = dataclasses.replace(view, copies=tuple(lying))
    assert copies_line(all_of_them, 0).endswith("n3 step 400 (0.0 s ago), and 2 more")
    nobody = dataclasses.replace(lying[0], source=NodeId(""))
    assert copies_line(dataclasses.replace(view, copies=(nobody,)), 0) == "n0 step 400 (0.0 s ago)"
