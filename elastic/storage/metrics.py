"""The metrics of a run: one JSON object a line, added while the run goes on.

    RUN/metrics.jsonl                          what rank 0 reported
    RUN/metrics-rank3.jsonl                    the same of rank 3
    RUN/metrics/00001763730000000000-rank0.jsonl    the same, on object stores

Nothing can be added to an object, and to rewrite a growing one with every report would cost more
than training. There the lines go into parts: each belongs to one process and one generation, is
named after its first line's time of day, is rewritten every `FLUSH_S` at most, and is followed by
the next one at `PART_BYTES_MAX`. So what a report costs does not grow with the run, and a process
of an earlier generation that wakes up late writes into its own parts only.

Rule: a part has one writer; a kill loses the lines of the last `FLUSH_S`, on object stores.
"""

from __future__ import annotations

import json
import time
from typing import Any

from elastic.errors import StorageError
from elastic.storage.files import Files

FOLDER = "metrics"
FLUSH_S = 2.0
PART_BYTES_MAX = 1 << 20


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
        self._rank = rank
        self._flush_s = flush_s
        self._name = ""
        self._generation: Any = None
        self._lines: list[bytes] = []
        self._num_bytes = 0
        self._unwritten = False
        self._flushed_at = 0.0

    def append(self, record: dict[str, Any]) -> None:
        """Add a line.

        Args:
            record: JSON object; on object stores "generation" and "unix_ns" name the part.

        Raises:
            StorageError: it cannot be written.
        """
        line = (json.dumps(record, ensure_ascii=False) + "\n").encode()
        if not self._files.is_object_store:
            self._files.append(log_name(self._rank), line)
            return
        generation = record.get("generation")
        if generation != self._generation or self._num_bytes >= PART_BYTES_MAX:
            self.flush()
            unix_ns = int(record.get("unix_ns", 0)) or time.time_ns()
            self._name = f"{FOLDER}/{unix_ns:020d}-rank{self._rank}.jsonl"
            self._generation, self._lines, self._num_bytes = generation, [], 0
        self._lines.append(line)
        self._num_bytes += len(line)
        self._unwritten = True
        if time.monotonic() - self._flushed_at >= self._flush_s:
            self.flush()

    def flush(self) -> None:
        """Let all lines be seen.

        Raises:
            StorageError: they cannot be written; the next attempt writes them as well.
        """
        if self._unwritten:
            # Counted from the attempt: a store that is away is not asked with every report.
            self._flushed_at = time.monotonic()
            self._files.write(self._name, b"".join(self._lines))
            self._unwritten = False
            self._flushed_at = time.monotonic()


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


def has_metrics(files: Files) -> bool:
    """Return whether rank 0 has reported anything.

    Raises:
        StorageError: storage cannot be read.
    """
    return files.exists(log_name(0)) or files.exists(FOLDER)


def _rows(files: Files, name: str) -> list[dict[str, Any]]:
    try:
        text = files.read(name).decode(errors="replace")
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return []
        raise
    rows = []
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("metrics"), dict):
            rows.append(row)
    return rows
