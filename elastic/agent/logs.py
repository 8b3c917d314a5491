"""Output of workers: copied from their pipes to files, and read back for followers.

Rule: no output of a process is lost, even if it is killed: its pipe is read to the end. There are
two exceptions: the oldest part of a log beyond its size limit, and output while the disk refuses
writes, which the file reports itself. A full disk never stops a worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from elastic.agent.log_marks import MarksFile, Stamp, marks_path
from elastic.agent.old_logs import hold, prune_logs
from elastic.core.facts import WorkerId
from elastic.core.messages import Assign
from elastic.runtime.eventlog import shift_files

log = logging.getLogger(__name__)

READ_BYTES = 64 * 1024
PIPE_BYTES = 1024 * 1024
"""A worker can print this much while the agent is busy; the kernel may allow less."""
LAST_BYTES = 4096
PRUNE_EVERY_S = 600.0
OPENED_MAX = 5


@dataclass(frozen=True, kw_only=True)
class LogLimits:
    """How much output of one worker is kept.

    Attributes:
        file_bytes_max: a file this large is renamed to `NAME.log.1`, and a new one begun.
        num_old_files: renamed files that are kept; older output is removed.
    """

    file_bytes_max: int = 256 * 1024 * 1024
    num_old_files: int = 3


class LogFile:
    """One log: appended to by this agent, readable by all while it grows.

    Attributes:
        generation, rank: of the worker, for output from here on; 0 and -1 before its first group.
    """

    def __init__(self, path: Path, limits: LogLimits) -> None:
        """Set the path of the newest file; the first write opens it, unless `create` did."""
        self.path = path
        self.ended = False
        self.generation, self.rank = 0, -1
        self._limits = limits
        self._marks = MarksFile()
        self._fd = -1
        self._size = 0
        self._lost = 0
        self._refusal = ""
        self._watchers: list[asyncio.Event] = []

    def create(self) -> None:
        """Create the file, if possible: of a worker that prints nothing there is an empty log."""
        with contextlib.suppress(OSError):
            self._open()

    def write(self, data: bytes) -> None:
        """Append; bytes that cannot be written are counted, and noted in the file once possible."""
        if self._lost:
            gap = f"\n[elastic-agent: {self._lost} bytes lost here: {self._refusal}]\n".encode()
            if self._append(gap) == len(gap):
                log.warning("log_lost path=%s bytes=%d", self.path, self._lost)
                self._lost = 0
        # A gap is noted at its place, so nothing is written before that note.
        taken = 0 if self._lost else self._append(data)
        if taken < len(data) and not self._lost:
            log.warning("log_unwritable path=%s error=%r", self.path, self._refusal)
        self._lost += len(data) - taken
        for watcher in self._watchers:
            watcher.set()

    def end(self) -> None:
        """Close the file and wake its followers: nothing more will be written."""
        self.ended = True
        self._marks.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        for watcher in self._watchers:
            watcher.set()

    @contextlib.contextmanager
    def watched(self, watcher: asyncio.Event) -> Iterator[None]:
        """Set `watcher` on every change, inside the `with` block."""
        self._watchers.append(watcher)
        try:
            yield
        finally:
            self._watchers.remove(watcher)

    def _append(self, data: bytes) -> int:
        """Return how many bytes were written; `_refusal` holds the error if not all."""
        view = memoryview(data)
        try:
            if self._fd < 0:
                self._open()
            if self._size >= self._limits.file_bytes_max:
                os.close(self._fd)
                self._fd = -1
                shift_files(self.path, self._limits.num_old_files)
                shift_files(marks_path(self.path), self._limits.num_old_files)
                self._open()
            self._marks.mark(self._size, Stamp(time.time_ns(), self.generation, self.rank))
            while view:
                written = os.write(self._fd, view)
                self._size += written
                view = view[written:]
        except OSError as error:
            self._refusal = error.strerror or str(error)
        return len(data) - len(view)

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        for _ in range(OPENED_MAX):
            fd = os.open(self.path, flags, 0o600)
            try:
                hold(fd)
            except FileNotFoundError:
                os.close(fd)  # An old log of this name was pruned just now.
            except BaseException:
                os.close(fd)
                raise
            else:
                self._fd = fd
                break
        else:
            raise OSError(errno.ESTALE, f"it was removed {OPENED_MAX} times while it was opened")
        self._size = os.fstat(self._fd).st_size
        self._marks.open(self.path)


class OutputCopy:
    """Copies the output of one process from its pipe to its present log."""

    def __init__(self, fd: int, target: LogFile, on_end: Callable[[], None]) -> None:
        """Start to copy; must be called on the event loop.

        Args:
            fd: reading end of the pipe, non-blocking; closed at the end.
            target: first log of the output.
            on_end: called once, when all writers have closed the pipe.
        """
        self.target = target
        self.last = b""
        self._fd = fd
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(fd, self._read_some)

    @property
    def open(self) -> bool:
        """Whether the pipe is still open."""
        return self._fd >= 0

    def drain(self) -> None:
        """Copy all that is in the pipe now.

        After the process's death that is all that it wrote; later output of its children is read
        by the event loop.
        """
        for _ in range(1 + 2 * PIPE_BYTES // READ_BYTES):
            if not self._read_some():
                return

    def switch(self, target: LogFile) -> None:
        """Copy what is in the pipe to the old log, and later output to this one."""
        self.drain()
        self.target = target

    def last_line(self) -> str:
        """Return the last line that is not empty, for a message about why the process ended."""
        lines = [line.strip() for line in self.last.decode("utf-8", "replace").splitlines()]
        return next((line for line in reversed(lines) if line), "")

    def close(self) -> None:
        """Stop copying, even if other processes still hold the writing end."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
            self._on_end()

    def _read_some(self) -> bool:
        """Copy one piece; return False if the pipe was empty or has ended."""
        if self._fd < 0:
            return False
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self.close()
            return False
        self.last = (self.last + data[-LAST_BYTES:])[-LAST_BYTES:]
        self.target.write(data)
        return True


