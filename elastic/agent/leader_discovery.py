"""Finds the coordinator that leads: tries all known addresses at once, and those they refer to.

Rule: the address that last succeeded has a short head start, so that standbys of a healthy cluster
are not contacted. A standby refers to the leader; if the leader does not reply, the agent stays
connected to the standby, which reports the next leader as soon as there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import anyio
from anyio.abc import TaskGroup

from elastic.errors import (
    CoordinatorUnreachable,
    ElasticError,
    NotAuthorized,
    NotLeading,
    VersionMismatch,
)
from elastic.runtime.access import Access
from elastic.runtime.rpc import SILENCE_S
from elastic.runtime.stream import ClientStream, open_stream
from elastic.wire.codec_stream import ATTACH_METHOD

CONNECT_S_MAX = 2.0
"""Timeout for each endpoint; others are tried meanwhile."""
START_S = 0.25
"""After so long without a reply the next endpoint is tried as well."""
ROUND_S_MIN = 2.0
ROUND_S_MAX = 10.0
"""Duration of a round, doubled up to this maximum. While a standby knows of no leader, the other
endpoints are tried again in every round: they may have come back."""
HOPELESS = (NotAuthorized, VersionMismatch)
"""Errors that a retry cannot fix: credentials or a version must be changed first."""


async def find_leader(
    endpoints: Sequence[str],
    access: Access,
    on_waiting: Callable[[str], None],
    *,
    learned: Collection[str] = (),
    silence_s: float = SILENCE_S,
) -> ClientStream:
    """Return a stream to the leading coordinator; retry while any standby may still name it.

    Args:
        endpoints: "host:port" of each, the likeliest first.
        access: credentials for them.
        on_waiting: receives the reason for waiting, after each round without a leader.
        learned: those of the endpoints that were learned, not configured; another program may
            listen there by now, so a refusal from it is not final.
        silence_s: silence of a coordinator's host after which the connection is lost, as last
            set by a coordinator.

    Raises:
        NotAuthorized, VersionMismatch: one refused us permanently, and none accepted us.
        ElasticError: none of them accepted us, and none is a standby to wait for.
    """
    round_s = ROUND_S_MIN
    while True:
        search = _DiscoveryRound(access, silence_s)
        stream = await search.run(endpoints, round_s)
        if stream is not None:
            return stream
        if not search.waiting:
            raise search.failure(learned)
        on_waiting(search.blocker())
        round_s = min(2 * round_s, ROUND_S_MAX)


class _DiscoveryRound:
    """One round: every endpoint is tried once, and standbys are waited for."""

    def __init__(self, access: Access, silence_s: float) -> None:
        self._access = access
        self._silence_s = silence_s
        self._found: ClientStream | None = None
        self._asking: dict[str, None] = {}
        self._failures: dict[str, ElasticError] = {}
        self._moved = anyio.Event()
        self._tasks: TaskGroup
        # The standbys that we are connected to, with their last reply.
        self.waiting: dict[str, NotLeading] = {}

    async def run(self, endpoints: Sequence[str], limit_s: float) -> ClientStream | None:
        """Return the stream of the first that accepts us, None if none does in time."""
        with anyio.move_on_after(limit_s):
            async with anyio.create_task_group() as self._tasks:
                for endpoint in endpoints:
                    moved = self._moved
                    self._start_probe(endpoint)
                    with anyio.move_on_after(START_S):
                        await moved.wait()
                while self._asking:
                    await self._moved.wait()
        return self._found

    def failure(self, learned: Collection[str]) -> ElasticError:
        """Return the error that explains why none accepted us."""
        failures = list(self._failures.values())
        hopeless = [
            error
            for endpoint, error in self._failures.items()
            if isinstance(error, HOPELESS) and endpoint not in learned
        ]
        if hopeless or len(failures) == 1:
            return (hopeless or failures)[0]
        text = "; ".join(str(error) for error in failures)
        return CoordinatorUnreachable(",".join(self._failures), text)

    def blocker(self) -> str:
        """Return why there is no leader yet: the standbys' replies, and the others' errors."""
        refusals = [
            f"the standby at {endpoint} names {news.leader or 'no coordinator'} as the leader"
            for endpoint, news in sorted(self.waiting.items())
        ]
        failures = (str(error) for _, error in sorted(self._failures.items()))
        return "; ".join((*refusals, *failures))

    def _start_probe(self, endpoint: str) -> None:
        if endpoint not in self._asking and self._found is None:
            self._asking[endpoint] = None
            self._tasks.start_soon(self._probe, endpoint)

    async def _probe(self, endpoint: str) -> None:
        """Try one endpoint; if it is a standby, wait for it to report a later term."""
        term: int | None = None
        try:
            while True:
                try:
                    stream = await open_stream(
                        endpoint,
                        ATTACH_METHOD,
                        access=self._access,
                        timeout_s=CONNECT_S_MAX,
                        after_term=term,
                        silence_s=self._silence_s,
                    )
                except NotLeading as news:
                    if term is not None and news.term <= term:
                        raise
                    term = news.term
                    self.waiting[endpoint] = news
                    self._wake()
                    if news.leader and news.leader != endpoint:
                        self._start_probe(news.leader)
                else:
                    await self._take(stream)
                    return
        except ElasticError as error:
            self._failures[endpoint] = error
        self.waiting.pop(endpoint, None)
        self._asking.pop(endpoint, None)
        self._wake()

    async def _take(self, stream: ClientStream) -> None:
        if self._found is None:
            self._found = stream
            self._tasks.cancel_scope.cancel()
            return
        with anyio.CancelScope(shield=True):
            await stream.close()

    def _wake(self) -> None:
        self._moved.set()
        self._moved = anyio.Event()
