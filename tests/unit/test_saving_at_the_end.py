"""The last checkpoint of a run: it is there, also if the group breaks meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.core.policy.cursor import Cursor
from elastic.worker import keeping
from elastic.worker.keeping import Keeper
from elastic.worker.logbook import Logbook
from elastic.worker.saving import Seat
from elastic.worker.stream_book import StreamBook
from tests.unit.saving_under_test import DEADLINE_S, Run, Table


def keepers_of(run: Run) -> list[Keeper]:
    """Return the members' keepers, behind the last epoch of a run of seven steps."""
    found = []
    for rank, saver in enumerate(run.savers):
        saver.configure({"every_n_steps": 100})
        keeper = Keeper(run.objects, Logbook(), StreamBook())
        keeper._saver, keeper.steps = saver, 7
        link = SimpleNamespace(save_wish=lambda generation: 0)
        keeper._place = SimpleNamespace(  # type: ignore[assignment]
            world_rank=rank, generation=1, link=link, activity=None
        )
        found.append(keeper)
    return found


def at_end(keepers: list[Keeper]) -> None:
    for keeper in keepers:
        keeper.at_end(Cursor(1, 0), None, lambda: False)


def test_it_is_taken_once(tmp_path: Path) -> None:
    run = Run(tmp_path, workers=2)
    keepers = keepers_of(run)
    at_end(keepers)
    at_end(keepers)
    run.savers[0].finish()
    assert [saver.number for saver in run.savers] == [1, 1]
    assert len(run.committed()) == 1


def test_the_next_group_takes_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member was lost before its part was written: this was the run's last state."""
    run = Run(tmp_path, workers=2)
    keepers = keepers_of(run)
    at_end(keepers[:1])
    for rank, saver in enumerate(run.savers):
        saver.enter(Seat(2, rank, 2))
    monkeypatch.setattr(keeping, "tell_rows", Table(2).tell)
    together(keepers)
    assert [saver.number for saver in run.savers] == [1, 1]
    monkeypatch.setattr("elastic.worker.writing.ORPHANED_S", 0.0)
    at_end(keepers)
    for saver in run.savers:
        saver.finish()
    assert len(run.committed()) == 1


def together(keepers: list[Keeper]) -> None:
    """Let members agree that were on both sides of the gate."""

    def agree(rank: int) -> None:
        keepers[rank].agree_on_number(rank)

    threads: list[Any] = [threading.Thread(target=agree, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
