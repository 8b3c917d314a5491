"""Leadership: which coordinator may write to a store, proved by one key and its revision.

Rule: nobody trusts a clock. A leader is whoever wrote the leader key last; every write of the
journal compares that key's revision, so a leader that was replaced cannot change anything, even
if it has not noticed yet. Leases only decide when a standby may try.

Keys, under the journal's prefix:

    leader   who leads now; on a shared store it dies with its lease
    term     how often leadership was taken; never falls, also when nobody leads
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import TypeVar

import anyio

from elastic.errors import CorruptRecord, Fenced, StoreUnavailable, check
from elastic.runtime.clock import Clock
from elastic.store.interface import Compare, Entry, Lease, Put, Snapshot, Store

log = logging.getLogger(__name__)

LEASE_TTL_S = 3.0
"""A leader that is silent this long may be replaced. Training does not notice, only decisions
wait; shorter would make leaders fall over a slow disk of the store."""
RENEWALS_PER_TTL = 3
STANDBY_POLL_S = 0.5
RETRY_S = 0.2
SLOW_S = 1.0
"""A store that takes longer is said to be waited for."""

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Holder:
    """Who a leader key names.

    Attributes:
        life: random, so that a process recognises a claim of its own whose answer got lost.
    """

    name: str
    address: str
    pid: int
    life: str

    def encode(self) -> bytes:
        """Return the key's value."""
        return json.dumps(asdict(self), sort_keys=True).encode()


def describe(entry: Entry) -> str:
    """Return who leads, in words; a value that does not decode is shown by its size."""
    try:
        fields = json.loads(entry.value)
        return f"{fields['name']} at {fields['address']} (pid {fields['pid']})"
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"somebody who left {len(entry.value)} unreadable bytes"


def term_of(entry: Entry) -> int:
    """Return how often leadership was taken, as its key says.

    Raises:
        CorruptRecord: it says something else; beginning anew would let old orders count again.
    """
    text = entry.value[:32]
    if not text.isdigit() or text != entry.value or int(text) < 1:
        raise CorruptRecord(
            f"key {entry.key} holds {text!r}: expected the number of terms so far, in digits; "
            f"restore the store from a backup, or write a number that was never reached"
        )
    return int(text)


async def patiently(
    what: str, attempt: Callable[[], Awaitable[Answer]], clock: Clock, *, pause_s: float = RETRY_S
) -> Answer:
    """Call `attempt` until the store answers, and say so when that takes long.

    Args:
        what: what waits, for the log line.
        attempt: one try; repeated after StoreUnavailable only.
        clock: for the age of the wait.
        pause_s: between two tries.
    """
    since_ns, said = clock.monotonic_ns(), ""

    def say(error: str) -> None:
        nonlocal said
        if error != said:
            said = error
            waited_s = (clock.monotonic_ns() - since_ns) / 1e9
            log.warning("waiting_for_store what=%r since_s=%.1f error=%r", what, waited_s, error)

    # The first try alone may take a store ten seconds.
    slow = asyncio.get_running_loop().call_later(SLOW_S, say, "no answer yet")
    try:
        while True:
            try:
                answer = await attempt()
            except StoreUnavailable as error:
                say(str(error))
                await anyio.sleep(pause_s)
                continue
            if said:
                waited_s = (clock.monotonic_ns() - since_ns) / 1e9
                log.info("store_answers_again what=%r after_s=%.1f", what, waited_s)
            return answer
    finally:
        slow.cancel()


