"""The metrics of a run: one JSON object a line, appended during the run.

    RUN/metrics.jsonl                          reports of rank 0
    RUN/metrics-rank3.jsonl                    the same of rank 3
    RUN/metrics/00001763730000000000-rank0.jsonl    the same, on object stores

Objects cannot be appended to, and rewriting a growing object with every report would cost more than
training. There the lines go into parts: each belongs to one process and one generation, is named
after the wall-clock time of its first line, or the nanosecond after the newest part where the clock
is behind that, is rewritten at most every `FLUSH_S`, and is followed by the next part at
`PART_BYTES_MAX`. So the cost of a report does not increase with the run, and a late process of an
earlier generation writes only to its own parts.

Rule: a part has one writer. Lines that cannot be written are kept, and written with later ones:
training does not wait for them.

What is durable when: a report returns once its line is in the file, where a kill of its process
does not reach it. After `WAIT_S` it returns anyway: where storage is slow or hangs, a kill loses
the lines that are still to be written. On object stores a kill loses those of the last `FLUSH_S`.
Before a part of the checkpoint that a line names is voted on, and where a train function returned,
all lines are on the disk, or in the store, unless storage refuses them or hangs. Where one is left
otherwise they are in the file, which outlives the process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic.errors import StorageError
from elastic.storage.files import Files
from elastic.storage.retry import SLICE_S

log = logging.getLogger(__name__)

FOLDER = "metrics"
FLUSH_S = 2.0
PART_BYTES_MAX = 1 << 20
KEPT_BYTES_MAX = 16 << 20
"""Limit of unwritten lines; beyond it the oldest are lost."""
TIMEOUT_S = 0.5
"""How long a report retries after a transient fault."""
AGAIN_S = 2.0
"""Pause before the next write after a failed one."""
WAIT_S = 0.2
"""How long a report waits for its line to be in the file; a write takes 0.1 ms, and on a machine
that is overloaded a thread may be late."""
HANGS_S = 60.0
"""How long a checkpoint, or the end of a train function, waits for storage that gives no answer."""
LEAVES_S = 0.5
"""The same once the group is over: the next one waits for this member."""


@dataclass
class _Part:
    """A file or object, and the lines of it that this process has.

    Attributes:
        name: in the run directory.
        lines: of an object all of them; of a file those that are not appended yet.
        num_written: how many of the lines are written.
        num_bytes: of the lines.
    """

    name: str
    lines: list[bytes] = field(default_factory=list)
    num_written: int = 0
    num_bytes: int = 0


def line_of(record: Mapping[str, Any]) -> bytes:
    """Return a record as a line, ASCII only: no Unicode line separator, surrogates escaped."""
    return (json.dumps(record) + "\n").encode()


class MetricsLog:
    """Writes the reports of one rank; used by one thread of one process at a time."""

    def __init__(self, files: Files, rank: int, *, flush_s: float = FLUSH_S) -> None:
        """Write nothing yet.

        Args:
            files: the run directory.
            rank: of the reports.
            flush_s: on an object store, the minimum time between two writes, in seconds.
        """
        self._files = files
        self._impatient = Files(files.path, patience_s=min(TIMEOUT_S, files.patience_s))
        self._rank = rank
        self._flush_s = flush_s
        self._generation: Any = None
        # The last one receives lines. A line stays in its part also if a write of it fails: the
        # write may have succeeded without its answer, and in two parts it would be read twice.
        self._parts = [] if files.is_object_store else [_Part(log_name(rank))]
        self._num_unwritten = 0
        self._is_unsynced = False
        self._not_before = 0.0

    def append(self, record: dict[str, Any]) -> None:
        """Add a line.

        Args:
            record: JSON object; on object stores "generation" and "unix_ns" name the part.

        Raises:
            StorageError: the write failed; the line is kept, and written with a later one.
        """
        self.append_line(line_of(record), record)

    def append_line(self, line: bytes, record: Mapping[str, Any]) -> None:
        """Add the line of a record; see `append`."""
        if self._files.is_object_store:
            generation = record.get("generation")
            is_full = not self._parts or self._parts[-1].num_bytes >= PART_BYTES_MAX
            if is_full or generation != self._generation:
                self._parts.append(_Part(self._next_name(int(record.get("unix_ns", 0)))))
                self._generation = generation
        part = self._parts[-1]
        part.lines.append(line)
        part.num_bytes += len(line)
        self._num_unwritten += len(line)
        self._forget_oldest()
        self.write_due()

    def _next_name(self, unix_ns: int) -> str:
        """Return a part's name that is sorted after those of all parts so far.

        Rows are numbered in the order of the parts, and clocks of nodes differ.
        """
        known = [part.name for part in self._parts]
        with contextlib.suppress(StorageError):
            known += self._impatient.list(f"{FOLDER}/*-rank{self._rank}.jsonl")
        stamps = [name.partition("/")[2].partition("-")[0] for name in known]
        newest_ns = max((int(stamp) for stamp in stamps if stamp.isdecimal()), default=0)
        at_ns = max(unix_ns or time.time_ns(), newest_ns + 1)
        return f"{FOLDER}/{at_ns:020d}-rank{self._rank}.jsonl"

    def write_due(self) -> None:
        """Write all lines, unless the last attempt was a moment ago.

        Raises:
            StorageError: the write failed; the lines are kept.
        """
        if time.monotonic() >= self._not_before:
            self._write(self._impatient)

    def flush(self, *, to_disk: bool = True) -> None:
        """Write all lines, and have them on the disk too if `to_disk`.

        Raises:
            StorageError: they cannot be written; the next attempt includes them.
        """
        self._write(self._files)
        if to_disk and self._is_unsynced:
            self._files.sync(self._parts[0].name)
            self._is_unsynced = False

    def _write(self, files: Files) -> None:
        if not self._num_unwritten:
            return
        # Set before the attempt, so that a failing store is not tried at every report.
        self._not_before = time.monotonic() + AGAIN_S
        for part in [*self._parts]:
            if pending := sum(map(len, part.lines[part.num_written :])):
                self._write_part(part, files)
                self._num_unwritten -= pending
            if len(self._parts) > 1:
                self._parts.pop(0)  # This one: it is complete, and takes no more lines.
        flush_s = self._flush_s if files.is_object_store else 0.0
        self._not_before = time.monotonic() + flush_s

    def _write_part(self, part: _Part, files: Files) -> None:
        data = b"".join(part.lines)
        if files.is_object_store:
            files.write(part.name, data)
            part.num_written = len(part.lines)
        else:
            files.append(part.name, data)
            self._is_unsynced = True
            part.lines = []
            part.num_bytes = 0

    def _forget_oldest(self) -> None:
        lost = 0
        while self._num_unwritten > KEPT_BYTES_MAX:
            part = next(part for part in self._parts if part.num_written < len(part.lines))
            num_bytes = len(part.lines.pop(part.num_written))
            part.num_bytes -= num_bytes
            self._num_unwritten -= num_bytes
            lost += 1
        if lost:
            log.warning("metrics_lost rank=%d lines=%d: storage takes none", self._rank, lost)


@dataclass(eq=False)
class _Request:
    """What the thread of a writer is to do.

    Attributes:
        record: of a line that is added, None to have all lines written.
        line: the record as a line.
        to_disk: have all lines on the disk too.
        error: why it was not done.
    """

    rank: int = 0
    record: dict[str, Any] | None = None
    line: bytes = b""
    to_disk: bool = False
    done: threading.Event = field(default_factory=threading.Event)
    error: StorageError | None = None


class MetricsWriter:
    """Writes the reports of this process on a thread of its own, in their order."""

    def __init__(self, files: Files) -> None:
        """Write nothing yet.

        Args:
            files: the run directory.
        """
        self._files = files
        self._logs: dict[int, MetricsLog] = {}
        # The first of these is under way.
        self._requests: deque[_Request] = deque()
        self._num_bytes = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_warned = False

    def add(self, rank: int, record: dict[str, Any]) -> None:
        """Have a line written; what is written when is said in this module's docstring.

        Args:
            rank: of the report.
            record: see `MetricsLog.append`.
        """
        request = _Request(rank, record, line_of(record))
        is_behind = self._put(request)
        if not (is_behind or self._files.is_object_store):
            request.done.wait(WAIT_S)

    def flush(self, *, to_disk: bool = True, is_over: Callable[[], bool] = lambda: False) -> None:
        """Have every line that was added written.

        Args:
            to_disk: on the disk, where a power cut does not reach them.
            is_over: whether the group is; called again and again meanwhile, which also shows that
                this thread runs.

        Raises:
            StorageError: storage did not take them, or gives no answer; they are written later.
        """
        if not self._logs and not self._requests:
            return
        request = _Request(to_disk=to_disk)
        self._put(request)
        began = time.monotonic()
        while self._thread is None or not request.done.wait(SLICE_S):
            waited_s = time.monotonic() - began
            if self._thread is None or waited_s >= (LEAVES_S if is_over() else HANGS_S):
                raise StorageError(
                    f"{self._files.path}: storage has given no answer to a write for "
                    f"{waited_s:.1f} s"
                )
        if request.error is not None:
            raise request.error

    def _put(self, request: _Request) -> bool:
        """Hand a request to the thread; return whether others are before it."""
        with self._changed:
            is_behind = bool(self._requests)
            self._requests.append(request)
            self._num_bytes += len(request.line)
            self._forget_oldest()
            self._changed.notify()
            if self._thread is None:  # Asked under the lock: uploads in the background flush too.
                thread = threading.Thread(target=self._run, name="elastic-metrics", daemon=True)
                with contextlib.suppress(RuntimeError):  # There is none to be had: asked for again.
                    thread.start()
                    self._thread = thread
        return is_behind

    def _forget_oldest(self) -> None:
        """Keep the lines within their limit while storage hangs in the write of one."""
        lost = 0
        for request in list(self._requests)[1:] if self._num_bytes > KEPT_BYTES_MAX else ():
            if request.record is not None and self._num_bytes > KEPT_BYTES_MAX:
                self._requests.remove(request)
                self._num_bytes -= len(request.line)
                lost += 1
        if lost:
            log.warning("metrics_lost lines=%d: storage takes none", lost)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._requests:
                    self._changed.wait()
                request = self._requests[0]
            try:
                self._do(request)
            except StorageError as error:
                request.error = error
            except Exception as error:  # Its thread must go on, and who waits must be told.
                request.error = StorageError(f"metrics cannot be written: {error!r}")
            if request.record is not None:
                self._warn(request.error)
            with self._changed:
                self._requests.popleft()
                self._num_bytes -= len(request.line)
            request.done.set()

    def _do(self, request: _Request) -> None:
        if request.record is None:
            for one in self._logs.values():
                one.flush(to_disk=request.to_disk)
            return
        rank = request.rank
        mine = self._logs.setdefault(rank, MetricsLog(self._files, rank))
        try:
            mine.append_line(request.line, request.record)
            for other in self._logs.values():  # Of ranks that this process had before.
                other.write_due()
        except StorageError as error:
            raise StorageError(f"rank {rank} {error}") from error

    def _warn(self, error: StorageError | None) -> None:
        """Log an error once, until a write succeeds."""
        if error is not None and not self._is_warned:
            log.warning(
                "metrics_kept error=%r: training goes on; they are written once storage takes them",
                str(error),
            )
        self._is_warned = error is not None


def log_name(rank: int) -> str:
    """Return the name of a rank's metrics file, where files can be appended to."""
    return "metrics.jsonl" if rank == 0 else f"metrics-rank{rank}.jsonl"


