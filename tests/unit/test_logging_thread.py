"""Log lines: how they look, and that nobody waits for who reads them."""

from __future__ import annotations

import logging
import threading

from elastic.runtime.logging_thread import LogQueue
from tests.patience import DEADLINE_S


class Stalled(logging.Handler):
    """Writes nothing until it is let to."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.goes_on = threading.Event(), threading.Event()
        self.written: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.begun.set()
        assert self.goes_on.wait(DEADLINE_S)
        self.written.append(record.getMessage())


def line(number: int) -> logging.LogRecord:
    return logging.makeLogRecord({"msg": f"line {number}", "levelno": logging.INFO})


def test_nobody_waits_for_who_does_not_read_and_what_was_dropped_is_counted() -> None:
    handler = Stalled()
    front = LogQueue(handler, lines_max=3)
    front.handle(line(0))
    assert handler.begun.wait(DEADLINE_S)
    for number in range(1, 9):
        front.handle(line(number))
    front.drain(0.01)
    assert handler.written == []
    handler.goes_on.set()
    front.drain(60)
    front.handle(line(9))
    front.drain(60)
    lines = [*map("line {}".format, range(4)), "log_lines_dropped count=5", "line 9"]
    assert handler.written == lines