class Leadership:
    """One coordinator's claim to lead.

    `acquire` returns once this process leads; `keep` renews for ever and raises Fenced when
    leadership is lost for good. `fence` is the comparison that every write carries.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        holder: Holder,
        clock: Clock,
        *,
        shared: bool,
        ttl_s: float = LEASE_TTL_S,
    ) -> None:
        """Claim nothing yet.

        Args:
            store: where the keys are.
            prefix: of all keys, such as "elastic".
            holder: this process.
            clock: for the texts' ages.
            shared: several processes may use this store at once (etcd). If not, whoever claims
                is the only one alive, and takes over from its predecessor without waiting.
            ttl_s: of the lease on a shared store, seconds.
        """
        self._store = store
        self._key = f"{prefix}/leader"
        self._term_key = f"{prefix}/term"
        self._holder = holder
        self._clock = clock
        self._shared = shared
        self._ttl_s = ttl_s
        self._lease: Lease | None = None
        self._revision = 0
        self._regaining = anyio.Lock()
        self.term = 0

    def fence(self) -> Compare:
        """Return the comparison that holds as long as nobody else took over."""
        check(self._revision > 0, "a coordinator that does not lead wants to write")
        return Compare(self._key, self._revision)

    def holds(self, fence: Compare, current: tuple[Entry, ...]) -> bool:
        """Return whether `fence`, compared with what a commit found, was not what failed."""
        return any(e.key == fence.key and e.mod_revision == fence.mod_revision for e in current)

    async def acquire(self, tell: Callable[[str], None]) -> None:
        """Wait until this process leads.

        Args:
            tell: called with why it does not lead yet, whenever that changes.
        """
        said = ""
        while True:
            seen = await patiently("leadership", self._read, self._clock)
            leader = self._leader_in(seen)
            if leader is None or not self._shared:
                if await patiently("leadership", partial(self._claim, seen), self._clock):
                    log.info("leader name=%s term=%d", self._holder.name, self.term)
                    return
                continue
            who = describe(leader)
            if who != said:
                said = who
                log.info("standby leader=%r", who)
                tell(f"this coordinator is a standby: {who} leads")
            await anyio.sleep(STANDBY_POLL_S)

    async def keep(self) -> None:
        """Renew for as long as this process leads; never returns.

        Raises:
            Fenced: another coordinator has led since.
        """
        while True:
            lease = self._lease
            if lease is None:
                await anyio.sleep_forever()
                continue
            await anyio.sleep(lease.ttl_s / RENEWALS_PER_TTL)
            renew = partial(self._store.renew_lease, lease.lease_id)
            if not await patiently("lease renewal", renew, self._clock):
                await self.regain(self.fence())

    async def resign(self) -> None:
        """Let a standby take over at once; a store that does not answer is left alone."""
        if self._lease is None or not self._revision:
            return
        try:
            with anyio.move_on_after(self._ttl_s):
                await self._store.revoke_lease(self._lease.lease_id)
        except StoreUnavailable as error:
            log.warning("resign_failed error=%r", str(error))

    async def _read(self) -> Snapshot:
        leader = await self._store.read(self._key)
        term = await self._store.read(self._term_key)
        return Snapshot(leader.entries + term.entries, min(leader.revision, term.revision))

    def _leader_in(self, seen: Snapshot) -> Entry | None:
        return next((e for e in seen.entries if e.key == self._key), None)

    async def _claim(self, seen: Snapshot) -> bool:
        """Try to become the leader that follows `seen`; False if somebody was faster."""
        leader = self._leader_in(seen)
        term = next((e for e in seen.entries if e.key == self._term_key), None)
        lease = await self._store.grant_lease(self._ttl_s) if self._shared else None
        number = term_of(term) + 1 if term is not None else 1
        lease_id = lease.lease_id if lease is not None else 0
        try:
            result = await self._store.commit(
                [
                    Compare(self._key, leader.mod_revision if leader is not None else 0),
                    Compare(self._term_key, term.mod_revision if term is not None else 0),
                ],
                [
                    Put(self._key, self._holder.encode(), lease_id),
                    Put(self._term_key, str(number).encode()),
                ],
            )
        except Fenced:
            return False  # The store was so slow that the lease has ended already.
        if result.committed:
            self._lease, self._revision, self.term = lease, result.revision, number
            return True
        if lease is not None:
            await self._store.revoke_lease(lease.lease_id)
        # The answer to an earlier attempt may have been lost, not the attempt.
        mine = next((e for e in result.current if e.key == self._key), None)
        if mine is None or mine.value != self._holder.encode():
            return False
        self._lease = Lease(mine.lease, self._ttl_s) if mine.lease else None
        self._revision, self.term = mine.mod_revision, number
        return True

    async def regain(self, fence: Compare) -> None:
        """`fence` holds no more, as after a long outage of the store: lead on if nobody led since.

        Raises:
            Fenced: somebody did.
        """
        async with self._regaining:
            if fence.mod_revision != self._revision:
                return  # Somebody else of this process has regained it meanwhile.
            seen = await patiently("leadership", self._read, self._clock)
            leader = self._leader_in(seen)
            term = next((e for e in seen.entries if e.key == self._term_key), None)
            # Both were written by one commit, so that is the term's revision as well.
            unchanged = leader is None and term and term.mod_revision == self._revision
            if unchanged and await patiently("leadership", partial(self._claim, seen), self._clock):
                log.warning("leadership_regained name=%s term=%d", self._holder.name, self.term)
                return
            now = f"{describe(leader)} leads now" if leader else "another one has led since"
            raise Fenced(
                f"coordinator {self._holder.name} (term {self.term}) leads no more: {now}; it "
                f"ends, agents will find the new leader"
            )
