"""An agent's figures are what its workers said last, in the words of a scraper."""

from __future__ import annotations

import urllib.error
import urllib.request

import anyio
import pytest
from anyio.to_thread import run_sync
from prometheus_client.parser import text_string_to_metric_families

from elastic.agent.figures import Figures, FiguresServer
from elastic.core.config import JobSpec
from elastic.core.events.agent import ProcessExited, ProcessMessageReceived, SendProcess
from elastic.core.facts import (
    Assignment,
    Entry,
    EntryKind,
    ExitCause,
    ExitKind,
    JobId,
    WorkerId,
    WorkerPhase,
    WorkerReport,
)
from elastic.core.messages import Announce, Assign, Progress, Warm, WorkerUpdate
from elastic.core.telemetry import Telemetry
from tests.patience import DEADLINE_S

JOB, WORKER = JobId("j-a"), WorkerId("n1/1")


def trained() -> Figures:
    figures = Figures()
    figures.count_event(ProcessMessageReceived(1, Warm(77)))
    figures.count_event(ProcessMessageReceived(2, Warm(78)))
    entry = Entry(EntryKind.FUNCTION, "f")
    spec = JobSpec(job_id=JOB, name="a", entry=entry, min_workers=1, max_workers=8)
    figures.count_effect(SendProcess(1, Assign(WORKER, spec, "h")))
    place = Assignment(
        job_id=JOB, worker_id=WORKER, generation=3, rank=5, world_size=8, local_rank=0,
        local_world_size=1, node_rank=0, num_nodes=1, leader_address="h:1",
    )  # fmt: skip
    figures.count_effect(SendProcess(1, Announce(place)))
    figures.count_event(
        ProcessMessageReceived(1, WorkerUpdate(WorkerReport(WORKER, JOB, WorkerPhase.TRAINING, 3)))
    )
    told = Telemetry(steps=4, wall_ns=2 * 10**9, data_wait_ns=10**9)
    figures.count_event(ProcessMessageReceived(1, Progress(WORKER, 3, 12, telemetry=told)))
    # Of a group that is over: it says nothing of this one.
    figures.count_event(ProcessMessageReceived(1, Progress(WORKER, 2, 99)))
    return figures


def test_what_a_worker_said_last_is_told_by_rank() -> None:
    found = {
        (s.name, s.labels.get("rank", ""), s.labels.get("part", "")): s.value
        for family in text_string_to_metric_families(trained().text())
        for s in family.samples
    }
    assert found["elastic_worker_up", "5", ""] == 1
    assert found["elastic_worker_steps", "5", ""] == 12
    assert found["elastic_worker_step_seconds", "5", "wall"] == 0.5
    assert found["elastic_worker_step_seconds", "5", "data_wait"] == 0.25
    assert found["elastic_spares", "", ""] == 1


def test_an_end_out_of_order_counts_as_a_restart() -> None:
    figures = trained()
    figures.count_event(ProcessExited(1, ExitCause(ExitKind.SIGNAL, 9)))
    figures.count_event(ProcessExited(2, ExitCause(ExitKind.SIGNAL, 9)))
    text = figures.text()
    assert 'elastic_worker_restarts_total{job="j-a",kind="signal"} 1' in text
    assert "elastic_worker_up" not in text
    assert "elastic_spares 0" in text


@pytest.mark.anyio
async def test_it_answers_scrapers_and_nobody_else() -> None:
    server = FiguresServer("127.0.0.1", 0)

    def ask(path: str) -> tuple[int, str]:
        try:
            url = f"http://{server.address}{path}"
            with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, ""

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.run, lambda: "elastic_spares 1\n")
        assert await run_sync(ask, "/metrics") == (200, "elastic_spares 1\n")
        assert (await run_sync(ask, "/other"))[0] == 404
        tasks.cancel_scope.cancel()
