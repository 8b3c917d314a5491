"""Waits by polling until a request has been carried out.

Rule: the request continues whether or not a command waits for it. So an outage of the coordinator
is tolerated like a slow node, and when the wait ends early, the text states that the request
continues.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from elastic.client.jobs import OUTAGE_LIMIT_S, Client
from elastic.client.plain import PlainConsole
from elastic.client.printer import REPEAT_S, JobPrinter
from elastic.core.config import NS_PER_S, CoordinatorConfig
from elastic.errors import CoordinatorUntrusted, Unavailable

POLL_S = 0.3
RETURN_S = CoordinatorConfig.adoption_grace_s
PRINT_AFTER_S = 1.0
"""A wait that is over sooner is not printed."""


def wait_until(
    client: Client, check: Callable[[], str], timeout_s: float | None, goes_on: str
) -> None:
    """Poll until nothing is waited for, and print what is.

    A coordinator that has taken over meanwhile knows nothing at first: its answer counts once
    agents have had time to reconnect.

    Args:
        client: of the cluster.
        check: asks the coordinator; returns what is still waited for, "" for nothing.
        timeout_s: the longest wait, None for no limit.
        goes_on: printed when the wait ends early, such as "the drain continues".

    Raises:
        TimeoutError: the time was over first.
        Unavailable: no coordinator has answered for five minutes.
        ElasticError: as `check` raises.
    """
    printer = JobPrinter(PlainConsole(stderr=True), ranks=None)
    try:
        _poll(client, check, timeout_s, goes_on, printer)
    except KeyboardInterrupt:
        printer.print_line(goes_on)
        raise


def _poll(
    client: Client,
    check: Callable[[], str],
    timeout_s: float | None,
    goes_on: str,
    printer: JobPrinter,
) -> None:
    started = reported_at = time.monotonic()
    away_since: float | None = None
    printed = text = ""
    while True:
        polled_at = time.monotonic()
        try:
            text = check() or _unsure(client, time.monotonic() - started)
        except CoordinatorUntrusted:
            raise
        except Unavailable:
            away_since = away_since or polled_at
            if time.monotonic() - away_since > OUTAGE_LIMIT_S:
                printer.print_line(goes_on)
                raise
            printer.outage(time.monotonic() - away_since)
            text = text or "the coordinator does not answer"
        else:
            if away_since is not None:
                printer.outage(0.0)
                away_since = None
            if not text:
                return
        waited_s = time.monotonic() - started
        if timeout_s is not None and waited_s > timeout_s:
            raise TimeoutError(f"{text} after {timeout_s:g} s; {goes_on}")
        is_news = text != printed and waited_s > PRINT_AFTER_S
        if away_since is None and (is_news or time.monotonic() - reported_at > REPEAT_S):
            printed, reported_at = text, time.monotonic()
            printer.print_line(f"waits since {waited_s:.1f} s: {text}")
        time.sleep(POLL_S)


def _unsure(client: Client, waited_s: float) -> str:
    """Return what is waited for before the answer of a new coordinator counts, "" for nothing."""
    led_s = client.status().uptime_ns / NS_PER_S
    return "" if led_s >= min(waited_s, RETURN_S) else "agents to come back to the coordinator"
