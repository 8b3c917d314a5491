"""Spares that a zygote forks: as good as others, and quick; a zygote that fails is no failure."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from elastic.agent.kernel import process_state
from elastic.agent.logs import Logs
from elastic.agent.processes import WORKER_COMMAND, ZYGOTE_COMMAND, ChildProcesses, SpareCommand
from elastic.core.events.agent import (
    ProcessExited,
    ProcessMessageReceived,
    ProcessStarted,
    SpawnFailed,
)
from elastic.core.facts import Entry, EntryKind, ExitCause, ExitKind
from elastic.core.messages import Ping, Pong, Warm
from elastic.worker.process.main import EXIT_REPLACED
from tests.integration.played_agent import leave_orphans
from tests.integration.test_agent_processes import ECHO, ENV, Events, pids_of
from tests.patience import DEADLINE_S, wait_for_async

pytestmark = pytest.mark.anyio


LEAVES = """
import os, signal
pid = os.fork()
if pid:
    os.write(1, str(pid).encode())
else:
    os.closerange(0, 3)
    signal.pause()
"""


@pytest.fixture(scope="module", autouse=True)
def _adopts_no_more() -> Iterator[None]:
    yield
    leave_orphans()


class Node:
    """Processes of one agent."""

    def __init__(self, folder: Path, zygote: tuple[str, ...], command: tuple[str, ...]) -> None:
        self.events = Events()
        self.logs = Logs(folder, "n1", None)
        launch = SpareCommand(env=ENV, command=command, zygote=zygote)
        self.processes = ChildProcesses(launch, self.logs, self.events.post)

    @property
    def zygote(self) -> int:
        found = self.processes._zygote
        assert found is not None
        return found.pid

    async def warm(self, number: int) -> int:
        """Start a spare; returns its pid once it is warm."""
        self.processes.spawn(number)
        return await self.is_warm(number)

    async def is_warm(self, number: int) -> int:
        started = await self.events.wait_for(ProcessStarted, lambda e: e.process_id == number)
        said = await self.events.wait_for(ProcessMessageReceived, lambda e: e.process_id == number)
        assert said.message == Warm(started.pid)
        return started.pid

    async def exit_of(self, number: int) -> ExitCause:
        exited = await self.events.wait_for(ProcessExited, lambda e: e.process_id == number)
        return exited.cause


@asynccontextmanager
async def running(
    folder: Path,
    zygote: tuple[str, ...] = ZYGOTE_COMMAND,
    command: tuple[str, ...] = ECHO,
) -> AsyncIterator[Node]:
    """A node that leaves nothing behind."""
    node = Node(folder, zygote, command)
    try:
        yield node
    finally:
        with anyio.CancelScope(shield=True):
            await node.processes.close(DEADLINE_S)
            await node.logs.close(DEADLINE_S)


@pytest.fixture(scope="class")
async def node(
    _adopts_no_more: None, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Node]:
    """One whose zygote has imported everything, for tests that leave it as it is.

    No other node may run beside it in this process: each reaps what it does not know.
    """
    async with running(tmp_path_factory.mktemp("node")) as shared:
        yield shared


def other_version(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return how an agent of another version starts a process."""
    return (*command[:-1], "1.999")


COMPUTES = """
import os, sys, torch, weakref
from elastic.worker.process.main import warm_up_here
warm_up_here()
assert torch.get_num_threads() == 2
# At its end a worker need not undo what was imported.
assert not any(finalizer.atexit for finalizer in weakref.finalize._registry)
# A spare imports nothing before it is warm.
assert {"elastic.worker.process.control", "elastic.worker.process.runner"} <= set(sys.modules)
pid = os.fork()
if pid == 0:
    # Large enough to be divided among threads; libgomp hangs in the child of one that did so.
    (torch.ones(1500, 1500) @ torch.ones(1500, 1500)).sum()
    torch.nn.functional.conv2d(torch.ones(64, 32, 32, 32), torch.ones(64, 32, 3, 3)).relu_()
    torch.ones(1 << 22).exp_()
    os._exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
"""


async def test_what_is_forked_computes_with_several_threads() -> None:
    with anyio.fail_after(2 * DEADLINE_S):
        await anyio.run_process(
            [sys.executable, "-c", COMPUTES], env={**ENV, "OMP_NUM_THREADS": "2"}
        )


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def parent_of(pid: int) -> int:
    text = Path(f"/proc/{pid}/stat").read_text()
    return int(text.rpartition(")")[2].split()[1])


def is_answer(message: object, number: int) -> bool:
    """Return whether it answers this ping, whatever it says of how the main thread stands."""
    return isinstance(message, Pong) and message.number == number


