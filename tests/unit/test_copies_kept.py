"""Copies whose holder goes or loses them: they lie elsewhere before a drained node is let go."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.core.copy_messages import CopiesHeld, CopyFailed, DropCopy, KeepCopy, Replicate
from elastic.core.events.coordinator import SendAgent
from elastic.core.messages import Release
from elastic.core.policy.replication import Leftover, is_left_behind
from elastic.core.world import HeldCopy, JobPhase, NodeId, WorkerPhase
from tests.unit.coordinator_under_test import STOPPED
from tests.unit.test_copies_placed import JOB, Cluster
from tests.unit.test_sharded_copies import Cluster as Sharded

NOTICE_S = 60


def is_released(cluster: Cluster, name: str) -> bool:
    """Return whether a node was let go in the last step, or the last while."""
    return name in [node for node, _ in cluster.told(Release)]


def orders(cluster: Cluster) -> list[tuple[str, str]]:
    return [(name, order.address) for name, order in cluster.told(Replicate)]


# ---------------------------------------------------------------- a node that drains


def test_a_drained_node_stays_until_the_copy_that_it_holds_lies_elsewhere() -> None:
    cluster = Cluster()
    cluster.holds("b", 50)
    cluster.played.notice("b", NOTICE_S)
    assert orders(cluster) == [("a", "c:9")]
    assert not is_released(cluster, "b")
    assert "has state of job j" in cluster.played.node("b").reason
    cluster.holds("c", 45)
    assert not is_released(cluster, "b")
    cluster.holds("c", 50)
    assert [name for name, _ in cluster.told(DropCopy)] == ["b"]
    assert is_released(cluster, "b")
    assert "has state of" not in cluster.played.node("b").reason
    assert [note["node"] for note in cluster.played.noted("node_kept")] == ["b"]


def test_it_is_let_go_at_its_deadline_whatever_it_holds() -> None:
    cluster = Cluster()
    cluster.holds("b", 50)
    cluster.played.notice("b", NOTICE_S)
    cluster.played.advance(NOTICE_S - 0.1)
    assert not is_released(cluster, "b")
    cluster.played.advance(0.2)
    assert is_released(cluster, "b")


def test_it_is_let_go_at_once_if_no_node_takes_the_copy() -> None:
    cluster = Cluster("ab")
    cluster.holds("b", 50)
    cluster.played.notice("b", NOTICE_S)
    assert is_released(cluster, "b")


def test_a_node_that_could_not_be_reached_is_waited_for() -> None:
    cluster = Cluster()
    cluster.holds("b", 50)
    cluster.played.notice("b", NOTICE_S)
    cluster.played.says("a", CopyFailed(JOB, NodeId("c"), "no answer"))
    assert not is_released(cluster, "b")
    cluster.played.advance(31)
    assert ("a", "c:9") in orders(cluster)
    cluster.holds("c", 50)
    assert is_released(cluster, "b")


def test_it_stays_for_a_group_that_is_about_to_go_on_from_what_it_holds() -> None:
    """The only worker has died with its node; the next one asks the node that drains."""
    cluster = Cluster()
    cluster.holds("b", 50)
    cluster.played.notice("b", NOTICE_S)
    cluster.played.disconnect("a")
    cluster.played.advance(1)
    assert not is_released(cluster, "b")
    cluster.played.ready("c/1")
    assert cluster.played.announced["c/1"].assignment.copies == ("b:9",)  # type: ignore[index]
    assert not is_released(cluster, "b")
    cluster.played.update("c/1", WorkerPhase.TRAINING, copies_every=5)
    assert is_released(cluster, "b"), "it has it, and nobody is there to take a copy"


def waiting(*, in_place: bool = True) -> Cluster:
    """Job j needs two workers: that on b is lost with its node, and none may start elsewhere."""
    cluster = Cluster("abcd", trains="ab")
    played = cluster.played
    for name in "cd":
        played.cordon(name)
    played.update("a/1", WorkerPhase.TRAINING, in_place=in_place)
    cluster.holds("d", 50)
    played.disconnect("b")
    played.advance(1)
    played.ready("a/1")
    assert played.job("j").record.phase is JobPhase.PENDING
    return cluster


def test_a_job_that_waits_keeps_nobody_if_a_member_has_its_state() -> None:
    cluster = waiting()
    cluster.played.notice("d", NOTICE_S)
    assert is_released(cluster, "d")


def test_but_not_if_it_does_not_go_on_with_that() -> None:
    cluster = waiting(in_place=False)
    cluster.played.notice("d", NOTICE_S)
    assert not is_released(cluster, "d")
    cluster.holds("c", 45)
    assert not is_released(cluster, "d")
    cluster.holds("c", 50)
    assert is_released(cluster, "d"), "it lies there, too"


def test_a_job_that_waits_keeps_the_copy_when_the_member_that_has_the_state_leaves_first() -> None:
    cluster = waiting()
    cluster.played.notice("a", NOTICE_S)
    cluster.played.notice("d", NOTICE_S)
    assert not is_released(cluster, "d")
    cluster.played.advance(NOTICE_S)
    assert is_released(cluster, "d")


def test_a_job_that_ends_keeps_nobody() -> None:
    cluster = Cluster()
    cluster.holds("b", 50)
    cluster.played.notice("b", NOTICE_S)
    cluster.played.stop("j")
    assert is_released(cluster, "b")


def test_a_node_without_copies_is_let_go_at_once() -> None:
    cluster = Cluster()
    cluster.holds("b", 50)
    cluster.played.notice("c", NOTICE_S)
    assert is_released(cluster, "c")


@pytest.mark.parametrize(
    ("rests", "trains", "has_place", "is_elsewhere", "stays"),
    [
        (True, False, True, False, False),
        (False, False, False, False, True),
        (False, True, False, False, False),
        (False, True, True, False, True),
        (False, True, True, True, False),
        (False, False, True, True, False),
        (False, False, True, False, True),
    ],
)
def test_who_stays(
    rests: bool, trains: bool, has_place: bool, is_elsewhere: bool, stays: bool
) -> None:
    assert is_left_behind(Leftover(rests, trains, has_place, is_elsewhere)).value is stays


# ---------------------------------------------------------------- rows of a sharded model


def test_a_member_that_leaves_stays_until_the_next_group_has_its_rows_elsewhere() -> None:
    """Its own memory has rows that the next group asks for, and that of the one before."""
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
    assert not played.sent(Release)
    cluster.train("ab")
    assert not played.sent(Release)
    cluster.holds("a", ("c", 1, 10), ("b", 2, 20))
    assert not played.sent(Release)
    cluster.holds("d", ("a", 2, 20), ("b", 2, 20))
    assert [m.reason for m in played.sent(Release)] == ["SIGTERM"]


def lost_one() -> Sharded:
    """Of a group on a, b and c that waits for a third worker b is lost, of which a has a copy."""
    cluster = Sharded(nodes="abcd", trains="abc")
    cluster.played.cordon("d")
    cluster.holds("a", ("c", 1, 15), ("b", 1, 10))
    cluster.holds("d", ("a", 1, 15))
    cluster.played.disconnect("b")
    cluster.played.advance(1)
    cluster.played.ready("a/1", "c/1")
    assert cluster.played.job("j").record.phase is JobPhase.PENDING
    return cluster


def test_rows_that_are_copied_elsewhere_keep_nobody_while_a_job_waits() -> None:
    cluster = lost_one()
    cluster.played.notice("c", NOTICE_S)
    cluster.played.exits("c/1", STOPPED)
    assert [m.reason for m in cluster.played.sent(Release)] == ["SIGTERM"]


def test_the_only_copy_of_lost_rows_keeps_its_node_while_a_job_waits() -> None:
    cluster = lost_one()
    cluster.played.notice("a", NOTICE_S)
    cluster.played.exits("a/1", STOPPED)
    assert not cluster.played.sent(Release)
    cluster.holds("d", ("a", 1, 15), ("b", 1, 10))
    assert [m.reason for m in cluster.played.sent(Release)] == ["SIGTERM"]


def test_rows_that_are_copied_nowhere_keep_their_node_while_a_job_waits() -> None:
    cluster = lost_one()
    cluster.holds("a", ("b", 1, 10))
    cluster.played.notice("c", NOTICE_S)
    cluster.played.exits("c/1", STOPPED)
    assert not cluster.played.sent(Release)


# ---------------------------------------------------------------- a holder that dies


def test_a_holder_that_was_started_anew_is_brought_the_copy_again() -> None:
    """It was gone for a moment only, and its memory with it: who sends would not know."""
    cluster = Cluster()
    cluster.holds("b", 50)
    cluster.played.disconnect("b")
    cluster.played.agent("b", incarnation=2, copies_at="b:9")
    assert orders(cluster) == [("a", "b:9")]
    assert [name for name, _ in cluster.told(KeepCopy)] == ["b"]


def test_one_that_only_was_away_is_not() -> None:
    cluster = Cluster()
    cluster.holds("b", 50)
    cluster.played.disconnect("b")
    cluster.join("b", HeldCopy(JOB, 1, 50))
    assert orders(cluster) == []


def test_a_holder_that_has_freed_its_copy_is_brought_it_again() -> None:
    """It heard of no coordinator for long, for one."""
    cluster = Cluster()
    cluster.holds("b", 50)
    cluster.played.disconnect("b")
    cluster.join("b")
    assert orders(cluster) == [("a", "b:9")]
    cluster.holds("b", 50)
    cluster.played.says("b", CopiesHeld(()))
    assert orders(cluster) == [("a", "b:9")]


@pytest.mark.parametrize("is_sharded", [False, True])
def test_the_newest_snapshot_is_brought_to_another_node_when_its_holder_is_lost(
    is_sharded: bool,
) -> None:
    cluster: Any = Sharded(nodes="abcd", trains="ab") if is_sharded else Cluster()
    played = cluster.played
    played.disconnect("c" if is_sharded else "b")
    played.advance(1)
    told = {played.names[e.session]: e.message for e in played.of(SendAgent)
            if isinstance(e.message, Replicate)}  # fmt: skip
    expected = {"a": "d:9"} if is_sharded else {"a": "c:9"}  # That of b is with d already.
    assert {name: order.address for name, order in told.items()} == expected
