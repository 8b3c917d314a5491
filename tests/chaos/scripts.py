"""Driver scripts as processes: started, watched, and found again by a mark in their environment."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

import psutil

from tests.patience import DEADLINE_S, wait_for

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("drivers.py")
RESUMING = Path(__file__).with_name("resuming.py")
MARK = "ELASTIC_TEST_SCRIPT"


class Script:
    """A driver script, and all processes that came of it."""

    def __init__(self, case: str, tmp_path: Path, *launcher: str, script: Path = SCRIPT) -> None:
        self.mark = secrets.token_hex(8)
        self.out, self.err = tmp_path / "stdout", tmp_path / "stderr"
        known = {key: value for key, value in os.environ.items() if "ELASTIC_COORD" not in key}
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, *launcher, str(script), case, str(tmp_path / "storage")],
                env={**known, MARK: self.mark, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    def said(self) -> str:
        return self.out.read_text(errors="replace") + self.err.read_text(errors="replace")

    def wait(self) -> int:
        return self.process.wait(DEADLINE_S)

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != "zombie":
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def assert_nothing_is_left(self) -> None:
        wait_for(lambda: not self.processes(), "the end of all processes")
