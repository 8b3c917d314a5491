"""Reading a log from near its end, over rotated files, without tearing lines or characters."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.agent.log_follow import PIECE_BYTES, LogReader, log_files, whole_characters


def written(folder: Path, parts: list[bytes]) -> Path:
    """A log of which `parts` are the files, oldest first."""
    for old in folder.iterdir():
        old.unlink()
    for number, part in enumerate(reversed(parts)):
        name = "w.log" if number == 0 else f"w.log.{number}"
        (folder / name).write_bytes(part)
    return folder / "w.log"


def read(reader: LogReader, *, last: bool) -> str:
    """The next piece, "" if there is none."""
    return "".join(text for _, text in reader.read(last=last))


def all_of(reader: LogReader) -> list[str]:
    """Every piece until there is no more."""
    pieces = []
    while piece := read(reader, last=True):
        pieces.append(piece)
    reader.close()
    return pieces


@pytest.mark.parametrize("lines", [0, 1, 7, 5000, -1])
def test_a_tail_may_be_longer_than_a_piece(tmp_path: Path, lines: int) -> None:
    whole = [f"line {number} {'x' * 50}\n" for number in range(5000)]
    path = written(tmp_path, ["".join(whole).encode()])
    assert path.stat().st_size > 5 * PIECE_BYTES
    pieces = all_of(LogReader(path, lines))
    assert "".join(pieces) == "".join(whole[-lines:] if lines > 0 else whole if lines else [])
    assert all(piece.endswith("\n") and len(piece) <= 2 * PIECE_BYTES for piece in pieces)


@pytest.mark.parametrize("character", ["ä", "→", "🙂"])
@pytest.mark.parametrize("shift", range(4))
def test_a_line_without_end_is_sent_in_parts_of_whole_characters(
    tmp_path: Path, character: str, shift: int
) -> None:
    text = "x" * shift + character * PIECE_BYTES
    pieces = all_of(LogReader(written(tmp_path, [text.encode()]), -1))
    assert len(pieces) > 1
    assert "".join(pieces) == text


@pytest.mark.parametrize(
    ("data", "whole"),
    [(b"abc", 3), (b"a\xc3", 1), (b"a\xc3\xa4", 3), (b"a\xf0\x9f\x99", 1), (b"\x80" * 9, 9)],
)
def test_whole_characters_are_counted(data: bytes, whole: int) -> None:
    assert whole_characters(data) == whole


def test_a_log_that_is_not_written_yet_is_read_when_it_is(tmp_path: Path) -> None:
    path = tmp_path / "w.log"
    reader = LogReader(path, 3)
    assert read(reader, last=False) == ""
    path.write_text("first\n")
    assert read(reader, last=False) == "first\n"
    reader.close()
    assert log_files(tmp_path / "absent") == []


def test_a_reader_that_is_slower_than_the_rotation_goes_on_with_the_oldest_kept(
    tmp_path: Path,
) -> None:
    path = written(tmp_path, [b"1\n"])
    reader = LogReader(path, -1)
    assert read(reader, last=False) == "1\n"
    path.rename(tmp_path / "gone")
    (tmp_path / "gone").unlink()
    path.write_text("3\n")
    (tmp_path / "w.log.1").write_text("2\n")
    assert read(reader, last=False) + read(reader, last=False) == "2\n3\n"
    reader.close()