def read_metrics(files: Files, rank: int) -> list[dict[str, Any]]:
    """Return the reports of a rank, oldest first.

    A line that was torn by a kill is left out.
    """
    return [row for name in _names(files, rank) for row in _rows(files, name)]


class MetricsReader:
    """Reads the reports of a rank incrementally."""

    def __init__(self, files: Files, rank: int) -> None:
        self._files = files
        self._rank = rank
        self._num_bytes = 0
        """Read of a local file."""
        self._num_rows: dict[str, int] = {}
        """Read of each file or part elsewhere. A part with an older name may grow after a newer
        one was read: another process writes it, whose reports were late.
        """

    def read(self) -> list[dict[str, Any]]:
        """Return the reports since the last call; an unfinished line is returned later."""
        if not self._files.is_local:
            rows = []
            for name in _names(self._files, self._rank):
                found = _rows(self._files, name)
                rows += found[self._num_rows.get(name, 0) :]
                self._num_rows[name] = len(found)
            return rows
        try:
            with open(f"{self._files.root}/{log_name(self._rank)}", "rb") as file:
                file.seek(self._num_bytes)
                data = file.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(f"metrics of rank {self._rank} cannot be read: {error}") from error
        whole = data[: data.rfind(b"\n") + 1]
        self._num_bytes += len(whole)
        return _rows_in(whole)


