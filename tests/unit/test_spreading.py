"""What members of large groups say alike is said one after another, and nothing urgent waits."""

from __future__ import annotations

import itertools

from elastic.core.config import AgentConfig
from elastic.core.events.agent import SendCoordinator
from elastic.core.messages import Announce, LeaveGroup, Progress, Pulse, WorkerUpdate
from elastic.core.policy.spreading import (
    WAITING_NS,
    answer_after_ns,
    waiting_is_long_after_ns,
)
from elastic.core.world import Assignment, WorkerPhase
from tests.unit.agent_under_test import JOB, W1, Agent, S, reconnect, said_by, with_worker

MEMBER_NS = 100_000


def in_group_of(size: int, *, rank: int = 7, config: AgentConfig | None = None) -> Agent:
    """Return an agent whose worker was told of a large group."""
    agent = with_worker(config=config) if config else with_worker()
    agent.process(1, said_by(W1, WorkerPhase.READY))
    agent.hear(Announce(Assignment(JOB, W1, 3, rank, size, 0, 1, rank, size, "h:1")))
    return agent


def updates_within(agent: Agent, seconds: float) -> list[WorkerUpdate]:
    """Let time pass, and return what the coordinator hears of the worker meanwhile."""
    messages = [e.message for e in agent.pass_time(seconds) if isinstance(e, SendCoordinator)]
    return [message for message in messages if isinstance(message, WorkerUpdate)]


def test_small_groups_answer_at_once() -> None:
    assert answer_after_ns(rank=198, world_size=199, member_ns=MEMBER_NS) == 0
    agent = in_group_of(16)
    agent.process(1, said_by(W1, WorkerPhase.FORMING, 3))
    assert [update.report.phase for update in agent.sent(WorkerUpdate)] == [WorkerPhase.FORMING]
    agent.process(1, Progress(W1, 3, 1, 5))
    agent.process(1, Progress(W1, 3, 2, 5))
    assert agent.sent(Progress) == [Progress(W1, 3, 2, 5)]


def test_nobody_in_a_large_group_answers_before_all_were_told_and_no_two_at_once() -> None:
    size = 10_000
    moments = [answer_after_ns(rank, size, MEMBER_NS) for rank in range(size)]
    assert moments[0] == size * MEMBER_NS
    assert all(later - sooner == MEMBER_NS for sooner, later in itertools.pairwise(moments))


def test_the_largest_groups_answer_within_seconds() -> None:
    size = 1_000_000
    assert answer_after_ns(size - 1, size, MEMBER_NS) < 4 * S


def test_a_member_of_a_large_group_says_once_that_it_trains_when_its_turn_comes() -> None:
    agent = in_group_of(1000)
    agent.process(1, said_by(W1, WorkerPhase.FORMING, 3))
    assert not agent.sent(WorkerUpdate)
    agent.process(1, said_by(W1, WorkerPhase.TRAINING, 3))
    assert not agent.sent(WorkerUpdate)
    began_ns = agent.now_ns
    agent.at_deadline()
    assert agent.now_ns - began_ns == 1000 * MEMBER_NS + 7 * MEMBER_NS
    assert [update.report.phase for update in agent.sent(WorkerUpdate)] == [WorkerPhase.TRAINING]
    assert not updates_within(agent, 5.0)


def test_what_breaks_or_leaves_is_said_at_once() -> None:
    for phase in (WorkerPhase.BROKEN, WorkerPhase.READY, WorkerPhase.FINISHED):
        agent = in_group_of(1000)
        agent.process(1, said_by(W1, WorkerPhase.TRAINING, 3))
        assert not agent.sent(WorkerUpdate)
        agent.process(1, said_by(W1, phase, 3))
        assert [update.report.phase for update in agent.sent(WorkerUpdate)] == [phase]


def test_a_hello_says_all_there_is_and_nothing_is_said_again_after_it() -> None:
    agent = in_group_of(1000)
    agent.process(1, said_by(W1, WorkerPhase.TRAINING, 3))
    (report,) = reconnect(agent).workers
    assert report.phase is WorkerPhase.TRAINING


