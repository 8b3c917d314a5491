"""A user wants a checkpoint now: who is told, how often, and what an automatic one counts as."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.core.events.coordinator import Persist
from elastic.core.events.worker import GroupFailed, GroupFormed, TrainLeft, WishSave
from elastic.core.messages import ReportAck, SaveState
from elastic.core.world import FIRST_AUTOMATIC, WorkerId
from tests.unit.coordinator_under_test import Coordinator, running
from tests.unit.worker_under_test import ME, announce, forming, training

# ---------------------------------------------------------------- the coordinator


def saves(coordinator: Coordinator) -> list[tuple[str, int, int]]:
    return [(m.worker_id, m.generation, m.request) for m in coordinator.sent(SaveState)]


def save(coordinator: Coordinator, worker: str, number: int, **fields: Any) -> None:
    """Let the step engine of a worker tell of a checkpoint that it took by itself."""
    path = f"/run/auto-{number}"
    coordinator.reports(worker, FIRST_AUTOMATIC + number, checkpoint=path, **fields)


def test_a_wish_for_a_checkpoint_reaches_every_member_and_is_numbered() -> None:
    coordinator = running(run_path="/run", nodes=2)
    reply = coordinator.checkpoint("a")
    assert (reply.error, reply.text) == ("", "1")
    assert saves(coordinator) == [("n1/1", 1, 1), ("n2/1", 1, 1)]
    assert coordinator.checkpoint("a").text == "2"
    assert coordinator.noted("checkpoint_wished") == [{"request": "1"}, {"request": "2"}]


def test_a_wish_is_told_to_the_next_group_until_a_checkpoint_came() -> None:
    coordinator = running(run_path="/run", nodes=2)
    coordinator.checkpoint("a")
    coordinator.exits("n2/1")
    assert saves(coordinator) == [("n1/1", 2, 1)]
    coordinator.training("n1/1")
    save(coordinator, "n1/1", 5, request=1)
    coordinator.broken("n1/1")
    coordinator.advance(1)
    assert coordinator.members("a").startswith("g3")
    assert saves(coordinator) == []


@pytest.mark.parametrize("request_number", [0, 1])
def test_a_checkpoint_that_was_taken_before_the_wish_does_not_serve_it(request_number: int) -> None:
    coordinator = running(run_path="/run", nodes=2)
    coordinator.checkpoint("a")
    assert coordinator.checkpoint("a").text == "2"
    save(coordinator, "n1/1", 5, request=request_number)
    assert [one.request for one in coordinator.job("a").record.checkpoints] == [request_number]
    coordinator.exits("n2/1")
    assert saves(coordinator) == [("n1/1", 2, 2)]


def test_a_report_of_the_script_serves_no_wish() -> None:
    coordinator = running(run_path="/run", nodes=2)
    coordinator.checkpoint("a")
    coordinator.reports("n1/1", 0, checkpoint="/run/c")
    coordinator.exits("n2/1")
    assert saves(coordinator) == [("n1/1", 2, 1)]


def test_a_wish_is_said_again_to_an_agent_that_comes_back() -> None:
    coordinator = running(run_path="/run", nodes=2)
    coordinator.checkpoint("a")
    coordinator.disconnect("n2")
    coordinator.agent("n2")
    assert saves(coordinator) == [("n2/1", 1, 1)]


def test_wishes_of_a_later_coordinator_have_greater_numbers() -> None:
    coordinator = running(run_path="/run", nodes=1)
    coordinator.checkpoint("a")
    coordinator.restart()
    coordinator.agent("n1")
    assert saves(coordinator) == [], "nobody waits for it any more"
    assert int(coordinator.checkpoint("a").text) > 1


@pytest.mark.parametrize(
    ("job", "error", "text"),
    [
        ("nosuch", "not_found", "no job nosuch"),
        ("ended", "failed_precondition", "has ended already: stopped"),
        ("waits", "failed_precondition", "does not train now (waiting: "),
        ("homeless", "failed_precondition", "no run directory"),
    ],
)
def test_a_wish_that_cannot_come_true_is_refused_by_name(job: str, error: str, text: str) -> None:
    coordinator = running("homeless", nodes=1)
    coordinator.submit("waits", run_path="/run")
    coordinator.submit("ended", run_path="/run")
    coordinator.stop("ended")
    reply = coordinator.checkpoint(job)
    assert reply.error == error
    assert text in reply.text
    assert saves(coordinator) == []


def test_an_automatic_checkpoint_is_no_report_of_the_script() -> None:
    coordinator = running(run_path="/run", nodes=1)
    coordinator.reports("n1/1", 0, metrics='{"loss": 1}', checkpoint="/run/c")
    save(coordinator, "n1/1", 1, metrics='{"epoch": 0}')
    record = coordinator.job("a").record
    assert [one.path for one in record.checkpoints] == ["/run/c", "/run/auto-1"]
    assert record.metrics == '{"loss": 1}'
    assert [note["index"] for note in coordinator.noted("report")] == ["0"]
    assert len(coordinator.of(Persist)) == 1
    assert [ack.accepted for ack in coordinator.sent(ReportAck)] == [True]
    coordinator.broken("n1/1")
    coordinator.advance(1)
    assert coordinator.announced[WorkerId("n1/1")].assignment.checkpoint == "/run/c"


def test_automatic_checkpoints_do_not_push_out_reported_ones() -> None:
    coordinator = running(run_path="/run", nodes=1, num_to_keep=1)
    coordinator.reports("n1/1", 0, checkpoint="/run/c")
    for number in range(4):
        save(coordinator, "n1/1", number)
    kept = [one.path for one in coordinator.job("a").record.checkpoints]
    assert kept == ["/run/c", "/run/auto-2", "/run/auto-3"]


# ---------------------------------------------------------------- the worker


def wish(generation: int, request: int = 7) -> SaveState:
    return SaveState(ME, generation, request)


def test_a_wish_for_a_checkpoint_is_passed_on_while_it_trains() -> None:
    worker = training(1)
    assert worker.told(wish(1)) == [WishSave(1, 7)]
    assert worker.told(wish(1)) == [WishSave(1, 7)], "said twice it does no harm"


def test_a_wish_that_comes_before_the_group_stands_waits_for_it() -> None:
    worker = forming(1)
    assert worker.told(wish(1)) == []
    assert WishSave(1, 7) in worker.event(GroupFormed(1))


def test_a_wish_for_a_group_that_is_announced_waits_until_it_trains_there() -> None:
    worker = training(1)
    worker.told(announce(2))
    assert worker.told(wish(2)) == []
    assert worker.told(wish(1)) == [], "that group is over"
    worker.event(TrainLeft(1, at_boundary=False))
    assert WishSave(2, 7) in worker.event(GroupFormed(2))


def test_a_wish_of_an_older_group_or_for_another_worker_is_none() -> None:
    worker = forming(1)
    worker.told(wish(1))
    worker.told(announce(2))
    worker.event(GroupFailed(1, "aborted"))
    assert not any(isinstance(one, WishSave) for one in worker.event(GroupFormed(2)))
    assert worker.told(SaveState(WorkerId("n9/9"), 2, 8)) == []
