"""Limits on what one caller, and all callers together, may request of a coordinator.

Rule: agents have their own limits, so that no number of users locks an agent out. A caller over a
limit is refused with an error that names it, and may retry. Only submissions wait, for a slot,
before any of the job is read.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import anyio

from elastic.core.config import NS_PER_S
from elastic.errors import Busy
from elastic.runtime.clock import Clock
from elastic.runtime.descriptors import raise_limit
from elastic.runtime.rpc import CONNECTIONS_MAX

log = logging.getLogger(__name__)

CALLERS_REMEMBERED = 4096
OWN_FILES = 512
"""Open files that the coordinator itself may need beside its connections."""


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Limits on concurrent calls and on the rate of calls.

    Attributes:
        agents_max: agents' streams at once.
        streams_per_node_max: of them with the credentials of one node: it may reconnect before
            its old stream is known to be broken.
        streams_max: users' streams at once (watch, logs), of all callers together.
        streams_per_caller_max: the same for one caller.
        requests_max: users' requests in progress, of all callers together.
        requests_per_caller_max: the same for one caller.
        probes_max, probes_per_caller_max: calls and streams without credentials (health), of all
            hosts together and of one.
        rate_per_s, burst: requests and streams that one caller may start: on average, and at once.
        request_s_max: timeout for receiving the message of a request.
        submissions_at_once: jobs that are read at once: each may have megabytes, several times in
            memory until it is accepted.
        submission_wait_s_max: for a slot among those; the total must be below clients' deadlines.
        stall_s_max: a stream whose client reads nothing for so long is ended.
    """

    agents_max: int = 12_000
    streams_per_node_max: int = 8
    streams_max: int = 2000
    streams_per_caller_max: int = 500
    requests_max: int = 1000
    requests_per_caller_max: int = 250
    probes_max: int = 1000
    probes_per_caller_max: int = 100
    rate_per_s: float = 500.0
    burst: float = 2000.0
    request_s_max: float = 10.0
    submissions_at_once: int = 16
    submission_wait_s_max: float = 5.0
    stall_s_max: float = 60.0


class AdmissionLimiter:
    """Counts and limits the calls in progress.

    Attributes:
        limits: what is allowed.
    """

    def __init__(self, limits: ServerLimits, clock: Clock) -> None:
        self.limits = limits
        self._clock = clock
        self._inside: Counter[str] = Counter()
        self._inside_of: Counter[tuple[str, str]] = Counter()
        self._budgets: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self._turns = anyio.Semaphore(limits.submissions_at_once)

    @contextmanager
    def agent(self, node: str) -> Iterator[None]:
        """Count an agent's stream during a `with` block.

        Args:
            node: the node that its credentials name, "" for shared ones.

        Raises:
            Busy: there are too many.
        """
        most = self.limits.agents_max
        each = self.limits.streams_per_node_max if node else most
        with self._counted("agents", node, most, each):
            yield

    @contextmanager
    def user(self, who: str, *, streams: bool) -> Iterator[None]:
        """Count a user's call during a `with` block.

        Args:
            who: the caller, by name or host.
            streams: it is a stream, not a request.

        Raises:
            Busy: there are too many, or their rate is too high.
        """
        limits = self.limits
        self._spend(who)
        if streams:
            most, each = limits.streams_max, limits.streams_per_caller_max
        else:
            most, each = limits.requests_max, limits.requests_per_caller_max
        with self._counted("streams" if streams else "requests", who, most, each):
            yield

    @asynccontextmanager
    async def submission(self) -> AsyncIterator[None]:
        """Wait for a slot to submit a job, and hold it during an `async with` block.

        Raises:
            Busy: none became free in time.
        """
        has_turn, limits = False, self.limits
        with anyio.move_on_after(limits.submission_wait_s_max):
            await self._turns.acquire()
            has_turn = True
        if not has_turn:
            raise Busy(
                f"this coordinator takes {limits.submissions_at_once} submissions at once, and "
                f"none ended within {limits.submission_wait_s_max:g} s for this one to begin; "
                f"nothing was submitted, try again later"
            )
        try:
            yield
        finally:
            self._turns.release()

    @contextmanager
    def without_credentials(self, host: str) -> Iterator[None]:
        """Count a call without credentials during a `with` block.

        Raises:
            Busy: there are too many, or their rate is too high.
        """
        who, limits = f"a stranger at {host}", self.limits
        self._spend(who)
        with self._counted("probes", who, limits.probes_max, limits.probes_per_caller_max):
            yield

    @contextmanager
    def _counted(self, kind: str, who: str, most: int, each: int) -> Iterator[None]:
        if self._inside[kind] >= most:
            raise Busy(f"this coordinator holds {most} {kind} at once, its limit; try again later")
        if self._inside_of[kind, who] >= each:
            raise Busy(f"{who} has {each} {kind} open at once, the limit of one caller; close some")
        self._inside[kind] += 1
        self._inside_of[kind, who] += 1
        try:
            yield
        finally:
            self._inside[kind] -= 1
            self._inside_of[kind, who] -= 1
            if not self._inside_of[kind, who]:
                del self._inside_of[kind, who]

    def _spend(self, who: str) -> None:
        """Take one call from a caller's token bucket; raise Busy if it is empty."""
        limits, now_ns = self.limits, self._clock.monotonic_ns()
        left, since_ns = self._budgets.pop(who, (limits.burst, now_ns))
        left = min(limits.burst, left + (now_ns - since_ns) / NS_PER_S * limits.rate_per_s)
        self._budgets[who] = (max(0.0, left - 1.0), now_ns)
        if len(self._budgets) > CALLERS_REMEMBERED:
            self._budgets.popitem(last=False)
        if left < 1.0:
            raise Busy(
                f"{who} asks more than {limits.rate_per_s:g} times a second, the limit of one "
                f"caller; ask less often"
            )


def raise_file_limit() -> int:
    """Raise the limit of open files; return how many connections it permits.

    With the usual limit of 1,024, a thousand idle connections would keep the coordinator from
    opening its own files. A hard limit that is too low for `CONNECTIONS_MAX` is logged.
    """
    soft = raise_limit(CONNECTIONS_MAX + OWN_FILES)
    if soft >= CONNECTIONS_MAX + OWN_FILES:
        return CONNECTIONS_MAX
    connections = max(64, soft - OWN_FILES)
    log.warning(
        "open_files_limited limit=%d needed=%d connections=%d advice=%r",
        soft, CONNECTIONS_MAX + OWN_FILES, connections,
        "for a cluster of more nodes raise the hard limit (ulimit -Hn, LimitNOFILE= of systemd)",
    )  # fmt: skip
    return connections
