"""News that comes late, twice, out of order or from half of the agents leads nowhere wrong."""

from __future__ import annotations

from elastic.core.facts import WorkerPhase
from elastic.core.messages import ReportAck, StopWorker
from tests.unit.coordinator_under_test import Coordinator, running


def paths(coordinator: Coordinator) -> list[str]:
    """The checkpoints on record, oldest first."""
    return [record.path for record in coordinator.job("a").record.checkpoints]


def ending(coordinator: Coordinator) -> list[str]:
    """How the job ended, if it did."""
    return [note["phase"] for note in coordinator.noted("job_ended")]


# ---------------------------------------------------------------- reports


def test_an_old_checkpoint_that_is_told_again_does_not_become_the_newest() -> None:
    coordinator = running(nodes=2, num_to_keep=1)
    coordinator.reports("n1/1", 4, checkpoint="/c/4")
    coordinator.reports("n1/1", 5, checkpoint="/c/5")
    coordinator.restart()
    coordinator.agent("n2")
    coordinator.agent("n1", reports_due=2)
    coordinator.reports("n1/1", 4, checkpoint="/c/4")
    assert [ack.accepted for ack in coordinator.sent(ReportAck)] == [True]
    assert paths(coordinator) == ["/c/5"]


def test_a_group_is_not_replaced_before_reports_that_were_kept_meanwhile_are_taken() -> None:
    coordinator = running()
    coordinator.restart()
    coordinator.exits("n3/1")
    coordinator.agent("n3")
    coordinator.agent("n2")
    coordinator.agent("n1", reports_due=2)
    assert coordinator.job("a").reason == "lost n3/1; waiting for a report of n1/1"
    coordinator.reports("n1/1", 3)
    coordinator.reports("n1/1", 4, checkpoint="/c/4")
    assert paths(coordinator) == ["/c/4"]
    assert coordinator.members("a") == "g2: n1/1 n2/1"
    assert coordinator.announced["n1/1"].assignment.reported_checkpoint == "/c/4"


# ---------------------------------------------------------------- the end of a run


def test_user_code_that_raises_when_others_have_returned_is_tried_again() -> None:
    coordinator = running(nodes=2, max_failures=1)
    coordinator.finished("n1/1")
    coordinator.raises("n2/1")
    assert ending(coordinator) == []
    assert coordinator.members("a") == "g2: n1/1"


# ---------------------------------------------------------------- of an earlier group


def second_group() -> Coordinator:
    """A job whose group of three has lost one; the others have not heard of the next yet."""
    coordinator = running(nodes=3)
    coordinator.exits("n3/1")
    assert coordinator.members("a") == "g2: n1/1 n2/1"
    return coordinator


def test_a_result_of_an_earlier_group_is_not_the_next_ones() -> None:
    """Rank 0 said in the first that it had finished, and is lost before it has in the second."""
    coordinator = second_group()
    coordinator.finished("n1/1", '"early"')
    coordinator.training("n2/1")
    coordinator.finished("n2/1")
    coordinator.exits("n1/1")
    assert ending(coordinator) == []
    assert coordinator.members("a") == "g3: n2/1"


def test_steps_of_an_earlier_group_are_none_of_the_next_one() -> None:
    coordinator = second_group()
    for worker in ("n1/1", "n2/1"):
        coordinator.steps(worker, 7, first_ns=70)
    assert coordinator.noted("first_step") == []
    assert [worker.steps for worker in coordinator.job("a").workers] == [0, 0, 0]


def suspended() -> Coordinator:
    """A job of which one worker is left, fewer than its min, and has the state in memory."""
    coordinator = running(nodes=2, low=2)
    for worker in ("n1/1", "n2/1"):
        coordinator.update(worker, WorkerPhase.TRAINING, in_place=True)
    coordinator.disconnect("n2")
    coordinator.advance(1)
    coordinator.ready("n1/1")
    return coordinator


