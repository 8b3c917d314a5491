"""Who does not come into a group, or out of one, is shown and then killed; nobody else is."""

from __future__ import annotations

from elastic.core.events.coordinator import SendAgent
from elastic.core.messages import Announce, DumpStacks, StopWorker
from elastic.core.world import WorkerPhase
from tests.unit.coordinator_under_test import CONFIG, STOPPED, running


def test_who_comes_out_of_forming_late_with_all_the_others_is_not_killed() -> None:
    """The link between two members was cut, and healed: nobody hangs, and one is out first."""
    coordinator = running()
    coordinator.exits("n3/1")
    for worker in ("n1/1", "n2/1"):
        coordinator.update(worker, WorkerPhase.FORMING)
    coordinator.advance(CONFIG.form_timeout_s - 0.001)
    coordinator.training("n1/1")
    coordinator.advance(CONFIG.form_timeout_s - 1)
    assert not coordinator.sent(StopWorker)
    coordinator.advance(1)
    (stop,) = coordinator.sent(StopWorker)
    assert stop.worker_id == "n2/1", "but who never is"


def test_a_member_that_never_comes_to_train_is_killed_and_replaced() -> None:
    coordinator = running()
    coordinator.exits("n3/1")
    coordinator.training("n1/1")
    coordinator.advance(CONFIG.form_timeout_s - 0.01)
    (dump,) = coordinator.sent(DumpStacks)
    assert (dump.worker_id, dump.reason) == ("n2/1", "has to join generation 2")
    assert not coordinator.sent(StopWorker), "before its stacks are written"
    coordinator.advance(0.01)
    assert not coordinator.sent(DumpStacks), "which it was asked for already"
    (stop,) = coordinator.sent(StopWorker)
    assert (stop.worker_id, stop.grace_ns) == ("n2/1", 0)
    assert stop.reason == "did not join generation 2 within 20 s"
    assert coordinator.members("a") == "g3: n1/1"
    coordinator.exits("n2/1", STOPPED)
    gone = coordinator.noted("worker_gone")[-1]["cause"]
    assert gone == "killed because it hung (did not join generation 2 within 20 s)"


def test_where_nobody_comes_out_of_forming_all_stacks_are_written_before_the_next_group() -> None:
    coordinator = running()
    coordinator.exits("n3/1")
    for worker in ("n1/1", "n2/1"):
        coordinator.update(worker, WorkerPhase.FORMING)
    coordinator.advance(CONFIG.form_timeout_s)
    assert coordinator.members("a") == "g3: n1/1 n2/1"
    told = [e.message for e in coordinator.of(SendAgent)]
    kinds = [type(m) for m in told if isinstance(m, (DumpStacks, Announce))]
    assert kinds == [DumpStacks, DumpStacks, Announce, Announce]
    assert not coordinator.sent(StopWorker)


def test_the_stacks_of_who_was_late_once_before_are_written_again_before_it_is_killed() -> None:
    """It stood when it was late, and moved on: its loop may take as long as a collective then."""
    coordinator = running(hang_timeout_s=10.0, collective_timeout_s=60.0)
    for worker in ("n1/1", "n2/1"):
        coordinator.update(worker, WorkerPhase.TRAINING, in_place=True)
    coordinator.exits("n3/1")
    coordinator.training("n2/1")
    coordinator.advance(9)
    coordinator.pulse("n1/1", stands=10)
    coordinator.advance(0.8)
    assert [dump.worker_id for dump in coordinator.sent(DumpStacks)] == ["n1/1"]
    coordinator.pulse("n1/1")
    coordinator.advance(49)
    assert not coordinator.sent(StopWorker)
    coordinator.advance(1.5)
    assert [dump.worker_id for dump in coordinator.sent(DumpStacks)] == ["n1/1"]
    assert [stop.worker_id for stop in coordinator.sent(StopWorker)] == ["n1/1"]
