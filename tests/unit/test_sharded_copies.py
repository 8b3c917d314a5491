"""Copies of sharded models: where each node's rows lie, when they are freed, who waits for them."""

from __future__ import annotations

import os
from typing import Any

import pytest

from elastic.agent.copy_store import SLOTS, SOURCES_MAX, CopyStore
from elastic.core.copy_messages import CopiesHeld, CopyFailed, DropCopy, KeepCopy, Replicate
from elastic.core.facts import SNAPSHOT_SLOTS, HeldCopy, JobId, NodeId, WorkerId, WorkerPhase
from elastic.core.policy import replication
from elastic.core.policy.replication import CopyMode
from elastic.core.policy.shares import RowRange
from elastic.errors import Refused
from elastic.runtime.snapshot_memory import SnapshotMark, set_arrived, set_copying
from elastic.worker.checkpoint.replication_progress import ReplicationProgress
from elastic.worker.engine.sharded_choice import (
    SnapshotInfo,
    SnapshotKey,
    SnapshotOffer,
    choices,
    sources_of,
)
from elastic.worker.state.arena import SnapshotSlot
from tests.unit.coordinator_under_test import Coordinator

JOB = JobId("j")
A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


# ------------------------------------------------------------------- where rows lie


class Cluster:
    """Nodes with a slot each; a job of a sharded model trains on some, and wants copies."""

    def __init__(self, nodes: str = "abc", trains: str = "ab", least: int = 0) -> None:
        self.played = Coordinator()
        for name in nodes:
            self.join(name)
        self.told: list[tuple[str, Any]] = []
        self.played.submit("j", least or len(trains), len(trains))
        for name in trains:
            self.played.ready(f"{name}/1")
            self.hear()
        self.train(trains)

    def join(self, name: str, *copies: HeldCopy) -> None:
        self.played.agent(name, copies=copies, copies_at=f"{name}:9")

    def train(self, names: str, serial: int = 1) -> None:
        for name in names:
            self.played.update(
                f"{name}/{serial}", WorkerPhase.TRAINING, copies_every=5, copies_sharded=True
            )
            self.hear()

    def hear(self) -> None:
        for effect in self.played.effects:
            message = getattr(effect, "message", None)
            if isinstance(message, (Replicate, DropCopy, KeepCopy)):
                self.told.append((self.played.names[effect.session], message))  # type: ignore[union-attr]

    def holds(self, name: str, *copies: tuple[str, int, int]) -> None:
        """A node says what it holds: source, generation, steps."""
        held = tuple(HeldCopy(JOB, g, steps, NodeId(s)) for s, g, steps in copies)
        self.told = []
        self.played.says(name, CopiesHeld(held))
        self.hear()

    def orders(self) -> dict[str, str]:
        """Return where each node brings its rows to, as it was told last."""
        return {name: m.address for name, m in self.told if isinstance(m, Replicate)}

    def dropped(self) -> set[tuple[str, str]]:
        """Return which nodes were told to free whose rows."""
        return {(name, m.source) for name, m in self.told if isinstance(m, DropCopy)}


def test_without_another_node_the_workers_are_told_so_that_they_wait_for_none() -> None:
    cluster = Cluster("a", "a")
    ((name, order),) = [one for one in cluster.told if isinstance(one[1], Replicate)]
    assert (name, order.address, order.source) == ("a", "", "a")


def test_one_that_cannot_be_reached_by_one_node_still_holds_the_rows_of_others() -> None:
    cluster = Cluster()
    cluster.told = []
    cluster.played.says("a", CopyFailed(JOB, C, "no way"))
    cluster.hear()
    assert cluster.orders() == {"a": "b:9"}


def test_rows_of_a_dead_node_stay_while_the_others_have_copies_of_its_group_only() -> None:
    cluster = Cluster("abc", "abc", least=2)
    cluster.holds("b", ("a", 1, 10))
    cluster.holds("c", ("b", 1, 10))
    cluster.holds("a", ("c", 1, 10))
    cluster.played.disconnect("a")
    cluster.told = []
    cluster.played.advance(1)
    cluster.hear()
    for name in "bc":
        cluster.played.ready(f"{name}/1")
        cluster.hear()
    cluster.train("bc")
    assert cluster.orders() == {"b": "c:9", "c": "b:9"}
    assert cluster.dropped() == set()
    cluster.holds("b", ("a", 1, 10), ("c", 2, 12))
    assert cluster.dropped() == set()
    cluster.holds("c", ("b", 2, 12))
    assert cluster.dropped() == {("b", "a")}


def test_a_new_group_is_told_how_new_a_copy_of_state_is_that_all_share() -> None:
    played = Coordinator()
    for name in "abc":
        played.agent(name, copies_at=f"{name}:9")
    played.submit("j", 1, 1)
    played.ready("a/1")
    played.update("a/1", WorkerPhase.TRAINING, copies_every=5)
    copy = HeldCopy(JOB, 1, 40)
    played.says("c", CopiesHeld((copy,)))
    played.exits("a/1")
    assert played.announced[WorkerId("a/1")].assignment.copied is None
    played.advance(1)
    (worker,) = (one for agent in played.agents.values() for one in agent.workers)
    played.ready(worker)
    assert played.announced[worker].assignment.copied == copy


# ------------------------------------------------------------------- how a node holds them


