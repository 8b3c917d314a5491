"""A whole elastic-agent as a process, with echo workers: deaths, drains, refusals, exit codes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import pytest

from elastic.core.config import JobSpec
from elastic.core.facts import (
    Entry,
    EntryKind,
    ExitCause,
    ExitKind,
    JobId,
    WorkerId,
    WorkerPhase,
)
from elastic.core.messages import (
    DrainNotice,
    FollowLogs,
    Hello,
    LogLines,
    Release,
    StartWorker,
    StopWorker,
    Welcome,
    WorkerUpdate,
)
from tests.integration.small_coordinator import (
    SmallCoordinator,
    free_port,
    serving,
)
from tests.patience import DEADLINE_S, wait_for_async

pytestmark = pytest.mark.anyio
AGENT = [sys.executable, str(Path(__file__).parents[1] / "workers" / "echo_agent.py")]
ROOT = str(Path(__file__).parents[2])
Process = subprocess.Popen[str]


def launch(folder: Path, *flags: str, env: dict[str, str] | None = None) -> Process:
    """Start an agent; its log is in `folder`/agent.log."""
    command = [*AGENT, "--run-dir", str(folder / "run"), "--node-id", "n1", *flags]
    with open(folder / "agent.log", "a") as log:
        return subprocess.Popen(
            command,
            stderr=log,
            stdout=log,
            text=True,
            env={**os.environ, "PYTHONPATH": ROOT, **(env or {})},
        )


@contextmanager
def agent(folder: Path, *flags: str, env: dict[str, str] | None = None) -> Iterator[Process]:
    """Run a whole agent as a process of its own, and kill it in the end."""
    process = launch(folder, *flags, env=env)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@asynccontextmanager
async def node(folder: Path, *flags: str) -> AsyncIterator[tuple[SmallCoordinator, Process]]:
    """Run a coordinator, and an agent that is registered there."""
    coordinator = SmallCoordinator()
    async with serving(coordinator) as endpoint:
        with agent(folder, "--coord", endpoint, *flags) as process:
            await register(coordinator)
            log = folder / "agent.log"
            await wait_for_async(lambda: " connected coordinator=c1 " in log.read_text())
            yield coordinator, process


async def exit_code(process: Process) -> int:
    """Wait for the agent to end."""
    await wait_for_async(lambda: process.poll() is not None)
    return int(process.returncode)


def is_gone(pid: int) -> bool:
    """Whether a process does nothing any more."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return text.rpartition(")")[2].split()[0] in "ZX"


def start(serial: int, *orders: str) -> StartWorker:
    """Run a worker that does these things."""
    entry = Entry(EntryKind.SCRIPT, "echo", args=orders)
    spec = JobSpec(job_id=JobId("j1"), name="train", entry=entry, min_workers=1, max_workers=1)
    return StartWorker(WorkerId(f"n1/{serial}"), spec)


async def in_phase(coordinator: SmallCoordinator, phase: WorkerPhase) -> WorkerUpdate:
    """Wait for a worker to say that it is in this phase."""
    return await coordinator.received.wait_for(WorkerUpdate, lambda m: m.report.phase is phase)


async def register(coordinator: SmallCoordinator) -> Hello:
    """Take the agent in."""
    hello = await coordinator.received.wait_for(Hello)
    coordinator.say(Welcome("c1"))
    return hello


async def test_an_agent_runs_a_worker_and_reports_its_death(tmp_path: Path) -> None:
    async with node(tmp_path) as (coordinator, _):
        coordinator.say(start(1, "print:hello from the worker"))
        ready = await in_phase(coordinator, WorkerPhase.READY)
        coordinator.say(FollowLogs("f1", WorkerId("n1/1"), follow=True))
        lines = await coordinator.received.wait_for(LogLines)
        assert lines.text == "hello from the worker\n"
        os.kill(ready.report.pid, signal.SIGKILL)
        exited = await in_phase(coordinator, WorkerPhase.EXITED)
        assert exited.report.exit == ExitCause(ExitKind.SIGNAL, 9)
        assert (await coordinator.received.wait_for(LogLines)).end


