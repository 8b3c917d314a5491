"""Which node holds a copy of a job's state, and when a drained one may go with what it holds."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from elastic.core.copy_messages import CopiesHeld, CopyFailed, DropCopy, Replicate
from elastic.core.events.coordinator import SendAgent
from elastic.core.facts import HeldCopy, JobId, JobPhase, NodeId, WorkerPhase
from elastic.core.machine.copies import REFUSED_S
from elastic.core.messages import Release
from elastic.core.policy.replication import NO_NODE, TRAINING_COUNTS, CopyCandidate, choose, ring
from tests.unit.coordinator_under_test import STOPPED, Coordinator
from tests.unit.test_sharded_copies import Cluster as Sharded

JOB = JobId("j")
NOTICE_S = 60


# ------------------------------------------------------------------- which node


def node(name: str, **fields: Any) -> CopyCandidate:
    return CopyCandidate(NodeId(name), **{"host": name, **fields})


SOURCE = node("s", zone="x", trains=True)
CASES: dict[str, tuple[list[CopyCandidate], str]] = {
    "another zone": ([node("a", zone="y", trains=True), node("b", zone="x")], "a"),
    "a zone that is known": ([node("a"), node("b", zone="y", trains=True)], "b"),
    "a zone without any member": ([node("a", zone="w"), node("b", zone="y", trains=True)], "b"),
    "another host": ([node("a", host="s"), node("b", trains=True)], "b"),
    "one that does not train": ([node("a", trains=True), node("b")], "b"),
    "its own host, if there is no other": ([node("a", host="s", zone="x", trains=True)], "a"),
    "the one that has the newest": ([node("a", zone="y"), node("old"), node("new")], "new"),
    "none that is barred": ([node("barred", zone="y")], NO_NODE),
    "none": ([], NO_NODE),
}


@pytest.mark.parametrize("name", CASES)
def test_a_copy_goes_to(name: str) -> None:
    others, expected = CASES[name]
    ages = {NodeId("old"): (1, 5), NodeId("new"): (1, 6)}
    nodes = ring([*others, SOURCE])
    having = [SOURCE, node("member", zone="w", trains=True)]
    assert choose(having, nodes, {SOURCE.node_id, NodeId("barred")}, ages, {}).value == expected


def test_of_a_thousand_nodes_none_holds_many_and_each_copy_lies_in_another_zone() -> None:
    nodes = [node(f"gpu-{n:04}", zone=f"z{n // 500}", trains=n % 10 > 0) for n in range(1000)]
    order, zones = ring(nodes), {one.node_id: one.zone for one in nodes}
    num_copies = Counter[NodeId]()
    for one in nodes:
        holder = choose([one], order, {one.node_id}, {}, num_copies).value
        assert zones[holder] != one.zone
        num_copies[holder] += 1
    assert max(num_copies.values()) <= TRAINING_COUNTS + 1


# ------------------------------------------------------------------- as the coordinator orders it


class Cluster:
    """Nodes with a slot each; a job that is not sharded, and wants copies, trains on some."""

    def __init__(self, nodes: str = "abc", trains: str = "a") -> None:
        self.played = Coordinator()
        for name in nodes:
            self.played.agent(name, copies_at=f"{name}:9")
        self.played.submit("j", len(trains))
        self.played.ready(*[f"{name}/1" for name in trains])
        for name in trains:
            self.played.update(f"{name}/1", WorkerPhase.TRAINING, copies_every=5)

    def holds(self, name: str, steps: int) -> None:
        self.played.says(name, CopiesHeld((HeldCopy(JOB, 1, steps),)))

    def orders(self) -> dict[str, str]:
        """Return where each node was ordered to send its copies, in the last step or while."""
        return {
            self.played.names[e.session]: e.message.address
            for e in self.played.effects
            if isinstance(e, SendAgent) and isinstance(e.message, Replicate)
        }

    def holder(self) -> str:
        (address,) = self.orders().values()
        return address.partition(":")[0]

    def is_released(self, name: str) -> bool:
        sent = [e for e in self.played.effects if isinstance(e, SendAgent)]
        return name in [
            self.played.names[e.session] for e in sent if isinstance(e.message, Release)
        ]


def test_another_node_is_chosen_if_one_refuses_and_that_one_not_for_a_while() -> None:
    cluster = Cluster()
    first = cluster.holder()
    cluster.played.says("a", CopyFailed(JOB, NodeId(first), "no room"))
    second = cluster.holder()
    assert {first, second} == {"b", "c"}
    cluster.played.says("a", CopyFailed(JOB, NodeId(second), "no room"))
    assert cluster.orders() == {"a": ""}
    cluster.played.advance(REFUSED_S)
    assert cluster.holder() == first


def test_a_copy_stays_where_it_is_and_is_sent_again_if_it_was_lost_there() -> None:
    cluster = Cluster("ab")
    cluster.holds("b", 50)
    for name in ("c", "d"):
        cluster.played.agent(name, copies_at=f"{name}:9")
        assert cluster.orders() == {}
    cluster.played.says("b", CopiesHeld(()))
    assert cluster.orders() == {"a": "b:9"}
    cluster.holds("b", 50)
    cluster.played.disconnect("b")
    cluster.played.agent("b", incarnation=2, copies_at="b:9")
    assert cluster.orders() == {"a": "b:9"}


def test_a_new_coordinator_moves_nothing() -> None:
    cluster = Cluster()
    other = "b" if cluster.holder() == "c" else "c"
    cluster.played.restart()
    for name in "abc":
        copies = (HeldCopy(JOB, 1, 50),) if name == other else ()
        cluster.played.agent(name, copies=copies, copies_at=f"{name}:9")
    cluster.played.advance(5)
    assert cluster.orders() in ({}, {"a": f"{other}:9"})


# ------------------------------------------------------------------- when a drained node may go


def test_a_drained_node_stays_until_its_copy_lies_elsewhere() -> None:
    cluster = Cluster()
    first = cluster.holder()
    cluster.holds(first, 50)
    cluster.played.notice(first, NOTICE_S)
    second = cluster.holder()
    assert second != first
    assert "has state of job j" in cluster.played.node(first).reason
    cluster.holds(second, 45)
    assert not cluster.is_released(first)
    cluster.holds(second, 50)
    assert cluster.is_released(first)
    assert cluster.played.sent(DropCopy)


@pytest.mark.parametrize("why", ["its time is over", "no node takes it", "its job ends"])
def test_it_goes_with_its_copy_if(why: str) -> None:
    cluster = Cluster("ab" if why == "no node takes it" else "abc")
    holder = cluster.holder()
    cluster.holds(holder, 50)
    cluster.played.notice(holder, NOTICE_S)
    assert cluster.is_released(holder) == (why == "no node takes it")
    if why == "its time is over":
        cluster.played.advance(NOTICE_S)
    elif why == "its job ends":
        cluster.played.stop("j")
    assert cluster.is_released(holder)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_job_that_waits_keeps_the_copy_unless_a_waiting_worker_has_the_state(
    in_place: bool,
) -> None:
    cluster = Cluster("abcd", trains="ab")
    for name in "cd":
        cluster.played.cordon(name)
    cluster.played.update("a/1", WorkerPhase.TRAINING, in_place=in_place)
    cluster.holds("d", 50)
    cluster.played.disconnect("b")
    cluster.played.advance(1)
    cluster.played.ready("a/1")
    assert cluster.played.job("j").record.phase is JobPhase.PENDING
    cluster.played.notice("d", NOTICE_S)
    assert cluster.is_released("d") == in_place
    if not in_place:
        cluster.holds("c", 50)
        assert cluster.is_released("d")


def test_a_member_that_leaves_stays_until_the_next_group_has_its_copies() -> None:
    """Its memory has rows that the next group reads, and those of a node of the group before."""
    cluster = Sharded(nodes="abcd", trains="abc", least=2)
    cluster.holds("a", ("c", 1, 10))
    cluster.holds("b", ("a", 1, 10))
    cluster.holds("c", ("b", 1, 10))
    played = cluster.played
    played.cordon("d")
    played.notice("c", NOTICE_S)
    played.ready("a/1", "b/1", "c/1")
    played.exits("c/1", STOPPED)
    assert played.members("j") == "g2: a/1 b/1"
    cluster.train("ab")
    cluster.holds("a", ("c", 1, 10), ("b", 2, 20))
    assert not played.sent(Release)
    cluster.holds("b", ("a", 2, 20))
    cluster.holds("d", ("a", 2, 20), ("b", 2, 20))
    assert [m.reason for m in played.sent(Release)] == ["SIGTERM"]


@pytest.mark.parametrize(
    ("leaves", "copied", "goes"),
    [
        ("c", ("c", 1, 15), True),  # Its rows are copied, and the job cannot go on from newer ones.
        ("c", ("a", 1, 15), False),  # They are nowhere else.
        ("a", ("a", 1, 15), False),  # It has the only copy of the lost node's.
    ],
)
def test_rows_that_lie_nowhere_else_keep_their_node_while_a_job_waits(
    leaves: str, copied: tuple[str, int, int], goes: bool
) -> None:
    cluster = Sharded(nodes="abcd", trains="abc")
    played = cluster.played
    played.cordon("d")
    cluster.holds("a", ("b", 1, 10))
    cluster.holds("d", copied)
    played.disconnect("b")
    played.advance(1)
    played.ready("a/1", "c/1")
    assert played.job("j").record.phase is JobPhase.PENDING
    played.notice(leaves, NOTICE_S)
    played.exits(f"{leaves}/1", STOPPED)
    assert bool(played.sent(Release)) == goes


def copied_and_drained() -> tuple[Sharded, str]:
    """Return a cluster in which a node that does not train holds a's rows, and is drained."""
    cluster = Sharded(nodes="abcd", trains="ab")
    orders = {name: address[0] for name, address in cluster.orders().items()}
    for holder in {*orders.values()}:
        cluster.holds(holder, *[(of, 1, 10) for of, at in orders.items() if at == holder])
    cluster.played.notice(orders["a"], NOTICE_S)
    return cluster, orders["a"]


def test_the_only_copy_of_a_node_whose_agent_was_started_anew_is_kept() -> None:
    cluster, _ = copied_and_drained()
    played = cluster.played
    played.disconnect("a")
    played.agents["a"].workers.clear()
    played.agent("a", incarnation=2, copies_at="a:9")
    assert not played.sent(Release)
    played.advance(1)
    assert not played.sent(Release)


def test_the_only_copy_of_a_node_that_is_not_back_is_kept_after_a_restart() -> None:
    cluster, holder = copied_and_drained()
    played = cluster.played
    played.restart()
    played.agent(
        holder,
        copies_at=f"{holder}:9",
        copies=(HeldCopy(JOB, 1, 10, NodeId("a")),),
        draining=True,
        drain_reason="SIGTERM",
        drain_timeout_ns=50 * 10**9,
    )
    assert not played.sent(Release)
    played.advance(0.5)
    assert not played.sent(Release)
