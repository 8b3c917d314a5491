"""The view of a standby: the leader's records, read from the store on each request.

Rule: an answer includes its age and the leader's name. There is no cache of current state: each
request reads the store, and the last result is used only while the store does not answer.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass

import anyio

from elastic.coord.journal import read_nodes, read_records
from elastic.coord.leader_state import LeaderState
from elastic.coord.leadership import in_time
from elastic.core.records import Cordon, JobRecord
from elastic.core.view import ClusterView, JobView
from elastic.errors import ElasticError
from elastic.runtime.clock import Clock
from elastic.store.interface import Store
from elastic.wire.codec_jobs import without_secrets

log = logging.getLogger(__name__)

READ_S_MAX = 2.0
"""If the store takes longer, the last result is used."""
REFRESH_S = 5.0
KEPT_S = 0.2
"""A request within this time of the last read gets its result."""


@dataclass(frozen=True)
class StoreView:
    """The contents of the store, not before `read_ns` on the monotonic clock."""

    records: tuple[JobRecord, ...]
    cordons: tuple[Cordon, ...]
    read_ns: int


class StandbyView:
    """Reads the records of the coordinator that leads."""

    def __init__(self, store: Store, prefix: str, leader_state: LeaderState, clock: Clock) -> None:
        self._store = store
        self._prefix = prefix
        self._leader_state = leader_state
        self._clock = clock
        self._last: StoreView | None = None
        # When the last failed attempt ended.
        self._failed_ns: int | None = None
        self._reading = anyio.Lock()

    async def read_view(self) -> tuple[ClusterView, str]:
        """Return the jobs and the cordons, and their age as text.

        Nodes and workers are not in the store: only the leader knows them.

        Raises:
            NotLeading: nothing could be read yet.
        """
        if not self._leader_state.has_seen_store():
            raise self._leader_state.refusal()
        glimpse = await self._read()
        age_s = (self._clock.monotonic_ns() - glimpse.read_ns) / 1e9
        staleness = f"as of {age_s:.1f} s ago, from the store; {self._leader_state.refusal()}"
        ahead_ns = self._clock.unix_ns() - self._clock.monotonic_ns()
        jobs = tuple(
            _shown(record, staleness, glimpse.read_ns, ahead_ns) for record in glimpse.records
        )
        return ClusterView(self._clock.monotonic_ns(), (), jobs, glimpse.cordons), staleness

    def remember(self, view: ClusterView) -> None:
        """Keep the last view of this coordinator's own term, which has just ended."""
        records = tuple(without_secrets(job).record for job in view.jobs)
        self._last = StoreView(records, view.cordons, view.now_ns)

    async def refresh(self) -> None:
        """Read the store periodically, so that there is a view if it fails; never returns."""
        while True:
            with contextlib.suppress(ElasticError):
                if self._leader_state.is_standby():
                    await self._read()
            await anyio.sleep(REFRESH_S)

    async def _read(self) -> StoreView:
        """Return the store's contents now or at the last read, after two attempts at most.

        Requests that come during a read wait for it. They all share a failed attempt, and a
        read that began after they came.
        """
        came_ns = self._clock.monotonic_ns()
        async with self._reading:
            began_ns = self._clock.monotonic_ns()
            last = self._last
            if last is not None:
                is_young = began_ns - last.read_ns < KEPT_S * 1e9
                if is_young or last.read_ns >= came_ns:
                    return last
            if self._failed_ns is None or self._failed_ns <= came_ns:
                await self._try(began_ns)
            if self._last is None:
                raise self._leader_state.refusal()
            return self._last

    async def _try(self, began_ns: int) -> None:
        """Read the store; if that fails or is too slow, keep the last result."""
        try:
            found = await in_time(self._read_store(began_ns), READ_S_MAX)
        except ElasticError as error:
            log.debug("store_not_read error=%r", str(error))
            found = None
        if found is None:
            self._failed_ns = self._clock.monotonic_ns()
        self._last = found or self._last

    async def _read_store(self, began_ns: int) -> StoreView:
        records = await read_records(self._store, self._prefix)
        nodes = await read_nodes(self._store, self._prefix)
        return StoreView(records, nodes.cordons, began_ns)


def _shown(record: JobRecord, staleness: str, read_ns: int, ahead_ns: int) -> JobView:
    """Return a standby's view of a job; `ahead_ns` is the wall clock minus the monotonic one."""
    since_ns = min(read_ns, record.since_unix_ns - ahead_ns) if record.since_unix_ns else read_ns
    return JobView(record, f"{staleness}; then: {record.reason}", since_ns, ())