async def test_an_agent_says_what_its_flags_and_environment_say(tmp_path: Path) -> None:
    coordinator = SmallCoordinator()
    flags = ["--workers", "3", "--labels", "zone=a", "--resources", "disk=2"]
    async with serving(coordinator) as endpoint:
        env = {"ELASTIC_COORD": endpoint, "ELASTIC_WORKERS": "5", "ELASTIC_ACCELERATOR_TYPE": "X9"}
        with agent(tmp_path, *flags, env=env):
            found = (await register(coordinator)).node
    assert (found.node_id, found.host, found.num_slots) == ("n1", "127.0.0.1", 3)
    assert (found.labels, found.accelerator_type) == ((("zone", "a"),), "X9")
    assert found.resources.amount("disk") == 2
    assert found.resources.amount("CPU") >= 1
    assert found.incarnation > 0


async def test_a_stopped_worker_is_killed_and_called_hung(tmp_path: Path) -> None:
    async with node(tmp_path) as (coordinator, _):
        coordinator.say(start(1))
        ready = await in_phase(coordinator, WorkerPhase.READY)
        os.kill(ready.report.pid, signal.SIGSTOP)
        exited = await in_phase(coordinator, WorkerPhase.EXITED)
        assert exited.report.exit is not None
        assert exited.report.exit.kind is ExitKind.HUNG


async def test_workers_die_with_their_agent(tmp_path: Path) -> None:
    async with node(tmp_path) as (coordinator, process):
        coordinator.say(start(1))
        pid = (await in_phase(coordinator, WorkerPhase.READY)).report.pid
        assert not is_gone(pid)
        process.kill()
        await wait_for_async(lambda: is_gone(pid))
        with anyio.fail_after(DEADLINE_S):
            await coordinator.ended.wait()


async def test_a_worker_outlives_the_coordinator_and_is_reported_to_the_next(
    tmp_path: Path,
) -> None:
    port = free_port()
    first, second = SmallCoordinator(), SmallCoordinator()
    with agent(tmp_path, "--coord", f"127.0.0.1:{port}"):
        async with serving(first, port):
            await register(first)
            first.say(start(1))
            pid = (await in_phase(first, WorkerPhase.READY)).report.pid
        async with serving(second, port):
            hello = await register(second)
            assert [(r.worker_id, r.phase, r.pid) for r in hello.workers] == [
                ("n1/1", WorkerPhase.READY, pid)
            ]
            second.say(StopWorker(WorkerId("n1/1"), 5_000_000_000, "test"))
            exited = await in_phase(second, WorkerPhase.EXITED)
            assert exited.report.exit is not None
            assert exited.report.exit.kind is ExitKind.STOPPED


async def test_a_silent_agent_is_noticed_and_comes_back(tmp_path: Path) -> None:
    async with node(tmp_path) as (coordinator, process):
        process.send_signal(signal.SIGSTOP)
        before = anyio.current_time()
        with anyio.fail_after(DEADLINE_S):
            await coordinator.ended.wait()
        assert anyio.current_time() - before < 3.0  # 1.4 s; the rest is for a busy machine.
        process.send_signal(signal.SIGCONT)
        await register(coordinator)


async def test_sigterm_drains_and_a_second_one_ends_at_once(tmp_path: Path) -> None:
    async with node(tmp_path) as (coordinator, process):
        coordinator.say(start(1, "print:never asked"))
        pid = (await in_phase(coordinator, WorkerPhase.READY)).report.pid
        process.terminate()
        notice = await coordinator.received.wait_for(DrainNotice)
        assert notice.reason == "SIGTERM"
        assert 29e9 < notice.timeout_ns <= 30e9
        assert not is_gone(pid)
        process.terminate()
        assert (await coordinator.received.wait_for(DrainNotice)).timeout_ns == 0
        assert await exit_code(process) == 75
        assert is_gone(pid)
    log = (tmp_path / "run" / "logs" / "train" / "n1-1.log").read_text()
    assert log == "never asked\n"


