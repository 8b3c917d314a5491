"""Limits of the coordinator's process: open files are raised, and too few are told."""

from __future__ import annotations

import subprocess
import sys

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
        timeout=60,
    )
    return done.stdout.strip(), done.stderr.strip()


def test_a_hard_limit_that_is_too_low_is_raised_to_and_told_with_the_number_needed() -> None:
    printed, logged = limited(1024)
    assert printed == "512 1024"
    assert logged.startswith("WARNING open_files_limited limit=1024 needed=16896 connections=512 ")
    assert "LimitNOFILE" in logged