class Logs:
    """The logs of one node.

    Worker n1/3 of job train writes to `<log_dir>/train/n1-3.log`; spares write to
    `<log_dir>/n1-spares.log` until they are assigned.
    """

    def __init__(self, log_dir: Path, node_id: str, limits: LogLimits | None = None) -> None:
        """Set the directory; the first write creates it."""
        self.log_dir = log_dir
        self.limits = limits or LogLimits()
        self.spares = LogFile(log_dir / f"{node_id}-spares.log", self.limits)
        self._live: dict[WorkerId, LogFile] = {}
        self._copies: list[OutputCopy] = []
        self._node_id = node_id
        self._prune_at_s = 0.0
        self._all_ended = asyncio.Event()
        self._all_ended.set()

    def copy_spare(self, fd: int) -> OutputCopy:
        """Start to copy the output of a new process to the log of spares."""

        def ended() -> None:
            self._copies.remove(copy)
            if copy.target is not self.spares:
                copy.target.end()
                for worker_id in [w for w, live in self._live.items() if live is copy.target]:
                    del self._live[worker_id]
            if not self._copies:
                self._all_ended.set()

        copy = OutputCopy(fd, self.spares, ended)
        self._copies.append(copy)
        self._all_ended.clear()
        return copy

    def assign(self, copy: OutputCopy, assign: Assign) -> None:
        """From here on the process's output belongs to this worker."""
        target = LogFile(self.path_of(assign), self.limits)
        copy.switch(target)
        if copy.open:
            target.create()
            self._live[assign.worker_id] = target
        self._make_room()

    def path_of(self, assign: Assign) -> Path:
        """Return the path of the worker's log file."""
        return self.log_dir / assign.spec.name / f"{assign.worker_id.replace('/', '-')}.log"

    def _make_room(self) -> None:
        """Remove old logs, at most every `PRUNE_EVERY_S`, in a thread: the disk may be slow."""
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._prune_at_s:
            self._prune_at_s = now_s + PRUNE_EVERY_S
            about = (self.log_dir, self._node_id)
            # A daemon thread: it must not delay the agent's exit.
            threading.Thread(target=prune_logs, args=about, name="old-logs", daemon=True).start()

    def find(self, worker_id: WorkerId) -> LogFile | None:
        """Return the log of a present or former worker here; None if there is none."""
        live = self._live.get(worker_id)
        if live is not None:
            return live
        node, slash, serial = worker_id.rpartition("/")
        if not slash or "/" in node or not serial.isdigit() or not self.log_dir.is_dir():
            return None
        paths = [
            folder / f"{node}-{serial}.log"
            for folder in self.log_dir.iterdir()
            if (folder / f"{node}-{serial}.log").is_file()
        ]
        if not paths:
            return None
        found = LogFile(max(paths, key=lambda path: path.stat().st_mtime_ns), self.limits)
        found.ended = True
        return found

    async def close(self, timeout_s: float) -> None:
        """Read all pipes to their end; pipes still open after the timeout are closed."""
        try:
            await asyncio.wait_for(self._all_ended.wait(), timeout_s)
        except asyncio.TimeoutError:
            log.warning("output_unfinished processes=%d", len(self._copies))
        for copy in list(self._copies):
            copy.drain()
            copy.close()
        self.spares.end()


def output_pipe() -> tuple[int, int]:
    """Return (reading end, writing end) for a process's output; the reading end never blocks."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(reading, False)
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        with contextlib.suppress(OSError):  # The user's share of pipe memory may be used up.
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return reading, writing
