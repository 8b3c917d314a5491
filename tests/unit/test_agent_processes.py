"""The agent's machine: workers that are stopped, spares that fail, processes that hang."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic.core.config import AgentConfig, ns
from elastic.core.events.agent import (
    Kill,
    ProcessExited,
    ProcessSaid,
    ProcessStarted,
    ProcessStopped,
    Spawn,
    SpawnFailed,
)
from elastic.core.events.shared import Tick
from elastic.core.messages import (
    Assign,
    LeaveGroup,
    Ping,
    Pong,
    Release,
    ReportAck,
    StartWorker,
    Stop,
    StopWorker,
    WorkerUpdate,
)
from elastic.core.world import (
    EntryKind,
    ExitCause,
    ExitKind,
    WorkerPhase,
)
from tests.unit.agent_under_test import (
    CONFIG,
    CRASHED,
    KILLED,
    W1,
    W2,
    W3,
    S,
    announce,
    of,
    reconnect,
    registered,
    said_by,
    spec,
    with_spare,
    with_worker,
)

# ---------------------------------------------------------------- stopping workers


def test_a_stopped_worker_is_asked_and_killed_after_its_grace_period() -> None:
    agent = with_worker()
    agent.hear(StopWorker(W1, 2 * S, "job stopped"))
    assert agent.told(1) == [Stop("job stopped", 2 * S)]
    assert agent.hear(StopWorker(W1, 9 * S, "job stopped")) == [], "no second stop, no more time"
    effects = agent.pass_time(1.9)
    assert not of(effects, Kill)
    assert [kill.process_id for kill in of(agent.pass_time(0.2), Kill)] == [1]
    agent.do(ProcessExited(1, KILLED))
    assert agent.exit_of(W1) == ExitCause(
        ExitKind.STOPPED, 0, "job stopped (was ended by signal 9)"
    )


def test_a_worker_that_ends_by_itself_after_a_stop_was_stopped() -> None:
    agent = with_worker()
    agent.hear(StopWorker(W1, 2 * S, "job stopped"))
    agent.do(ProcessExited(1, ExitCause(ExitKind.CODE, 0)))
    cause = agent.exit_of(W1)
    assert cause is not None
    assert cause.kind is ExitKind.STOPPED


def test_a_stop_without_grace_kills_at_once() -> None:
    agent = with_worker()
    assert of(agent.hear(StopWorker(W1, 0, "hung")), Kill) == [Kill(1, "hung")]
    assert agent.hear(StopWorker(W1, 0, "hung")) == []


def test_nothing_is_said_to_a_process_that_is_killed() -> None:
    agent = with_worker()
    agent.hear(StopWorker(W1, 0, "hung"))
    for message in (announce(W1, 1), LeaveGroup(W1, 1, True, "x"), ReportAck(W1, 1, 0, True)):
        assert agent.hear(message) == []
    assert not agent.pass_time(60)


def test_a_second_stop_may_shorten_the_grace_period() -> None:
    agent = with_worker()
    agent.hear(StopWorker(W1, 20 * S, "slow"))
    agent.hear(StopWorker(W1, 1 * S, "fast"))
    assert of(agent.pass_time(1.0), Kill)


def test_a_worker_stopped_before_it_has_a_process_has_exited() -> None:
    agent = registered()
    agent.hear(StartWorker(W1, spec()))
    agent.hear(StopWorker(W1, 5 * S, "not needed"))
    assert agent.exit_of(W1) == ExitCause(ExitKind.STOPPED, 0, "not needed")
    agent.warm(1)
    assert agent.told(1) == []


def test_a_worker_that_does_not_run_here_is_said_to_have_exited() -> None:
    agent = registered()
    agent.hear(StopWorker(W3, 0, "unknown"))
    cause = agent.exit_of(W3)
    assert cause is not None
    assert cause.kind is ExitKind.STOPPED
    assert reconnect(agent).workers == ()


def test_processes_that_turn_out_to_be_too_many_are_ended() -> None:
    agent = registered()
    for worker_id in (W1, W2):
        agent.hear(StartWorker(worker_id, spec()))
    for process_id in (1, 2, 3):
        agent.do(ProcessStarted(process_id, 1000 + process_id))
    agent.hear(StopWorker(W1, 0, "x"))
    assert [kill.process_id for kill in of(agent.last, Kill)] == [3], "the newest goes first"
    agent.hear(StopWorker(W2, 0, "x"))
    assert [kill.process_id for kill in of(agent.last, Kill)] == [2]
    agent.do(ProcessExited(3, KILLED))
    assert "spare_failed" not in [note.name for note in agent.notes], "what we ended is no failure"


# ---------------------------------------------------------------- spares that fail


def test_a_spare_that_ends_is_replaced_after_a_growing_pause() -> None:
    agent = registered()
    pauses = []
    for process_id in (1, 2, 3):
        agent.do(ProcessStarted(process_id, 50))
        assert not of(agent.do(ProcessExited(process_id, CRASHED)), Spawn)
        began_ns = agent.now_ns
        assert of(agent.at_deadline(), Spawn) == [Spawn(process_id + 1)]
        pauses.append((agent.now_ns - began_ns) / S)
    assert pauses == [0.1, 0.2, 0.4]


def test_a_warm_spare_ends_a_row_of_failures() -> None:
    agent = registered()
    agent.do(SpawnFailed(1, "EAGAIN"))
    agent.at_deadline()
    agent.warm(2)
    began_ns = agent.now_ns
    agent.do(ProcessExited(2, KILLED))
    agent.at_deadline()
    assert agent.now_ns - began_ns == ns(0.1)


def test_spares_are_given_up_after_too_many_failures_and_tried_again_for_a_worker() -> None:
    agent = registered(config=AgentConfig(spawn_failures_max=2))
    agent.do(SpawnFailed(1, "EAGAIN"))
    agent.at_deadline()
    agent.do(SpawnFailed(2, "EAGAIN"))
    assert agent.machine.next_deadline_ns() is None, "no hot loop"
    agent.hear(StartWorker(W1, spec()))
    assert agent.exit_of(W1) is None
    effects = agent.last if of(agent.last, Spawn) else agent.at_deadline()
    assert of(effects, Spawn) == [Spawn(3)]
    agent.warm(3)
    assert [type(message) for message in agent.told(3)] == [Assign]
    assert of(agent.last, Spawn) == [Spawn(4)], "spawning works again, the spare is back"


def test_workers_that_no_process_is_for_are_reported_after_too_many_failures() -> None:
    agent = registered(config=AgentConfig(spawn_failures_max=2))
    agent.hear(StartWorker(W1, spec()))
    agent.do(SpawnFailed(1, "EAGAIN"))
    agent.do(SpawnFailed(2, "EAGAIN"))
    assert agent.exit_of(W1) is None, "attempts made together are one failure"
    agent.at_deadline()
    agent.do(SpawnFailed(3, "out of memory"))
    assert agent.exit_of(W1) is None, "process 4 may still get warm"
    agent.do(SpawnFailed(4, "out of memory"))
    agent.at_deadline()
    agent.do(SpawnFailed(5, "out of memory"))
    cause = agent.exit_of(W1)
    assert cause is not None
    assert cause.kind is ExitKind.SPAWN_FAILED
    assert "3 processes in a row did not start: out of memory" in cause.detail


def test_a_spare_that_never_warms_up_is_killed_and_counts_as_failed() -> None:
    agent = registered()
    agent.do(ProcessStarted(1, 50))
    effects = agent.pass_time(301)
    assert [kill.process_id for kill in of(effects, Kill)] == [1]
    assert of(effects, Spawn) == [Spawn(2)]
    assert agent.do(ProcessExited(1, KILLED)) == []


# ---------------------------------------------------------------- hangs


def test_a_worker_is_pinged_and_lives_as_long_as_it_answers() -> None:
    agent = with_worker()
    for number in range(1, 50):
        agent.at_deadline()
        assert agent.told(1) == [Ping(number)]
        agent.process(1, Pong(number))
        assert not of(agent.last, Kill)


def test_spares_are_not_pinged() -> None:
    agent = with_spare()
    assert agent.machine.next_deadline_ns() is None


def test_a_worker_that_does_not_answer_is_killed_as_hung() -> None:
    agent = with_worker()
    agent.at_deadline()
    agent.process(1, Pong(1))
    effects = agent.pass_time(CONFIG.hang_timeout_s + CONFIG.ping_interval_s + 0.1)
    assert [kill.process_id for kill in of(effects, Kill)] == [1]
    agent.do(ProcessExited(1, KILLED))
    cause = agent.exit_of(W1)
    assert cause is not None
    assert cause.kind is ExitKind.HUNG
    assert "did not answer for 30 s" in cause.detail


def test_a_slow_answer_is_a_sign_of_life_and_a_repeated_or_invented_one_is_not() -> None:
    agent = with_worker(config=AgentConfig(hang_timeout_s=2.0))
    agent.at_deadline()
    agent.at_deadline()
    agent.process(1, Pong(1))
    assert not of(agent.pass_time(1.5), Kill), "it was silent for more than 2 s only in parts"
    agent.process(1, Pong(1))
    agent.process(1, Pong(99))
    assert not of(agent.pass_time(0.4), Kill)
    assert of(agent.pass_time(0.2), Kill)


def test_the_agents_own_sleep_is_not_a_workers_silence() -> None:
    agent = with_worker()
    agent.at_deadline()
    agent.do(Tick(), after_s=3600)
    assert not of(agent.last, Kill)
    agent.process(1, Pong(1))
    assert not of(agent.pass_time(1), Kill)


@pytest.mark.parametrize("make", [with_worker, with_spare], ids=lambda make: make.__name__)
def test_a_process_that_stays_stopped_is_killed(make: Any) -> None:
    agent = make()
    agent.do(ProcessStopped(1, True))
    agent.do(ProcessStopped(1, True), after_s=0.3)
    assert not of(agent.last, Kill)
    effects = agent.pass_time(0.2)
    assert of(effects, Kill) == [Kill(1, "stopped (SIGSTOP) for 0.5 s")]
    agent.do(ProcessExited(1, KILLED))
    if make is with_worker:
        cause = agent.exit_of(W1)
        assert cause is not None
        assert cause.kind is ExitKind.HUNG


def test_a_process_that_was_stopped_for_a_moment_lives() -> None:
    agent = with_worker()
    agent.do(ProcessStopped(1, True))
    agent.do(ProcessStopped(1, False), after_s=0.3)
    assert not of(agent.pass_time(0.5), Kill)


def test_a_process_that_ended_by_itself_was_not_hung() -> None:
    agent = with_worker()
    agent.do(ProcessStopped(1, True))
    agent.pass_time(0.5)
    agent.do(ProcessExited(1, ExitCause(ExitKind.CODE, 3)))
    assert agent.exit_of(W1) == ExitCause(ExitKind.CODE, 3)


# ---------------------------------------------------------------- scripts that end their process

LEFT_WELL = ExitCause(ExitKind.CODE, 0)


def with_trained(phase: WorkerPhase = WorkerPhase.TRAINING, kind: Any = EntryKind.SCRIPT) -> Any:
    """Return an agent whose worker W1 is in that phase of generation 1."""
    agent = with_spare()
    job = spec()
    agent.hear(StartWorker(W1, replace(job, entry=replace(job.entry, kind=kind))))
    agent.do(ProcessSaid(1, said_by(W1, phase, 1)))
    return agent


@pytest.mark.parametrize("kind", [EntryKind.SCRIPT, EntryKind.MODULE])
def test_a_script_that_ends_its_process_with_success_has_finished(kind: EntryKind) -> None:
    agent = with_trained(kind=kind)
    agent.do(ProcessExited(1, LEFT_WELL))
    (update,) = agent.sent(WorkerUpdate)
    assert update.report.phase is WorkerPhase.FINISHED
    assert (update.report.generation, update.report.result) == (1, "null")
    agent.warm(2)
    assert agent.told(2) == [], "nobody waits for another process"
    (known,) = [one for one in reconnect(agent).workers if one.worker_id == W1]
    assert known.phase is WorkerPhase.FINISHED


@pytest.mark.parametrize(
    ("phase", "kind", "cause"),
    [
        (WorkerPhase.TRAINING, EntryKind.FUNCTION, LEFT_WELL),
        (WorkerPhase.TRAINING, EntryKind.SCRIPT, CRASHED),
        (WorkerPhase.TRAINING, EntryKind.SCRIPT, KILLED),
        (WorkerPhase.READY, EntryKind.SCRIPT, LEFT_WELL),
        (WorkerPhase.FORMING, EntryKind.SCRIPT, LEFT_WELL),
    ],
)
def test_any_other_end_of_a_process_is_an_exit(
    phase: WorkerPhase, kind: EntryKind, cause: ExitCause
) -> None:
    agent = with_trained(phase, kind)
    agent.do(ProcessExited(1, cause))
    assert agent.exit_of(W1) == cause


@pytest.mark.parametrize("order", [announce(W1, 2), LeaveGroup(W1, 1, False, "n2/1 was lost")])
def test_a_script_that_ends_its_process_while_it_is_wanted_elsewhere_is_started_anew(
    order: Any,
) -> None:
    agent = with_trained()
    agent.hear(order)
    agent.do(ProcessExited(1, LEFT_WELL))
    assert agent.exit_of(W1) == ExitCause(
        ExitKind.STOPPED, detail="its script had ended its process"
    )


def test_a_script_that_ends_its_process_since_its_group_broke_has_not_failed() -> None:
    agent = with_trained(WorkerPhase.BROKEN)
    agent.do(ProcessExited(1, LEFT_WELL))
    cause = agent.exit_of(W1)
    assert cause is not None
    assert cause.kind is ExitKind.STOPPED


def test_a_script_that_has_followed_its_orders_may_end() -> None:
    agent = with_trained()
    agent.hear(announce(W1, 2))
    agent.do(ProcessSaid(1, said_by(W1, WorkerPhase.FORMING, 2)))
    agent.do(ProcessSaid(1, said_by(W1, WorkerPhase.TRAINING, 2)))
    agent.do(ProcessExited(1, LEFT_WELL))
    assert agent.exit_of(W1) is None


def test_a_worker_that_ended_itself_is_gone_when_it_is_stopped_or_needed_again() -> None:
    for order, detail in (
        (StopWorker(W1, S, "job ended"), "job ended"),
        (announce(W1, 2), "its script had ended its process"),
    ):
        agent = with_trained()
        agent.do(ProcessExited(1, LEFT_WELL))
        agent.hear(LeaveGroup(W1, 1, True, "node n2 joins"))
        assert agent.exit_of(W1) is None
        agent.hear(order)
        assert agent.exit_of(W1) == ExitCause(ExitKind.STOPPED, detail=detail)


def test_an_agent_that_ends_does_not_wait_for_one_that_ended_itself() -> None:
    agent = with_trained()
    agent.do(ProcessExited(1, LEFT_WELL))
    agent.hear(Release("drained"))
    exit_of_it = agent.exit_of(W1)
    assert exit_of_it is not None
    assert exit_of_it.kind is ExitKind.STOPPED
