"""A file beside a log with time, generation and rank of its output: "n1-3.marks" for "n1-3.log".

A log is what a worker printed, byte for byte, so that every tool can read it. Each mark gives the
time, generation and rank of the output from one byte offset on.

Rule: a line belongs to the mark at its first byte. A log without marks can still be read.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MARK = struct.Struct("<qqqq")
EVERY_NS = 1_000_000
"""Output of the same generation and rank within this time shares one mark."""


@dataclass(frozen=True)
class Stamp:
    """When a line was printed, in which generation and by which rank.

    Attributes:
        unix_ns: when the agent read it, nanoseconds since 1970; 0 if not known.
        generation, rank: of the worker at that moment; 0 and -1 before its first group.
    """

    unix_ns: int = 0
    generation: int = 0
    rank: int = -1


def marks_path(log: Path) -> Path:
    """Return the path of a log file's marks: "n1-3.marks.2" for "n1-3.log.2"."""
    before, _, after = log.name.rpartition(".log")
    return log.with_name(f"{before}.marks{after}")


class MarksFile:
    """Writes the marks of one log file; marks that cannot be written are omitted."""

    def __init__(self) -> None:
        self._fd = -1
        self._last = Stamp()

    def open(self, log: Path) -> None:
        self.close()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        with contextlib.suppress(OSError):
            self._fd = os.open(marks_path(log), flags, 0o600)

    def mark(self, offset: int, stamp: Stamp) -> None:
        """Write a mark for the output from this offset on, unless the last one covers it."""
        is_same = (stamp.generation, stamp.rank) == (self._last.generation, self._last.rank)
        if self._fd < 0 or (is_same and 0 <= stamp.unix_ns - self._last.unix_ns < EVERY_NS):
            return
        with contextlib.suppress(OSError):
            os.write(self._fd, MARK.pack(offset, stamp.unix_ns, stamp.generation, stamp.rank))
            self._last = stamp

    def close(self) -> None:
        """Close the file; the next one starts with its own mark."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._last = -1, Stamp()


class MarksReader:
    """Reads the marks of one log file, which may still be written."""

    def __init__(self, log: Path) -> None:
        self._file = None
        with contextlib.suppress(OSError):
            self._file = open(marks_path(log), "rb", buffering=0)  # noqa: SIM115 (kept open)
        self._offsets: list[int] = []
        self._stamps: list[Stamp] = []
        self._partial = b""
        self._place = -1

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def split(self, data: bytes, start: int, before: Stamp) -> list[tuple[Stamp, bytes]]:
        """Cut lines where the stamp changes.

        Args:
            data: usually complete lines, read in order.
            start: file offset of the first byte; negative if it was in the previous file.
            before: the stamp of the preceding output, for data without a mark.
        """
        self._read_more()
        found, at = [], 0
        while at < len(data):
            stamp, until = self._stamp_at(start + at, before)
            end = len(data)
            if until is not None and until - start < end:
                # A line that starts before the next mark belongs to this one.
                border = max(at, until - start)
                is_begin = border > at and data[border - 1 : border] == b"\n"
                end = border if is_begin else data.find(b"\n", border) + 1 or len(data)
            found.append((stamp, data[at:end]))
            at, before = end, stamp
        return found

    def _stamp_at(self, offset: int, before: Stamp) -> tuple[Stamp, int | None]:
        """Return the stamp at an offset, and the next mark's offset; offsets must not decrease."""
        while self._place + 1 < len(self._offsets) and self._offsets[self._place + 1] <= offset:
            self._place += 1
        following: Sequence[int] = self._offsets[self._place + 1 : self._place + 2]
        stamp = self._stamps[self._place] if self._place >= 0 else before
        return stamp, following[0] if following else None

    def _read_more(self) -> None:
        while self._file is not None and (more := self._file.read(1 << 16)):
            self._partial += more
            whole = len(self._partial) - len(self._partial) % MARK.size
            for offset, unix_ns, generation, rank in MARK.iter_unpack(self._partial[:whole]):
                self._offsets.append(offset)
                self._stamps.append(Stamp(unix_ns, generation, rank))
            self._partial = self._partial[whole:]
