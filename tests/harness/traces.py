"""The state after every step of every process, compared with a run that nobody disturbed.

Rule: each line that any process has written for a step must equal the undisturbed run's line of it
in all parts; a final hash would let errors heal before it is taken. Only what was logged, which
travels with the next step, may be a step older: whoever knew it may be lost.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic.errors import ElasticError

Line = Mapping[str, Any]
Place = tuple[int, int]
"""Epoch, and the step of it that comes next."""
POLL_S = 0.02


class TraceDiffers(ElasticError):
    """A process has made something else of a step than a run that nobody disturbed."""


def lines_of(directory: Path) -> list[tuple[str, Line]]:
    """Return (process, line) of all that was written there, in each process's order.

    A line without an end is still being written, or was when its process was killed.
    """
    return [
        (path.stem, json.loads(line))
        for path in sorted(directory.glob("*.jsonl"))
        for line in path.read_text().split("\n")[:-1]
    ]


def place_of(line: Line) -> Place:
    """Return which step a line is of."""
    return line["epoch"], line["step"]


def traced(directory: Path) -> dict[Place, Line]:
    """Return the lines of a run in one process, by step."""
    return {place_of(line): line for _, line in lines_of(directory)}


def compare(directory: Path, expected: Callable[[Place], Line]) -> int:
    """Compare every line of every process, and require one for each step up to the last.

    Args:
        directory: `--trace` of the disturbed run.
        expected: returns the undisturbed run's line of a step; raises KeyError where it has none.

    Returns:
        The number of steps.

    Raises:
        TraceDiffers: names the first step, the process and the parts of the state.
    """
    found = sorted(lines_of(directory), key=lambda one: place_of(one[1]))
    for process, line in found:
        try:
            right = expected(place_of(line))
        except KeyError as unknown:
            raise TraceDiffers(
                f"process {process} has committed step {place_of(line)}, and the run that the job "
                f"ended with is shorter: what was committed was lost"
            ) from unknown
        # Whoever adopts whole steps has their mean a step later or not at all: it writes none.
        names = [name for name in right if name != "mean" or name in line]
        wrong = [name for name in names if not _is_right(name, line.get(name), right[name])]
        if wrong:
            epoch, step = place_of(line)
            raise TraceDiffers(
                f"{', '.join(wrong)} of process {process} differ from the undisturbed run's "
                f"after step {step - 1} of epoch {epoch}, and of no step before"
            )
    places = {place_of(line) for _, line in found}
    last = max(places, default=(0, 0))
    missing = [place for place in _all_to(last, places) if place not in places]
    if missing:
        raise TraceDiffers(f"no process has committed the steps {missing[:5]}, but later ones")
    return len(places)


def _is_right(name: str, value: Any, right: Any) -> bool:
    is_older = name == "mean" and right is not None and value == (right - 1 if right else None)
    return bool(value == right or is_older)


def _all_to(last: Place, places: set[Place]) -> list[Place]:
    steps = max((step for _, step in places), default=0)
    return [
        (epoch, step)
        for epoch in range(last[0] + 1)
        for step in range(1, (last[1] if epoch == last[0] else steps) + 1)
    ]


class Reference:
    """The same script alone in a process, which trains only as far as its steps are asked for."""

    def __init__(self, script: Path, options: Sequence[str], directory: Path) -> None:
        """Describe the run; the process starts with the first question.

        Args:
            script: takes `--epochs` and `--trace`.
            options: its other arguments.
            directory: for its trace and output; must exist.
        """
        self.directory = directory
        self._command = [
            # Results go below its home, and with it.
            *("env", "OMP_NUM_THREADS=1", f"HOME={directory}", sys.executable, str(script)),
            *options,
            *("--epochs", "1000000", "--trace", str(directory)),
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: dict[Place, Line] = {}
        self._read_bytes = 0

    def compare(self, directory: Path) -> int:
        """Compare a disturbed run with this one; see `compare`."""
        try:
            return compare(directory, self._line)
        finally:
            self._signal(signal.SIGSTOP)

    def end(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _line(self, place: Place) -> Line:
        """Return the line of a step, once the run has come to it."""
        if self._process is None:
            with (self.directory / "log").open("wb") as log:
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
        if place not in self._lines:
            self._signal(signal.SIGCONT)
        while place not in self._lines:
            is_over = self._process.poll() is not None
            self._read_on()
            if is_over and place not in self._lines:
                log_text = (self.directory / "log").read_text()
                raise TraceDiffers(f"the undisturbed run has no step {place}: {log_text[-2000:]}")
            time.sleep(POLL_S)
        return self._lines[place]

    def _signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def _read_on(self) -> None:
        """Read what was written since the last time; reading all of it again would be slow."""
        for path in self.directory.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read_bytes)
                text = file.read()
            text = text[: text.rfind(b"\n") + 1]
            self._read_bytes += len(text)
            self._lines |= {place_of(line): line for line in map(json.loads, text.splitlines())}


_references: dict[tuple[str, tuple[str, ...]], Reference] = {}


def reference_of(script: str | Path, options: Sequence[str]) -> Reference:
    """Return the undisturbed run of a script with these options; one for all who compare with it.

    Starting it takes seconds, most of them imports; `end_references` ends it.
    """
    key = (str(script), tuple(options))
    if key not in _references:
        directory = Path(tempfile.mkdtemp(prefix="undisturbed-"))
        _references[key] = Reference(Path(script), options, directory)
    return _references[key]


def end_references() -> None:
    """End all undisturbed runs, and remove their files."""
    while _references:
        _, reference = _references.popitem()
        reference.end()
        shutil.rmtree(reference.directory, ignore_errors=True)
