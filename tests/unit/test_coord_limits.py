"""Limits of the coordinator's process: open files are raised, and too few are told; turns."""

from __future__ import annotations

import subprocess
import sys

import anyio
import pytest

from elastic.coord.server_limits import AdmissionLimiter, ServerLimits
from elastic.errors import Busy
from elastic.runtime.clock import SystemClock
from tests.patience import DEADLINE_S

CODE = """
import logging, resource
from elastic.coord.server_limits import raise_file_limit
logging.basicConfig(format="%(levelname)s %(message)s")
resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard}))
print(raise_file_limit(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def limited(hard: int) -> tuple[str, str]:
    """Return what a process prints and logs whose limit of open files is 256, at most `hard`."""
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(hard=hard)],
        capture_output=True,
        text=True,
        check=True,
        timeout=DEADLINE_S,
    )
    return done.stdout.strip(), done.stderr.strip()


def test_a_hard_limit_that_is_too_low_is_raised_to_and_told_with_the_number_needed() -> None:
    printed, logged = limited(1024)
    assert printed == "512 1024"
    assert logged.startswith("WARNING open_files_limited limit=1024 needed=16896 connections=512 ")
    assert "LimitNOFILE" in logged


@pytest.mark.anyio
async def test_submissions_wait_for_their_turn_and_are_told_when_it_does_not_come() -> None:
    door = AdmissionLimiter(
        ServerLimits(submissions_at_once=2, submission_wait_s_max=DEADLINE_S), SystemClock()
    )
    inside: list[int] = []
    ends = [anyio.Event() for _ in range(3)]

    async def submit(number: int) -> None:
        async with door.submission():
            inside.append(number)
            await ends[number].wait()

    with anyio.fail_after(DEADLINE_S):
        async with anyio.create_task_group() as tasks:
            for number in range(3):
                tasks.start_soon(submit, number)
            await anyio.wait_all_tasks_blocked()
            assert inside == [0, 1]
            ends[1].set()
            await anyio.wait_all_tasks_blocked()
            assert inside == [0, 1, 2]
            ends[0].set()
            ends[2].set()
    closed = AdmissionLimiter(
        ServerLimits(submissions_at_once=1, submission_wait_s_max=0.01), SystemClock()
    )
    async with closed.submission():
        with pytest.raises(Busy, match="takes 1 submissions at once"):
            async with closed.submission():
                pass
    async with closed.submission():
        pass
