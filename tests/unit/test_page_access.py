"""Logins to the page that come slowly, in part, or not at all."""

from __future__ import annotations

from collections import deque
from typing import Any

import anyio
import pytest

from elastic.coord.audit import Audit
from elastic.coord.server_guard import AccessRules
from elastic.coord.server_limits import AdmissionLimiter, ServerLimits
from elastic.coord.web.access import Gate
from elastic.runtime.clock import SystemClock
from tests.patience import DEADLINE_S

pytestmark = pytest.mark.anyio
FORM = b"token=the-token&then=%2F"
CLOCK = SystemClock()


async def no_pages(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("a login leads to no page")


@pytest.fixture
def gate() -> Gate:
    """Return a gate with a place for one stranger, who has a moment."""
    limits = ServerLimits(request_s_max=0.01, probes_per_caller_max=1)
    return Gate(
        no_pages,
        locks=AccessRules(token="the-token"),
        limiter=AdmissionLimiter(limits, CLOCK),
        audit=Audit(None, process="c", clock=CLOCK),
        clock=CLOCK,
        is_local=True,
    )


async def log_in(gate: Gate, *messages: dict[str, Any]) -> list[int]:
    """Send these messages and then nothing; return the status of the answer, if there is one."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/login",
        "query_string": b"",
        "headers": [],
        "client": ("10.0.0.9", 5),
    }
    coming, sent = deque(messages), list[dict[str, Any]]()

    async def receive() -> dict[str, Any]:
        if not coming:
            await anyio.sleep_forever()
        return coming.popleft()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    with anyio.fail_after(DEADLINE_S):
        await gate(scope, receive, send)  # type: ignore[arg-type]
    return [message["status"] for message in sent if "status" in message]


async def test_a_login_that_does_not_come_is_given_up_and_holds_no_place(gate: Gate) -> None:
    part = {"type": "http.request", "body": FORM[:5], "more_body": True}
    assert await log_in(gate) == [408]
    assert await log_in(gate, part) == [408]
    assert await log_in(gate, part, {"type": "http.request", "body": FORM[5:]}) == [303]


async def test_a_client_that_hangs_up_is_no_error_and_holds_no_place(gate: Gate) -> None:
    assert await log_in(gate, {"type": "http.disconnect"}) == []
    assert await log_in(gate, {"type": "http.request", "body": FORM}) == [303]