class Numbering:
    """Numbers the reports of a run: one that is repeated after a loss gets the same number.

    In a loop over `train.epochs()` it is identified by its place ("at"). Other code restarts in a
    new process, from a checkpoint or from the start, and continues the count from there.
    """

    def __init__(
        self, begins: Mapping[str, int] | None = None, named: Mapping[str, int] | None = None
    ) -> None:
        """Start before the first row of a run directory.

        Args:
            begins: a checkpoint's name -> number of its report, for checkpoints that the run may
                start from and that none of its own reports names.
            named: the same, for reports of this run that are known already.
        """
        self._named = {**(named or {}), **(begins or {})}
        self._places: dict[str, int] = {}
        self._number = max((begins or {}).values(), default=0)

    def take(self, row: Mapping[str, Any]) -> int:
        """Return the number of the next row, from 1."""
        place = json.dumps(row["at"]) if "at" in row else ""
        if place and place in self._places:
            return self._places[place]
        if not place and not self._places and row["index"] == 0:
            self._number = self._named.get(row.get("resumed_from", ""), 0)
        self._number += 1
        if place:
            self._places[place] = self._number
        if name := row.get("checkpoint"):
            self._named[name] = self._number
        return self._number


METRICS_BYTES_MAX = 1 << 40


def has_metrics(files: Files) -> bool:
    """Return whether rank 0 has reported anything."""
    return files.exists(log_name(0)) or files.exists(FOLDER)


def _names(files: Files, rank: int) -> list[str]:
    """Return the names of a rank's file and parts, whether or not they exist, oldest first."""
    parts = files.list(f"{FOLDER}/*-rank{rank}.jsonl") if files.is_object_store else []
    return [log_name(rank), *parts]


def _rows(files: Files, name: str) -> list[dict[str, Any]]:
    return _rows_in(files.read_if_there(name, METRICS_BYTES_MAX) or b"")


def _rows_in(data: bytes) -> list[dict[str, Any]]:
    rows = []
    for line in data.decode(errors="replace").split("\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("metrics"), dict):
            rows.append(row)
    return rows
