"""The agent's hands, on real processes: start, hear, watch, kill, and lose nothing they printed."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import anyio
import pytest

from elastic.agent import processes as processes_module
from elastic.agent.kernel import process_state, session_members
from elastic.agent.log_follow import LogFollowers
from elastic.agent.logs import LogLimits, Logs
from elastic.agent.node_lock import WORDS_CHARS, hold_node
from elastic.agent.processes import ChildProcesses, SpareCommand
from elastic.core.config import JobSpec
from elastic.core.events.agent import (
    AgentEvent,
    ProcessExited,
    ProcessMessageReceived,
    ProcessStarted,
    ProcessStopped,
    SpawnFailed,
)
from elastic.core.facts import Entry, EntryKind, ExitCause, ExitKind, JobId, WorkerId
from elastic.core.messages import Assign, FollowLogs, LogLines, Ping, Pong, Stop, Warm, WorkerUpdate
from elastic.errors import NameTaken
from tests.patience import DEADLINE_S, wait_for_async

pytestmark = pytest.mark.anyio
ECHO = (sys.executable, str(Path(__file__).parents[1] / "workers" / "echo_worker.py"))
WORKER = WorkerId("n1/7")
ENV = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
Found = TypeVar("Found", bound=AgentEvent)


class Events:
    """What was posted, for whoever waits for some of it."""

    def __init__(self) -> None:
        self.all: list[AgentEvent] = []
        self._came = anyio.Event()

    def post(self, event: AgentEvent) -> None:
        self.all.append(event)
        self._came.set()
        self._came = anyio.Event()

    async def wait_for(
        self, kind: type[Found], where: Callable[[Found], bool] = lambda _: True
    ) -> Found:
        """The first event of this kind for which `where` holds."""
        with anyio.fail_after(DEADLINE_S):
            while True:
                for event in self.all:
                    if isinstance(event, kind) and where(event):
                        return event
                await self._came.wait()


def assign(*orders: str) -> Assign:
    """The message that makes a spare the worker n1/7, which then does these things."""
    entry = Entry(EntryKind.SCRIPT, "echo", args=orders)
    spec = JobSpec(job_id=JobId("j1"), name="train", entry=entry, min_workers=1, max_workers=1)
    return Assign(WORKER, spec, "127.0.0.1")


def log_of(folder: Path) -> Path:
    """Where the worker's output goes."""
    return folder / "train" / "n1-7.log"


class Node:
    """Processes, logs and events of one agent."""

    def __init__(self, folder: Path, command: tuple[str, ...], limits: LogLimits | None) -> None:
        self.events = Events()
        self.logs = Logs(folder, "n1", limits)
        launch = SpareCommand(env=ENV, command=command)
        self.processes = ChildProcesses(launch, self.logs, self.events.post)

    async def warm(self, process_id: int = 1) -> int:
        """Start a spare; returns its pid once it is warm."""
        self.processes.spawn(process_id)
        started = await self.events.wait_for(ProcessStarted, lambda e: e.process_id == process_id)
        said = await self.events.wait_for(
            ProcessMessageReceived, lambda e: e.process_id == process_id
        )
        assert said.message == Warm(started.pid)
        return started.pid

    async def work(self, *orders: str) -> int:
        """Start a spare and make it the worker; returns its pid once it did all orders."""
        pid = await self.warm()
        self.give(*orders)
        await self.ready()
        return pid

    def give(self, *orders: str) -> None:
        """Make process 1 the worker."""
        self.processes.open_log(1, assign(*orders))
        self.processes.send(1, assign(*orders))

    async def ready(self) -> None:
        await self.events.wait_for(
            ProcessMessageReceived, lambda e: isinstance(e.message, WorkerUpdate)
        )

    async def exit_of(self, process_id: int = 1) -> ExitCause:
        event = await self.events.wait_for(ProcessExited, lambda e: e.process_id == process_id)
        return event.cause


@asynccontextmanager
async def running(
    folder: Path, *, command: tuple[str, ...] = ECHO, limits: LogLimits | None = None
) -> AsyncIterator[Node]:
    """A node that leaves nothing behind."""
    node = Node(folder, command, limits)
    try:
        yield node
    finally:
        with anyio.CancelScope(shield=True):
            await node.processes.close(DEADLINE_S)
            await node.logs.close(DEADLINE_S)


