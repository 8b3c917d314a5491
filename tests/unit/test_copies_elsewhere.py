"""Copies of a lost node's rows that cannot be fetched: the other nodes that have them are asked."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from elastic.agent.arenas import Arenas
from elastic.agent.copy_server import CopyServer
from elastic.agent.copy_store import SLOTS, CopyStore
from elastic.agent.own_rows import OwnRows
from elastic.coord.certs import init_authority
from elastic.core.policy.cursor import Cursor
from elastic.core.world import JobId, NodeId
from elastic.errors import Refused
from elastic.runtime.access import find_tls
from elastic.runtime.copy_wire import FETCH, PUSH, TEXT, Request, calling
from elastic.runtime.peer_tls import PeerTls
from elastic.runtime.snapshot_memory import HEADER, Mark, whole
from elastic.worker import sharded_restore
from elastic.worker.peer_copies import PeerCopies
from elastic.worker.reading import read_checkpoint
from elastic.worker.rows import tell_rows
from elastic.worker.saving import Saver, Seat
from elastic.worker.sharded_choice import Key, Told, sources_of
from elastic.worker.sharded_restore import Restorer
from elastic.worker.state import State
from tests.unit.sharded_under_test import Member, Memory, ShardedRun, assert_rows_of, together

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]

JOB, KEY = JobId("j1"), "a secret"
LOST = NodeId("lost")
OLD, NEW = 1, 2
"""Steps of two snapshots."""


class Holder:
    """An agent that has copies of rows; what it does when they are fetched is a test's.

    Attributes:
        fetched: steps of the copies that it was asked for.
        texts: how many copies it has described.
        listed: called when it has described two.
    """

    def __init__(self, tls: PeerTls | None = None, own: OwnRows | None = None) -> None:
        self.fetched: list[int] = []
        self.fault: Callable[[Holder, Mark], None] = lambda holder, mark: None
        self.listed: Callable[[], None] = lambda: None
        self.texts = 0
        self.store = CopyStore(lambda: None)
        self.store.grant(JOB, KEY)
        self.server = CopyServer("127.0.0.1", self.store, tls, own)
        self.address = self.server.address
        honest = self.server._give

        def give(line: Any, request: Request, key: str) -> None:
            if request.verb == FETCH and request.mark is not None:
                self.fetched.append(request.mark.steps)
                self.fault(self, request.mark)
            honest(line, request, key)
            if request.verb == TEXT:
                self.texts += 1
                if self.texts == SLOTS:
                    self.listed()

        self.server._give = give  # type: ignore[method-assign]
        self.server.start()

    def take(self, node: Memory, source: str = LOST, tls: PeerTls | None = None) -> None:
        """Be brought all that a node has."""
        for content in contents(node):
            mark = whole(content[:HEADER])
            if mark is None:
                continue
            with calling(self.address, tls=tls) as line:
                line.ask(Request(PUSH, JOB, mark, source), KEY)
                line.send_body(memoryview(content)[HEADER:][: mark.num_bytes], lambda: True)
                line.read_answer(KEY)


def contents(node: Memory) -> list[bytes]:
    return [Path(path).read_bytes() for path in node.paths]


def dies(holder: Holder, mark: Mark) -> None:
    """It is gone with all its connections, and nobody listens there any more."""
    holder.server.close()
    raise ConnectionResetError("dead")


def lies(holder: Holder, mark: Mark) -> None:
    """A bit has flipped in its memory."""
    if mark.steps == NEW:
        with holder.store.reading(JOB, mark, LOST) as (body, _):
            body[len(body) // 2] ^= 1


def has_newer_ones(holder: Holder, mark: Mark) -> None:
    """It has been brought others meanwhile."""
    if mark.steps == NEW:
        raise Refused("a newer copy has come: ask again")


FAULTS = [dies, lies, has_newer_ones]


@pytest.fixture
def run(tmp_path: Path) -> ShardedRun:
    """Two nodes, and two snapshots in memory of both; nothing is in storage."""
    found = ShardedRun(tmp_path, shape=(2,), nodes=2)
    for steps in (OLD, NEW):
        for member, saver in zip(found.members, found.savers, strict=True):
            saver.take(lambda m=member, s=steps: m.state(s), Cursor(0, steps), steps, durable=False)  # type: ignore[misc]
    return found


@pytest.fixture
def holders(run: ShardedRun) -> Iterator[list[Holder]]:
    """Two, with copies of the second node's rows; the first is the one that is asked first."""
    found = sorted((Holder(), Holder()), key=lambda one: one.address)
    for one in found:
        one.take(run.nodes[1])
    yield found
    for one in found:
        one.server.close()


