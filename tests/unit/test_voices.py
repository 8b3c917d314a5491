"""Output of workers by torchrun's flags: shown, prefixed, written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.client.voices import ALL, LogWish, Voices, parse_streams
from elastic.core.world import Group, Member, NodeId, WorkerId
from elastic.errors import ConfigError, StorageError
from elastic.wire.codec_jobs import LogChunk


def chunk(worker: str, rank: int, text: str = "hello\n", generation: int = 2) -> LogChunk:
    return LogChunk(WorkerId(worker), rank, generation, NodeId(worker.partition("/")[0]), text)


def voices(wish: LogWish) -> Voices:
    """Three workers on two nodes: n1/1, n1/2 and n2/1."""
    places = [("n1/1", 0), ("n1/2", 1), ("n2/1", 2)]
    members = tuple(
        Member(WorkerId(name), NodeId(name[:2]), rank, "127.0.0.1:1") for name, rank in places
    )
    heard = Voices(wish)
    view: Any = SimpleNamespace(record=SimpleNamespace(group=Group(2, members)))
    heard.know(view)
    return heard


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("0", set()), ("3", {ALL}), ("1", {ALL}), ("0:1,1:3", {0, 1}), ("0:0,1:2", {1})],
)
def test_streams_are_read_as_torchrun_reads_them(text: str, ranks: set[int]) -> None:
    assert parse_streams("--tee", text) == ranks


@pytest.mark.parametrize("text", ["", "4", "x", "1,2", "a:1", "0:", "0:9", "0:1,"])
def test_what_is_no_stream_is_refused_with_the_flag(text: str) -> None:
    with pytest.raises(ConfigError, match="--tee"):
        parse_streams("--tee", text)


def test_nothing_asked_for_is_everything_shown_as_it_is() -> None:
    heard = voices(LogWish())
    assert heard.hear(chunk("n2/1", 2))
    assert heard.prefix(chunk("n2/1", 2)) == ""


def test_teed_output_is_shown_with_the_local_rank_and_written(tmp_path: Path) -> None:
    heard = voices(LogWish(directory=str(tmp_path), tee=frozenset({ALL}), role="trainer"))
    said = chunk("n2/1", 2)
    assert heard.hear(said)
    assert heard.hear(replace(said, text="again\n"))
    assert heard.prefix(said) == "[trainer0]:"
    assert (tmp_path / "attempt_1" / "2" / "output.log").read_text() == "hello\nagain\n"


def test_redirected_output_is_written_and_not_shown(tmp_path: Path) -> None:
    heard = voices(LogWish(directory=str(tmp_path), redirects=frozenset({1})))
    assert heard.hear(chunk("n1/1", 0))
    assert not heard.hear(chunk("n1/2", 1))
    assert [path.parent.name for path in tmp_path.rglob("*.log")] == ["1"]


def test_ranks_that_are_filtered_out_are_not_shown() -> None:
    heard = voices(LogWish(local_ranks=(1,)))
    shown = [name for name, rank in (("n1/1", 0), ("n1/2", 1), ("n2/1", 2))
             if heard.hear(chunk(name, rank))]  # fmt: skip
    assert shown == ["n1/2"]


def test_a_template_of_ones_own_makes_the_prefix() -> None:
    heard = voices(LogWish(tee=frozenset({ALL}), prefix="<${rank} ${unknown}>"))
    assert heard.prefix(chunk("n2/1", 2)) == "<2 ${unknown}>"


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "attempt_1").write_text("a file")
    heard = voices(LogWish(directory=str(tmp_path), tee=frozenset({ALL})))
    with pytest.raises(StorageError, match="give --log-dir a directory"):
        heard.hear(chunk("n1/1", 0))
