"""What the coordinator does while members wait for each other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.core.config import ns
from elastic.core.events.coordinator import CloseSession
from elastic.core.events.shared import Tick
from elastic.core.messages import Announce, DumpStacks, Probe, ProbeAck, Pulse, StopWorker
from elastic.core.world import Begun, JobId, JobPhase, NodePhase, WorkerId, WorkerPhase
from tests.unit.coordinator_under_test import CONFIG, MS, Coordinator, running


def quiet(nodes: int = 3, seconds: float = 20, **changes: object) -> Coordinator:
    """A job that trains, and of which nothing was heard for a while."""
    coordinator = running(nodes=nodes, **changes)
    coordinator.advance(seconds)
    coordinator.answers_probes = False
    return coordinator


def all_wait_but_one(coordinator: Coordinator, seconds: float) -> None:
    coordinator.pulse("n1/1", waits=seconds)
    coordinator.pulse("n3/1", waits=seconds)
    coordinator.pulse("n2/1", stands=seconds)


# ---------------------------------------------------------------- silent nodes


def test_nobody_is_probed_while_nobody_waits() -> None:
    coordinator = quiet()
    assert coordinator.machine.next_deadline_ns() is None
    coordinator.pulse("n1/1", stands=5)
    coordinator.pulse("n1/1")
    assert coordinator.sent(Probe) == []
    assert coordinator.machine.next_deadline_ns() is None


def test_a_silent_node_is_lost_as_soon_as_its_probe_is_over() -> None:
    coordinator = quiet()
    coordinator.pulse("n1/1", waits=0.3)
    assert [probe.number for probe in coordinator.sent(Probe)] == [1, 2]
    coordinator.says("n2", ProbeAck(1))
    coordinator.advance(0.59)
    assert coordinator.node("n3").phase is NodePhase.READY
    coordinator.says("n1", ProbeAck(0))
    coordinator.says("n2", ProbeAck(0))
    coordinator.advance(0.01)
    assert coordinator.node("n3").phase is NodePhase.LOST
    assert coordinator.members("a") == "g2: n1/1 n2/1"
    assert [effect.reason for effect in coordinator.of(CloseSession)] == [
        "its agent did not answer a probe within 0.6 s while members waited"
    ]


@pytest.mark.parametrize("sign", ["ack", "progress", "pulse", "report", "update"])
def test_any_word_of_an_agent_is_an_answer(sign: str) -> None:
    coordinator = quiet(nodes=2)
    coordinator.pulse("n1/1", waits=0.3)
    assert len(coordinator.sent(Probe)) == 1
    coordinator.advance(0.5)
    if sign == "ack":
        coordinator.says("n2", ProbeAck(1))
    elif sign == "progress":
        coordinator.steps("n2/1", 5)
    elif sign == "pulse":
        coordinator.pulse("n2/1")
    elif sign == "report":
        coordinator.reports("n2/1", 0)
    else:
        coordinator.training("n2/1")
    coordinator.advance(0.3)
    assert coordinator.node("n2").phase is NodePhase.READY


def test_who_answers_is_asked_again_every_half_second_as_long_as_somebody_waits() -> None:
    coordinator = quiet(nodes=2)
    asked_s = []
    for tenth in range(20):
        coordinator.pulse("n1/1", waits=0.3 + tenth / 10)
        probes = coordinator.sent(Probe)
        coordinator.advance(0.1)
        probes += coordinator.sent(Probe)
        for probe in probes:
            asked_s.append(tenth / 10)
            coordinator.says("n2", ProbeAck(probe.number))
    assert asked_s == [0.0, 0.5, 1.0, 1.5]
    assert coordinator.node("n2").phase is NodePhase.READY


def test_looks_end_when_nobody_waits_any_more() -> None:
    coordinator = quiet(nodes=2)
    coordinator.pulse("n1/1", waits=0.3)
    coordinator.says("n2", ProbeAck(1))
    coordinator.pulse("n1/1")
    coordinator.advance(0.2)
    assert coordinator.machine.next_deadline_ns() is None


def test_looks_end_when_the_one_that_waited_is_not_heard_of_any_more() -> None:
    coordinator = quiet(nodes=2)
    coordinator.pulse("n1/1", waits=0.3)
    coordinator.disconnect("n1")
    coordinator.agent("n1")
    for _ in range(40):
        for name in ("n1", "n2"):
            coordinator.says(name, ProbeAck(0))
        coordinator.advance(0.1)
    assert coordinator.machine.next_deadline_ns() is None
    assert coordinator.members("a") == "g1: n1/1 n2/1"


@pytest.mark.parametrize("event", ["tick", "other"])
def test_a_coordinator_that_was_slow_itself_blames_nobody(event: str) -> None:
    coordinator = quiet()
    coordinator.pulse("n1/1", waits=0.3)
    # A store that takes two seconds for a record: the answers wait in the queue.
    coordinator.now_ns += 2000 * MS
    if event == "tick":
        coordinator.step(Tick())
    else:
        coordinator.steps("n1/1", 5)
    coordinator.says("n2", ProbeAck(1))
    coordinator.says("n3", ProbeAck(2))
    assert {n: coordinator.node(n).phase for n in ("n2", "n3")} == {
        "n2": NodePhase.READY,
        "n3": NodePhase.READY,
    }


def test_a_node_that_was_probed_and_broke_its_stream_has_the_grace_of_every_other() -> None:
    coordinator = quiet(nodes=2)
    coordinator.pulse("n1/1", waits=0.3)
    coordinator.disconnect("n2")
    coordinator.advance(0.1)
    coordinator.agent("n2")
    coordinator.advance(0.3)
    coordinator.says("n2", ProbeAck(0))
    coordinator.advance(0.2)
    assert coordinator.node("n2").phase is NodePhase.READY


# ---------------------------------------------------------------- hung members


def hang_for(coordinator: Coordinator, since: float, until: float) -> list[object]:
    """Let all wait for n2/1 from `since` to `until` seconds; return what was sent meanwhile."""
    sent: list[object] = []
    for tenth in range(round(since * 10), round(until * 10)):
        all_wait_but_one(coordinator, tenth / 10)
        coordinator.advance(0.1)
        sent += coordinator.sent(object)
    return [message for message in sent if isinstance(message, (DumpStacks, StopWorker))]


def test_a_hung_worker_is_killed_after_all_stacks_are_written() -> None:
    coordinator = quiet(hang_timeout_s=5)
    assert hang_for(coordinator, 0.3, 4.9) == []
    sent = hang_for(coordinator, 4.9, 5.6)
    assert [type(message).__name__ for message in sent] == ["DumpStacks"] * 3 + ["StopWorker"]
    (note,) = coordinator.noted("worker_hung")
    assert (note["worker"], note["node"], note["rank"]) == ("n2/1", "n2", "1")
    assert 5.0 <= float(note["seconds"]) <= 5.2
    assert coordinator.members("a") == "g2: n1/1 n3/1"
    coordinator.exits("n2/1")
    assert "killed because it hung" in coordinator.noted("worker_gone")[-1]["cause"]
    assert coordinator.job("a").record.phase is JobPhase.RUNNING
    assert coordinator.job("a").record.failures == 0


def test_who_moves_after_its_stacks_were_written_lives() -> None:
    coordinator = quiet(hang_timeout_s=5)
    hang_for(coordinator, 0.3, 5.1)
    assert len(coordinator.noted("worker_hung")) == 1
    coordinator.pulse("n2/1")
    coordinator.advance(0.5)
    assert coordinator.members("a") == "g1: n1/1 n2/1 n3/1"
    # A later hang is judged from its own beginning.
    hang_for(coordinator, 0.3, 4.9)
    assert len(coordinator.noted("worker_hung")) == 1


def test_a_slow_worker_is_never_killed() -> None:
    coordinator = quiet(hang_timeout_s=1)
    for tenth in range(3, 300):
        coordinator.pulse("n1/1", waits=tenth / 10)
        coordinator.pulse("n3/1", waits=tenth / 10)
        coordinator.says("n2", ProbeAck(0))
        coordinator.advance(0.1)
    assert coordinator.noted("worker_hung") == []
    assert coordinator.members("a") == "g1: n1/1 n2/1 n3/1"


def test_two_that_hang_and_hide_those_who_wait_for_them_are_killed_in_the_end() -> None:
    coordinator = quiet(nodes=4, hang_timeout_s=5)
    coordinator.answers_probes = True
    for tenth in range(10, 106):
        for rank in range(4):
            pair = tuple(sorted((rank, rank ^ 1)))
            begun = Begun("pair", pair, 8 if rank in (0, 3) else 7)
            coordinator.pulse(f"n{rank + 1}/1", begun, stands=tenth / 10)
        assert (coordinator.noted("worker_hung") == []) == (tenth < 100)
        coordinator.advance(0.1)
    assert [note["worker"] for note in coordinator.noted("worker_hung")] == ["n2/1", "n3/1"]
    assert coordinator.members("a") == "g2: n1/1 n4/1"


def test_with_a_timeout_of_zero_nobody_is_killed() -> None:
    coordinator = quiet(hang_timeout_s=0)
    assert hang_for(coordinator, 0.3, 60) == []


@pytest.mark.parametrize(
    ("worker", "generation"), [("n1/1", 0), ("n1/1", 9), ("n2/1", 1), ("n9/1", 1)]
)
def test_pulses_of_other_groups_and_of_other_nodes_count_for_nothing(
    worker: str, generation: int
) -> None:
    coordinator = quiet(hang_timeout_s=1)
    coordinator.says("n1", Pulse(WorkerId(worker), generation, 300 * MS, 0))
    assert coordinator.sent(Probe) == []
    assert coordinator.machine.next_deadline_ns() is None


def test_a_hang_that_comes_again_in_every_group_ends_the_job() -> None:
    config = replace(CONFIG, crash_loop_limit=2, restart_delay_s_max=0)
    coordinator = running(nodes=4, hang_timeout_s=40, config=config)
    # Each group stands still for longer than what counts as a healthy period.
    for hung in ("n4/1", "n3/1", "n2/1"):
        assert coordinator.job("a").record.phase is JobPhase.RUNNING
        members = coordinator.members("a").split()[1:]
        coordinator.training(*members)
        for tenth in range(3, 410):
            if coordinator.members("a").split()[1:] != members:
                break
            for worker in members:
                what = "stands" if worker == hung else "waits"
                coordinator.pulse(worker, **{what: tenth / 10})
            coordinator.advance(0.1)
        coordinator.exits(hung)
    record = coordinator.store[JobId("a")]
    assert record.phase is JobPhase.FAILED
    assert "3 workers lost in a row without progress" in record.reason
    assert record.failures == 0


def all_wait_for(coordinator: Coordinator, since: float, until: float) -> list[object]:
    """Let all wait for each other from `since` to `until` seconds; return what was sent."""
    sent: list[object] = []
    for tenth in range(round(since * 10), round(until * 10)):
        for worker in ("n1/1", "n2/1", "n3/1"):
            coordinator.pulse(worker, waits=tenth / 10)
        coordinator.advance(0.1)
        sent += coordinator.sent(object)
    return [message for message in sent if isinstance(message, (DumpStacks, StopWorker, Announce))]


def test_a_group_in_which_all_wait_for_each_other_is_formed_anew() -> None:
    coordinator = quiet(hang_timeout_s=5)
    assert all_wait_for(coordinator, 0.3, 9.9) == []
    sent = all_wait_for(coordinator, 9.9, 10.5)
    assert [type(message).__name__ for message in sent] == ["DumpStacks"] * 3 + ["Announce"] * 3
    assert coordinator.members("a") == "g2: n1/1 n2/1 n3/1"
    (note,) = coordinator.noted("group_stuck")
    assert note["generation"] == "1"
    assert "a link between two of them is cut" in note["reason"]
    record = coordinator.store[JobId("a")]
    assert (record.failures, record.losses) == (0, 1)


def test_groups_that_are_stuck_again_and_again_end_the_job() -> None:
    coordinator = quiet(hang_timeout_s=1, config=replace(CONFIG, crash_loop_limit=2))
    for generation in (1, 2, 3):
        assert coordinator.members("a").startswith(f"g{generation}:")
        coordinator.training("n1/1", "n2/1", "n3/1")
        all_wait_for(coordinator, 0.3, 2.2)
    record = coordinator.store[JobId("a")]
    assert record.phase is JobPhase.FAILED
    assert "3 groups in a row broke without progress" in record.reason


def test_a_worker_that_does_not_leave_its_group_is_killed() -> None:
    coordinator = running(nodes=2, low=2)
    coordinator.exits("n1/1")
    assert coordinator.job("a").record.phase is JobPhase.PENDING
    coordinator.advance(19.9)
    assert "n2/1" in {w.report.worker_id for w in coordinator.job("a").workers}
    coordinator.advance(0.2)
    assert [m.worker_id for m in coordinator.sent(StopWorker)] == ["n2/1"]


def test_a_loop_that_goes_on_in_place_is_given_time_unless_it_stands_still() -> None:
    coordinator = running(nodes=3, hang_timeout_s=30)
    for name in ("n1", "n2"):
        coordinator.update(f"{name}/1", WorkerPhase.TRAINING, in_place=True)
    coordinator.exits("n3/1")
    assert coordinator.members("a").startswith("g2: n1/1 n2/1")
    coordinator.update("n1/1", WorkerPhase.FORMING)
    coordinator.training("n1/1")
    # n2/1 is in user code between two epochs: longer than forming takes, and it says nothing.
    coordinator.advance(25)
    assert coordinator.sent(StopWorker) == []
    stopped = []
    for second in range(25, 40):
        coordinator.pulse("n2/1", stands=second)
        stopped += [(second, m.worker_id) for m in coordinator.sent(StopWorker)]
        coordinator.advance(1)
        stopped += [(second, m.worker_id) for m in coordinator.sent(StopWorker)]
    assert stopped == [(30, "n2/1")]


# ---------------------------------------------------------------- while a group forms


def forming(nodes: int = 3) -> Coordinator:
    """A group of three that was announced this moment; the one before it has lost a member."""
    coordinator = quiet(nodes=nodes + 1)
    coordinator.exits(f"n{nodes + 1}/1")
    assert coordinator.members("a").startswith("g2: n1/1 n2/1 n3/1")
    return coordinator


def test_a_host_that_falls_silent_while_its_group_forms_is_lost_before_its_keepalive_ends() -> None:
    coordinator = forming()
    for name in ("n1", "n2"):
        coordinator.update(f"{name}/1", WorkerPhase.FORMING)
    coordinator.advance(0.4)
    assert coordinator.sent(Probe) == []
    for _ in range(20):
        coordinator.says("n1", ProbeAck(0))
        coordinator.says("n2", ProbeAck(0))
        assert coordinator.node("n3").phase is NodePhase.READY
        coordinator.advance(0.1)
    assert coordinator.node("n3").phase is NodePhase.LOST
    assert coordinator.members("a").startswith("g3: n1/1 n2/1")
    assert (
        "did not answer a probe within 1.8 s"
        in coordinator.noted("node_disconnected")[-1]["reason"]
    )


def test_whoever_answers_while_a_group_forms_for_long_is_never_lost() -> None:
    coordinator = forming()
    coordinator.answers_probes = True
    coordinator.advance(19)
    assert all(coordinator.node(f"n{i}").phase is NodePhase.READY for i in (1, 2, 3))
    assert coordinator.members("a").startswith("g2: ")


def test_a_member_that_waits_has_a_silent_host_asked_anew_with_less_time() -> None:
    coordinator = forming()
    for name in ("n1", "n2"):
        coordinator.update(f"{name}/1", WorkerPhase.FORMING)
    coordinator.advance(0.6)
    for name in ("n1", "n2"):
        coordinator.training(f"{name}/1")
        coordinator.says(name, ProbeAck(0))
    coordinator.pulse("n1/1", waits=0.3)
    assert len(coordinator.sent(Probe)) == 1
    coordinator.says("n2", ProbeAck(0))
    coordinator.advance(0.6)
    assert coordinator.node("n3").phase is NodePhase.LOST


def test_no_look_is_left_behind_once_a_group_trains() -> None:
    coordinator = forming()
    coordinator.training("n1/1", "n2/1", "n3/1")
    coordinator.exits("n4/2")
    coordinator.advance(0.6)
    assert coordinator.sent(Probe) == []
    assert not coordinator.machine._cluster.looks


# ---------------------------------------------------------------- groups that do not form


def test_who_forms_is_not_given_up_while_another_is_still_on_its_way() -> None:
    coordinator = running(nodes=3)
    for name in ("n1", "n2"):
        coordinator.update(f"{name}/1", WorkerPhase.TRAINING, in_place=True)
    coordinator.exits("n3/1")
    coordinator.update("n1/1", WorkerPhase.FORMING)
    # n2/1 is in user code between two epochs, and comes as soon as that is over.
    coordinator.advance(CONFIG.form_timeout_s * 3)
    assert coordinator.sent(StopWorker) == []
    coordinator.training("n2/1", "n1/1")
    assert coordinator.members("a").startswith("g2: n1/1 n2/1")


def test_of_a_group_that_does_not_form_only_who_does_not_come_out_is_ended() -> None:
    coordinator = running(nodes=3)
    for worker in ("n1/1", "n2/1", "n3/1"):
        coordinator.update(worker, WorkerPhase.READY)
    coordinator.agent("n4")
    coordinator.exits("n3/1")
    for worker in ("n1/1", "n2/1"):
        coordinator.update(worker, WorkerPhase.FORMING)
    before = int(coordinator.members("a")[1])
    coordinator.advance(CONFIG.form_timeout_s + 0.1)
    assert coordinator.sent(StopWorker) == []
    assert int(coordinator.members("a")[1]) == before + 1
    coordinator.update("n1/1", WorkerPhase.FORMING)
    coordinator.advance(CONFIG.form_timeout_s + 0.1)
    assert [m.worker_id for m in coordinator.sent(StopWorker)] == ["n2/1"]


def test_groups_that_break_while_somebody_is_on_its_way_do_not_prolong_its_time() -> None:
    coordinator = running(nodes=3, collective_timeout_s=100)
    for name in ("n1", "n2"):
        coordinator.update(f"{name}/1", WorkerPhase.TRAINING, in_place=True)
    coordinator.exits("n3/1")
    stopped, seconds = [], 0
    while not stopped and seconds < 200:
        coordinator.update("n1/1", WorkerPhase.FORMING)
        for _ in range(15):
            coordinator.advance(1)
            seconds += 1
            stopped += [m.worker_id for m in coordinator.sent(StopWorker)]
        coordinator.broken("n1/1")
        coordinator.advance(0.5)
    assert stopped == ["n2/1"]
    assert seconds <= 120
    assert coordinator.job("a").record.losses <= 2


@pytest.mark.parametrize("is_looked_at_again", [False, True])
def test_a_group_that_a_slow_store_holds_up_has_all_its_time_once_it_is_told(
    is_looked_at_again: bool,
) -> None:
    coordinator = running(nodes=3)
    coordinator.exits("n3/1")
    if is_looked_at_again:
        coordinator.agent("n4")
    # Until now the record was being written: nobody has heard of the group before.
    coordinator.now_ns += ns(CONFIG.form_timeout_s + 1)
    coordinator.step(Tick())
    assert coordinator.sent(StopWorker) == []
    for name in ("n1", "n2"):
        coordinator.says(name, ProbeAck(0))
    coordinator.advance(CONFIG.form_timeout_s - 0.1)
    assert coordinator.sent(StopWorker) == []
    coordinator.advance(0.2)
    assert {m.worker_id for m in coordinator.sent(StopWorker)} == {"n1/1", "n2/1"}