class TestOneNode:
    """What leaves the zygote of a node as it is."""

    async def test_forked_spares_are_our_children_and_answer(self, node: Node) -> None:
        pids = [await node.warm(number) for number in (1, 2, 3)]
        assert len(set(pids)) == 3
        for number, pid in enumerate(pids, 1):
            assert parent_of(pid) == os.getpid()
            assert name_of(pid) == "elastic-worker"
            assert os.getsid(pid) == pid != os.getsid(0)
            node.processes.send(number, Ping(number))
            await node.events.wait_for(
                ProcessMessageReceived, lambda e, n=number: is_answer(e.message, n)
            )
        os.kill(pids[1], signal.SIGKILL)
        assert await node.exit_of(2) == ExitCause(ExitKind.SIGNAL, 9)
        await wait_for_async(lambda: not Path(f"/proc/{pids[1]}").exists())
        assert pids_of(node.processes) == {1: pids[0], 3: pids[2]}

    async def test_spares_of_a_job_have_its_imports_and_do_without_if_those_fail(
        self, node: Node, tmp_path: Path
    ) -> None:
        installed = tmp_path / "site-packages"
        installed.mkdir()
        (installed / "costly.py").write_text(IMPORTED)
        (installed / "dear.py").write_text(f"{IMPORTED}\nPART = 1")
        (installed / "deadly.py").write_text("import os; os._exit(1)")
        function = Entry(
            EntryKind.FUNCTION, "train", python_path=(str(installed),), imports=("dear:PART",)
        )
        script = replace(function, kind=EntryKind.SCRIPT, imports=())
        scripts: list[Entry] = []
        for name in ("costly", "deadly"):
            (tmp_path / f"{name}.txt").write_text(f"import {name}")
            scripts.append(replace(script, target=str(tmp_path / f"{name}.txt")))
        for number, entry in enumerate((scripts[0], *scripts, function, function), 11):
            node.processes.spawn(number, entry.target, entry)
            pid = await node.is_warm(number)
            assert (parent_of(pid), os.getsid(pid)) == (os.getpid(), pid)
            assert name_of(pid) == "elastic-worker"
        # Imported once, for both, and after torch's functions were replaced.
        assert (installed / "costly.py.kept").read_text().split() == ["True"]
        assert (installed / "dear.py.kept").read_text().split() == ["True"]

    async def test_what_a_worker_leaves_behind_is_adopted_and_reaped(self, node: Node) -> None:
        await node.warm(21)
        left = await anyio.run_process([sys.executable, "-c", LEAVES], start_new_session=True)
        pid = int(left.stdout)
        assert parent_of(pid) == os.getpid()
        os.kill(pid, signal.SIGKILL)
        await wait_for_async(lambda: not exists(pid))


IMPORTED = """
import functools
from torch.distributed import init_process_group  # Kept by this name.
with open(__file__ + ".kept", "a") as file:
    file.write(f"{isinstance(init_process_group, functools.partial)} ")
"""


@pytest.mark.slow
async def test_one_that_dies_before_it_is_told_of_is_told_of(tmp_path: Path) -> None:
    """Its zygote is held up between the birth and the word of it."""
    async with running(tmp_path) as node:
        await node.warm(1)
        before = set(children_of(os.getpid()))
        node.processes.spawn(2)
        (born,) = await new_children(before)
        os.kill(node.zygote, signal.SIGSTOP)
        os.kill(born, signal.SIGKILL)
        await wait_for_async(lambda: process_state(born) in ("Z", ""))
        await wait_for_checks(node, 2)  # Whoever reaps it would do so now.
        os.kill(node.zygote, signal.SIGCONT)
        assert await node.exit_of(2) == ExitCause(ExitKind.SIGNAL, 9)


async def wait_for_checks(node: Node, count: int) -> None:
    """Wait until the agent has looked after its processes so many times more."""
    seen: list[None] = []
    look = node.processes._check

    def counted() -> None:
        look()
        seen.append(None)

    node.processes._check = counted  # type: ignore[method-assign]
    await wait_for_async(lambda: len(seen) >= count)


async def new_children(before: set[int]) -> set[int]:
    """Wait for children that were not there before."""
    found: set[int] = set()

    def came() -> bool:
        found.update(set(children_of(os.getpid())) - before)
        return bool(found)

    await wait_for_async(came)
    return found


@pytest.mark.slow
async def test_a_spare_that_is_killed_before_it_is_born_ends(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        node.processes.spawn(1)
        node.processes.kill(1, "changed our mind")
        assert await node.exit_of(1) == ExitCause(ExitKind.SIGNAL, 9)
        assert pids_of(node.processes) == {}


async def test_a_zygote_that_is_killed_is_replaced(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        first, killed = await node.warm(9), node.zygote
        os.kill(killed, signal.SIGSTOP)
        owed = (0, 1)
        for number in owed:
            node.processes.spawn(number)
        os.kill(killed, signal.SIGKILL)
        for number in owed:
            await node.is_warm(number)
        assert node.zygote != killed
        assert process_state(first) not in ("", "Z")
        await wait_for_async(lambda: not exists(killed))  # Reaped, not a zombie.


@pytest.mark.parametrize(
    "command", [("/no/such/program",), (sys.executable, "-c", "raise SystemExit(3)")]
)
async def test_a_zygote_that_cannot_start_is_done_without(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    async with running(tmp_path, zygote=command) as node:
        await node.warm(1)
        await node.warm(2)
        assert not any(isinstance(event, SpawnFailed) for event in node.events.all)


async def test_spares_of_a_package_that_was_replaced_do_not_start(tmp_path: Path) -> None:
    async with running(
        tmp_path, zygote=other_version(ZYGOTE_COMMAND), command=other_version(WORKER_COMMAND)
    ) as node:
        node.processes.spawn(1)
        cause = await node.exit_of(1)
        assert (cause.kind, cause.code) == (ExitKind.CODE, EXIT_REPLACED)
        assert "restart elastic-agent on this node" in cause.detail
        await wait_for_async(lambda: not node.processes._has_zygote)


async def test_closing_leaves_nothing_of_what_is_being_born(tmp_path: Path) -> None:
    before = set(children_of(os.getpid()))  # Of other tests: Python's resource tracker.
    async with running(tmp_path) as node:
        await node.warm(1)
        zygote = node.zygote
        for number in (2, 3, 4):
            node.processes.spawn(number)
    assert not exists(zygote)
    await wait_for_async(lambda: set(children_of(os.getpid())) <= before)


def children_of(pid: int) -> list[int]:
    """Living ones; those that are dead are reaped."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        number = int(path.name)
        try:
            if parent_of(number) == pid and process_state(number) not in ("Z", "X", ""):
                found.append(number)
        except OSError:
            continue
    return found
