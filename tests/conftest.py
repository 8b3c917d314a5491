"""Shared by all tests: the event loop, a watchdog for hangs, a check for leaks, a report.

Rule: nothing here makes a test easier to pass.
"""

from __future__ import annotations

import faulthandler
import gc
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

from tests.effort import examples
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

# The folder of the marks of running tests, and the first seed of this run.
MARKS = "ELASTIC_TEST_MARKS"
SEED = "ELASTIC_TEST_SEED"
LINES_AT_ONCE = 15
# The longest parts first: the short ones at the end then balance the load of the cores.
PARTS = ("chaos", "integration", "simulation", "property", "scenarios", "unit", "tidy")
# Seconds between checks of a test's watchdog.
POLL_S = 5.0
# A copy of the original stderr, which a test may have redirected.
STDERR = pytest.StashKey[int]()

# The time of an example depends on the load of the machine.
settings.register_profile(
    "untimed",
    deadline=None,
    max_examples=examples(50),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Run async tests on asyncio: grpc.aio supports no other loop."""
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def _no_process_is_left_behind() -> Iterator[None]:
    """Fail the session if a process that a test started outlives it, and kill that process."""
    mark = f"{os.getpid()}-{psutil.Process().create_time()}"
    os.environ[SESSION_MARK] = mark
    yield
    end_references()
    del os.environ[SESSION_MARK]
    # A process may still be exiting: it must only end by itself.
    _, left = psutil.wait_procs(started_here(mark), timeout=DEADLINE_S)
    left = [process for process in left if is_alive(process)]
    lines = [described(process) for process in left]
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=DEADLINE_S)
    if lines:
        pytest.fail("processes outlived the tests that started them:\n" + "\n".join(lines))


@pytest.fixture(scope="module", autouse=True)
def _what_others_made_is_frozen() -> None:
    """Leave out of collections, and of walks over all objects, what is there by now: millions.

    A training loop walks over all that are not frozen when it begins; in a worker's process these
    are the script's own. What a test file makes while it is imported is frozen, too: make what such
    a walk is to find in the test.
    """
    gc.collect()
    gc.freeze()


def described(process: psutil.Process) -> str:
    """Return pid, command, and the test that started it (from PYTEST_CURRENT_TEST)."""
    try:
        test = process.environ().get("PYTEST_CURRENT_TEST", "an unknown test")
        return f"  pid {process.pid}: {' '.join(process.cmdline())[:200]} (started in {test})"
    except psutil.Error:
        return f"  pid {process.pid}"


@pytest.fixture(scope="session")
def fresh_seed() -> int:
    """Return a seed that differs in each run, and is printed at its start."""
    return int(os.environ[SEED])


def pytest_report_header() -> str:
    """Return a line that tells how to repeat this run."""
    return f"fresh seed: {os.environ[SEED]} (the same again: {SEED}={os.environ[SEED]})"


def pytest_configure(config: pytest.Config) -> None:
    """Save stderr before output is captured; set the variables that all processes share."""
    if not hasattr(config, "workerinput"):
        os.environ[MARKS] = tempfile.mkdtemp(prefix="elastic-tests-")
        os.environ.setdefault(SEED, str(random.SystemRandom().randrange(1_000_000)))
    assert sys.__stderr__ is not None
    config.stash[STDERR] = os.dup(sys.__stderr__.fileno())
    if "CI" in os.environ and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SaysAtOnce(config))


class SaysAtOnce:
    """Prints each failure at once: a run that is cut off prints no table of failures."""

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
    """Order the tests by part."""
    ranks = {part: rank for rank, part in enumerate(PARTS)}
    items.sort(key=lambda item: ranks.get(part_of(item.nodeid), len(PARTS)))


def part_of(nodeid: str) -> str:
    """Return the folder of tests/ that a test is in."""
    return Path(nodeid).parts[1]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """When a test hangs, print all stacks and end this process and all that it started.

    Nothing gentler always works: threads may block in C++, and so may a fixture's cleanup.
    xdist reports that test as failed and continues with its file in a new process.
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
    """Return the folder that marks a running test, and remains if its process crashes."""
    return Path(os.environ[MARKS], f"{zlib.crc32(nodeid.encode()):08x}")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the marks, in the process that created them."""
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ[MARKS], ignore_errors=True)


class Watchdog(threading.Thread):
    """Ends a test that hangs; see `end_hung`."""

    def __init__(self, nodeid: str, stderr: int) -> None:
        super().__init__(name="test-watchdog", daemon=True)
        self._nodeid, self._stderr = nodeid, stderr
        self._is_over = threading.Event()

    def cancel(self) -> None:
        """Stop watching: the test has ended."""
        self._is_over.set()

    def run(self) -> None:
        """Check every POLL_S seconds until the test is over, or hangs."""
        deadline = Deadline(HANG_S)
        while not self._is_over.wait(POLL_S):
            # For C++ code that holds the GIL: no Python thread runs then.
            faulthandler.dump_traceback_later(HANG_S, exit=True, file=self._stderr)
            if deadline.passed():
                end_hung(self._nodeid, self._stderr)


def end_hung(nodeid: str, stderr: int) -> None:
    """Print the stacks of this process and its children, then kill all of them."""
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
    """Disable the watchdog while a debugger is in use."""
    faulthandler.cancel_dump_traceback_later()
    for thread in threading.enumerate():
        if isinstance(thread, Watchdog):
            thread.cancel()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the number of tests in each part of tests/, and their seconds."""
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