def go_on(
    run: ShardedRun,
    shares: Sequence[Sequence[str]],
    tls: Sequence[str] = (),
    *,
    old: Sequence[int] = (),
) -> tuple[list[Member], list[State | None], list[str]]:
    """Form a group of which only the first member's node was there before.

    Args:
        run: the one before.
        shares: which agents each member asks, by rank.
        tls: of all members' nodes.
        old: ranks of members of protocol 1.0; the coordinator then deals nothing.

    Returns:
        Members, what each has come to, what was wrong with what was not used.
    """
    size, problems = len(shares), []
    members = [Member(rank, (size,), seed=9, stepped=False) for rank in range(size)]

    def restore(rank: int, group: Any) -> State | None:
        ours, node = members[rank].ours(), run.nodes[0] if rank == 0 else Memory()
        saver = Saver(node.paths, None)
        saver.enter(Seat(2, rank, size))
        copies = PeerCopies(shares[rank], JOB, KEY, tls=tls, node_id=f"n{rank}", is_dealt=not old)
        restorer = Restorer(
            group, saver, ours, copies=copies,
            listed=lambda: [
                (int(m.about("steps", 0)), n, m) for n, m in reversed(run.directory.automatic())
            ],
            read=lambda name, marker: read_checkpoint(
                run.directory, name, marker or run.directory.marker(name), ours=ours, rank=rank
            ),
        )  # fmt: skip
        if rank in old:
            gathers_as_in_1_0(restorer, group)
        state, _ = restorer.restore()
        problems.extend(restorer.problems)
        if state is not None:
            members[rank].objects.put(state["objects"])
        return state

    return members, together(size, restore), problems


def gathers_as_in_1_0(restorer: Any, group: Any) -> None:
    """Have a member do as those of protocol 1.0 did: what cannot be fetched is sought nowhere."""

    def gathered(key: Key, told: Sequence[Told], here: Any, shards: Any) -> Any:
        sources, fetched = sources_of(key, told), {}
        mine = [one.offer for one in sources if one.rank == restorer._rank and one.offer >= 0]
        restorer._fetch(mine, shards, fetched)
        is_there = any(one.offer >= 0 for one in sources)
        if is_there and not all(
            row[0] > 0 for row in tell_rows(group, [float(len(fetched) == len(mine))])
        ):
            return [], {}
        return sources, {
            number: here[key] if one.offer < 0 else fetched[one.offer]
            for number, one in enumerate(sources)
            if one.rank == restorer._rank
        }

    restorer._gathered = gathered


def assert_all_at(
    steps: int, run: ShardedRun, came: tuple[list[Member], list[State | None], list[str]]
) -> None:
    members, states, problems = came
    assert [state and state["steps"] for state in states] == [steps] * len(members), problems
    for member in members:
        assert_rows_of(member, run.members[0].whole, run.members[0].optimizer_state)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("size", [1, 2])
