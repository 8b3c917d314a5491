"""What all tests share: an event loop, the end of what hangs or is left behind, a report.

Rule: nothing here makes a test easier to pass.
"""

from __future__ import annotations

import faulthandler
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import zlib
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

from tests.harness.traces import end_references
from tests.patience import (
    DEADLINE_S,
    HANG_S,
    SESSION_MARK,
    SLOWNESS,
    Deadline,
    is_alive,
    started_here,
)

# A folder with one for each test that runs, and where seeds begin that no run had before.
MARKS = "ELASTIC_TEST_MARKS"
SEED = "ELASTIC_TEST_SEED"
LINES_AT_ONCE = 15
# Where tests of one file share a cluster, and so have to run in one process.
SHARING = ("chaos", "integration", "gpu")
# The longest parts first: what is left for the end then divides well among the cores.
PARTS = ("chaos", "integration", "simulation", "property", "scenarios", "unit", "tidy")
# How often the watchdog of a test looks.
POLL_S = 5.0
# Where people read, whatever a test has done to the process's own.
STDERR = pytest.StashKey[int]()

# How long an example takes says something of the machine, which others may use too.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Run async tests on asyncio: grpc.aio knows no other loop."""
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def _no_process_is_left_behind() -> Iterator[None]:
    """Fail the session if a process that a test started outlives it; end it all the same."""
    mark = f"{os.getpid()}-{psutil.Process().create_time()}"
    os.environ[SESSION_MARK] = mark
    yield
    end_references()
    del os.environ[SESSION_MARK]
    # A process may be on its way out: what counts is that it goes without being told.
    _, left = psutil.wait_procs(started_here(mark), timeout=DEADLINE_S)
    left = [process for process in left if is_alive(process)]
    lines = [described(process) for process in left]
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=DEADLINE_S)
    if lines:
        pytest.fail("processes outlived the tests that started them:\n" + "\n".join(lines))


def described(process: psutil.Process) -> str:
    """Return pid, command, and the test that started it (pytest tells it to every child)."""
    try:
        test = process.environ().get("PYTEST_CURRENT_TEST", "an unknown test")
        return f"  pid {process.pid}: {' '.join(process.cmdline())[:200]} (started in {test})"
    except psutil.Error:
        return f"  pid {process.pid}"


@pytest.fixture(scope="session")
def fresh_seed() -> int:
    """Give a seed that is another one in each run, and is shown at its beginning."""
    return int(os.environ[SEED])


def pytest_report_header() -> str:
    """Say how to have the same run again."""
    return f"fresh seed: {os.environ[SEED]} (the same again: {SEED}={os.environ[SEED]})"


def pytest_configure(config: pytest.Config) -> None:
    """Keep the way to whoever reads before output is captured; begin what all processes share."""
    if not hasattr(config, "workerinput"):
        os.environ[MARKS] = tempfile.mkdtemp(prefix="elastic-tests-")
        os.environ.setdefault(SEED, str(random.SystemRandom().randrange(1_000_000)))
    assert sys.__stderr__ is not None
    config.stash[STDERR] = os.dup(sys.__stderr__.fileno())
    if "CI" in os.environ and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SaysAtOnce(config))


class SaysAtOnce:
    """Prints what fails when it does: a run that is cut off has no table of failures at its end."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            terminal = self._config.pluginmanager.get_plugin("terminalreporter")
            assert terminal is not None
            terminal.write_line(f"\n{report.nodeid} has failed ({report.duration:.0f} s):")
            for line in report.longreprtext.splitlines()[-LINES_AT_ONCE:]:
                terminal.write_line(f"    {line}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the parts into their order, and together what shares a cluster."""
    ranks = {part: rank for rank, part in enumerate(PARTS)}
    items.sort(key=lambda item: ranks.get(part_of(item.nodeid), len(PARTS)))
    for item in items:
        if part_of(item.nodeid) in SHARING:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


def part_of(nodeid: str) -> str:
    """Return the folder of tests/ that a test is in."""
    return Path(nodeid).parts[1]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End this process, and all that it has started, when a test hangs, showing all stacks.

    Nothing gentler works everywhere: threads may wait in C++, and so may a fixture's clean-up.
    xdist reports the one test as failed and goes on with its file in a new process.
    """
    running = mark_of(item.nodeid)
    if running.exists():
        item.add_marker(pytest.mark.skip("the process that ran it before has died of it"))
    running.mkdir(parents=True, exist_ok=True)
    stderr = item.config.stash[STDERR]
    watchdog = Watchdog(item.nodeid, stderr)
    watchdog.start()
    try:
        return (yield)
    finally:
        watchdog.cancel()
        watchdog.join()
        faulthandler.cancel_dump_traceback_later()
        running.rmdir()


def mark_of(nodeid: str) -> Path:
    """Return the folder that a test has while it runs, which stays if its process dies of it."""
    return Path(os.environ[MARKS], f"{zlib.crc32(nodeid.encode()):08x}")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the marks, as whoever has made them."""
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ[MARKS], ignore_errors=True)


class Watchdog(threading.Thread):
    """Ends a test that hangs, unless it ends before."""

    def __init__(self, nodeid: str, stderr: int) -> None:
        super().__init__(name="test-watchdog", daemon=True)
        self._nodeid, self._stderr = nodeid, stderr
        self._is_over = threading.Event()

    def cancel(self) -> None:
        """The test has ended."""
        self._is_over.set()

    def run(self) -> None:
        """Look until the test is over, or hangs."""
        deadline = Deadline(HANG_S)
        while not self._is_over.wait(POLL_S):
            # For code in C++ that holds the interpreter's lock: no thread of Python's runs then.
            faulthandler.dump_traceback_later(HANG_S, exit=True, file=self._stderr)
            if deadline.passed():
                end_hung(self._nodeid, self._stderr)


def end_hung(nodeid: str, stderr: int) -> None:
    """Show the stacks of this process and its children, end them, and end this one."""
    os.write(stderr, f"\n{nodeid} hangs, after {HANG_S:.0f} s or more:\n".encode())
    faulthandler.dump_traceback(stderr)
    processes = started_here(os.environ.get(SESSION_MARK, ""))
    for process in processes:
        os.write(stderr, f"\n{described(process)}\n{stacks_of(process)}".encode())
    for process in processes:
        process.kill()
    os._exit(1)


def stacks_of(process: psutil.Process) -> str:
    """Return the Python stacks of another process, as far as py-spy can read them."""
    command = shutil.which("py-spy") or str(Path(sys.executable).with_name("py-spy"))
    try:
        done = subprocess.run(
            [command, "dump", "--nonblocking", "--pid", str(process.pid)],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{error}\n"
    return done.stdout + done.stderr


def pytest_enter_pdb() -> None:
    """Let people think as long as they want."""
    faulthandler.cancel_dump_traceback_later()
    for thread in threading.enumerate():
        if isinstance(thread, Watchdog):
            thread.cancel()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many tests each part of tests/ has, and the seconds that they took."""
    seconds: dict[str, float] = defaultdict(float)
    tests: dict[str, set[str]] = defaultdict(set)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                part = part_of(report.nodeid)
                seconds[part] += report.duration
                tests[part].add(report.nodeid)
    if seconds:
        terminalreporter.section(f"seconds by part (this machine: {SLOWNESS:.1f} x a quiet one's)")
    for part, total in seconds.items():
        terminalreporter.write_line(f"{part:12} {len(tests[part]):5} tests {total:8.1f} s")
