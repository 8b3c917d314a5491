"""The metrics of a run: one JSON object a line, added while the run goes on.

    RUN/metrics.jsonl                          what rank 0 reported
    RUN/metrics-rank3.jsonl                    the same of rank 3
    RUN/metrics/00001763730000000000-rank0.jsonl    the same, on object stores

Nothing can be added to an object, and to rewrite a growing one with every report would cost more
than training. There the lines go into parts: each belongs to one process and one generation, is
named after its first line's time of day, is rewritten every `FLUSH_S` at most, and is followed by
the next one at `PART_BYTES_MAX`. So what a report costs does not grow with the run, and a process
of an earlier generation that wakes up late writes into its own parts only.

Rule: a part has one writer; a kill loses the lines of the last `FLUSH_S`, on object stores. What
storage does not take now is kept, and written with what comes next: training waits for none of it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from typing import Any

from elastic.errors import StorageError
from elastic.storage.files import Files

log = logging.getLogger(__name__)

FOLDER = "metrics"
FLUSH_S = 2.0
PART_BYTES_MAX = 1 << 20
KEPT_BYTES_MAX = 16 << 20
"""Of lines that storage has not taken; beyond it the oldest are lost."""
TIMEOUT_S = 0.5
"""How long a report waits for storage that fails for a moment."""
AGAIN_S = 2.0
"""Until storage is asked again that has failed."""


class MetricsLog:
    """What one rank reports; used by one thread of one process."""

    def __init__(self, files: Files, rank: int, *, flush_s: float = FLUSH_S) -> None:
        """Write nothing yet.

        Args:
            files: the run directory.
            rank: whose metrics.
            flush_s: on an object store, the shortest time between two writes, in seconds.
        """
        self._files = files
        self._impatient = Files(files.path, patience_s=min(TIMEOUT_S, files.patience_s))
        self._rank = rank
        self._flush_s = flush_s
        self._name = "" if files.is_object_store else log_name(rank)
        self._generation: Any = None
        # Of a file the lines to add, of an object all that it is to hold, and how many it has.
        self._lines: list[bytes] = []
        self._num_bytes = self._num_written = 0
        self._is_failing = False
        self._not_before = 0.0

    def append(self, record: dict[str, Any]) -> None:
        """Add a line.

        Args:
            record: JSON object; on object stores "generation" and "unix_ns" name the part.

        Raises:
            StorageError: it cannot be written now; it is kept, and written with a later one.
        """
        # In ASCII: no character in it ends a line for anybody, and half a surrogate pair is one.
        line = (json.dumps(record) + "\n").encode()
        if self._files.is_object_store:
            generation = record.get("generation")
            if generation != self._generation or self._num_bytes >= PART_BYTES_MAX:
                self._begin_part(record)
        self._lines.append(line)
        self._num_bytes += len(line)
        self._forget_oldest()
        if time.monotonic() >= self._not_before:
            self._write(TIMEOUT_S)

    def flush(self) -> None:
        """Let all lines be seen.

        Raises:
            StorageError: they cannot be written; the next attempt writes them as well.
        """
        self._write(self._files.patience_s)

    def _begin_part(self, record: dict[str, Any]) -> None:
        """Let what comes go to an object of its own; the one before is then whole.

        Where storage does not take that one, the lines that it lacks go along.
        """
        try:
            if not self._is_failing or time.monotonic() >= self._not_before:
                self._write(TIMEOUT_S)
        except StorageError as error:
            log.warning("metrics_kept rank=%d error=%r", self._rank, str(error))
        self._lines = self._lines[self._num_written :]
        self._num_bytes, self._num_written = sum(map(len, self._lines)), 0
        unix_ns = int(record.get("unix_ns", 0)) or time.time_ns()
        self._name = f"{FOLDER}/{unix_ns:020d}-rank{self._rank}.jsonl"
        self._generation = record.get("generation")

    def _write(self, patience_s: float) -> None:
        if self._num_written == len(self._lines):
            return
        files = self._files if patience_s > TIMEOUT_S else self._impatient
        data = b"".join(self._lines)
        # Counted from the attempt: a store that is away is not asked with every report.
        self._not_before, self._is_failing = time.monotonic() + AGAIN_S, True
        if files.is_object_store:
            files.write(self._name, data)
            self._num_written = len(self._lines)
        else:
            files.append(self._name, data)
            self._lines, self._num_bytes = [], 0
        self._is_failing = False
        flush_s = self._flush_s if files.is_object_store else 0.0
        self._not_before = time.monotonic() + flush_s

    def _forget_oldest(self) -> None:
        lost = 0
        while self._num_bytes > KEPT_BYTES_MAX and len(self._lines) > 1:
            self._num_bytes -= len(self._lines.pop(0))
            self._num_written = max(0, self._num_written - 1)
            lost += 1
        if lost:
            log.warning("metrics_lost rank=%d lines=%d: storage takes none", self._rank, lost)


def log_name(rank: int) -> str:
    """Return the name of a rank's metrics where files can be appended to."""
    return "metrics.jsonl" if rank == 0 else f"metrics-rank{rank}.jsonl"


def read_metrics(files: Files, rank: int) -> list[dict[str, Any]]:
    """Return what a rank reported, oldest first.

    A line that was torn by a kill in the middle of writing is left out.

    Raises:
        StorageError: it is there and cannot be read.
    """
    names = [log_name(rank)]
    if files.is_object_store:
        names += files.list(f"{FOLDER}/*-rank{rank}.jsonl")
    return [row for name in names for row in _rows(files, name)]


class MetricsReader:
    """What a rank reports, as it comes."""

    def __init__(self, files: Files, rank: int) -> None:
        """Begin before its first line.

        Args:
            files: the run directory.
            rank: whose metrics.
        """
        self._files, self._rank = files, rank
        self._seen = 0
        """Bytes of the file, rows on an object store."""

    def read(self) -> list[dict[str, Any]]:
        """Return what has come since the last call; a line that is being written comes later.

        Raises:
            StorageError: it is there and cannot be read.
        """
        if not self._files.is_local:
            rows = read_metrics(self._files, self._rank)[self._seen :]
            self._seen += len(rows)
            return rows
        try:
            with open(f"{self._files.root}/{log_name(self._rank)}", "rb") as file:
                file.seek(self._seen)
                data = file.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(f"metrics of rank {self._rank} cannot be read: {error}") from error
        whole = data[: data.rfind(b"\n") + 1]
        self._seen += len(whole)
        return _rows_in(whole)


class Numbering:
    """Numbers the reports of a run: one that is made again after a loss has its number again.

    In a loop over `train.epochs()` a place tells it. Other code begins again in a new process, with
    a checkpoint or from the start, and counts on from there.
    """

    def __init__(
        self, begins: Mapping[str, int] | None = None, named: Mapping[str, int] | None = None
    ) -> None:
        """Begin before the first row of a run directory.

        Args:
            begins: a checkpoint's name -> the report that it came with, of those that the run may
                begin with and that no report of its own names.
            named: the same of the run's reports that are known already.
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
    """Return whether rank 0 has reported anything.

    Raises:
        StorageError: storage cannot be read.
    """
    return files.exists(log_name(0)) or files.exists(FOLDER)


def _rows(files: Files, name: str) -> list[dict[str, Any]]:
    try:
        data = files.read(name, METRICS_BYTES_MAX)
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return []
        raise
    return _rows_in(data)


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
