"""Snapshots in memory go on while the coordinator, or storage, is away."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from elastic.core.events.worker import CheckpointWritten
from elastic.worker.checkpoint import checkpoint_writer as writing
from tests.patience import is_set, wait_for
from tests.unit.saving_under_test import Coordinator, Run


class Silent(Coordinator):
    """Answers nobody until it is back."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[CheckpointWritten] = []
        self.is_back = False

    def post(self, item: CheckpointWritten) -> None:
        self.asked.append(item)
        if self.is_back:
            super().post(item)

    def come_back(self) -> None:
        self.is_back = True
        for item in list(self.asked):
            super().post(item)


def steps_of(name: str) -> int:
    return int(name.split("-s")[1][:9])


def test_the_newest_step_is_in_memory_while_nobody_consents(tmp_path: Path) -> None:
    coordinator = Silent()
    run = Run(tmp_path, coordinator=coordinator)
    (snapshotter,) = run.savers
    for _ in range(6):
        wait_for(lambda: not snapshotter.is_busy(), "room for a snapshot")
        run.save(wait=False)
        assert snapshotter.held() == run.steps
    wait_for(lambda: list(coordinator.asked), "the first one is asked about")
    coordinator.come_back()
    snapshotter.finish()
    assert steps_of(run.committed()[-1]) == run.steps
    # What was overtaken has left nothing in storage.
    assert len(list(tmp_path.glob("**/auto-*"))) == len(run.committed()) <= 2


def test_the_newest_step_is_in_memory_while_storage_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, hangs, is_back = writing.write_part, threading.Event(), threading.Event()

    def write_part(*args: Any) -> Any:
        hangs.set()
        assert is_set(is_back)
        return honest(*args)

    monkeypatch.setattr(writing, "write_part", write_part)
    monkeypatch.setattr(writing, "STALLED_S", 0.0)
    run = Run(tmp_path)
    (snapshotter,) = run.savers
    run.save(wait=False)
    assert is_set(hangs)
    for _ in range(5):
        wait_for(lambda: not snapshotter.is_busy(), "room for a snapshot")
        run.save(wait=False)
        assert snapshotter.held() == run.steps
    is_back.set()
    snapshotter.finish()
    assert steps_of(run.committed()[-1]) == run.steps
