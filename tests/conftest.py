"""What all tests share: the event loop they run on, a watch for processes left behind, a table.

Rule: nothing here makes a test easier to pass.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

# Inherited by every process that a test starts, also by those whose parent is gone.
SESSION_MARK = "ELASTIC_TEST_SESSION"
# Python's own, ends with us: it frees shared memory that a process left behind.
RESOURCE_TRACKER = "multiprocessing.resource_tracker"
GOODBYE_S = 5.0
LINES_AT_ONCE = 15
# How long a test may go on after its timeout has ended it.
CLEANUP_S = 120.0
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
    del os.environ[SESSION_MARK]
    # A process may be on its way out: what counts is that it goes without being told.
    _, left = psutil.wait_procs(started_here(mark), timeout=GOODBYE_S)
    left = [process for process in left if is_alive(process)]
    lines = [described(process) for process in left]
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=GOODBYE_S)
    if lines:
        pytest.fail("processes outlived the tests that started them:\n" + "\n".join(lines))


def started_here(mark: str) -> list[psutil.Process]:
    """Find living processes that carry our mark, or descend from us."""
    ours = {process.pid: process for process in psutil.Process().children(recursive=True)}
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(SESSION_MARK) == mark:
                ours[process.pid] = process
        except psutil.Error:
            continue  # Gone, or another user's.
    return [process for _, process in sorted(ours.items()) if is_alive(process)]


def is_alive(process: psutil.Process) -> bool:
    """Tell a process that can still do something from one that only waits to be reaped."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE and RESOURCE_TRACKER not in " ".join(
            process.cmdline()
        )
    except psutil.NoSuchProcess:
        return False


def described(process: psutil.Process) -> str:
    """Return pid, command, and the test that started it (pytest tells it to every child)."""
    try:
        test = process.environ().get("PYTEST_CURRENT_TEST", "an unknown test")
        return f"  pid {process.pid}: {' '.join(process.cmdline())[:200]} (started in {test})"
    except psutil.Error:
        return f"  pid {process.pid}"


def pytest_configure(config: pytest.Config) -> None:
    """Keep the way to whoever reads before output is captured."""
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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End the whole process if a test's timeout does not end it: it shows where it stands.

    So it is with what waits outside of Python, and with a clean-up that waits for a thread. With
    several processes the test fails under its name, and others run what is left.
    """
    limit_s = limit_of(item)
    if not limit_s:
        return (yield)
    faulthandler.dump_traceback_later(
        limit_s + CLEANUP_S, exit=True, file=item.config.stash[STDERR]
    )
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def limit_of(item: pytest.Item) -> float:
    """Return how long a test may take, as pytest-timeout has it: its mark first, then who asks."""
    mark = item.get_closest_marker("timeout")
    given = None
    if mark is not None:
        given = mark.args[0] if mark.args else mark.kwargs.get("timeout")
    for other in (item.config.getoption("timeout"), os.environ.get("PYTEST_TIMEOUT")):
        given = other if given is None else given
    return float(item.config.getini("timeout") if given is None else given)


def pytest_enter_pdb() -> None:
    """Let people think as long as they want."""
    faulthandler.cancel_dump_traceback_later()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many tests each part of tests/ has, and the seconds that they took."""
    seconds: dict[str, float] = defaultdict(float)
    tests: dict[str, set[str]] = defaultdict(set)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                part = Path(report.nodeid).parts[1]
                seconds[part] += report.duration
                tests[part].add(report.nodeid)
    if seconds:
        terminalreporter.section("seconds by part")
    for part, total in seconds.items():
        terminalreporter.write_line(f"{part:12} {len(tests[part]):5} tests {total:8.1f} s")