def mark(number: int, generation: int = 1) -> SnapshotMark:
    return SnapshotMark(number, generation, 10 * number, 1, 64, 7, 3, 9)


def bring(store: CopyStore, one: SnapshotMark, source: str, *, breaks: bool = False) -> None:
    with store.writing(JOB, one, lambda: None, source) as (body, commit):
        body[:] = os.urandom(len(body))
        if not breaks:
            commit(1)


@pytest.fixture
def store() -> CopyStore:
    found = CopyStore(lambda: None)
    found.grant(JOB, "key")
    return found


def test_two_newest_copies_of_each_source_are_held_and_given(store: CopyStore) -> None:
    for number in (1, 2, 3):
        bring(store, mark(number), "a")
    bring(store, mark(2), "b")
    assert set(store.list(JOB)) == {("a", mark(2)), ("a", mark(3)), ("b", mark(2))}
    assert set(store.held()) == {HeldCopy(JOB, 1, 30, A), HeldCopy(JOB, 1, 20, B)}
    with store.reading(JOB, mark(2), "a"):
        pass
    with pytest.raises(Refused, match="a newer copy has come"), store.reading(JOB, mark(1), "a"):
        pass


def test_the_newest_rows_stay_where_a_snapshot_was_left_out(store: CopyStore) -> None:
    for number in (1, 2):
        bring(store, mark(number), "a")
    bring(store, mark(4), "a", breaks=True)  # The third came to nothing, and now the node dies.
    assert store.list(JOB) == (("a", mark(2)),)


def test_rows_that_a_group_goes_on_from_stay_until_it_has_sent_others(store: CopyStore) -> None:
    for one in (mark(1), mark(2), mark(2, generation=2)):  # It went on from the first.
        bring(store, one, "a")
    assert set(store.list(JOB)) == {("a", mark(1)), ("a", mark(2, generation=2))}


def test_rows_of_one_node_are_freed_alone(store: CopyStore) -> None:
    bring(store, mark(1), "a")
    bring(store, mark(1), "b")
    assert store.drop(DropCopy(JOB, "over", NodeId("a")))
    assert not store.drop(DropCopy(JOB, "over", NodeId("a")))
    assert store.list(JOB) == (("b", mark(1)),)
    assert store.drop(DropCopy(JOB, "over"))
    assert store.key_of(JOB) == ""


def test_a_node_holds_the_rows_of_so_many_only(store: CopyStore) -> None:
    for number in range(SOURCES_MAX):
        bring(store, mark(1), f"n{number}")
    with pytest.raises(Refused, match=f"the rows of {SOURCES_MAX} nodes"):
        bring(store, mark(1), "another")


# ------------------------------------------------------------------- when workers wait for them


class Memory:
    """A slot, as agent and worker see it."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("slot")
        self.slot = SnapshotSlot(f"/proc/{os.getpid()}/fd/{self.descriptor}")
        self.arrival = ReplicationProgress()
        self.arrival.is_awaited = True

    def take(self, one: SnapshotMark) -> None:
        self.arrival.begin(one, self.slot)
        self.slot.unmark(0)
        self.slot.mark(0, one)

    def waits(self) -> bool:
        return self.arrival.is_missing()


def test_the_next_snapshot_waits_until_this_one_has_arrived() -> None:
    memory = Memory()
    assert not memory.waits()
    memory.take(mark(1))
    set_copying(memory.descriptor, CopyMode.ON)
    assert memory.waits()
    set_arrived(memory.descriptor, mark(1, generation=2))
    assert memory.waits()
    set_arrived(memory.descriptor, mark(1))
    assert not memory.waits()
    memory.take(mark(3))
    assert memory.waits()
    set_copying(memory.descriptor, CopyMode.OFF)
    assert not memory.waits()


@pytest.mark.parametrize("why", ["the agent was told nothing", "another worker has not copied"])
def test_it_does_not_wait_for_ever(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory()
    memory.take(mark(1))
    if why == "another worker has not copied":
        set_copying(memory.descriptor, CopyMode.ON)
        memory.slot.unmark(0)
    assert memory.waits()
    monkeypatch.setattr(replication, "UNREPORTED_S", 0.0)
    assert not memory.waits()


# ------------------------------------------------------------------- what is gone on from


def test_copies_are_used_for_the_rows_that_no_member_has() -> None:
    key, old = SnapshotKey(5, 1, 2, 7), SnapshotKey(4, 1, 1, 7)
    first, second = {0: (4, (RowRange(0, 2),))}, {0: (4, (RowRange(2, 2),))}
    offers = (SnapshotOffer(key, "b", "x:1", second), SnapshotOffer(key, "a", "x:1", first))
    one = SnapshotInfo.of(SnapshotInfo({key: first, old: first}, ((3, "c3"),), offers).to_bytes())
    other = SnapshotInfo.of(
        SnapshotInfo({}, None, (SnapshotOffer(old, "b", "y:1", second),)).to_bytes()
    )
    assert [(s.rank, s.offer) for s in sources_of(key, [one, other])] == [(0, -1), (0, 0)]
    assert [(s.rank, s.offer) for s in sources_of(old, [one, other])] == [(0, -1), (1, 0)]
    assert choices([one, other]) == [key, old, "c3"]
    assert sources_of(SnapshotKey(9, 1, 3, 7), [one, other]) == []


def test_slots_here_and_there_are_as_many() -> None:
    assert SLOTS == SNAPSHOT_SLOTS