def test_if_one_node_cannot_give_its_copy_another_is_asked(
    run: ShardedRun, holders: list[Holder], fault: Any, size: int
) -> None:
    first, second = holders
    first.fault = fault
    shares = [[first.address, second.address]] if size == 1 else [[first.address], [second.address]]
    came = go_on(run, shares)
    assert_all_at(NEW, run, came)
    assert (first.fetched, second.fetched) == ([NEW], [NEW])
    assert len(came[2]) == 1


@pytest.mark.parametrize("old", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("failing", [0, 1])
def test_beside_a_member_of_an_older_version_all_go_on_to_the_next_snapshot(
    run: ShardedRun, old: tuple[int, ...], failing: int
) -> None:
    """Whoever of them cannot fetch, and whoever is the older one: none waits for the others."""
    holder, empty = Holder(), Holder()
    holder.fault = lies
    holder.take(run.nodes[1])
    # Told of all agents, each asks those at its rank.
    addresses = [holder.address, empty.address] if failing == 0 else [empty.address, holder.address]
    came = go_on(run, [addresses, addresses], old=old)
    assert_all_at(OLD, run, came)
    assert holder.fetched == [NEW, OLD]
    for one in (holder, empty):
        one.server.close()


def test_the_second_is_not_asked_if_the_first_gives_what_it_has(
    run: ShardedRun, holders: list[Holder]
) -> None:
    first, second = holders
    assert_all_at(NEW, run, go_on(run, [[first.address], [second.address]]))
    assert (first.fetched, second.fetched) == ([NEW], [])


def test_a_node_whose_certificate_is_none_by_now_is_passed_over(
    run: ShardedRun, tmp_path: Path
) -> None:
    for folder in ("ours", "theirs"):
        init_authority(tmp_path / folder, ("127.0.0.1",), datetime.now(timezone.utc))
    ours, theirs = (
        PeerTls.of(find_tls(str(tmp_path / folder / "coordinator")))
        for folder in ("ours", "theirs")
    )
    assert ours is not None
    first, second = sorted((Holder(ours), Holder(ours)), key=lambda one: one.address)

    def is_of_another_authority() -> None:
        first.server._tls = theirs

    first.listed = is_of_another_authority
    for one in (first, second):
        one.take(run.nodes[1], tls=ours)
    shares = [[first.address], [second.address]]
    came = go_on(run, shares, tls=ours.paths)
    assert_all_at(NEW, run, came)
    assert (first.fetched, second.fetched) == ([], [NEW])
    assert "authority" in came[2][0]
    for one in (first, second):
        one.server.close()


def test_a_node_that_has_lost_its_own_rows_gets_them_from_another_one(run: ShardedRun) -> None:
    """And does not ask for those that it still has."""
    of_first, of_second = Holder(), Holder()
    of_first.take(run.nodes[0], "n0")
    of_second.take(run.nodes[1], "n1")
    came = go_on(run, [[of_first.address], [of_second.address]])
    assert_all_at(NEW, run, came)
    assert (of_first.texts, of_second.texts) == (0, 2)
    assert (of_first.fetched, of_second.fetched) == ([], [NEW])
    for one in (of_first, of_second):
        one.server.close()


@pytest.mark.parametrize("fault", [lies, has_newer_ones])
@pytest.mark.parametrize("size", [1, 2])
def test_if_nobody_can_all_go_on_from_the_snapshot_before(
    run: ShardedRun, holders: list[Holder], fault: Any, size: int
) -> None:
    first, second = holders
    first.fault = second.fault = fault
    shares = [[first.address, second.address]] if size == 1 else [[first.address], [second.address]]
    assert_all_at(OLD, run, go_on(run, shares))
    assert (first.fetched, second.fetched) == ([NEW, OLD], [NEW])


def test_if_all_that_have_rows_die_all_members_read_storage(
    run: ShardedRun, holders: list[Holder]
) -> None:
    run.save(steps=OLD)
    for one in holders:
        one.fault = dies
    came = go_on(run, [[holders[0].address], [holders[1].address]])
    assert_all_at(OLD, run, came)


def test_no_other_node_is_asked_when_it_has_taken_too_long(
    run: ShardedRun, holders: list[Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = holders
    first.fault = lies
    monkeypatch.setattr(sharded_restore, "OTHERS_S", -1.0)
    assert_all_at(OLD, run, go_on(run, [[first.address], [second.address]]))
    assert (first.fetched, second.fetched) == ([NEW, OLD], [])


def test_a_dead_node_with_the_rows_of_many_is_waited_for_once(tmp_path: Path) -> None:
    """The rows of both lost nodes lie there, and each one's on another node."""
    run = ShardedRun(tmp_path, shape=(3,), nodes=3)
    for member, saver in zip(run.members, run.savers, strict=True):
        saver.take(lambda m=member: m.state(NEW), Cursor(0, NEW), NEW, durable=False)  # type: ignore[misc]
    every, *each = sorted((Holder() for _ in range(3)), key=lambda one: one.address)
    every.listed = every.server.close
    for source, one, node in zip(("x", "y"), each, run.nodes[1:], strict=True):
        every.take(node, source)
        one.take(node, source)
    came = go_on(run, [[one.address for one in (every, *each)]])
    assert_all_at(NEW, run, came)
    assert len(came[2]) == 1, came[2]
    for one in (every, *each):
        one.server.close()


@pytest.mark.parametrize("how", ["alone", "after a copy that lies"])
def test_a_node_without_members_gives_what_its_dead_workers_had(
    run: ShardedRun, holders: list[Holder], how: str
) -> None:
    arenas = Arenas()
    for path, content in zip(arenas.give(JOB, 1), contents(run.nodes[1]), strict=True):
        Path(path).write_bytes(content)
    source = Holder(own=OwnRows(LOST, arenas))
    shares = [[source.address]]
    if how != "alone":
        for one in holders:
            one.fault = dies
        shares[0] += [one.address for one in holders]
    assert_all_at(NEW, run, go_on(run, shares))
    source.server.close()
    arenas.close()


def test_rows_that_are_written_over_are_refused(run: ShardedRun) -> None:
    arenas = Arenas()
    paths = arenas.give(JOB, 1)
    for path, content in zip(paths, contents(run.nodes[1]), strict=True):
        Path(path).write_bytes(content)
    source = Holder(own=OwnRows(LOST, arenas))

    def is_written_over(holder: Holder, mark: Mark) -> None:
        del holder, mark
        for path in paths:
            with Path(path).open("r+b") as slot:
                slot.write(bytes(HEADER))

    source.fault = is_written_over
    came = go_on(run, [[source.address]])
    assert came[1] == [None]
    assert source.fetched == [NEW, OLD]
    source.server.close()
    arenas.close()


def test_own_rows_are_there_for_whoever_reads_them_when_the_memory_is_given_back(
    run: ShardedRun,
) -> None:
    arenas = Arenas()
    for path, content in zip(arenas.give(JOB, 1), contents(run.nodes[1]), strict=True):
        Path(path).write_bytes(content)
    own = OwnRows(LOST, arenas)
    marks = [mark for _, mark in own.list(JOB)]
    assert sorted(mark.steps for mark in marks) == [OLD, NEW]
    held = [os.open(path, os.O_RDONLY) for path in arenas.give(JOB, 1)]
    open_paths = [Path(f"/proc/self/fd/{number}") for number in held]
    with own.reading(JOB, marks[0]) as (body, is_whole):
        arenas.close()
        assert len(bytes(body)) == marks[0].num_bytes
        assert is_whole()
        for path in open_paths:
            with path.open("r+b") as slot:
                slot.write(bytes(HEADER))
        assert not is_whole(), "it was written over while it was read"
    for number in held:
        os.close(number)
    assert own.list(JOB) == ()
    with pytest.raises(Refused, match="another snapshot"), own.reading(JOB, marks[0]):
        pass
