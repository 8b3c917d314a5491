"""What was written is what is read, past the page cache or through it."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import resource
import signal
from pathlib import Path

import pytest

from elastic.storage import local_file
from elastic.storage.local_file import ALIGN, LocalFile

BUFFER = 4 * ALIGN


def written(path: Path, pieces: list[bytes]) -> bytes:
    with LocalFile(str(path), BUFFER) as file:
        for piece in pieces:
            file.write(memoryview(piece))
        file.finish()
    return path.read_bytes()


@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [0],
        [1],
        [BUFFER - 1],
        [BUFFER],
        [BUFFER + 1],
        [BUFFER, 1],
        [BUFFER, ALIGN],
        [BUFFER, ALIGN + 1, ALIGN - 1],
        [3 * BUFFER + 2 * ALIGN + 17],
        [1] * 100 + [2 * BUFFER] + [3] * 7,
    ],
)
def test_a_file_holds_what_was_written(tmp_path: Path, sizes: list[int]) -> None:
    draw = random.Random(len(sizes))
    pieces = [draw.randbytes(size) for size in sizes]
    assert written(tmp_path / "file", pieces) == b"".join(pieces)


def test_sizes_drawn_at_random_make_no_difference(tmp_path: Path) -> None:
    for seed in range(30):
        draw = random.Random(seed)
        pieces = [draw.randbytes(draw.randrange(2 * BUFFER)) for _ in range(draw.randrange(6))]
        assert written(tmp_path / f"file{seed}", pieces) == b"".join(pieces), f"seed {seed}"


def test_a_file_system_that_refuses_direct_writes_is_written_as_usual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct writes here")
        return fcntl.fcntl(fd, command, flags)

    class Refusing:
        F_GETFL, F_SETFL = fcntl.F_GETFL, fcntl.F_SETFL

    Refusing.fcntl = staticmethod(refuse)  # type: ignore[attr-defined]
    monkeypatch.setattr(local_file, "fcntl", Refusing)
    data = random.Random(1).randbytes(3 * BUFFER + 5)
    assert written(tmp_path / "file", [data]) == data


def test_a_file_that_may_not_grow_is_an_error_and_not_a_shorter_file(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * BUFFER + 100, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            written(tmp_path / "file", [bytes(4 * BUFFER)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
