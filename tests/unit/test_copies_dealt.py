"""Who is told where the rows of a sharded model lie: each agent by one member, however many."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.copy_messages import CopiesHeld, KeepCopy
from elastic.core.events.coordinator import SendAgent
from elastic.core.machine.announcing import DEALT_SINCE_MINOR
from elastic.core.messages import Announce
from elastic.core.policy.replication import KEPT_S, asks
from elastic.core.world import Assignment, HeldCopy, JobId, NodeId, WorkerPhase
from elastic.wire.codec_stream import encode_coordinator_message
from elastic.worker.peer_copies import PeerCopies
from tests.unit.test_coordinator_crowds import Crowd

JOB = JobId("j")
OLD, NEW = DEALT_SINCE_MINOR - 1, DEALT_SINCE_MINOR


def address(name: str) -> str:
    return f"host-{name}:40000"


class Ring:
    """A sharded run with a worker on each node, whose rows lie with the next one."""

    def __init__(self, size: int, others: Sequence[str] = (), *, old: Sequence[int] = ()) -> None:
        self.played = Crowd()
        self.names = [f"n{number:04d}" for number in range(size)]
        self.played.hold()
        for number, name in enumerate(self.names):
            self.join(name, OLD if number in old else NEW)
        for name in others:
            self.join(name)
        self.played.let_go()
        self.played.submit("j", 1, size)
        self.train(self.names)

    def join(self, name: str, minor: int = NEW) -> None:
        self.played.agent(name, copies_at=address(name), protocol_minor=minor)

    def train(self, names: Sequence[str]) -> None:
        self.played.hold()
        self.played.ready(*[f"{name}/1" for name in names])
        self.played.let_go()
        self.played.hold()
        for name in names:
            self.played.update(
                f"{name}/1", WorkerPhase.TRAINING, copies_every=5, copies_sharded=True
            )
        self.played.let_go()
        self.said = [(self.played.names[e.session], e.message) for e in self.played.of(SendAgent)]

    def copy(self) -> None:
        """Each node says that it holds the rows of the one before."""
        self.played.hold()
        for number, name in enumerate(self.names):
            held = HeldCopy(JOB, 1, 10, NodeId(self.names[number - 1]))
            self.played.says(name, CopiesHeld((held,)))
        self.played.let_go()

    def lose(self, *names: str) -> list[Assignment]:
        """Nodes die; returns what the members of the next group are told, by rank."""
        for name in names:
            self.played.disconnect(name)
        return self.regroup([name for name in self.names if name not in names])

    def regroup(self, names: Sequence[str]) -> list[Assignment]:
        """Wait for the next group of workers on these nodes; returns what they are told."""
        self.played.advance(1)
        self.train(names)
        told = [a.assignment for a in self.played.announced.values()]
        newest = max(one.generation for one in told)
        assert newest > 1
        return sorted((one for one in told if one.generation == newest), key=lambda one: one.rank)

    def told_alone(self, name: str) -> set[str]:
        """Let a group of one worker break; returns what it is told of the next."""
        self.played.broken(f"{name}/1")
        (told,) = self.regroup([name])
        return {*told.copies}


def asked(told: Sequence[Assignment]) -> list[str]:
    """Return whom the members of a group ask for rows, as often as they do."""
    found = []
    for one in told:
        copies = PeerCopies(one.copies, JOB, "", is_dealt=one.copies_dealt)
        found += copies.share(one.rank, one.world_size)
    return found


def test_every_agent_that_has_rows_is_asked_by_one_member_and_each_asks_its_own() -> None:
    ring = Ring(5)
    ring.copy()
    told = ring.lose(ring.names[2])
    assert sorted(asked(told)) == [address(n) for n in ring.names if n != ring.names[2]]
    for one in told:
        assert one.copies_dealt
        assert one.copies == (address(one.worker_id.partition("/")[0]),)


def test_an_announcement_does_not_grow_with_the_group() -> None:
    sizes = {}
    for size in (10, 300):
        ring = Ring(size)
        ring.copy()
        told = ring.lose(ring.names[2])
        assert len(told) == size - 1
        assert len(asked(told)) == size - 1
        sizes[size] = max(len(encode_coordinator_message(Announce(one))) for one in told)
    # Larger numbers take a byte more.
    assert sizes[300] <= sizes[10] + 10, sizes


@pytest.mark.parametrize("old", [(0,), (0, 1, 3, 4)])
def test_beside_a_worker_of_an_older_agent_all_are_told_all(old: tuple[int, ...]) -> None:
    """It would ask a part of its own share only."""
    ring = Ring(5, old=old)
    ring.copy()
    told = ring.lose(ring.names[2])
    everywhere = [address(n) for n in ring.names if n != ring.names[2]]
    for one in told:
        assert not one.copies_dealt
        assert sorted(one.copies) == everywhere
    assert sorted(asked(told)) == everywhere


def test_a_worker_that_an_older_coordinator_tells_all_asks_its_part() -> None:
    copies = PeerCopies(["a:1", "b:1", "c:1"], JOB, "")
    assert [list(copies.share(rank, 2)) for rank in (0, 1)] == [["a:1", "c:1"], ["b:1"]]


def test_a_node_whose_worker_died_is_asked_for_what_it_had_for_a_while() -> None:
    """It holds no copies itself: those of both nodes that train lie with the third."""
    ring = Ring(2, others=["z"])
    granted = [n for n, m in ring.said if isinstance(m, KeepCopy)]
    assert sorted(granted) == [*ring.names, "z"], "it would not give what it has"
    held = [HeldCopy(JOB, 1, 10, NodeId(name)) for name in ring.names]
    ring.played.says("z", CopiesHeld(tuple(held)))
    first, second = ring.names
    ring.played.cordon("z")
    ring.played.cordon(second)
    ring.played.exits(f"{second}/1")
    (told,) = ring.regroup([first])
    assert {*told.copies} == {address("z"), address(second)}
    # Also when the next group forms.
    assert ring.told_alone(first) == {address("z"), address(second)}
    ring.played.advance(KEPT_S + 1)
    assert ring.told_alone(first) == {address("z")}


@given(st.sets(st.text(min_size=1, max_size=5), max_size=20), st.integers(1, 8))
def test_who_asks_a_node_does_not_depend_on_other_nodes(names: set[str], size: int) -> None:
    order = sorted(NodeId(name) for name in names)
    first_ranks = {node_id: rank for rank, node_id in enumerate(order[:size])}
    for node_id in order:
        rank = asks(node_id, first_ranks, size)
        assert 0 <= rank < size
        assert rank == first_ranks.get(node_id, asks(node_id, {}, size))
