"""Strangers and broken clients at the port, while an agent's stream and a submission must work."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from pathlib import Path

import anyio
import grpc
import grpc.aio
import pytest

from elastic.coord.roles import Role
from elastic.core.facts import ExitCause, ExitKind, JobPhase, WorkerPhase
from elastic.core.messages import FollowLogs, LogLines, StopWorker, WorkerUpdate
from elastic.runtime.access import Access
from elastic.wire.generated.elastic.v1 import jobs_pb2
from tests.integration.coordinator import Coordinator, ScriptedAgent, User, node, spec
from tests.integration.floods import (
    GREETINGS,
    never_reading,
    oversize,
    strangers,
    wait_hung_up,
)
from tests.integration.locked import call, token
from tests.patience import DEADLINE_S

pytestmark = pytest.mark.anyio
MANY = 2000
USUAL_FILES = 1024
LIST = "/elastic.v1.Jobs/List"


class Besieged:
    """A coordinator that was started as daemons are: with room for 1,024 open files."""

    def __init__(self, folder: Path) -> None:
        tokens = folder / "tokens.json"
        self.all = token(tokens, Role.ADMIN)
        self.read = token(tokens, Role.READ, "reader")
        store = f"sqlite:{folder}/store"
        self.coordinator = Coordinator(folder / "c", store=store, args=("--tokens", str(tokens)))


@pytest.fixture(scope="module")
def besieged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Besieged]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    made = Besieged(tmp_path_factory.mktemp("besieged"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(USUAL_FILES, hard), hard))
    with ExitStack() as stack:
        try:
            stack.enter_context(made.coordinator)
        finally:
            wanted = MANY + 500
            most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        yield made


def count_of_strangers() -> int:
    """As many as this process may open, at most `MANY`."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MANY if soft == resource.RLIM_INFINITY else min(MANY, soft - 300)


async def check_work_goes_on(besieged: Besieged, name: str) -> None:
    """Let a new agent register, a job train on it, and stop."""
    address = besieged.coordinator.address
    async with (
        ScriptedAgent(address, node(name), token=besieged.all) as agent,
        User(address, token=besieged.all) as user,
    ):
        await agent.join()
        job = await user.submit(spec(name))
        report = await agent.train()
        await user.stop(job)
        assert (await agent.hear(StopWorker)).reason
        gone = replace(report, phase=WorkerPhase.EXITED, exit=ExitCause(ExitKind.STOPPED))
        await agent.say(WorkerUpdate(gone))
        await user.wait_job(job, lambda j: j.record.phase is JobPhase.STOPPED)


async def test_two_thousand_idle_connections_keep_nobody_out(besieged: Besieged) -> None:
    address = besieged.coordinator.address
    with strangers(address, b"", count_of_strangers()):
        await check_work_goes_on(besieged, "idle")


@pytest.mark.parametrize("greeting", list(GREETINGS)[::3])
async def test_strange_bytes_harm_nobody_and_are_hung_up_on(
    besieged: Besieged, greeting: str
) -> None:
    with strangers(besieged.coordinator.address, GREETINGS[greeting], 20) as socks:
        await check_work_goes_on(besieged, f"strange-{list(GREETINGS).index(greeting)}")
        await wait_hung_up(socks[-1])


@pytest.mark.parametrize("who", ["all", "stranger"])
async def test_a_message_above_the_limit_is_refused(besieged: Besieged, who: str) -> None:
    shown = besieged.all if who == "all" else ""
    for method in ("/elastic.v1.Jobs/Submit", "/elastic.v1.Agents/Attach"):
        code = await oversize(besieged.coordinator.address, method, shown)
        assert code in (
            {"RESOURCE_EXHAUSTED", "INVALID_ARGUMENT"} if shown else {"UNAUTHENTICATED"}
        )
    await check_work_goes_on(besieged, f"oversize-{who}")


async def test_readers_that_never_read_hold_up_neither_the_agent_nor_others(
    besieged: Besieged,
) -> None:
    address, text = besieged.coordinator.address, "x" * 60_000 + "\n"
    async with (
        ScriptedAgent(address, node("loud"), token=besieged.all) as agent,
        User(address, token=besieged.all) as user,
    ):
        await agent.join()
        job = await user.submit(spec("loud"))
        report = await agent.train()
        request = jobs_pb2.LogsRequest(job=job, tail_lines=-1, follow=True).SerializeToString()
        method = "/elastic.v1.Jobs/Logs"
        async with never_reading(address, method, request, besieged.read, count=3):
            follows = [await agent.hear(FollowLogs) for _ in range(3)]
            for _ in range(150):  # 27 MB, past what may wait for a reader.
                for follow in follows:
                    await agent.say(LogLines(follow.follow_id, report.worker_id, text))
            await check_work_goes_on(besieged, "beside-the-loud-one")
            outcome = await call(address, LIST, access=Access(besieged.read))
            assert outcome.code == "OK"
        await user.stop(job)
        await agent.hear(StopWorker)


async def test_one_caller_cannot_take_all_streams(besieged: Besieged) -> None:
    address = besieged.coordinator.address
    async with User(address, token=besieged.all) as user, AsyncExitStack() as streams:
        job = await user.submit(spec("watched-by-many", workers=(50, 50)))
        details = await open_until_refused(streams, address, job, besieged.read)
        assert details.startswith("RESOURCE_EXHAUSTED")
        assert "reader has 500 streams open" in details
        await check_work_goes_on(besieged, "beside-many")
        await user.stop(job)


async def open_until_refused(streams: AsyncExitStack, address: str, job: str, shown: str) -> str:
    """Watch a job in more and more streams until that is one too many; returns what is said then.

    However many that takes: on a busy machine a connection may break, with all of its streams.
    """
    request = jobs_pb2.WatchRequest(job=job).SerializeToString()
    with anyio.fail_after(DEADLINE_S):
        while True:
            opened = never_reading(address, "/elastic.v1.Jobs/Watch", request, shown, count=50)
            last = (await streams.enter_async_context(opened))[-1]
            with anyio.move_on_after(0.2):
                if await last.code() is not grpc.StatusCode.UNAVAILABLE:
                    return f"{(await last.code()).name}: {await last.details()}"
