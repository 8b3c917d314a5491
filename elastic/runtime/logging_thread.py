"""Logging setup: lines go to stderr from a thread of their own.

Rule: no caller waits for the log. The reader of stderr may stall for minutes (a journal, a
container's log driver, `tee`). An event loop that waits for it would not reply to peers, while
gRPC's own threads still reply to pings, so that peers detect no failure. Lines that do not fit are
dropped and counted, and the count is written when lines get through again.
"""

from __future__ import annotations

import atexit
import logging
import logging.handlers
import queue
import sys
import time

LINES_MAX = 10_000
LAST_WORDS_S = 1.0
"""Timeout for queued lines to be written at the end of the process."""


class LogQueue(logging.handlers.QueueHandler):
    """Queues lines for the thread that writes them, and never waits."""

    def __init__(self, handler: logging.Handler, lines_max: int = LINES_MAX) -> None:
        self.lines: queue.Queue[logging.LogRecord] = queue.Queue(lines_max)
        super().__init__(self.lines)
        self._dropped = 0
        self._writer = logging.handlers.QueueListener(self.lines, handler)
        self._writer.start()

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queue a line, and before it how many were dropped."""
        try:
            if self._dropped:
                self.lines.put_nowait(_dropped_line(self._dropped))
                self._dropped = 0
            self.lines.put_nowait(record)
        except queue.Full:
            self._dropped += 1

    def drain(self, timeout_s: float = LAST_WORDS_S) -> bool:
        """Wait until all lines are written; False if that takes longer than the timeout.

        After False the process must end by `os._exit`: logging's own exit handler would wait for
        the reader.
        """
        until_s = time.monotonic() + timeout_s
        with self.lines.all_tasks_done:
            while self.lines.unfinished_tasks and (left_s := until_s - time.monotonic()) > 0:
                self.lines.all_tasks_done.wait(left_s)
            return not self.lines.unfinished_tasks


def set_up_logging(process: str, *, level: str = "info") -> LogQueue:
    """Send this process's log lines to stderr, replacing what was set.

    Args:
        process: its name in each line, such as "elastic-agent".
        level: debug, info, warning or error.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(line_formatter(process))
    front = LogQueue(handler)
    root = logging.getLogger()
    root.handlers[:] = [front]
    root.setLevel(level.upper())
    atexit.register(front.drain)
    return front


def line_formatter(process: str) -> logging.Formatter:
    """Return the formatter: `2026-11-21T05:00:00.123Z INFO elastic-agent event key=value`, UTC."""
    formatter = logging.Formatter(f"%(asctime)s %(levelname)s {process} %(message)s")
    formatter.converter = time.gmtime
    formatter.default_time_format = "%Y-%m-%dT%H:%M:%S"
    formatter.default_msec_format = "%s.%03dZ"
    return formatter


def _dropped_line(count: int) -> logging.LogRecord:
    return logging.makeLogRecord(
        {
            "name": __name__,
            "levelno": logging.WARNING,
            "levelname": "WARNING",
            "msg": f"log_lines_dropped count={count}",
        }
    )
