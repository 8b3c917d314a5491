"""Automatic checkpoints: complete, checked to the last byte, and never in the way of training."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from elastic.core.world import RefusalCode, is_automatic
from elastic.storage.marker import MARKER
from elastic.worker import keeping, writing
from elastic.worker.reading import read_checkpoint
from tests.unit.saving_under_test import DEADLINE_S, Run, assert_same


def read(run: Run, name: str) -> dict[str, Any]:
    marker = dict(run.directory.markers())[name]
    return read_checkpoint(run.directory, name, marker)


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_what_is_read_is_what_was_there(tmp_path: Path, workers: int) -> None:
    run = Run(tmp_path, workers=workers)
    run.save()
    (name,) = run.committed()
    assert_same(read(run, name), run.state())


def test_a_snapshot_is_of_its_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on while storage is slow."""
    run, may_write = Run(tmp_path), threading.Event()
    real = writing.write_part

    def slow(*args: Any) -> Any:
        assert may_write.wait(DEADLINE_S)
        return real(*args)

    monkeypatch.setattr(writing, "write_part", slow)
    run.save(wait=False)
    then = {key: value.clone() for key, value in run.model.state_dict().items()}
    assert not run.savers[0].is_busy()
    run.save(wait=False)
    assert run.savers[0].is_busy()  # Both slots hold what is not written yet.
    may_write.set()
    run.savers[0].finish()
    state = read(run, run.committed()[0])
    assert torch.equal(state["objects"]["models"][0]["embed.weight"], then["embed.weight"])


def test_stock_pytorch_reads_it(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", workers=2)
    run.save()
    folder = run.folder(run.committed()[0])
    other = Run(tmp_path / "other", seed=1)
    other.step()  # Stock PyTorch loads into what is there; an optimizer has no state before.
    state = {"model": other.model.state_dict(), "optimizer": other.optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    other.optimizer.load_state_dict(state["optimizer"])
    assert_same(other.model.state_dict(), run.model.state_dict())  # The shared one by both names.
    assert_same(other.optimizer.state_dict(), run.optimizer.state_dict())
    dcp_to_torch_save(folder, tmp_path / "state.pt")
    found = torch.load(tmp_path / "state.pt", weights_only=True)
    assert set(found["model"]) == {*run.model.state_dict(), "seen"}


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
    assert is_automatic(told.index)


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


def test_a_member_that_is_lost_costs_the_checkpoint_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "ORPHANED_S", 0.0)
    run = Run(tmp_path, workers=2)
    lost = run.savers.pop()
    run.save(wait=False)
    run.savers[0]._writer.generation = 2  # type: ignore[union-attr]
    run.savers[0].finish()
    assert run.committed() == []
    del lost


def test_two_are_kept_and_leftovers_go(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save()
    left = run.folder(f"auto-j0-s{0:09d}-g000007-000001")
    left.mkdir(parents=True)
    (left / "part-00000.distcp").write_bytes(b"torn")
    for _ in range(3):
        run.save()
    assert run.directory.names() == run.committed()
    assert len(run.committed()) == 2


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
    candidates = keeping._candidates(run.directory)
    found = keeping._read_newest(run.directory, candidates, problems)
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
    saver = run.savers[0]
    assert saver.held() == 2
    assert_same(saver.read_held(2)[1], run.state())
    with pytest.raises(ValueError, match="no snapshot of step 9"):
        saver.read_held(9)
