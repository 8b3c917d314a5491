"""Automatic checkpoints: complete, checked to the last byte, and never in the way of training."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.core.events.worker import CheckpointWritten
from elastic.core.facts import RefusalCode
from elastic.core.policy.cursor import Cursor
from elastic.storage.marker import MARKER
from elastic.worker.checkpoint import committer
from elastic.worker.checkpoint.checkpoint_reader import read_checkpoint
from elastic.worker.checkpoint.snapshot import RankInfo
from elastic.worker.checkpoint.snapshotter import Snapshotter
from elastic.worker.engine import state_restore as restoring
from elastic.worker.state.arena import SnapshotSlot
from tests.patience import DEADLINE_S
from tests.unit.saving_under_test import Run, assert_same


def read(run: Run, name: str) -> dict[str, Any]:
    marker = dict(run.directory.markers())[name]
    return read_checkpoint(run.directory, name, marker)


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def test_the_coordinator_is_asked_before_it_counts(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.coordinator.refuses = "no more of this, please"  # The words are for people.
    run.coordinator.code = RefusalCode.JOB_ENDED
    run.save()
    assert run.committed() == []
    run.coordinator.refuses = ""
    run.save()
    (name,) = run.committed()
    told = run.coordinator.told[-1]
    assert told.checkpoint == run.directory.checkpoint_path(name)
    assert isinstance(told, CheckpointWritten)


def test_who_must_end_leaves_all_of_its_state_in_the_nodes_memory(tmp_path: Path) -> None:
    """Two workers share it, and one of them has come further, or both have."""
    slots = [tmp_path / name for name in ("one", "two")]
    for slot in slots:
        slot.touch()
    run = Run(tmp_path / "run")
    run.savers = [Snapshotter([str(slot) for slot in slots], None) for _ in range(2)]
    first, second = run.savers
    for rank, one in enumerate(run.savers):
        one.enter(RankInfo(1, rank, 2, rank, 2))
    run.save()
    assert [mark.steps for _, mark in second.held_snapshots()] == [1]
    run.step()
    place = second.slots.next(2)
    place.unmark(1, 1, 2)  # It may still copy its part of a snapshot there.
    first.leave(run.state, Cursor(0, 2), 2)
    assert [mark.steps for _, mark in second.held_snapshots()] == [1]
    place.unmark(1)
    first.leave(run.state, Cursor(0, 2), 2)
    assert_same(second.read_held(2)[1], run.state())
    second.leave(run.state, Cursor(0, 2), 2)
    assert [(mark.steps, mark.number) for _, mark in first.held_snapshots()] == [(2, 2), (1, 1)]
    run.step()
    second.leave(run.state, Cursor(0, 3), 3)
    assert [mark.steps for _, mark in first.held_snapshots()] == [3, 1]


def test_what_was_left_does_not_count_with_a_part_of_a_later_snapshot_in_it(
    tmp_path: Path,
) -> None:
    slots = [tmp_path / name for name in ("one", "two")]
    for slot in slots:
        slot.touch()
    run = Run(tmp_path / "run")
    run.savers = [Snapshotter([str(slot) for slot in slots], None) for _ in range(2)]
    first, second = run.savers
    for rank, one in enumerate(run.savers):
        one.enter(RankInfo(1, rank, 2, rank, 2))
    run.save()
    run.step()
    first.leave(run.state, Cursor(0, 2), 2)
    run.step()
    second.take(run.state, Cursor(0, 3), 3, durable=False)
    second.settle()
    assert [mark.steps for _, mark in second.held_snapshots()] == [1]


def test_a_copy_that_breaks_off_is_no_snapshot_and_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)

    def held() -> list[int]:
        return [mark.steps for _, mark in run.savers[0].held_snapshots()]

    run.save()
    run.save()
    assert held() == [2, 1]
    during = []

    def put(*_: object) -> None:
        during.append(held())
        raise MemoryError

    monkeypatch.setattr(SnapshotSlot, "put", put)
    for _ in range(3):
        with pytest.raises(MemoryError):
            run.save()
    assert during == [[2], [2], [2]]
    assert held() == [2]


def test_a_group_that_is_over_is_asked_about_under_the_next_one(tmp_path: Path) -> None:
    run = Run(tmp_path)
    refused = threading.Event()
    post = run.coordinator.post

    def refuse_first(item: Any) -> None:
        run.coordinator.refuses = "generation 1 is over" if item.generation == 1 else ""
        post(item)
        refused.set()

    run.coordinator.post = refuse_first  # type: ignore[method-assign]
    run.save(wait=False)
    assert refused.wait(DEADLINE_S)
    run.savers[0]._writer.generation = 2  # type: ignore[union-attr]
    run.savers[0].finish()
    assert len(run.committed()) == 1


def test_a_refusal_that_came_late_is_asked_about_under_the_next_group_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time for the next group begins with the refusal: here it is over at once."""
    monkeypatch.setattr(committer, "CONSENT_S", 0)
    run = Run(tmp_path)
    post = run.coordinator.post

    def refuse_late(item: Any) -> None:
        run.coordinator.refuses = ""
        if item.generation == 1:
            run.savers[0]._writer.generation = 2  # type: ignore[union-attr]
            run.coordinator.refuses = "generation 1 is over"
        post(item)

    run.coordinator.post = refuse_late  # type: ignore[method-assign]
    run.save(wait=False)
    run.savers[0].finish()
    assert [one.generation for one in run.coordinator.told] == [1, 2]
    assert len(run.committed()) == 1


