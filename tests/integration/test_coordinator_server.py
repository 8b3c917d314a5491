"""A real coordinator process, and agents and users that speak to it over real streams."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import anyio
import grpc
import grpc.aio
import pytest

from elastic.core.facts import (
    ExitCause,
    ExitKind,
    JobPhase,
    NodePhase,
    WorkerId,
    WorkerPhase,
    WorkerReport,
)
from elastic.core.messages import (
    DrainNotice,
    FollowLogs,
    ForgetWorker,
    LogLines,
    Refusal,
    Release,
    StopWorker,
    Welcome,
    WorkerUpdate,
)
from elastic.core.view import JobView
from elastic.runtime import rpc
from elastic.wire.codec_jobs import JobEvent, TimedNote
from tests.integration.coordinator import (
    ROOT,
    Coordinator,
    ScriptedAgent,
    User,
    node,
    spec,
)
from tests.patience import wait_for_async

pytestmark = pytest.mark.anyio
PROTOCOL = (("elastic-protocol", "1.0"),)


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """One coordinator for the tests that need nothing special; each uses names of its own."""
    with Coordinator(tmp_path_factory.mktemp("coordinator")) as running:
        yield running


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """One that asks for a token."""
    folder = tmp_path_factory.mktemp("guarded")
    token = folder / "token"
    token.write_text("secret-word\n")
    token.chmod(0o600)
    with Coordinator(folder, args=("--token-file", str(token))) as running:
        yield running


def is_phase(phase: JobPhase) -> object:
    return lambda job: job.record.phase is phase


def finished(report: WorkerReport) -> WorkerUpdate:
    return WorkerUpdate(replace(report, phase=WorkerPhase.FINISHED, result='{"accuracy": 1}'))


def exited(report: WorkerReport, kind: ExitKind = ExitKind.STOPPED) -> WorkerUpdate:
    return WorkerUpdate(replace(report, phase=WorkerPhase.EXITED, exit=ExitCause(kind)))


# ------------------------------------------------------------------------------ agents


async def test_an_agent_registers_and_is_shown(coordinator: Coordinator) -> None:
    async with (
        ScriptedAgent(coordinator.address, node("reg")) as agent,
        User(coordinator.address) as user,
    ):
        await agent.hello()
        assert (await agent.hear(Welcome)).coordinator.startswith(coordinator.address)
        shown = await user.wait_node("reg", lambda n: n is not None)
        assert (shown.phase, shown.free_slots) == (NodePhase.READY, 2)


async def test_a_second_live_agent_of_a_node_is_refused_and_the_first_one_stays(
    coordinator: Coordinator,
) -> None:
    async with ScriptedAgent(coordinator.address, node("twice", 1)) as first:
        await first.join()
        async with ScriptedAgent(coordinator.address, node("twice", 2)) as second:
            await second.hello()
            refusal = await second.hear(Refusal)
            assert "in use by another live agent" in refusal.reason
            assert "--node-id" in refusal.reason
            assert not refusal.final
            assert (await second.end())[0] == "OK"
        await first.say(DrainNotice("still here", 10**9))
        await first.hear(Release)


async def test_the_same_agent_over_a_new_stream_replaces_the_old_one(
    coordinator: Coordinator,
) -> None:
    async with ScriptedAgent(coordinator.address, node("again")) as old:
        await old.join()
        async with ScriptedAgent(coordinator.address, node("again")) as new:
            await new.join()
            assert (await old.end())[0] == "OK"
            async with User(coordinator.address) as user:
                shown = await user.wait_node("again", lambda n: n is not None)
                assert shown.phase is NodePhase.READY


async def test_an_earlier_life_of_an_agent_is_refused_for_good(coordinator: Coordinator) -> None:
    async with ScriptedAgent(coordinator.address, node("stale", 5)) as late:
        await late.join()
    async with ScriptedAgent(coordinator.address, node("stale", 4)) as early:
        await early.hello()
        assert (await early.hear(Refusal)).final


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\xff\xff\xff garbage", "do not read as"),
        (b"", "without a body"),
        (DrainNotice("no hello", 0), "expected Hello"),
        (LogLines("f1", WorkerId("n/1"), "text"), "expected Hello"),
    ],
    ids=["garbage", "empty", "no-hello", "log-lines-first"],
)
async def test_nonsense_ends_its_own_stream_and_nothing_else(
    coordinator: Coordinator, data: bytes | DrainNotice | LogLines, says: str
) -> None:
    async with ScriptedAgent(coordinator.address, node("nonsense")) as agent:
        await agent.say(data)
        code, details = await agent.end()
        assert code == "INVALID_ARGUMENT"
        assert says in details
    async with User(coordinator.address) as user:
        assert (await user.status()).protocol == rpc.PROTOCOL


async def test_a_second_hello_on_one_stream_ends_it(coordinator: Coordinator) -> None:
    async with ScriptedAgent(coordinator.address, node("hello-hello")) as agent:
        await agent.join()
        await agent.hello()
        assert (await agent.end())[0] == "INVALID_ARGUMENT"


async def test_a_stopped_agent_is_noticed(coordinator: Coordinator, tmp_path: Path) -> None:
    script = (
        "import asyncio, sys\n"
        "from tests.integration.coordinator import ScriptedAgent, node\n"
        "async def main():\n"
        "    async with ScriptedAgent(sys.argv[1], node('frozen')) as agent:\n"
        "        await agent.join()\n"
        "        await agent.end()\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", script, coordinator.address]
    process = subprocess.Popen(command, cwd=ROOT)  # noqa: ASYNC220 (it returns at once)
    try:
        async with User(coordinator.address) as user:
            await user.wait_node("frozen", lambda n: n is not None)
            process.send_signal(signal.SIGSTOP)
            await user.wait_node("frozen", lambda n: n.phase is not NodePhase.READY)
            await user.wait_node("frozen", lambda n: n.phase is NodePhase.LOST)
    finally:
        process.kill()
        process.wait()


async def test_a_drained_node_is_released_and_leaves(coordinator: Coordinator) -> None:
    async with User(coordinator.address) as user:
        async with ScriptedAgent(coordinator.address, node("leaver")) as agent:
            await agent.join()
            await user.drain("leaver", 5.0)
            await agent.hear(Release)
        await user.wait_node("leaver", lambda n: n.phase is NodePhase.LEFT)
        for timeout_s in (-1.0, float("nan"), float("inf")):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await user.drain("leaver", timeout_s)
            assert refused.value.code().name == "INVALID_ARGUMENT"
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await user.drain("nobody", 1.0)
        assert unknown.value.code().name == "NOT_FOUND"


# ------------------------------------------------------------------------------ who may come in


@pytest.mark.parametrize(
    ("metadata", "code", "says"),
    [
        (PROTOCOL, "UNAUTHENTICATED", "--token-file"),
        ((*PROTOCOL, ("authorization", "Bearer wrong")), "UNAUTHENTICATED", "wrong token"),
        ((*PROTOCOL, ("authorization", "secret-word")), "UNAUTHENTICATED", "without a token"),
        ((("authorization", "Bearer secret-word"),), "FAILED_PRECONDITION", "elastic-protocol"),
        (
            (("authorization", "Bearer secret-word"), ("elastic-protocol", "2.0")),
            "FAILED_PRECONDITION",
            "install the same version",
        ),
    ],
    ids=["no-token", "wrong-token", "no-bearer", "no-version", "other-major"],
)
async def test_calls_without_the_right_papers_are_refused_with_what_to_do(
    guarded: Coordinator, metadata: tuple[tuple[str, str], ...], code: str, says: str
) -> None:
    async with User(guarded.address, metadata=metadata) as user:
        for refused_call in (user.status(), user.submit(spec("x")), user.watch("x", [])):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await refused_call
            assert refused.value.code().name == code
            assert says in str(refused.value.details())
    async with ScriptedAgent(guarded.address, node(), metadata=metadata) as agent:
        got, details = await agent.end()
        assert (got, says in details) == (code, True)
    assert "secret-word" not in guarded.log()


async def test_health_needs_no_papers_and_reflection_no_version(
    guarded: Coordinator, coordinator: Coordinator
) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    async with grpc.aio.insecure_channel(guarded.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "elastic.v1.Agents", "elastic.v1.Jobs"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
    async with grpc.aio.insecure_channel(coordinator.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = [a async for a in stub.ServerReflectionInfo(iter([request]))]
        names = {service.name for service in answers[0].list_services_response.service}
        assert {"elastic.v1.Agents", "elastic.v1.Jobs", "elastic.v1.Cluster"} <= names


# ------------------------------------------------------------------------------ jobs


async def test_a_job_runs_from_submission_to_success_and_its_watch_ends(
    coordinator: Coordinator,
) -> None:
    address = coordinator.address
    async with ScriptedAgent(address, node("runner")) as agent, User(address) as user:
        await agent.join()
        job_id = await user.submit(spec("digits", payload=b"pickled"))
        assert job_id.startswith("j-")
        async with anyio.create_task_group() as tasks:
            events: list[JobEvent] = []
            tasks.start_soon(user.watch, job_id, events)
            await wait_for_async(lambda: events)
            report = await agent.train()
            await user.wait_job(job_id, is_phase(JobPhase.RUNNING))
            await agent.say(finished(report))
            await agent.hear(StopWorker)
            await agent.say(exited(report))
            await agent.hear(ForgetWorker)
        snapshots = [event for event in events if isinstance(event, JobView)]
        notes = [event.note.name for event in events if isinstance(event, TimedNote)]
        assert isinstance(events[0], JobView)
        assert snapshots[-1].record.phase is JobPhase.SUCCEEDED
        assert snapshots[-1].record.result == '{"accuracy": 1}'
        assert not snapshots[-1].workers
        assert all(shot.record.spec.entry.payload == b"" for shot in snapshots)
        assert {"group_formed", "job_ended"} <= set(notes)


async def test_a_job_is_found_by_id_by_the_beginning_of_it_and_by_name(
    coordinator: Coordinator,
) -> None:
    async with User(coordinator.address) as user:
        job_id = await user.submit(spec("findme"))
        for wanted in (job_id, job_id[:-1], "findme"):
            assert (await user.get(wanted)).record.spec.job_id == job_id
        await user.stop("findme")
        second = await user.submit(spec("findme"))
        assert (await user.get("findme")).record.spec.job_id == second
        await user.stop(second)
        with pytest.raises(grpc.aio.AioRpcError, match="no job has the id or name 'nothing'"):
            await user.get("nothing")
        assert "findme" in await user.list(include_ended=True)
        assert "findme" not in await user.list(include_ended=False)


async def test_a_name_cannot_be_used_twice_and_an_ended_job_cannot_be_stopped(
    coordinator: Coordinator,
) -> None:
    async with User(coordinator.address) as user:
        job_id = await user.submit(spec("unique"))
        with pytest.raises(grpc.aio.AioRpcError) as taken:
            await user.submit(spec("unique"))
        assert taken.value.code().name == "ALREADY_EXISTS"
        assert job_id in str(taken.value.details())
        await user.stop(job_id)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await user.stop(job_id)
        assert ended.value.code().name == "FAILED_PRECONDITION"


async def test_a_job_that_cannot_be_is_refused(coordinator: Coordinator) -> None:
    from elastic.wire.codec_jobs import submit_request

    async with User(coordinator.address) as user:
        broken = submit_request(spec("broken"))
        broken.spec.min_workers = 5
        empty = type(broken)()
        for request in (broken, empty):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await user.jobs.Submit(request, **user.options)
            assert refused.value.code().name == "INVALID_ARGUMENT"


async def test_output_of_workers_reaches_those_who_ask(coordinator: Coordinator) -> None:
    address = coordinator.address
    async with ScriptedAgent(address, node("talker")) as agent, User(address) as user:
        await agent.join()
        job_id = await user.submit(spec("talk"))
        report = await agent.train()
        await user.wait_job(job_id, is_phase(JobPhase.RUNNING))
        received: set[str] = set()
        for follow in (False, True):
            chunks: list[object] = []

            async def gather(into: list[object], follow: bool) -> None:
                into.extend(await user.logs(job_id, follow=follow, ranks=[0]))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(gather, chunks, follow)
                wish = await agent.hear(FollowLogs)
                while wish.follow_id in received:  # More room for what was asked for before.
                    wish = await agent.hear(FollowLogs)
                received.add(wish.follow_id)
                assert (wish.worker_id, wish.tail_lines, wish.follow) == (
                    report.worker_id,
                    -1,
                    follow,
                )
                await agent.say(LogLines(wish.follow_id, wish.worker_id, "one\n"))
                await agent.say(LogLines("f999", wish.worker_id, "nobody asked\n"))
                if follow:
                    await agent.say(finished(report))
                    await agent.hear(StopWorker)
                    await agent.say(exited(report))
                await agent.say(LogLines(wish.follow_id, wish.worker_id, "two\n", end=True))
            assert "".join(chunk.text for chunk in chunks) == "one\ntwo\n"  # type: ignore[attr-defined]
            assert {(c.rank, c.node_id) for c in chunks} == {(0, "talker")}  # type: ignore[attr-defined]
    async with User(address) as user:
        text = "".join(chunk.text for chunk in await user.logs(job_id))
        assert "its node talker is not connected" in text


async def test_who_follows_a_job_before_it_starts_gets_its_output_from_the_beginning(
    coordinator: Coordinator,
) -> None:
    address = coordinator.address
    async with ScriptedAgent(address, node("early")) as agent, User(address) as user:
        await agent.join()
        job_id = await user.submit(spec("early"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: user.logs(job_id, follow=True))
            # The agent does not know of the worker yet, and would say that there is no output.
            await user.wait_job(job_id, lambda job: job.workers)
            report = await agent.ready()
            wish = await agent.hear(FollowLogs)
            assert (wish.worker_id, wish.tail_lines) == (report.worker_id, -1)
            tasks.cancel_scope.cancel()
        await user.stop(job_id)


async def test_a_worker_that_dies_at_once_is_followed_too(coordinator: Coordinator) -> None:
    address = coordinator.address
    async with ScriptedAgent(address, node("brief")) as agent, User(address) as user:
        await agent.join()
        job_id = await user.submit(spec("brief"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: user.logs(job_id, follow=True))
            reports = []
            for _ in range(2):
                reports.append(await agent.train())
                await agent.say(exited(reports[-1], ExitKind.SIGNAL))
            for report in reports:
                assert (await agent.hear(FollowLogs)).worker_id == report.worker_id
            tasks.cancel_scope.cancel()
        await user.stop(job_id)


async def test_a_follower_that_goes_away_is_told_to_the_agent(coordinator: Coordinator) -> None:
    address = coordinator.address
    async with ScriptedAgent(address, node("quiet")) as agent, User(address) as user:
        await agent.join()
        job_id = await user.submit(spec("quiet"))
        await agent.train()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: user.logs(job_id, follow=True))
            wish = await agent.hear(FollowLogs)
            tasks.cancel_scope.cancel()
        stop = await agent.hear(FollowLogs)
        assert (stop.follow_id, stop.stop) == (wish.follow_id, True)
        await user.stop(job_id)
