"""Nodes of a job that do not reach each other: who stays out of the group, and until when."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.core.events.coordinator import SendAgent
from elastic.core.facts import JobId, JobPhase, NodeId, WorkerPhase
from elastic.core.messages import LeaveGroup, LinksTried, StopWorker, TryLinks
from tests.unit.coordinator_under_test import CONFIG, STOPPED, Coordinator, running

A, B, C, D = map(NodeId, "abcd")


# ---------------------------------------------------------------- the coordinator


def passes(coordinator: Coordinator, seconds: float, *cut: str) -> list[str]:
    """Let time pass, in which agents try what they are told to; return who was asked.

    Args:
        coordinator: with its agents.
        seconds: how long.
        cut: links that are cut, as "n1 n2".
    """
    parted = [set(link.split()) for link in cut]
    asked = []
    for _ in range(round(seconds * 2)):
        coordinator.advance(0.5)
        for effect in coordinator.of(SendAgent):
            agent = coordinator.at(effect.session)
            if agent is not None and isinstance(order := effect.message, TryLinks):
                me = agent.node.node_id
                asked.append(me)
                names = [link.node_id for link in order.links]
                lost = tuple(n for n in names if {me, n} in parted)
                reached = tuple(n for n in names if n not in lost)
                coordinator.says(me, LinksTried(order.job_id, reached, lost))
    return asked


def forming(nodes: int = 3, low: int = 1) -> Coordinator:
    """A group whose members never come out of forming."""
    coordinator = running(nodes=nodes, low=low)
    coordinator.broken("n1/1")
    coordinator.advance(CONFIG.broken_grace_s)
    assert coordinator.members("a").startswith("g2")
    for number in range(nodes):
        coordinator.update(f"n{number + 1}/1", WorkerPhase.FORMING)
    return coordinator


def test_what_failed_in_an_earlier_group_does_not_count() -> None:
    coordinator = forming()
    passes(coordinator, 3, "n2 n3")
    coordinator.training("n1/1", "n2/1", "n3/1")
    coordinator.broken("n1/1")
    coordinator.advance(CONFIG.broken_grace_s)
    assert passes(coordinator, 4, "n2 n3").count("n2") == 1
    assert coordinator.noted("link_cut") == []
    passes(coordinator, 2, "n2 n3")
    assert len(coordinator.noted("link_cut")) == 1


def test_it_is_found_while_others_have_formed_the_group_and_wait_in_it() -> None:
    coordinator = forming()
    coordinator.training("n1/1")
    for second in range(10):
        coordinator.pulse("n1/1", waits=second + 1)
        passes(coordinator, 1, "n2 n3")
    assert coordinator.members("a") == "g3: n1/1 n2/1"
    assert coordinator.sent(StopWorker) == []


def test_a_link_that_comes_and_goes_does_not_end_the_job() -> None:
    coordinator = running(nodes=2, config=replace(CONFIG, crash_loop_limit=10))

    def play(seconds: float, *cut: str) -> None:
        """Workers do what they are told; what is cut breaks their group, and the next hangs."""
        if cut and "n2/1" in coordinator.members("a"):
            coordinator.broken("n1/1")
        for _ in range(round(seconds)):
            passes(coordinator, 1, *cut)
            for worker in ("n1/1", "n2/1"):
                is_member = worker in coordinator.members("a")
                is_asked = "to join" in coordinator.job("a").reason
                if not is_member or is_asked:
                    coordinator.ready(worker)
                elif cut and "n2/1" in coordinator.members("a"):
                    coordinator.update(worker, WorkerPhase.FORMING)
                else:
                    coordinator.training(worker)

    for _ in range(40):
        play(10, "n1 n2")
        play(8)
    assert coordinator.job("a").record.phase is JobPhase.RUNNING
    assert len(coordinator.noted("link_cut")) < 6
    play(60)
    assert coordinator.members("a").endswith(": n1/1 n2/1")


def test_who_is_out_takes_the_place_of_one_that_reaches_fewer() -> None:
    coordinator = forming(nodes=4, low=3)
    passes(coordinator, 6, "n2 n4")
    for number in range(1, 4):
        coordinator.update(f"n{number}/1", WorkerPhase.FORMING)
    coordinator.ready("n4/1")
    passes(coordinator, 10, "n2 n4", "n2 n3")
    assert coordinator.members("a") == "g4: n1/1 n3/1 n4/1"


def test_another_node_takes_the_place_of_one_that_stays_out() -> None:
    coordinator = forming(low=3)
    coordinator.agent("n4")
    passes(coordinator, 6, "n2 n3")
    coordinator.ready("n1/1", "n2/1", "n4/1")
    assert coordinator.members("a") == "g3: n1/1 n2/1 n4/1"
    # It held a slot beyond max, which others may want.
    coordinator.agent("n3")
    assert [message.worker_id for message in coordinator.sent(StopWorker)] == ["n3/1"]


def test_another_node_takes_its_place_while_the_queue_has_several_jobs() -> None:
    coordinator = forming(low=3)
    coordinator.agent("n4")
    coordinator.submit("b", 1)
    coordinator.ready("n4/1")
    coordinator.training("n4/1")
    passes(coordinator, 6, "n2 n3")
    coordinator.ready("n1/1", "n2/1", "n3/1")
    assert len(coordinator.job("a").workers) == 3
    coordinator.agent("n5", slots=2)
    coordinator.ready("n5/1")
    assert coordinator.members("a") == "g3: n1/1 n2/1 n5/1"
    coordinator.exits("n3/1", STOPPED)
    coordinator.training("n1/1", "n2/1", "n5/1")
    passes(coordinator, 9, "n2 n3")
    assert [w.report.worker_id for w in coordinator.job("a").workers] == ["n1/1", "n2/1", "n5/1"]


@pytest.mark.parametrize("job", ["a", "b", "unknown"])
def test_who_has_nothing_to_do_with_a_job_says_nothing_of_it(job: str) -> None:
    coordinator = forming()
    coordinator.agent("n9")
    coordinator.submit("b", 2)
    for _ in range(3):
        coordinator.says("n9", LinksTried(JobId(job), (), (NodeId("n1"), NodeId("n9"))))
        coordinator.says("n1", LinksTried(JobId(job), (), (NodeId("n9"), NodeId("n1"))))
    assert coordinator.noted("link_cut") == []


def test_what_is_said_of_a_group_that_has_come_together_meanwhile_is_not_so_any_more() -> None:
    coordinator = forming()
    coordinator.training("n1/1", "n2/1", "n3/1")
    for _ in range(3):
        coordinator.says("n2", LinksTried(JobId("a"), (), (NodeId("n3"),)))
        coordinator.says("n3", LinksTried(JobId("a"), (), (NodeId("n2"),)))
    assert coordinator.noted("link_cut") == []
    assert coordinator.members("a").startswith("g2")


def test_a_link_of_a_node_that_is_lost_is_forgotten() -> None:
    coordinator = forming()
    passes(coordinator, 6, "n2 n3")
    coordinator.training("n1/1", "n2/1")
    coordinator.ready("n3/1")
    coordinator.disconnect("n2")
    coordinator.advance(CONFIG.node_grace_s)
    assert coordinator.members("a") == "g4: n1/1 n3/1"


def test_members_that_wait_are_looked_into_before_their_group_counts_as_stuck() -> None:
    coordinator = running(nodes=3, low=1)
    coordinator.advance(20)
    for second in range(8):
        for name in ("n1", "n2", "n3"):
            if coordinator.members("a").startswith("g1"):
                coordinator.pulse(f"{name}/1", waits=second + 1 - second % 2 / 10)
        passes(coordinator, 1, "n1 n3")
    assert coordinator.members("a") == "g2: n1/1 n2/1"
    assert [message.at_boundary for message in coordinator.sent(LeaveGroup)] == []


def test_it_is_found_where_groups_break_as_soon_as_they_form() -> None:
    coordinator = running(config=replace(CONFIG, crash_loop_limit=10))
    coordinator.broken("n1/1")
    for _ in range(20):
        passes(coordinator, 0.5, "n2 n3")
        if coordinator.noted("link_cut"):
            break
        for worker in ("n1/1", "n2/1", "n3/1"):
            coordinator.update(worker, WorkerPhase.FORMING)
        coordinator.broken("n2/1")
    group = coordinator.members("a").partition(" ")
    coordinator.training("n1/1", "n2/1")
    assert coordinator.job("a").record.phase is JobPhase.RUNNING
    assert group[2] == "n1/1 n2/1"
    assert coordinator.job("a").record.losses < 10