def test_who_waits_for_its_peers_is_known_to_be_in_the_group_first() -> None:
    agent = in_group_of(1000)
    agent.process(1, said_by(W1, WorkerPhase.TRAINING, 3))
    agent.process(1, Pulse(W1, 3, waiting_ns=S, still_ns=0))
    assert [type(message) for message in agent.sent()] == [WorkerUpdate, Pulse]


def test_of_progress_in_a_large_group_the_newest_is_told_in_turn() -> None:
    agent = in_group_of(1000)
    for steps in (1, 2, 3):
        agent.process(1, Progress(W1, 3, steps, 5))
        assert not agent.sent(Progress)
    agent.at_deadline()
    assert agent.sent(Progress) == [Progress(W1, 3, 3, 5)]
    told_ns = agent.now_ns
    agent.process(1, Progress(W1, 3, 4, 5))
    assert not agent.sent(Progress)
    while not agent.sent(Progress):
        agent.at_deadline()
    assert agent.now_ns - told_ns == 1000 * MEMBER_NS * 10
    # Of the group before, nothing waits any more.
    agent.process(1, Progress(W1, 3, 5, 5))
    agent.hear(LeaveGroup(W1, 3, at_boundary=False, reason="over"))
    agent.hear(Announce(Assignment(JOB, W1, 4, 0, 2, 0, 1, 0, 2, "h:1")))
    agent.process(1, Progress(W1, 4, 1, 6))
    assert agent.sent(Progress) == [Progress(W1, 4, 1, 6)]


def test_rank_0_of_a_large_group_tells_how_far_it_is_as_often_as_it_says_it() -> None:
    agent = in_group_of(1000, rank=0)
    agent.pass_time(1.0)
    for steps in (1, 2, 3):
        agent.process(1, Progress(W1, 3, steps, 5))
        assert agent.sent(Progress) == [Progress(W1, 3, steps, 5)]


def test_in_a_large_group_waiting_is_worth_a_word_later() -> None:
    assert waiting_is_long_after_ns(16) == WAITING_NS
    assert waiting_is_long_after_ns(10_000) == 2 * S


def leaving(*, follows: bool) -> LeaveGroup:
    return LeaveGroup(W1, 3, at_boundary=False, reason="lost n9/1", follows=follows)


def test_who_leaves_because_another_group_follows_need_not_say_that_it_is_out() -> None:
    agent = in_group_of(1000)
    agent.process(1, said_by(W1, WorkerPhase.TRAINING, 3))
    agent.hear(leaving(follows=True))
    agent.process(1, said_by(W1, WorkerPhase.READY, 3))
    agent.hear(Announce(Assignment(JOB, W1, 4, 6, 999, 0, 1, 6, 999, "h:1")))
    agent.process(1, said_by(W1, WorkerPhase.TRAINING, 4))
    said = [(m.report.phase, m.report.generation) for m in updates_within(agent, 5.0)]
    assert said == [(WorkerPhase.TRAINING, 4)]


def test_it_is_said_in_its_turn_when_none_follows_after_all_and_at_once_when_told_so() -> None:
    agent = in_group_of(1000)
    agent.hear(leaving(follows=True))
    agent.process(1, said_by(W1, WorkerPhase.READY, 3))
    assert not agent.sent(WorkerUpdate)
    agent.hear(leaving(follows=False))
    assert [update.report.phase for update in agent.sent(WorkerUpdate)] == [WorkerPhase.READY]

    agent = in_group_of(1000)
    agent.hear(leaving(follows=True))
    agent.process(1, said_by(W1, WorkerPhase.READY, 3))
    began_ns = agent.now_ns
    agent.at_deadline()
    assert agent.now_ns - began_ns == 2 * (1000 + 7) * MEMBER_NS
    assert [update.report.phase for update in agent.sent(WorkerUpdate)] == [WorkerPhase.READY]


def test_what_goes_wrong_on_the_way_out_is_said_at_once() -> None:
    agent = in_group_of(1000)
    agent.hear(leaving(follows=True))
    agent.process(1, said_by(W1, WorkerPhase.BROKEN, 3))
    assert [update.report.phase for update in agent.sent(WorkerUpdate)] == [WorkerPhase.BROKEN]
