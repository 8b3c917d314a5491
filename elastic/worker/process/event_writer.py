"""Writes the job's events into the run directory while this worker receives them.

Rule: a thread of its own waits for storage. What storage does not take is tried again with what
comes next, and at the end.
"""

from __future__ import annotations

import logging
import queue
import threading

from elastic.errors import StorageError
from elastic.storage.events import EventsFile
from elastic.storage.files import Files

log = logging.getLogger(__name__)

FINISH_S = 1.0
"""How long a process that ends waits for storage."""


class EventWriter:
    """The run's events, while this is the first rank; its thread begins with the first one."""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[tuple[str, ...] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, run_path: str, lines: tuple[str, ...]) -> None:
        """Have these lines written; returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, args=(run_path,), name="elastic-events", daemon=True
            )
            self._thread.start()
        self._lines.put(lines)

    def finish(self) -> None:
        """Wait for a moment until all is written."""
        if self._thread is not None:
            self._lines.put(None)
            self._thread.join(FINISH_S)

    def _run(self, run_path: str) -> None:
        untaken: tuple[str, ...] = ()
        file: EventsFile | None = None
        while (lines := self._lines.get()) is not None:
            try:
                file = file or EventsFile(Files(run_path))
                file.add((*untaken, *lines))
                untaken = ()
            except StorageError as error:
                untaken = (*untaken, *lines)
                log.warning("events_unwritten run=%s error=%r", run_path, str(error))
