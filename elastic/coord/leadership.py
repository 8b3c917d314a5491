"""Leadership: which coordinator may write to a store, proven by one key and its revision.

Rule: the leader is the process that wrote the leader key last. Every write of the journal compares
that key's revision, so a replaced leader can change nothing, even before it notices. Actions
without a write (orders to agents) are allowed only while the lease that it renewed last is valid by
its own clock, which also runs while its machine is suspended, counted from before the renewal was
sent; agents reject an earlier term.

Keys, under the journal's prefix:

    leader   who leads now; on a shared store it expires with its lease
    term     how often leadership was taken; never decreases, also while there is no leader
    history  random id of this store: drawn by its first leader, and again after a restore
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TypeVar

import anyio

from elastic.errors import CorruptRecord, Fenced, NotAuthorized, StoreUnavailable, check
from elastic.runtime.clock import Clock
from elastic.store.interface import Compare, Entry, Lease, Put, SharedStore, Store

log = logging.getLogger(__name__)

LEASE_TTL_S = 2.0
"""A leader that is silent this long may be replaced. Training does not notice, only decisions
wait. etcd accepts no less with its usual election time of 1 s, and checks for expired leases
twice a second: so a killed leader is replaced within 3 s."""
RENEWALS_PER_TTL = 5
STANDBY_POLL_S = 0.2
"""How often a standby reads the leader key; part of the 3 s."""
RETRY_S = 0.2
DENIED_RETRY_S = 1.0
"""etcd checks a password slowly, on purpose: a process that waits for a new one retries rarely."""
SLOW_S = 1.0
"""If the store takes longer, the wait is logged and shown."""

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class LeaderKey:
    """The coordinator that a leader key names.

    Attributes:
        nonce: random id of the process, which recognises its own claim by it.
        term: under which it leads, 0 before it does.
    """

    name: str
    address: str
    pid: int
    nonce: str
    term: int = 0

    def encode(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def decode(cls, value: bytes) -> LeaderKey:
        """Return the leader from a key's value; an undecodable value is one with no address."""
        try:
            fields = json.loads(value)
            return cls(
                name=str(fields["name"]),
                address=str(fields["address"]),
                pid=int(fields["pid"]),
                nonce=str(fields["nonce"]),
                term=int(fields.get("term", 0)),
            )
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return cls(f"somebody who left {len(value)} unreadable bytes", "", 0, "")


def describe(holder: LeaderKey) -> str:
    """Return the leader as text: its name, address and pid."""
    where = f" at {holder.address} (pid {holder.pid})" if holder.address else ""
    return f"{holder.name}{where}"


def term_of(entry: Entry) -> int:
    """Return how often leadership was taken, from the term key's entry.

    Raises:
        CorruptRecord: it is no number; starting over would make outdated orders valid again.
    """
    text = entry.value[:32]
    if not text.isdigit() or text != entry.value or int(text) < 1:
        raise CorruptRecord(
            f"key {entry.key} holds {text!r}: expected the number of terms so far, in digits; "
            f"restore the store from a backup, or write a number that was never reached"
        )
    return int(text)


async def retry_until_available(
    what: str,
    attempt: Callable[[], Awaitable[Answer]],
    clock: Clock,
    *,
    was_let_in: bool = True,
) -> Answer:
    """Call `attempt` until the store answers, and log when that takes long.

    A store that admitted this process before and does not now has a new password, or this process
    has: the two sides are never changed at the same moment.

    Args:
        what: what waits, for the log line.
        attempt: one attempt; repeated after StoreUnavailable and NotAuthorized only.
        clock: for the duration of the wait.
        was_let_in: the store has admitted this process before.

    Raises:
        NotAuthorized: the store has never admitted this process.
    """
    since_ns, logged = clock.monotonic_ns(), ""

    def log_once(error: str) -> None:
        nonlocal logged
        if error != logged:
            logged = error
            waited_s = (clock.monotonic_ns() - since_ns) / 1e9
            log.warning("waiting_for_store what=%r since_s=%.1f error=%r", what, waited_s, error)

    # The first attempt alone may take ten seconds.
    slow = asyncio.get_running_loop().call_later(SLOW_S, log_once, "no answer yet")
    try:
        while True:
            try:
                answer = await attempt()
            except StoreUnavailable as error:
                log_once(str(error))
                await anyio.sleep(RETRY_S)
                continue
            except NotAuthorized as error:
                if not was_let_in:
                    raise
                log_once(str(error))
                await anyio.sleep(DENIED_RETRY_S)
                continue
            if logged:
                waited_s = (clock.monotonic_ns() - since_ns) / 1e9
                log.info("store_answers_again what=%r after_s=%.1f", what, waited_s)
            return answer
    finally:
        slow.cancel()