def test_a_survivor_on_a_leaving_node_passes_its_state_on_if_others_come_in_time() -> None:
    coordinator = suspended()
    coordinator.notice("n1", 30)
    coordinator.advance(20)
    for name in ("n3", "n4"):
        coordinator.agent(name)
    coordinator.ready("n3/1", "n4/1")
    assert coordinator.members("a") == "g2: n1/1 n3/1"
    coordinator.training("n1/1", "n3/1")
    coordinator.ready("n1/1", "n3/1")
    assert coordinator.members("a") == "g3: n3/1 n4/1"


def test_a_survivor_on_a_leaving_node_is_ended_at_its_deadline() -> None:
    coordinator = suspended()
    coordinator.notice("n1", 30)
    coordinator.advance(29)
    assert not coordinator.sent(StopWorker)
    coordinator.advance(2)
    assert [m.worker_id for m in coordinator.sent(StopWorker)] == ["n1/1"]


def test_who_has_the_state_is_waited_for_while_it_leaves_the_group_that_is_over() -> None:
    coordinator = running(nodes=2, low=2)
    for worker in ("n1/1", "n2/1"):
        coordinator.update(worker, WorkerPhase.TRAINING, in_place=True)
    coordinator.disconnect("n2")
    coordinator.advance(1)
    coordinator.agent("n3")
    coordinator.scale("a", low=1)
    coordinator.ready("n3/1")
    assert coordinator.members("a").startswith("g1")
    coordinator.ready("n1/1")
    assert coordinator.members("a") == "g2: n1/1 n3/1"


def joined_and_not_stepped() -> Coordinator:
    """A group whose second member has joined a run that only the first has the state of so far."""
    coordinator = running(nodes=1, high=2)
    coordinator.update("n1/1", WorkerPhase.TRAINING, in_place=True)
    coordinator.steps("n1/1", 7, first_ns=70)
    coordinator.agent("n2")
    coordinator.ready("n2/1")
    coordinator.ready("n1/1")
    assert coordinator.members("a") == "g2: n1/1 n2/1"
    for worker in ("n1/1", "n2/1"):
        coordinator.update(worker, WorkerPhase.TRAINING, in_place=True)
    return coordinator


def test_a_newcomer_counts_as_holder_of_the_state_once_its_group_has_made_a_step() -> None:
    coordinator = joined_and_not_stepped()
    coordinator.notice("n1", 30)
    for worker in ("n1/1", "n2/1"):
        coordinator.broken(worker)
    coordinator.advance(1)
    assert coordinator.members("a") == "g3: n1/1 n2/1"
    for worker in ("n1/1", "n2/1"):
        coordinator.update(worker, WorkerPhase.TRAINING, in_place=True)
    coordinator.steps("n2/1", 8, first_ns=80)
    for worker in ("n1/1", "n2/1"):
        coordinator.broken(worker)
    coordinator.advance(1)
    assert coordinator.members("a") == "g4: n2/1"


def test_who_comes_back_with_the_state_joins_at_once_a_group_that_began_without_it() -> None:
    """Its node was given up. Max is lower by then, and the others have waited for longer."""
    coordinator = joined_and_not_stepped()
    coordinator.disconnect("n1")
    coordinator.broken("n2/1")
    assert coordinator.members("a") == "g3: n2/1"
    coordinator.update("n2/1", WorkerPhase.TRAINING, in_place=True)
    coordinator.scale("a", high=1)
    coordinator.agent("n1")
    coordinator.advance(1)  # It has yet to notice that its group is over.
    assert coordinator.members("a") == "g3: n2/1"
    coordinator.update("n1/1", WorkerPhase.BROKEN, in_place=True)
    assert coordinator.members("a") == "g4: n1/1"


def test_who_comes_back_after_the_group_has_made_a_step_is_one_of_many() -> None:
    coordinator = joined_and_not_stepped()
    coordinator.disconnect("n1")
    coordinator.broken("n2/1")
    coordinator.update("n2/1", WorkerPhase.TRAINING, in_place=True)
    coordinator.steps("n2/1", 1, first_ns=80)
    coordinator.agent("n1")
    coordinator.update("n1/1", WorkerPhase.BROKEN, in_place=True)
    assert coordinator.members("a") == "g3: n2/1"
    coordinator.ready("n2/1")
    assert coordinator.members("a") == "g4: n2/1 n1/1"
