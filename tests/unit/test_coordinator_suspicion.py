"""What the coordinator does while members wait for each other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.core.config import ns
from elastic.core.events.shared import Tick
from elastic.core.facts import JobId, JobPhase, NodePhase, WorkerPhase
from elastic.core.messages import Announce, DumpStacks, ProbeAck, StopWorker
from tests.unit.coordinator_under_test import CONFIG, MS, Coordinator, running


def quiet(nodes: int = 3, seconds: float = 20, **changes: object) -> Coordinator:
    """A job that trains, and of which nothing was heard for a while."""
    coordinator = running(nodes=nodes, **changes)
    coordinator.advance(seconds)
    coordinator.answers_probes = False
    return coordinator


# ---------------------------------------------------------------- silent nodes


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


def test_groups_that_are_stuck_again_and_again_end_the_job() -> None:
    coordinator = quiet(hang_timeout_s=1, config=replace(CONFIG, crash_loop_limit=2))
    for generation in (1, 2, 3):
        assert coordinator.members("a").startswith(f"g{generation}:")
        coordinator.training("n1/1", "n2/1", "n3/1")
        all_wait_for(coordinator, 0.3, 2.2)
    record = coordinator.store[JobId("a")]
    assert record.phase is JobPhase.FAILED
    assert "3 groups in a row broke without progress" in record.reason


# ---------------------------------------------------------------- groups that do not form


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


@pytest.mark.parametrize("is_checked_at_again", [False, True])
def test_a_group_that_a_slow_store_holds_up_has_all_its_time_once_it_is_told(
    is_checked_at_again: bool,
) -> None:
    coordinator = running(nodes=3)
    coordinator.exits("n3/1")
    if is_checked_at_again:
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
