"""Leadership where the store is slow, or does not let its coordinator in any more."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest

from elastic.coord import leadership
from elastic.coord.leadership import Leadership
from elastic.core.config import NS_PER_S
from elastic.errors import Fenced, NotAuthorized
from elastic.runtime.clock import SystemClock
from elastic.store.interface import CommitResult, Compare, Lease, StoreSnapshot, Write
from tests.harness.shared_store import SharedMemoryStore
from tests.patience import DEADLINE_S
from tests.unit.journal_under_test import PREFIX, holder

pytestmark = pytest.mark.anyio


class Guarded(SharedMemoryStore):
    """A store in memory that asks for a password; `denied` is set whenever it was the wrong one."""

    def __init__(self) -> None:
        super().__init__()
        self.is_open = True
        self.denied = anyio.Event()
        self.renewed = anyio.Event()

    def check(self) -> None:
        if not self.is_open:
            self.denied.set()
            self.denied = anyio.Event()
            raise NotAuthorized("etcd refuses user 'el'")

    async def read(self, prefix: str) -> StoreSnapshot:
        self.check()
        return await super().read(prefix)

    async def commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> CommitResult:
        self.check()
        return await super().commit(compares, writes)

    async def grant_lease(self, ttl_s: float) -> Lease:
        self.check()
        return await super().grant_lease(ttl_s)

    async def renew_lease(self, lease_id: int) -> bool:
        self.check()
        self.renewed.set()
        return await super().renew_lease(lease_id)

    async def revoke_lease(self, lease_id: int) -> None:
        self.check()
        await super().revoke_lease(lease_id)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leadership, "RETRY_S", 0.01)
    monkeypatch.setattr(leadership, "DENIED_RETRY_S", 0.01)


def candidate(store: Guarded, ttl_s: float = 60.0) -> Leadership:
    return Leadership(store, PREFIX, holder("a"), SystemClock(), ttl_s=ttl_s)


# ------------------------------------------------------------------------------ not let in


async def test_who_was_never_let_in_is_told_so_and_does_not_try_again() -> None:
    store = Guarded()
    store.is_open = False
    with anyio.fail_after(DEADLINE_S), pytest.raises(NotAuthorized, match="user 'el'"):
        await candidate(store).acquire(lambda _: None)


async def test_a_leader_whose_password_was_changed_leads_again_once_it_has_the_new_one() -> None:
    store = Guarded()
    leader = candidate(store, ttl_s=0.3)
    with anyio.fail_after(DEADLINE_S):
        await leader.acquire(lambda _: None)
        store.is_open = False
        with pytest.raises(Fenced, match="not renewed in time"):
            await leader.keep()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(leader.acquire, lambda _: None)
            for _ in range(2):
                await store.denied.wait()
            store.is_open = True
    assert leader.term == 2


async def test_a_lease_is_renewed_by_the_new_password_if_that_comes_in_time() -> None:
    store = Guarded()
    leader = candidate(store, ttl_s=1.5)
    with anyio.fail_after(DEADLINE_S):
        await leader.acquire(lambda _: None)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(leader.keep)
            store.is_open = False
            await store.denied.wait()
            store.is_open, store.renewed = True, anyio.Event()
            await store.renewed.wait()
            tasks.cancel_scope.cancel()
    assert leader.is_valid()


async def test_who_ends_without_the_password_lets_its_lease_lapse() -> None:
    store = Guarded()
    leader = candidate(store)
    await leader.acquire(lambda _: None)
    store.is_open = False
    await leader.resign()
    assert not leader.is_valid()


# ------------------------------------------------------------------------------ suspended


class SuspendedClock(SystemClock):
    """The clocks of a machine that was suspended."""

    slept_ns = 0

    def boottime_ns(self) -> int:
        return super().boottime_ns() + self.slept_ns


async def test_a_leader_whose_machine_was_suspended_is_not_valid_when_it_wakes() -> None:
    clock = SuspendedClock()
    leader = Leadership(SharedMemoryStore(), PREFIX, holder("a"), clock, ttl_s=60.0)
    await leader.acquire(lambda _: None)
    assert leader.is_valid()
    clock.slept_ns = 61 * NS_PER_S
    assert not leader.is_valid()


# ------------------------------------------------------------------------------ slow writes


async def test_a_claim_whose_renewal_is_not_answered_does_not_count() -> None:
    store = Guarded()
    leader = candidate(store, ttl_s=0.2)
    polls: list[bool] = []

    def saw(_: object) -> None:
        polls.append(leader.is_valid())

    async def never(lease_id: int) -> bool:
        if len(polls) > 1:
            return await SharedMemoryStore.renew_lease(store, lease_id)
        await anyio.sleep_forever()
        raise AssertionError

    store.renew_lease = never  # type: ignore[method-assign]
    with anyio.fail_after(DEADLINE_S):
        await leader.acquire(saw)
    assert polls == [False, False]
    assert leader.is_valid()
