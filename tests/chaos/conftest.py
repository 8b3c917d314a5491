"""What the tests of driver scripts share: a way to start one, and its end in any case."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chaos.scripts import Script


@pytest.fixture
def scripts() -> Iterator[list[Script]]:
    """End what a failed test left."""
    started: list[Script] = []
    yield started
    for script in started:
        for process in script.processes():
            process.kill()
        script.process.wait()


@pytest.fixture
def start(scripts: list[Script], tmp_path: Path) -> Callable[..., Script]:
    def start_one(case: str, *launcher: str, **more: Path) -> Script:
        scripts.append(Script(case, tmp_path, *launcher, **more))
        return scripts[-1]

    return start_one
