"""Checkpoints as scripts see them: dicts, notes, copies, and damage that is refused by name."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from elastic.errors import StorageError, UsageError
from elastic.storage.marker import MARKER, CheckpointMarker
from elastic.storage.run_directory import RunDirectory
from elastic.train import Checkpoint


def committed(run_path: str, tmp_path: Path, **texts: str) -> Checkpoint:
    """Commit a checkpoint with these files, as a report does."""
    source = tmp_path / "source"
    source.mkdir(exist_ok=True)
    for name, text in texts.items():
        (source / name).write_text(text)
    run = RunDirectory(run_path)
    files = run.upload(source, "c1", claim=lambda path: True)
    return Checkpoint(run.commit("c1", CheckpointMarker("j1", 1, 0, 1, 1, "{}", files)))


class NotPlain:
    """A class of the user's own."""


def test_a_dict_comes_back_as_it_was() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    data = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
        "epoch": 3,
        "more": [1.5, None, True, "ü", b"\x00", (1, {2, 3}), {4: torch.float16}],
    }
    back = Checkpoint.from_dict(data).to_dict()
    assert list(back) == list(data)
    assert isinstance(back["model"], OrderedDict)
    assert torch.equal(back["model"]["weight"], model.weight)
    assert torch.equal(back["rng"], data["rng"])
    assert (back["epoch"], back["more"]) == (3, data["more"])
    optimizer.load_state_dict(back["optimizer"])


def test_a_slice_of_a_tensor_does_not_bring_the_rest_along() -> None:
    checkpoint = Checkpoint.from_dict({"part": torch.zeros(1_000_000)[:2]})
    (file,) = Path(checkpoint.path).iterdir()
    assert file.stat().st_size < 100_000


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"a": {"b": [0, NotPlain()]}}, r"value \['a'\]\['b'\]\[1\] is a .*NotPlain"),
        ({"f": print}, r"\['f'\] is a builtins.builtin_function"),
        ({"a": {NotPlain: 1}}, r"\['a'\] has a key"),
        ([1], "got a list, expected a dict"),
    ],
)
def test_a_value_that_would_need_code_to_read_is_refused(data: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Checkpoint.from_dict(data)


def test_a_dict_that_contains_itself_is_refused() -> None:
    data: dict[str, Any] = {}
    data["self"] = data
    with pytest.raises(UsageError, match="nested too deep"):
        Checkpoint.from_dict(data)


def test_reading_a_dict_runs_nobodys_code(tmp_path: Path) -> None:
    torch.save({"x": NotPlain()}, tmp_path / "dict.pt")
    with pytest.raises(StorageError, match=r"dict.pt cannot be read"):
        Checkpoint.from_directory(tmp_path).to_dict()


def test_a_directory_without_a_dict_says_how_to_read_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="as_directory"):
        Checkpoint.from_directory(tmp_path).to_dict()


def test_metadata_may_change_after_the_commit(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    Checkpoint(tmp_path / "source").set_metadata({"a": 1})
    checkpoint = committed(str(tmp_path / "run"), tmp_path, model="x")
    assert checkpoint.get_metadata() == {"a": 1}
    checkpoint.update_metadata({"b": [2]})
    assert Checkpoint(checkpoint.path).get_metadata() == {"a": 1, "b": [2]}
    with checkpoint.as_directory() as directory:
        assert (Path(directory) / "model").read_text() == "x"
    with pytest.raises(UsageError, match="not JSON-serializable"):
        checkpoint.set_metadata({"x": object()})


def damage(path: Path, how: str) -> str:
    """Damage the file; return what should be said of it."""
    if how == "missing":
        path.unlink()
        return "file model is missing"
    if how == "torn":
        os.truncate(path, 3)
        return "file model is truncated: 3 bytes instead of 7"
    data = bytearray(path.read_bytes())
    data[2] ^= 1
    path.write_bytes(data)
    return "file model is changed: checksum"


@pytest.mark.parametrize("how", ["missing", "torn", "flipped"])
def test_a_damaged_checkpoint_is_refused_by_the_files_name(tmp_path: Path, how: str) -> None:
    checkpoint = committed(str(tmp_path / "run"), tmp_path, model="weights", other="x")
    says = damage(Path(checkpoint.path) / "model", how)
    with pytest.raises(StorageError, match=says), checkpoint.as_directory():
        pytest.fail("it was handed out")
    with pytest.raises(StorageError, match=says):
        checkpoint.to_directory(tmp_path / "copy")
    with pytest.raises(StorageError, match=says):
        checkpoint.to_dict()


def test_a_damaged_marker_is_refused_too(tmp_path: Path) -> None:
    checkpoint = committed(str(tmp_path / "run"), tmp_path, model="weights")
    marker = Path(checkpoint.path) / MARKER
    body = json.loads(marker.read_text())
    body["files"]["model"][0] = 8
    marker.write_text(json.dumps(body))
    with pytest.raises(StorageError, match="its marker _COMMITTED"), checkpoint.as_directory():
        pytest.fail("it was handed out")


def test_a_damaged_copy_of_a_remote_one_is_refused(tmp_path: Path) -> None:
    checkpoint = committed("memory://damaged/run", tmp_path, model="weights")
    with checkpoint.as_directory() as directory:
        assert (Path(directory) / "model").read_text() == "weights"
    fsspec.filesystem("memory").pipe("/damaged/run/checkpoints/c1/model", b"wEights")
    with pytest.raises(StorageError, match="model is changed: checksum"), checkpoint.as_directory():
        pytest.fail("it was handed out")
