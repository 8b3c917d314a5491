"""Log lines: how they look, and that nobody waits for who reads them."""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Iterator

import pytest

from elastic.runtime.logging_thread import Front, line_formatter, set_up_logging


def test_a_log_line_says_when_how_bad_and_who() -> None:
    record = logging.LogRecord("x", logging.WARNING, "f", 1, "node_lost node=%s", ("n1",), None)
    record.created, record.msecs = 1_000_000_000.25, 250.0
    line = line_formatter("elastic-agent").format(record)
    assert line == "2001-09-09T01:46:40.250Z WARNING elastic-agent node_lost node=n1"


@pytest.fixture
def _root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.usefixtures("_root_logger")
def test_logging_is_set_up_once_at_the_level_asked_for() -> None:
    stream = io.StringIO()
    set_up_logging("first", stream=io.StringIO())
    front = set_up_logging("elastic-coord", level="warning", stream=stream)
    logging.getLogger("a.b").info("quiet")
    logging.getLogger("a.b").warning("loud key=%d", 1)
    front.drain()
    assert stream.getvalue().endswith("WARNING elastic-coord loud key=1\n")
    assert stream.getvalue().count("\n") == 1


class Stalled(logging.Handler):
    """Writes nothing until it is let to."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.goes_on = threading.Event(), threading.Event()
        self.written: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.begun.set()
        assert self.goes_on.wait(60)
        self.written.append(record.getMessage())


def line(number: int) -> logging.LogRecord:
    return logging.makeLogRecord({"msg": f"line {number}", "levelno": logging.INFO})


def test_nobody_waits_for_who_does_not_read_and_what_was_dropped_is_counted() -> None:
    handler = Stalled()
    front = Front(handler, lines_max=3)
    front.handle(line(0))
    assert handler.begun.wait(60)
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
