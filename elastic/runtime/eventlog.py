"""A JSON Lines event log, for users and programs.

Rule: no caller waits for the event log. Lines go through a bounded queue to one thread; lines that
do not fit, or cannot be written, are dropped and counted, and the count is written when lines get
through again. Every process writes the same schema:

    {"time_unix_ns": 1, "process": "agent:n1", "job": "j1", "event": "group_formed",
     "fields": {"generation": "4"}}
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import stat
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from elastic.core.events.shared import Note
from elastic.runtime.clock import Clock

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EventLogLimits:
    """How much an event log may hold.

    Attributes:
        queue_lines_max: queued lines; more are dropped.
        file_bytes_max: a file this large is closed and renamed to `NAME.1`.
        num_old_files: renamed files that are kept.
    """

    queue_lines_max: int = 10_000
    file_bytes_max: int = 64 * 1024 * 1024
    num_old_files: int = 3


class EventLog:
    """Appends events to one file from a thread of its own."""

    def __init__(
        self,
        path: Path,
        *,
        process: str,
        clock: Clock,
        limits: EventLogLimits | None = None,
    ) -> None:
        """Start the thread, which opens the file: this call never touches the disk.

        Args:
            path: of the newest file; its directory is created when needed.
            process: name of the writer, such as "agent:node-7".
            clock: for `time_unix_ns`.
            limits: the defaults suit a daemon.
        """
        self._path = path
        self._process = process
        self._clock = clock
        self._limits = limits or EventLogLimits()
        self._queue: queue.Queue[str | None] = queue.Queue(self._limits.queue_lines_max)
        self._file: IO[bytes] | None = None
        self._size = 0
        self._rotates = True
        self._lock = threading.Lock()
        self._dropped = 0
        self._dropped_unreported = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="event-log", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """How many lines were dropped since the start."""
        with self._lock:
            return self._dropped

    def write(self, note: Note) -> None:
        """Queue one event; never waits for the disk. From any thread."""
        try:
            self._queue.put_nowait(self._line(note))
        except queue.Full:
            self._count_dropped(1)

    def close(self, timeout_s: float = 2.0) -> None:
        """Write queued lines, within the timeout, and close the file."""
        self._closing.set()
        with contextlib.suppress(queue.Full):  # Full: the thread is awake and sees `_closing`.
            self._queue.put_nowait(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("event_log_unfinished path=%s lines=%d", self._path, self._queue.qsize())

    def _line(self, note: Note) -> str:
        record = event_record(note, self._clock.unix_ns(), self._process)
        return json.dumps(record, ensure_ascii=False)

    def _count_dropped(self, lines: int) -> None:
        with self._lock:
            self._dropped += lines
            self._dropped_unreported += lines

    def _run(self) -> None:
        while True:
            lines = [self._queue.get()]
            while len(lines) < self._limits.queue_lines_max:
                try:
                    lines.append(self._queue.get_nowait())
                except queue.Empty:
                    break
            self._append([line for line in lines if line is not None])
            if self._closing.is_set() and self._queue.empty():
                break
        if self._file is not None:
            self._file.close()

    def _append(self, lines: list[str]) -> None:
        """Write a batch; on an error the batch is dropped, and the thread continues."""
        with self._lock:
            dropped = self._dropped_unreported
        if dropped:
            lines = [*lines, self._line(Note("events_dropped", fields=(("lines", str(dropped)),)))]
        if not lines:
            return
        payload = "".join(line + "\n" for line in lines).encode("utf-8", "backslashreplace")
        try:
            write_all(self._opened(len(payload)), payload)
            self._size += len(payload)
        except OSError as error:
            self._count_dropped(len(lines) - bool(dropped))
            if not dropped:
                log.warning("event_log_unwritable path=%s error=%r", self._path, str(error))
            return
        with self._lock:
            self._dropped_unreported -= dropped

    def _opened(self, more: int) -> IO[bytes]:
        """Return the file to append to, after rotation if `more` bytes no longer fit."""
        file = self._file or self._open()
        if self._rotates and self._size and self._size + more > self._limits.file_bytes_max:
            try:
                shift_files(self._path, self._limits.num_old_files)
            except OSError as error:
                # A process may append without the right to rename. A long file is better than none.
                self._rotates = False
                log.warning("event_log_unrotated path=%s error=%r", self._path, str(error))
                return file
            file.close()
            file = self._open()
        return file

    def _open(self) -> IO[bytes]:
        self._file = None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Private: other users of this machine must not read what jobs do and print.
        self._file = open(  # noqa: SIM115 (kept open)
            self._path, "ab", buffering=0, opener=for_owner
        )
        about = os.fstat(self._file.fileno())
        self._size, self._rotates = about.st_size, stat.S_ISREG(about.st_mode)
        return self._file


def event_record(note: Note, unix_ns: int, process: str) -> dict[str, Any]:
    return {
        "time_unix_ns": unix_ns,
        "process": process,
        "job": note.job_id,
        "event": note.name,
        "fields": dict(note.fields),
    }


def for_owner(path: str, flags: int) -> int:
    """Open a file, created with mode 0600; an `opener` for Python's `open`."""
    return os.open(path, flags, 0o600)


def write_all(file: IO[bytes], payload: bytes) -> None:
    """Append the whole payload to an unbuffered file, or nothing of it.

    Raises:
        OSError: the write failed; the part that was written is truncated again.
    """
    before = os.fstat(file.fileno()).st_size
    view = memoryview(payload)
    try:
        while view:
            view = view[file.write(view) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(file.fileno(), before)
        raise


def shift_files(path: Path, num_old_files: int) -> None:
    """Rename NAME to NAME.1, NAME.1 to NAME.2 and so on; the oldest one is overwritten."""
    if num_old_files < 1:
        path.unlink(missing_ok=True)
        return
    for number in range(num_old_files, 0, -1):
        older = path.with_name(f"{path.name}.{number}")
        newer = path if number == 1 else path.with_name(f"{path.name}.{number - 1}")
        if newer.exists():
            os.replace(newer, older)


# --------------------------------------------------------------------------------------- logging


def fields_text(fields: Iterable[tuple[str, str]]) -> str:
    """Return `key=value key="two words"`: values that would not split are quoted."""
    return " ".join(f"{key}={quoted(value)}" for key, value in fields)


def quoted(value: str) -> str:
    """Return the value, as a JSON string if it is empty or holds space, quotes, = or control."""
    plain = value.isprintable() and value and not any(c in ' "=' for c in value)
    return value if plain else json.dumps(value, ensure_ascii=False)


def note_text(note: Note) -> str:
    """Return the log line of a note: name, job, fields."""
    job = (("job", note.job_id),) if note.job_id else ()
    return f"{note.name} {fields_text((*job, *note.fields))}".rstrip()
