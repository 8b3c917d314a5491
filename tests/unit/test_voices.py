"""Output of workers by torchrun's flags: shown, prefixed, written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.client.output_router import ALL, LogOptions, OutputRouter
from elastic.core.facts import Group, Member, NodeId, WorkerId
from elastic.errors import StorageError
from elastic.wire.codec_jobs import LogChunk


def chunk(worker: str, rank: int, text: str = "hello\n", generation: int = 2) -> LogChunk:
    return LogChunk(WorkerId(worker), rank, generation, NodeId(worker.partition("/")[0]), text)


def voices(wish: LogOptions) -> OutputRouter:
    """Three workers on two nodes: n1/1, n1/2 and n2/1."""
    places = [("n1/1", 0), ("n1/2", 1), ("n2/1", 2)]
    members = tuple(
        Member(WorkerId(name), NodeId(name[:2]), rank, "127.0.0.1:1") for name, rank in places
    )
    received = OutputRouter(wish)
    view: Any = SimpleNamespace(record=SimpleNamespace(group=Group(2, members)))
    received.know(view)
    return received


def test_nothing_asked_for_is_everything_shown_as_it_is() -> None:
    received = voices(LogOptions())
    assert received.route(chunk("n2/1", 2))
    assert received.prefix(chunk("n2/1", 2)) == ""


def test_teed_output_is_shown_with_the_local_rank_and_written(tmp_path: Path) -> None:
    received = voices(LogOptions(directory=str(tmp_path), tee=frozenset({ALL}), role="trainer"))
    said = chunk("n2/1", 2)
    assert received.route(said)
    assert received.route(replace(said, text="again\n"))
    assert received.prefix(said) == "[trainer0]:"
    received.options = replace(received.options, prefix="${hostname}:${rank}: ")
    assert received.prefix(said) == "n2:2: "
    assert (tmp_path / "attempt_1" / "2" / "output.log").read_text() == "hello\nagain\n"


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "attempt_1").write_text("a file")
    received = voices(LogOptions(directory=str(tmp_path), tee=frozenset({ALL})))
    with pytest.raises(StorageError, match="give --log-dir a directory"):
        received.route(chunk("n1/1", 0))
