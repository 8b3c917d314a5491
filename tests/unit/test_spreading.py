"""What members of large groups say alike is said one after another, and nothing urgent waits."""

from __future__ import annotations

from collections import Counter

from elastic.core.config import AgentConfig
from elastic.core.facts import Assignment, WorkerPhase
from elastic.core.messages import Announce, LeaveGroup, Progress, Pulse, Welcome, WorkerUpdate
from elastic.core.policy.pacing import telemetry_every_ns, telemetry_offset_ns
from tests.unit.agent_under_test import JOB, W1, Agent, S, reconnect, reported_by, with_worker

MEMBER_NS = 100_000


def in_group_of(size: int, *, rank: int = 7, config: AgentConfig | None = None) -> Agent:
    """Return an agent whose worker was told of a large group."""
    agent = with_worker(config=config) if config else with_worker()
    agent.process(1, reported_by(W1, WorkerPhase.READY))
    agent.hear(Announce(Assignment(JOB, W1, 3, rank, size, 0, 1, rank, size, "h:1")))
    return agent


def test_who_waits_for_its_peers_is_known_to_be_in_the_group_first() -> None:
    agent = in_group_of(1000)
    agent.process(1, reported_by(W1, WorkerPhase.TRAINING, 3))
    agent.process(1, Pulse(W1, 3, waiting_ns=S, still_ns=0))
    assert [type(message) for message in agent.sent()] == [WorkerUpdate, Pulse]


def test_of_progress_in_a_large_group_the_newest_is_told_in_turn() -> None:
    agent = in_group_of(1000)
    stepped_ns = agent.now_ns
    for steps in (1, 2, 3):
        agent.process(1, Progress(W1, 3, steps, 5))
        assert not agent.sent(Progress)
    agent.at_deadline()
    assert agent.sent(Progress) == [Progress(W1, 3, 3, 5)]
    every_ns = telemetry_every_ns(7, 1000, MEMBER_NS)
    assert every_ns == 30 * S
    agent.process(1, Progress(W1, 3, 4, 5))
    assert not agent.sent(Progress)
    while not agent.sent(Progress):
        agent.at_deadline()
    # Its turn is counted from its first step, which was made some time before it was reported.
    assert agent.now_ns - stepped_ns == every_ns + telemetry_offset_ns(7, 1000, every_ns)
    # Of the group before, nothing waits any more, and nothing is lost.
    agent.process(1, Progress(W1, 3, 5, 5))
    assert not agent.sent(Progress)
    agent.hear(LeaveGroup(W1, 3, at_boundary=False, reason="over"))
    assert agent.sent(Progress) == [Progress(W1, 3, 5, 5)]
    agent.process(1, Progress(W1, 3, 6, 5))
    assert agent.sent(Progress) == [Progress(W1, 3, 6, 5)]
    agent.hear(Announce(Assignment(JOB, W1, 4, 0, 2, 0, 1, 0, 2, "h:1")))
    agent.process(1, Progress(W1, 4, 1, 6))
    assert agent.sent(Progress) == [Progress(W1, 4, 1, 6)]


def test_some_neighbours_report_at_the_same_time_and_all_in_the_same_interval() -> None:
    offsets_ns = [telemetry_offset_ns(rank, 1000, 30 * S) for rank in range(1000)]
    assert sorted(offsets_ns) == offsets_ns
    assert {one % S for one in offsets_ns} == {0}
    numbers = Counter(offsets_ns)
    assert len(numbers) == 30
    assert max(numbers.values()) - min(numbers.values()) <= 1
    assert telemetry_offset_ns(5, 1000, 0) == 0


def test_a_coordinator_that_is_new_is_told_soon() -> None:
    agent = in_group_of(1000)
    agent.process(1, Progress(W1, 3, 1, 5))
    agent.at_deadline()
    agent.process(1, Progress(W1, 3, 2, 5))
    reconnect(agent)
    agent.hear(Welcome("c"))
    began_ns = agent.now_ns
    while not agent.sent(Progress):
        agent.at_deadline()
    assert agent.now_ns - began_ns <= S


def test_a_first_step_does_not_wait_for_long_and_the_last_progress_comes_before_the_end() -> None:
    agent = in_group_of(1000)
    agent.process(1, Progress(W1, 3, 0))
    agent.at_deadline()
    assert agent.sent(Progress) == [Progress(W1, 3, 0)]
    reported_ns = agent.now_ns
    agent.process(1, Progress(W1, 3, 1, 5))
    agent.at_deadline()
    assert agent.sent(Progress) == [Progress(W1, 3, 1, 5)]
    assert agent.now_ns - reported_ns <= S
    agent.process(1, Progress(W1, 3, 2, 5))
    agent.process(1, reported_by(W1, WorkerPhase.FINISHED, 3))
    kinds = [type(one) for one in agent.sent() if isinstance(one, (Progress, WorkerUpdate))]
    assert kinds == [Progress, WorkerUpdate]


def test_rank_0_of_a_large_group_tells_how_far_it_is_as_often_as_it_says_it() -> None:
    agent = in_group_of(1000, rank=0)
    agent.pass_time(1.0)
    for steps in (1, 2, 3):
        agent.process(1, Progress(W1, 3, steps, 5))
        assert agent.sent(Progress) == [Progress(W1, 3, steps, 5)]


def leaving(*, follows: bool) -> LeaveGroup:
    return LeaveGroup(W1, 3, at_boundary=False, reason="lost n9/1", follows=follows)


def test_it_is_said_in_its_turn_when_none_follows_after_all_and_at_once_when_told_so() -> None:
    agent = in_group_of(1000)
    agent.hear(leaving(follows=True))
    agent.process(1, reported_by(W1, WorkerPhase.READY, 3))
    assert not agent.sent(WorkerUpdate)
    agent.hear(leaving(follows=False))
    assert [update.report.phase for update in agent.sent(WorkerUpdate)] == [WorkerPhase.READY]

    agent = in_group_of(1000)
    agent.hear(leaving(follows=True))
    agent.process(1, reported_by(W1, WorkerPhase.READY, 3))
    began_ns = agent.now_ns
    agent.at_deadline()
    assert agent.now_ns - began_ns == 2 * (1000 + 7) * MEMBER_NS
    assert [update.report.phase for update in agent.sent(WorkerUpdate)] == [WorkerPhase.READY]
