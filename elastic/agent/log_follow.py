"""Reads a worker's log for a remote reader: the tail first, then new output.

Rule: a reader reads files, never memory of the writer, so that a slow reader delays nothing and
loses nothing (unless log rotation removes a file that it has not read yet). Text is cut at line
ends; only a line longer than a piece is sent in parts.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import BinaryIO

from elastic.agent.log_marks import MarksReader, Stamp
from elastic.agent.logs import LogFile, Logs
from elastic.agent.old_logs import hold
from elastic.core.messages import FollowLogs, LogLines

PIECE_BYTES = 32 * 1024
FOLLOWS_MAX = 256

SendLines = Callable[[LogLines], Awaitable[bool]]
"""Sends when there is room; False when the stream has ended."""


class FlowWindow:
    """Flow control of one reader, in characters: it grants room, which sending uses up."""

    def __init__(self, chars: int) -> None:
        """Start with this much room, 0 for no limit."""
        self._is_limited, self._left = chars > 0, chars
        self._more = asyncio.Event()

    def give(self, chars: int) -> None:
        """Add room, after the reader has consumed this many characters."""
        self._left += chars
        self._more.set()

    async def take(self, chars: int) -> None:
        """Wait until there is any room, then use this much, which may exceed it."""
        while self._is_limited and self._left <= 0:
            self._more.clear()
            await self._more.wait()
        self._left -= chars


class LogFollowers:
    """All present readers of this node's logs, a task for each."""

    def __init__(self, logs: Logs, send: SendLines) -> None:
        self._logs = logs
        self._send = send
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._rooms: dict[str, FlowWindow] = {}

    def handle(self, request: FollowLogs) -> None:
        """Start to send, or stop; a repeated follow id grants more room."""
        if request.stop:
            task = self._tasks.pop(request.follow_id, None)
            if task is not None:
                task.cancel()
        elif request.follow_id in self._tasks:
            self._rooms[request.follow_id].give(request.room)
        else:
            self._rooms[request.follow_id] = FlowWindow(request.room)
            task = asyncio.ensure_future(self._follow(request))
            self._tasks[request.follow_id] = task

    def stop_all(self) -> None:
        """Cancel all readers, because their stream has ended."""
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()

    async def finish(self, timeout_s: float) -> None:
        """Let readers reach the end of logs that have ended, within the timeout; then stop all."""
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=timeout_s)
        self.stop_all()

    async def _follow(self, request: FollowLogs) -> None:
        worker_id = request.worker_id
        try:
            if len(self._tasks) > FOLLOWS_MAX:
                text = f"elastic-agent: more than {FOLLOWS_MAX} readers of logs on this node\n"
                await self._send(LogLines(request.follow_id, worker_id, text, end=True))
                return
            found = self._logs.find(worker_id)
            if found is None:
                text = f"elastic-agent: no output of worker {worker_id} on this node\n"
                await self._send(LogLines(request.follow_id, worker_id, text, end=True))
                return
            await self._send_log(found, request)
        except OSError as error:
            why = error.strerror or error
            text = f"elastic-agent: output of worker {worker_id} cannot be read any more: {why}\n"
            await self._send(LogLines(request.follow_id, worker_id, text, end=True))
        finally:
            if self._tasks.get(request.follow_id) in (None, asyncio.current_task()):
                self._tasks.pop(request.follow_id, None)
                self._rooms.pop(request.follow_id, None)

    async def _send_log(self, found: LogFile, request: FollowLogs) -> None:
        changed = asyncio.Event()
        piece_bytes = min(PIECE_BYTES, request.room or PIECE_BYTES)
        pieces = LogReader(found.path, request.tail_lines, piece_bytes)
        try:
            with found.watched(changed):
                while True:
                    changed.clear()
                    last = found.ended or not request.follow
                    stamped = pieces.read(last=last)
                    for stamp, text in stamped:
                        await self._rooms[request.follow_id].take(len(text))
                        lines = LogLines(
                            request.follow_id, request.worker_id, text,
                            unix_ns=stamp.unix_ns, generation=stamp.generation, rank=stamp.rank,
                        )  # fmt: skip
                        if not await self._send(lines):
                            return
                    if last and not stamped:
                        await self._send(
                            LogLines(request.follow_id, request.worker_id, "", end=True)
                        )
                        return
                    if not stamped:
                        await changed.wait()
        finally:
            pieces.close()


