"""The follower when many ask a standby at once, and its store is slow or silent."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import pytest

from elastic.coord.leader_state import LeaderState
from elastic.coord.standby_view import StandbyView
from elastic.core.config import JobSpec
from elastic.core.facts import JobId, JobPhase
from elastic.core.records import JobRecord
from elastic.core.view import ClusterView, JobView
from elastic.errors import NotLeading, StoreUnavailable
from elastic.runtime.clock import Clock, SystemClock
from elastic.store.interface import StoreSnapshot
from tests.patience import DEADLINE_S
from tests.strategies import SCRIPT
from tests.unit.test_coord_journal import PREFIX
from tests.unit.test_coord_office import StoppedClock

pytestmark = pytest.mark.anyio
READERS = 6


class Asked:
    """A store that counts who asks for the jobs, and answers nobody."""

    def __init__(self) -> None:
        self.tries = 0
        self.called = anyio.Event()

    async def read(self, prefix: str) -> StoreSnapshot:
        if prefix.endswith("/jobs/"):
            self.tries += 1
            self.called.set()
            await self.answer()
        return StoreSnapshot((), 1)

    async def answer(self) -> None:
        await anyio.sleep_forever()


class Refusing(Asked):
    """It answers at once that it cannot."""

    async def answer(self) -> None:
        await anyio.lowlevel.checkpoint()
        raise StoreUnavailable("no answer")


class Slow(Asked):
    """It answers when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = anyio.Event()

    async def answer(self) -> None:
        await self.answers.wait()


def standby(store: Asked, clock: Clock) -> StandbyView:
    leader_state = LeaderState("b", clock)
    leader_state.saw(None)
    store_: Any = store
    return StandbyView(store_, PREFIX, leader_state, clock)


async def test_a_try_that_failed_is_an_answer_to_all_who_waited_for_it() -> None:
    store = Refusing()
    follows = standby(store, SystemClock())
    refused = 0

    async def ask() -> None:
        nonlocal refused
        with pytest.raises(NotLeading):
            await follows.read_view()
        refused += 1

    with anyio.fail_after(DEADLINE_S):
        async with anyio.create_task_group() as tasks:
            for _ in range(READERS):
                tasks.start_soon(ask)
    assert (refused, store.tries) == (READERS, 1)


async def test_a_standby_shows_how_long_a_job_has_been_in_its_phase() -> None:
    clock = StoppedClock()
    clock.advance(60)
    follows = standby(Slow(), clock)
    spec = JobSpec(job_id=JobId("a"), name="a", entry=SCRIPT, min_workers=1, max_workers=1)
    since_ns = clock.unix_ns() - 33_000_000_000
    for reported_ns, age_s in ((since_ns, 33), (0, 0)):
        record = JobRecord(spec, JobPhase.PENDING, since_unix_ns=reported_ns)
        now_ns = clock.monotonic_ns()
        follows.remember(ClusterView(now_ns, (), (JobView(record, "", now_ns, ()),)))
        view, _ = await follows.read_view()
        assert (now_ns - view.jobs[0].since_ns) / 1e9 == age_s
