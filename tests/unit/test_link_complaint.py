"""What an agent without a coordinator says while it waits: what changed, and a reminder."""

from __future__ import annotations

import logging

import pytest

from elastic.agent.link import WaitLogger
from elastic.core.config import ns


class HandClock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_ns = 0

    def monotonic_ns(self) -> int:
        return self.now_ns

    def unix_ns(self) -> int:
        return self.now_ns


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def complaint(clock: HandClock, caplog: pytest.LogCaptureFixture) -> WaitLogger:
    caplog.set_level(logging.WARNING)
    return WaitLogger(clock)


def test_a_connection_ends_the_wait(
    clock: HandClock, complaint: WaitLogger, caplog: pytest.LogCaptureFixture
) -> None:
    complaint.report("nobody answers")
    complaint.clear()
    clock.now_ns = ns(100)
    complaint.report("nobody answers")
    assert not caplog.records


def test_what_nobody_else_says_is_said_at_once_and_then_every_half_minute(
    clock: HandClock, complaint: WaitLogger, caplog: pytest.LogCaptureFixture
) -> None:
    for second in range(0, 62, 2):
        clock.now_ns = ns(second)
        complaint.report_at_once("its leader is not to be reached")
    assert [record.getMessage() for record in caplog.records] == [
        f'waiting_for_coordinator for_s={second} reason="its leader is not to be reached"'
        for second in (0, 30, 60)
    ]