def test_who_is_no_longer_rank_0_has_none_of_its_own_counted_late(tmp_path: Path) -> None:
    run = Run(tmp_path)
    refused = threading.Event()
    post = run.coordinator.post

    def refuse(item: Any) -> None:
        run.coordinator.refuses = f"generation {item.generation} is over"
        post(item)
        refused.set()

    run.coordinator.post = refuse  # type: ignore[method-assign]
    run.save(wait=False)
    assert refused.wait(DEADLINE_S)
    run.savers[0]._writer._committer.enter(2, (), leads=False)  # type: ignore[union-attr]
    run.savers[0].finish()
    assert run.committed() == []
    assert {one.generation for one in run.coordinator.told} == {1}


def test_one_that_was_away_and_leads_has_none_counted_behind_a_newer_one(tmp_path: Path) -> None:
    run = Run(tmp_path)
    refused = threading.Event()
    post = run.coordinator.post

    def refuse(item: Any) -> None:
        run.coordinator.refuses = "generation 1 is over" if item.generation == 1 else ""
        post(item)
        refused.set()

    run.coordinator.post = refuse  # type: ignore[method-assign]
    run.save(wait=False)
    assert refused.wait(DEADLINE_S)
    newer = run.directory.checkpoint_path("auto-j1-s000000002-g000002-000002")
    committer = run.savers[0]._writer._committer  # type: ignore[union-attr]
    committer.enter(3, (newer,), leads=True)
    run.savers[0].finish()
    assert run.committed() == []
    assert {one.generation for one in run.coordinator.told} == {1}


def damaged(content: bytes, draws: random.Random) -> bytes:
    """Return the content with a bit flipped, or cut off."""
    at = draws.randrange(len(content))
    if draws.random() < 0.3:
        return content[:at]
    return content[:at] + bytes([content[at] ^ (1 << draws.randrange(8))]) + content[at + 1 :]


@pytest.mark.parametrize("seed", range(60))
def test_any_damage_is_noticed_and_the_one_before_is_used(tmp_path: Path, seed: int) -> None:
    draws = random.Random(seed)
    run = Run(tmp_path, workers=2)
    run.save()
    before = {key: value.clone() for key, value in run.model.state_dict().items()}
    run.save()
    newest = run.folder(run.committed()[-1])
    name = draws.choice(sorted(path.name for path in newest.iterdir()))
    file = newest / name
    if draws.random() < 0.15:
        file.unlink()
    else:
        file.write_bytes(damaged(file.read_bytes(), draws))
    problems: list[str] = []
    candidates = restoring._candidates(run.directory)
    found = restoring._read_newest(run.directory, candidates, problems)
    assert found is not None
    _, state = found
    assert state["steps"] == 1
    assert torch.equal(state["objects"]["models"][0]["embed.weight"], before["embed.weight"])
    if name != MARKER:  # Without a marker that can be read there is no checkpoint.
        assert name in problems[0]
        assert str(newest) in problems[0]


def test_what_lies_in_memory_is_read_again(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save()
    run.save()
    snapshotter = run.savers[0]
    assert snapshotter.held() == 2
    assert_same(snapshotter.read_held(2)[1], run.state())
    with pytest.raises(ValueError, match="no snapshot of step 9"):
        snapshotter.read_held(9)