@contextmanager
def children_get(handler: signal.Handlers) -> Iterator[None]:
    """Let processes that are started meanwhile inherit this for SIGHUP."""
    before = signal.signal(signal.SIGHUP, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_a_closed_terminal_drains_the_node(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        with children_get(signal.SIG_DFL):  # These tests may run under nohup.
            coordinator, process = await stack.enter_async_context(node(tmp_path))
        process.send_signal(signal.SIGHUP)
        notice = await coordinator.received.wait_for(DrainNotice)
        assert notice.reason == "SIGHUP"
        assert 29e9 < notice.timeout_ns <= 30e9
        coordinator.say(Release("nothing left"))
        assert await exit_code(process) == 75


async def test_nohup_keeps_an_agent_when_its_terminal_is_closed(tmp_path: Path) -> None:
    log = tmp_path / "agent.log"
    with children_get(signal.SIG_IGN):  # As nohup does.
        process = launch(tmp_path, "--coord", f"127.0.0.1:{free_port()}")
    try:
        await wait_for_async(lambda: "coordinator_unreachable" in log.read_text())
        process.send_signal(signal.SIGHUP)
        process.terminate()
        assert await exit_code(process) == 75
    finally:
        process.kill()
        process.wait()
    assert "SIGHUP" not in log.read_text()


async def test_a_released_agent_ends_as_drained(tmp_path: Path) -> None:
    async with node(tmp_path) as (coordinator, process):
        process.send_signal(signal.SIGINT)
        await coordinator.received.wait_for(DrainNotice)
        coordinator.say(Release("nothing left"))
        assert await exit_code(process) == 75


async def test_a_wrong_token_ends_the_agent(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("word")
    coordinator = SmallCoordinator(token="another")
    async with serving(coordinator) as endpoint:
        flags = ["--coord", endpoint, "--token-file", str(tmp_path / "token")]
        with agent(tmp_path, *flags) as process:
            assert await exit_code(process) == 69
    said = (tmp_path / "agent.log").read_text()
    assert "wrong token" in said
    assert "secret_file_open" in said
    assert "Traceback" not in said


async def test_a_second_agent_of_a_node_is_refused_and_names_the_first(tmp_path: Path) -> None:
    async with node(tmp_path) as (_, first):
        with agent(tmp_path, "--coord", "127.0.0.1:1") as second:
            assert await exit_code(second) == 69
        assert first.poll() is None
        said = (tmp_path / "agent.log").read_text()
        assert f"an agent of node n1 runs on this host already, as process {first.pid} " in said


async def test_an_agent_without_a_coordinator_says_so_and_leaves_when_told(
    tmp_path: Path,
) -> None:
    log = tmp_path / "agent.log"
    with agent(tmp_path, "--coord", f"127.0.0.1:{free_port()}") as process:
        await wait_for_async(lambda: "coordinator_unreachable" in log.read_text())
        process.terminate()
        assert await exit_code(process) == 75
    # One line, however often it tried.
    assert len(re.findall("coordinator_unreachable", log.read_text())) == 1


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--coord", "nowhere"], "address 'nowhere': expected host:port"),
        (["--coord", "h:1", "--workers", "0"], "--workers '0': expected auto"),
        (["--coord", "h:1", "--resources", "GPU=900"], "GPU=900: this machine offers"),
        (["--coord", "h:1", "--labels", "zone"], "--labels 'zone': expected"),
        (["--coord", "h:1", "--node-id", "a/b"], "node name 'a/b': expected"),
        (["--coord", "h:1", "--token-file", "/no/such/file"], "token file /no/such/file"),
        (["--coord", "h:1", "--spares", "-1"], "--spares -1: expected"),
        (["--coord", "h:1", "--drain-timeout", "-1"], "--drain-timeout -1.0: expected"),
        (["--coord", "h:1", "--run-dir", "/proc/nothing"], "pass another --run-dir"),
        (["--coord", "h:1", "--log-dir", "/dev/null"], "pass another one"),
        (["--coord", "h:1", "--host", "203.0.113.1"], "--host 203.0.113.1: workers could not"),
        ([], "Missing option '--coord'"),
        (["--coord", "h:1", "--no-such-flag"], "No such option"),
    ],
)
async def test_flags_that_cannot_work_are_refused(
    tmp_path: Path, flags: list[str], told: str
) -> None:
    with agent(tmp_path, *flags) as process:
        is_usage = "option" in told.lower()
        assert await exit_code(process) == (2 if is_usage else 78)
    assert told in (tmp_path / "agent.log").read_text()