class LogReader:
    """Reads a log and its older files in order, piece by piece, from near its end."""

    def __init__(self, path: Path, tail_lines: int, piece_bytes: int = PIECE_BYTES) -> None:
        """Seek to the start of the last `tail_lines` lines; -1 for the whole log."""
        self._path, self._piece_bytes = path, piece_bytes
        self._file: BinaryIO | None = None
        self._marks: MarksReader | None = None
        self._stamp = Stamp()
        self._pending = b""
        # Offset in the file at which `_pending` starts.
        self._at = 0
        paths = log_files(path)
        if paths:
            chosen, offset = tail_start(paths, tail_lines)
            self._go_to(chosen)
            if self._file is not None:
                self._file.seek(offset)
            self._at = offset

    def read(self, *, last: bool) -> list[tuple[Stamp, str]]:
        """Return the next lines, cut where their stamps change; empty when there are none now.

        Args:
            last: nothing more will be written: return an unfinished last line too.
        """
        while True:
            data = self._file.read(self._piece_bytes) if self._file is not None else b""
            self._pending += data
            cut = 1 + max(self._pending.rfind(b"\n"), self._pending.rfind(b"\r"))
            if not cut and len(self._pending) >= self._piece_bytes:
                cut = whole_characters(self._pending)
            if not cut and not data:
                if self._open_next():
                    continue
                cut = len(self._pending) if last else 0
            if cut or not data:
                text, self._pending = self._pending[:cut], self._pending[cut:]
                found = [(self._stamp, text)] if text else []
                if self._marks is not None:
                    found = self._marks.split(text, self._at, self._stamp)
                self._at += cut
                self._stamp = found[-1][0] if found else self._stamp
                return [(stamp, part.decode("utf-8", "replace")) for stamp, part in found]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._marks is not None:
            self._marks.close()
            self._marks = None

    def _go_to(self, path: Path) -> None:
        file = _open(path)
        self.close()
        self._file, self._marks, self._at = file, MarksReader(path), -len(self._pending)

    def _open_next(self) -> bool:
        """Open the file that follows this one; False if this is the newest."""
        paths = log_files(self._path)
        if self._file is None:
            following = paths[:1]
        else:
            mine = os.fstat(self._file.fileno())
            same = [os.path.samestat(mine, path.stat()) for path in paths]
            following = paths[same.index(True) + 1 :] if True in same else paths
        if not following:
            return False
        self._go_to(following[0])
        return True


def _open(path: Path) -> BinaryIO:
    """Open a log for reading; a shared lock keeps it from being removed until it is closed.

    Raises:
        OSError: it cannot be read, or was removed just now.
    """
    file = open(path, "rb", buffering=0)  # noqa: SIM115 (kept open)
    try:
        hold(file.fileno())
    except BaseException:
        file.close()
        raise
    return file


def log_files(path: Path) -> list[Path]:
    """Return the files of a log that exist, oldest first."""
    older: list[Path] = []
    while (file := path.with_name(f"{path.name}.{len(older) + 1}")).exists():
        older.append(file)
    return [*reversed(older), *([path] if path.exists() else [])]


def tail_start(paths: list[Path], lines: int) -> tuple[Path, int]:
    """Return the file and the offset where the last `lines` lines start; -1: all of them.

    A line may start in one file and end in the next; an unfinished last line counts too.
    """
    if lines < 0:
        return paths[0], 0
    wanted, seen = lines, False
    for path in reversed(paths):
        with open(path, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            if not lines:
                return path, end
            # The newline of the very last line does not separate two lines.
            last = not seen and end > 0 and byte_at(file, end - 1) == b"\n"
            seen = seen or end > 0
            offset, found = line_end_before(file, end - last, wanted)
        if found == wanted:
            return path, offset + 1
        wanted -= found
    return paths[0], 0


def byte_at(file: BinaryIO, offset: int) -> bytes:
    file.seek(offset)
    return file.read(1)


def line_end_before(file: BinaryIO, end: int, count: int) -> tuple[int, int]:
    """Find the `count`-th newline before the offset `end`, backwards.

    Returns:
        Its offset and `count`; or 0 and the number found, if there are fewer.
    """
    found = 0
    while end > 0:
        begin = max(0, end - PIECE_BYTES)
        file.seek(begin)
        block = file.read(end - begin)
        place = len(block)
        while (place := block.rfind(b"\n", 0, place)) >= 0:
            found += 1
            if found == count:
                return begin + place, found
        end = begin
    return 0, found


def whole_characters(data: bytes) -> int:
    """Return the length of `data` up to its last complete UTF-8 character (all if not UTF-8)."""
    for back in range(1, 5):
        byte = data[-back]
        if byte & 0xC0 != 0x80:
            length = 1 + (byte >= 0xC0) + (byte >= 0xE0) + (byte >= 0xF0)
            return len(data) - back if length > back else len(data)
    return len(data)