async def in_time(answer: Awaitable[Answer], limit_s: float) -> Answer | None:
    """Return the store's answer, None if there is none in this time.

    Not anyio's `move_on_after`: a cancelled gRPC call raises a cancellation of its own, which
    anyio takes for one from outside, so the task would end silently.
    """
    try:
        return await asyncio.wait_for(answer, max(0.0, limit_s))
    except asyncio.TimeoutError:
        return None


class Leadership:
    """Acquires, renews and resigns leadership for one coordinator.

    `acquire` returns once this process leads; `keep` renews and raises Fenced when leadership is
    over, after which `acquire` may be called again. `fence` is the comparison that every write
    includes.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        holder: LeaderKey,
        clock: Clock,
        *,
        ttl_s: float = LEASE_TTL_S,
    ) -> None:
        """Claim nothing yet.

        Args:
            store: where the keys are. If it is not a shared one, a claiming process is the only one
                alive, and takes over from its predecessor without waiting.
            prefix: of all keys, such as "elastic".
            holder: this process.
            clock: for ages in texts, and for the validity of the lease.
            ttl_s: of the lease on a shared store, seconds.
        """
        self._store = store
        self._key = f"{prefix}/leader"
        self._term_key = f"{prefix}/term"
        self._history_key = f"{prefix}/history"
        self._holder = holder
        self._clock = clock
        self._shared = store if isinstance(store, SharedStore) else None
        self._ttl_s = ttl_s
        self._lease: Lease | None = None
        self._valid_until_ns = 0
        self._revision = 0
        self._reported = ""
        self._was_let_in = False
        self._why_over = "another one has led since"
        self.term = 0
        self.history = ""

    def fence(self) -> Compare:
        """Return the comparison that succeeds as long as no other process took over.

        Raises:
            Fenced: this process does not lead any more.
        """
        check(self.term > 0, "a coordinator that never led wants to write")
        if not self._revision:
            raise self.fenced()
        return Compare(self._key, self._revision)

    def holds(self, fence: Compare, current: tuple[Entry, ...]) -> bool:
        """Return whether `fence` held in a commit, so that something else made it fail."""
        return any(e.key == fence.key and e.mod_revision == fence.mod_revision for e in current)

    def is_valid(self) -> bool:
        """Return whether no other process can lead now: the renewed lease has not expired."""
        if self._shared is None:
            return self._revision > 0
        return self._clock.boottime_ns() < self._valid_until_ns

    async def acquire(self, saw: Callable[[LeaderKey | None], None]) -> None:
        """Wait until this process leads.

        Args:
            saw: called with the leader, None for none, after each read of the store.
        """
        while not await self._take_over(saw):  # noqa: ASYNC110 (the store tells nobody)
            await anyio.sleep(STANDBY_POLL_S)

    async def _take_over(self, saw: Callable[[LeaderKey | None], None]) -> bool:
        """Claim leadership if there is no leader; return False if another process leads."""
        while True:
            seen = await retry_until_available(
                "leadership",
                partial(self._read, self._key),
                self._clock,
                was_let_in=self._was_let_in,
            )
            self._was_let_in = True
            leader = LeaderKey.decode(seen.value) if seen is not None else None
            if self._shared is not None:
                saw(leader)
            is_shared = self._shared is not None
            if leader is not None and is_shared and leader.nonce != self._holder.nonce:
                if describe(leader) != self._reported:
                    self._reported = describe(leader)
                    log.info("standby leader=%r term=%d", self._reported, leader.term)
                return False
            if await retry_until_available("leadership", partial(self._claim, seen), self._clock):
                self._reported = ""
                log.info("leader name=%s term=%d", self._holder.name, self.term)
                return True

    async def keep(self) -> None:
        """Renew for as long as this process leads; never returns.

        Raises:
            Fenced: it does not any more, or cannot be sure.
        """
        shared, lease = self._shared, self._lease
        if shared is None or lease is None:
            await anyio.sleep_forever()
            return
        while True:
            await anyio.sleep(lease.ttl_s / RENEWALS_PER_TTL)
            began_ns = self._clock.boottime_ns()
            left_s = (self._valid_until_ns - began_ns) / 1e9
            renewed = await in_time(self._renew(shared, lease), left_s)
            if not self.is_valid() or renewed is None:
                raise self.fenced(f"its lease of {lease.ttl_s:g} s was not renewed in time")
            if not renewed:
                raise self.fenced("its lease has ended")
            self._valid_until_ns = began_ns + round(lease.ttl_s * 1e9)

    def fenced(self, why: str = "") -> Fenced:
        """End the term, so that this process does not lead any more; return the error for it.

        Args:
            why: the reason; "" to keep the previous one.
        """
        self._valid_until_ns = self._revision = 0
        self._why_over = why or self._why_over
        return Fenced(
            f"coordinator {self._holder.name} (term {self.term}) leads no more: "
            f"{self._why_over}; agents will find the new leader"
        )

    def replaced(self, current: tuple[Entry, ...]) -> Fenced:
        """End the term after a write whose fence did not hold; return the error for it.

        Args:
            current: the entries that the commit found.
        """
        leader = next((e for e in current if e.key == self._key), None)
        if leader is None:
            return self.fenced("another one has led since")
        return self.fenced(f"{describe(LeaderKey.decode(leader.value))} leads now")

    async def resign(self) -> None:
        """Revoke the lease so that a standby takes over at once; do not insist on an answer."""
        lease, self._lease = self._lease, None
        self._valid_until_ns = self._revision = 0
        if lease is None or self._shared is None:
            return
        try:
            await in_time(self._shared.revoke_lease(lease.lease_id), self._ttl_s)
        except (StoreUnavailable, NotAuthorized) as error:
            log.warning("resign_failed error=%r", str(error))

    async def _renew(self, shared: SharedStore, lease: Lease) -> bool:
        """Renew until the store answers; the caller cancels this after its timeout.

        This also retries NotAuthorized: a new password may arrive before the lease expires.
        """
        while True:
            try:
                return await shared.renew_lease(lease.lease_id)
            except (StoreUnavailable, NotAuthorized) as error:
                log.warning("lease_renewal_postponed error=%r", str(error))
                await anyio.sleep(RETRY_S)

    async def _read(self, key: str) -> Entry | None:
        entries = (await self._store.read(key)).entries
        return next((entry for entry in entries if entry.key == key), None)

    async def _claim(self, leader: Entry | None) -> bool:
        """Try to succeed this leader; return False if another process was faster."""
        term = await self._read(self._term_key)
        history = await self._read(self._history_key)
        number = term_of(term) + 1 if term is not None else 1
        drawn = history.value if history is not None else secrets.token_hex(8).encode()
        shared = self._shared
        lease = await shared.grant_lease(self._ttl_s) if shared is not None else None
        lease_id = lease.lease_id if lease is not None else 0
        compares = [
            Compare(self._key, leader.mod_revision if leader is not None else 0),
            Compare(self._term_key, term.mod_revision if term is not None else 0),
            Compare(self._history_key, history.mod_revision if history is not None else 0),
        ]
        puts = [
            Put(self._key, replace(self._holder, term=number).encode(), lease_id),
            Put(self._term_key, str(number).encode()),
        ]
        if history is None:
            puts.append(Put(self._history_key, drawn))
        # Set before the commit: a process stopped meanwhile must revoke a lease it may have won.
        self._lease = lease
        try:
            result = await self._store.commit(compares, puts)
        except Fenced:
            self._lease = None
            return False  # The store was so slow that the lease has expired already.
        if not result.committed:
            self._lease = None
            if shared is not None and lease is not None:
                await shared.revoke_lease(lease.lease_id)
            return False
        if shared is not None and lease is not None:
            # A slow store may need most of the lease's time for a write, but little for a renewal,
            # which etcd does not write: counted from before the claim, it would always expire.
            began_ns = self._clock.boottime_ns()
            renewed = await in_time(self._renew(shared, lease), lease.ttl_s)
            self._valid_until_ns = began_ns + round(lease.ttl_s * 1e9) if renewed else 0
            if not self.is_valid():
                log.warning("leader_claim_lost term=%d: its lease was not renewed at once", number)
                self._lease = None
                return False
        self._revision, self.term = result.revision, number
        self.history = drawn.decode("ascii", "replace")
        return True