def pids_of(processes: ChildProcesses) -> dict[int, int]:
    """Return the pid of every process that has not exited, by its number."""
    return {c.process_id: c.pid for c in processes._children.values() if not c.exited}


# ------------------------------------------------------------------------------ life and death


async def test_a_process_says_hears_and_ends_when_asked(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        pid = await node.warm()
        assert pids_of(node.processes) == {1: pid}
        assert os.getsid(pid) == pid != os.getsid(0)
        node.processes.send(1, Ping(42))
        await node.events.wait_for(ProcessMessageReceived, lambda e: e.message == Pong(42))
        node.processes.send(1, Stop("enough", 0))
        assert await node.exit_of() == ExitCause(ExitKind.CODE, 0)
        assert pids_of(node.processes) == {}


@pytest.mark.parametrize("has_pidfd", [True, False], ids=["pidfd", "thread"])
async def test_a_killed_process_is_told_of_at_once(
    tmp_path: Path, has_pidfd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_pidfd:
        monkeypatch.delattr(processes_module.os, "pidfd_open", raising=False)
    async with running(tmp_path) as node:
        pid = await node.work()
        os.kill(pid, signal.SIGKILL)
        assert await node.exit_of() == ExitCause(ExitKind.SIGNAL, 9)
        # Told once, and reaped soon after: no zombie stays.
        await wait_for_async(lambda: not Path(f"/proc/{pid}").exists())
        assert sum(isinstance(event, ProcessExited) for event in node.events.all) == 1


async def test_an_exit_comes_after_everything_that_the_process_said(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        pid = await node.work()
        os.kill(pid, signal.SIGSTOP)
        await node.events.wait_for(ProcessStopped)
        for number in range(5000):
            node.processes.send(1, Ping(number))
        node.processes.send(1, Stop("enough", 0))
        os.kill(pid, signal.SIGCONT)
        assert await node.exit_of() == ExitCause(ExitKind.CODE, 0)
        last = node.events.all.index(ProcessExited(1, ExitCause(ExitKind.CODE, 0)))
        pongs = [
            event.message.number
            for event in node.events.all[:last]
            if isinstance(event, ProcessMessageReceived) and isinstance(event.message, Pong)
        ]
        assert pongs == list(range(5000))


async def test_a_stopped_process_is_seen_and_can_be_killed(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        pid = await node.warm()
        os.kill(pid, signal.SIGSTOP)
        await node.events.wait_for(ProcessStopped, lambda e: e.stopped)
        os.kill(pid, signal.SIGCONT)
        await node.events.wait_for(ProcessStopped, lambda e: not e.stopped)
        os.kill(pid, signal.SIGSTOP)
        await wait_for_async(lambda: process_state(pid) == "T")
        node.processes.kill(1, "it had stopped")
        assert (await node.exit_of()).code == signal.SIGKILL


@pytest.mark.parametrize("order", ["child", "group"])
@pytest.mark.parametrize("death", ["killed", "exited"])
async def test_nothing_that_a_worker_started_outlives_it(
    tmp_path: Path, order: str, death: str
) -> None:
    async with running(tmp_path) as node:
        pid = await node.work(order)
        await wait_for_async(
            lambda: log_of(tmp_path).exists() and log_of(tmp_path).read_text() != ""
        )
        child = int(log_of(tmp_path).read_text())
        assert session_members(pid) == sorted([pid, child])
        if death == "killed":
            node.processes.kill(1, "test")
        else:
            node.processes.send(1, Stop("enough", 0))
        await node.exit_of()
        await wait_for_async(lambda: process_state(child) in ("", "Z"))
        await wait_for_async(lambda: not Path(f"/proc/{pid}").exists())


async def test_a_process_that_escaped_with_the_pipe_delays_no_news(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        pid = await node.work("escape")
        await wait_for_async(
            lambda: log_of(tmp_path).exists() and log_of(tmp_path).read_text() != ""
        )
        escaped = int(log_of(tmp_path).read_text())
        try:
            os.kill(pid, signal.SIGKILL)
            assert (await node.exit_of()).code == signal.SIGKILL
            await wait_for_async(lambda: not Path(f"/proc/{pid}").exists())
            assert process_state(escaped) == "S"
        finally:
            os.kill(escaped, signal.SIGKILL)


async def test_a_process_that_speaks_nonsense_is_killed(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        await node.warm()
        node.give("nonsense")
        assert (await node.exit_of()).code == signal.SIGKILL


async def test_a_command_that_is_not_there_fails_to_spawn_by_name(tmp_path: Path) -> None:
    async with running(tmp_path, command=("/no/such/python",)) as node:
        node.processes.spawn(1)
        failed = await node.events.wait_for(SpawnFailed)
        assert failed.process_id == 1
        assert "cannot start /no/such/python" in failed.detail
        assert pids_of(node.processes) == {}


async def test_a_spare_that_dies_says_why(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "import no_such_module_at_all")
    async with running(tmp_path, command=command) as node:
        node.processes.spawn(1)
        cause = await node.exit_of()
        assert (cause.kind, cause.code) == (ExitKind.CODE, 1)
        assert cause.detail == "ModuleNotFoundError: No module named 'no_such_module_at_all'"
        assert "Traceback" in (tmp_path / "n1-spares.log").read_text()


async def test_sending_to_a_process_that_is_gone_is_no_error(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        await node.warm()
        node.processes.kill(1, "test")
        await node.exit_of()
        node.processes.send(1, Ping(1))
        node.processes.kill(1, "again")
        node.processes.send(99, Ping(1))


# -------------------------------------------------------------------------------------- output


async def test_all_that_was_printed_before_a_kill_is_in_the_log(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        pid = await node.warm()
        node.give("print:begin", "error:to stderr", "flood:50000")
        await node.ready()
        os.kill(pid, signal.SIGKILL)
        await node.exit_of()
    lines = log_of(tmp_path).read_text().splitlines()
    assert lines == ["begin", "to stderr", *(f"line {number}" for number in range(50000))]


async def test_output_before_the_assignment_belongs_to_the_spares(tmp_path: Path) -> None:
    async with running(tmp_path, command=(*ECHO, "--late", "print:I am a spare")) as node:
        await node.work("print:I am a worker")
    assert log_of(tmp_path).read_text() == "I am a worker\n"
    assert (tmp_path / "n1-spares.log").read_text() == "I am a spare\n"


async def test_a_log_that_grows_too_large_keeps_its_newest_part(tmp_path: Path) -> None:
    limits = LogLimits(file_bytes_max=100_000, num_old_files=1)
    async with running(tmp_path, limits=limits) as node:
        await node.work("flood:50000")
    path = log_of(tmp_path)
    old = path.with_name("n1-7.log.1")
    assert not path.with_name("n1-7.log.2").exists()
    lines = (old.read_text() + path.read_text()).splitlines()
    assert lines[-1] == "line 49999"
    assert lines[1:] == [f"line {number}" for number in range(50000 - len(lines) + 1, 50000)]


async def test_a_disk_that_refuses_does_not_stop_a_worker_and_the_gap_is_said(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as node:
        await node.warm()
        (tmp_path / "train").write_text("a file where the folder should be")
        node.give("flood:20000")
        await node.ready()
        (tmp_path / "train").unlink()
        node.processes.send(1, assign("print:after"))
        await wait_for_async(lambda: log_of(tmp_path).exists())
    total = sum(len(f"line {number}\n") for number in range(20000))
    text = log_of(tmp_path).read_text()
    said = re.match(r"\n\[elastic-agent: (\d+) bytes lost here: File exists\]\n", text)
    assert said is not None
    rest = text[said.end() :]
    assert rest.endswith("after\n")
    assert int(said[1]) + len(rest) - len("after\n") == total


class Reader:
    """Someone far away who reads a log."""

    def __init__(self) -> None:
        self.text = ""
        self.ended = False
        self._came = anyio.Event()

    async def send(self, lines: LogLines) -> bool:
        assert not self.ended
        self.text += lines.text
        self.ended = lines.end
        self._came.set()
        self._came = anyio.Event()
        return True

    async def wait_for(self, text: str) -> None:
        with anyio.fail_after(DEADLINE_S):
            while text not in self.text:
                await self._came.wait()

    async def wait_end(self) -> None:
        with anyio.fail_after(DEADLINE_S):
            while not self.ended:
                await self._came.wait()


async def test_a_reader_follows_a_worker_to_its_end(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        pid = await node.work("flood:3000")
        reader = Reader()
        followers = LogFollowers(node.logs, reader.send)
        followers.handle(FollowLogs("f1", WORKER, tail_lines=2, follow=True))
        await reader.wait_for("line 2999\n")
        assert reader.text == "line 2998\nline 2999\n"
        node.processes.send(1, assign("print:more"))
        await reader.wait_for("more\n")
        assert not reader.ended
        os.kill(pid, signal.SIGKILL)
        await reader.wait_end()
        assert reader.text == "line 2998\nline 2999\nmore\n"


async def test_a_reader_loses_nothing_over_a_rotation(tmp_path: Path) -> None:
    limits = LogLimits(file_bytes_max=40_000, num_old_files=50)
    async with running(tmp_path, limits=limits) as node:
        await node.warm()
        reader = Reader()
        followers = LogFollowers(node.logs, reader.send)
        node.processes.open_log(1, assign())
        followers.handle(FollowLogs("f1", WORKER, follow=True))
        node.processes.send(1, assign("flood:50000", "exit:0"))
        await reader.wait_end()
    assert reader.text.splitlines() == [f"line {number}" for number in range(50000)]


async def test_a_reader_who_does_not_follow_gets_what_is_there(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        await node.work("flood:100", "print:last")
        await wait_for_async(lambda: log_of(tmp_path).read_text().endswith("last\n"))
        reader = Reader()
        followers = LogFollowers(node.logs, reader.send)
        followers.handle(FollowLogs("f1", WORKER))
        await reader.wait_end()
        assert len(reader.text.splitlines()) == 101


async def test_the_log_of_a_worker_from_before_is_still_found(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        await node.work("print:long ago")
    later = Logs(tmp_path, "n1")
    reader = Reader()
    LogFollowers(later, reader.send).handle(FollowLogs("f1", WORKER, follow=True))
    await reader.wait_end()
    assert reader.text == "long ago\n"


async def test_a_worker_that_printed_nothing_has_an_empty_log(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        await node.work()
    reader = Reader()
    LogFollowers(Logs(tmp_path, "n1"), reader.send).handle(FollowLogs("f1", WORKER))
    await reader.wait_end()
    assert reader.text == ""


@pytest.mark.parametrize("worker", ["n1/8", "n1", "../n1/7", "n1/../../7", ""])
async def test_a_log_that_is_not_there_is_said_to_be_missing(tmp_path: Path, worker: str) -> None:
    async with running(tmp_path) as node:
        await node.work("print:something")
        reader = Reader()
        followers = LogFollowers(node.logs, reader.send)
        followers.handle(FollowLogs("f1", WorkerId(worker), follow=True))
        await reader.wait_end()
        assert reader.text == f"elastic-agent: no output of worker {worker} on this node\n"


# ------------------------------------------------------------------------ one node, one agent


@pytest.fixture
def private(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    return folder


def test_a_node_id_is_held_by_one_process_at_a_time(private: Path) -> None:
    with (
        hold_node(private, "n1", 5_000_000),
        pytest.raises(NameTaken, match=f"already, as process {os.getpid()} "),
        hold_node(private, "n1", 6_000_000),
    ):
        pytest.fail("held twice")
    with hold_node(private, "n1", 7_000_000), hold_node(private, "n2", 7_000_000):
        pass


def test_a_later_life_has_a_greater_number_also_when_the_clock_falls(private: Path) -> None:
    with hold_node(private, "n1", 5_000_000) as first:
        assert first == 5
    with hold_node(private, "n1", 1_000_000) as second:
        assert second == 6
    words = (private / "agent-n1.lock").read_text()
    with hold_node(private, "n1", 1_000_000) as third:
        assert third == 7
    # Written in place: at no moment is it empty, whenever a kill or a full disk comes.
    assert len((private / "agent-n1.lock").read_text()) == len(words) == WORDS_CHARS
