"""A file of secrets that is replaced: it is there after a power cut, and no draft stays behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic.runtime.access import replace_file


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_file_that_cannot_be_replaced_is_as_it_was_and_leaves_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    path = tmp_path / "tokens"
    replace_file(path, b"old", 0o600)

    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, fails, fail)
    with pytest.raises(OSError, match="no space"):
        replace_file(path, b"new secret", 0o600)
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["tokens"]
