"""Waiting for what was ordered: outages are waited out, and time limits say what goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.client import polling
from elastic.errors import CoordinatorUnreachable, CoordinatorUntrusted, Refused


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "POLL_S", 0)


def looking(*answers: str | Exception) -> Callable[[], str]:
    """Return what answers so, one after the other."""
    left: Iterator[str | Exception] = iter(answers)

    def look() -> str:
        answer = next(left)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return look


class Led:
    """A client of a coordinator that has led for so long, longer with each question."""

    def __init__(self, *seconds: float) -> None:
        self.left = list(seconds)

    def status(self) -> Any:
        led_s = self.left.pop(0) if len(self.left) > 1 else self.left[0]
        return SimpleNamespace(uptime_ns=round(led_s * 1e9))


LONG: Any = Led(1e6)
AWAY = CoordinatorUnreachable("host:1", "connection refused")


def test_a_coordinator_that_is_away_is_waited_out() -> None:
    polling.wait_until(
        LONG, looking("1 worker", AWAY, AWAY, "1 worker", ""), 60, "the drain goes on"
    )


def test_the_end_of_the_time_says_what_is_waited_for_and_what_goes_on() -> None:
    with pytest.raises(TimeoutError, match="1 worker after 1e-06 s; the drain goes on"):
        polling.wait_until(LONG, looking("1 worker", "1 worker"), 1e-6, "the drain goes on")
    with pytest.raises(TimeoutError, match="the coordinator does not answer after"):
        polling.wait_until(LONG, looking(AWAY), 1e-9, "the drain goes on")


def test_whoever_interrupts_the_wait_reads_what_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted() -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        polling.wait_until(LONG, interrupted, None, "the drain goes on")
    assert "the drain goes on" in capsys.readouterr().err


def test_an_outage_that_is_too_long_ends_the_waiting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(polling, "OUTAGE_LIMIT_S", -1.0)
    with pytest.raises(CoordinatorUnreachable):
        polling.wait_until(LONG, looking("1 worker", AWAY), None, "the drain goes on")
    assert "the drain goes on" in capsys.readouterr().err


@pytest.mark.parametrize("error", [Refused("it was resumed"), CoordinatorUntrusted("host:1", "x")])
def test_what_no_patience_mends_is_raised_at_once(error: Exception) -> None:
    with pytest.raises(type(error)):
        polling.wait_until(LONG, looking(error), None, "the pause goes on")


def test_a_silent_coordinator_is_not_said_to_be_missing() -> None:
    silent = str(CoordinatorUnreachable("host:1", "Deadline Exceeded"))
    assert "stopped or overloaded" in silent
    assert "start one" not in silent
    assert "start one with" in str(AWAY)
