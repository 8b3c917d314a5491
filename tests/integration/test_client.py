"""The client against a real coordinator; agents say what a test tells them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from elastic.client.job_follower import JobPrinter, follow
from elastic.client.jobs import Client
from elastic.core.facts import JobId, JobPhase
from elastic.core.view import JobView
from elastic.errors import (
    CoordinatorUnreachable,
    NameTaken,
    NotFound,
    Refused,
    Unavailable,
    UsageError,
)
from elastic.runtime.rpc import server_options, status_of
from elastic.wire.generated.elastic.v1 import jobs_pb2
from tests.integration.coordinator import Coordinator, spec
from tests.integration.played_jobs import playing
from tests.patience import DEADLINE_S, wait_for

NOBODY = "127.0.0.1:1"


# --------------------------------------------------------------------------------------- the client


def test_a_job_is_submitted_shown_and_stopped(client: Client) -> None:
    job_id = client.submit(spec("shown", workers=(2, 4)))
    view = client.get("shown")
    assert view.record.spec.job_id == job_id
    assert view.record.phase is JobPhase.PENDING
    assert "no node is connected" in view.reason
    assert job_id in [job.record.spec.job_id for job in client.list()]
    client.stop("shown", "enough")
    assert client.get(job_id).reason == "enough"
    assert job_id not in [job.record.spec.job_id for job in client.list(include_ended=False)]
    with pytest.raises(Refused, match="has ended already"):
        client.stop(job_id)


def test_a_submission_whose_answer_was_lost_may_be_repeated(client: Client) -> None:
    job = replace(spec("repeated"), job_id=JobId("j-repeat"))
    assert client.submit(job) == client.submit(job) == "j-repeat"
    with pytest.raises(NameTaken, match="repeated"):
        client.submit(spec("repeated"))


def test_refusals_are_our_own_errors(client: Client) -> None:
    with pytest.raises(NotFound, match="nosuch"):
        client.get("nosuch")
    with pytest.raises(NotFound):
        list(client.watch("nosuch"))
    with pytest.raises(NotFound):
        list(client.logs("nosuch"))
    with pytest.raises(NotFound):
        client.drain("nosuch")
    with pytest.raises(UsageError, match="drain timeout"):
        client.drain("nosuch", timeout_s=-1)
    with pytest.raises(UsageError, match="'Z80' is unknown"):
        client.submit(replace(spec("chip"), accelerator_type="Z80"))


def test_nobody_at_the_address_is_found_out() -> None:
    with Client([NOBODY, "127.0.0.1:2"]) as nowhere:
        for ask in (
            nowhere.status,
            lambda: list(nowhere.watch("j")),
            lambda: list(nowhere.logs("j")),
        ):
            with pytest.raises(CoordinatorUnreachable, match=f"{NOBODY},127.0.0.1:2"):
                ask()


def test_the_address_that_answers_is_found(coordinator: Coordinator) -> None:
    with Client(f"{NOBODY},{coordinator.address}") as client:
        job_id = client.submit(spec("second"))
        client.stop(job_id)
        events = list(client.watch(job_id))
    assert isinstance(events[-1], JobView)
    with Client([NOBODY, coordinator.address]) as client:
        assert list(client.logs(job_id)) == []


def test_a_closed_client_says_so_and_ends_its_streams(coordinator: Coordinator) -> None:
    client = Client(coordinator.address)
    job_id = client.submit(spec("closed"))
    with ThreadPoolExecutor(1) as pool:
        events = client.watch(job_id)
        next(events)
        rest = pool.submit(list, events)
        client.close()
        assert all(not isinstance(e, JobView) or e.record.phase for e in rest.result(DEADLINE_S))
    with pytest.raises(UsageError, match="closed"):
        client.status()
    assert list(client.watch(job_id)) == []


def test_a_coordinator_that_is_not_ready_yet_is_asked_again() -> None:
    calls: list[int] = []

    def answer(_: bytes, context: grpc.ServicerContext) -> bytes:
        calls.append(1)
        if len(calls) < 3:
            code, details, trailing = status_of(Unavailable("this coordinator is starting"))
            context.set_trailing_metadata(trailing)
            context.abort(code, details)
        return jobs_pb2.ListJobsResponse().SerializeToString()

    handler = grpc.method_handlers_generic_handler(
        "elastic.v1.Jobs", {"List": grpc.unary_unary_rpc_method_handler(answer)}
    )
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool, options=server_options())
        server.add_generic_rpc_handlers((handler,))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            with Client(f"127.0.0.1:{port}") as client:
                assert client.list() == ()
        finally:
            server.stop(None).wait()
    assert len(calls) == 3


def test_a_watch_goes_on_over_a_restart_of_the_coordinator(tmp_path: Path) -> None:
    with Coordinator(tmp_path, store=f"sqlite:{tmp_path / 'state'}") as running:
        outages: list[float] = []
        fell_silent = threading.Event()

        def on_outage(seconds: float) -> None:
            outages.append(seconds)
            if len(outages) >= 2:
                fell_silent.set()

        with Client(running.address) as client, ThreadPoolExecutor(1) as pool:
            job_id = client.submit(spec("survivor"))
            events = client.watch("survivor", on_outage=on_outage)
            assert isinstance(next(events), JobView)
            rest = pool.submit(list, events)
            running.kill()
            assert fell_silent.wait(DEADLINE_S)
            running.start()
            running.wait_ready()
            client.stop(job_id)
            last = rest.result(DEADLINE_S)[-1]
        assert isinstance(last, JobView)
        assert last.record.phase is JobPhase.STOPPED
        assert outages[-1] == 0.0
        assert outages[:-1] == sorted(outages[:-1])


def test_a_watch_gives_up_after_its_limit(tmp_path: Path) -> None:
    with Coordinator(tmp_path) as running, Client(running.address) as client:
        job_id = client.submit(spec("given-up"))
        events = client.watch(job_id, limit_s=0.3)
        next(events)
        running.kill()
        with pytest.raises(CoordinatorUnreachable, match=running.address):
            for _ in events:
                pass


# ---------------------------------------------------------------------------------------- following


def test_following_calls_back_in_the_callers_thread(client: Client) -> None:
    job_id = client.submit(spec("called-back"))
    reports: list[dict[str, Any]] = []
    threads: set[int] = set()

    def on_report(metrics: dict[str, Any]) -> None:
        reports.append(metrics)
        threads.add(threading.get_ident())

    notes: list[str] = []
    with playing(client.address, "called-back"):
        view = follow(
            client,
            job_id,
            JobPrinter(),
            on_report=on_report,
            on_note=lambda note: notes.append(note.name),
        )
    assert view.record.phase is JobPhase.SUCCEEDED
    assert view.record.result == '"done"'
    assert reports == [{"loss": 0.5}]
    assert threads == {threading.get_ident()}
    # The group may have been there first; its worker reports once somebody follows.
    assert {"report", "job_ended"} <= set(notes)


def test_an_error_in_a_callback_ends_the_following_and_leaves_no_thread(client: Client) -> None:
    job_id = client.submit(spec("raises"))

    def on_note(_: object) -> None:
        raise ZeroDivisionError

    def readers() -> set[str]:
        return {thread.name for thread in threading.enumerate() if "follow-" in thread.name}

    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(follow, client, job_id, JobPrinter(), on_note=on_note)
        wait_for(lambda: readers() == {"follow-events", "follow-output"}, "both readers to run")
        client.stop(job_id)
        with pytest.raises(ZeroDivisionError):
            following.result(DEADLINE_S)
    assert not readers()
