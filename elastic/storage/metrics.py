"""The metrics of a run: one JSON object a line, appended during the run.

    RUN/metrics.jsonl                          reports of rank 0
    RUN/metrics-rank3.jsonl                    the same of rank 3
    RUN/metrics/00001763730000000000-rank0.jsonl    the same, on object stores

Objects cannot be appended to, and rewriting a growing object with every report would cost more than
training. There the lines go into parts: each belongs to one process and one generation, is named
after the wall-clock time of its first line, is rewritten at most every `FLUSH_S`, and is followed
by the next part at `PART_BYTES_MAX`. So the cost of a report does not increase with the run, and a
late process of an earlier generation writes only to its own parts.

Rule: a part has one writer; on object stores a kill loses the lines of the last `FLUSH_S`. Lines
that cannot be written are kept, and written with later ones: training does not wait for them.
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
"""Limit of unwritten lines; beyond it the oldest are lost."""
TIMEOUT_S = 0.5
"""How long a report retries after a transient fault."""
AGAIN_S = 2.0
"""Pause before the next write after a failed one."""


class MetricsLog:
    """Writes the reports of one rank; used by one thread of one process."""

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
        self._name = "" if files.is_object_store else log_name(rank)
        self._generation: Any = None
        # For a file the lines to append; for an object its whole content, `_num_written` of which
        # are written.
        self._lines: list[bytes] = []
        self._num_bytes = self._num_written = 0
        self._is_failing = False
        self._not_before = 0.0

    def append(self, record: dict[str, Any]) -> None:
        """Add a line.

        Args:
            record: JSON object; on object stores "generation" and "unix_ns" name the part.

        Raises:
            StorageError: the write failed; the line is kept, and written with a later one.
        """
        # ASCII only: no Unicode line separator, and a lone surrogate is escaped.
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
        """Write all lines.

        Raises:
            StorageError: they cannot be written; the next attempt includes them.
        """
        self._write(self._files.patience_s)

    def _begin_part(self, record: dict[str, Any]) -> None:
        """Start a new object for later lines, after completing the present one.

        If that fails, its missing lines go into the new object.
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
        # Set before the attempt, so that a failing store is not tried at every report.
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
    """Return the name of a rank's metrics file, where files can be appended to."""
    return "metrics.jsonl" if rank == 0 else f"metrics-rank{rank}.jsonl"


def read_metrics(files: Files, rank: int) -> list[dict[str, Any]]:
    """Return the reports of a rank, oldest first.

    A line that was torn by a kill is left out.

    Raises:
        StorageError: the metrics exist and cannot be read.
    """
    names = [log_name(rank)]
    if files.is_object_store:
        names += files.list(f"{FOLDER}/*-rank{rank}.jsonl")
    return [row for name in names for row in _rows(files, name)]


class MetricsReader:
    """Reads the reports of a rank incrementally."""

    def __init__(self, files: Files, rank: int) -> None:
        """Start before its first line.

        Args:
            files: the run directory.
            rank: of the reports.
        """
        self._files, self._rank = files, rank
        self._seen = 0
        """Bytes read of a local file; rows read elsewhere."""

    def read(self) -> list[dict[str, Any]]:
        """Return the reports since the last call; an unfinished line is returned later.

        Raises:
            StorageError: the metrics exist and cannot be read.
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
