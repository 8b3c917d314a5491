"""Simulated leadership: a store with one lease, and coordinators that wait for it and renew it.

Rule: as in a real store, the lease expires by the store's clock, and each write is checked against
the present holder. A coordinator judges its lease by its own clock, which does not advance while
its machine is paused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.simulation.checkers import Checkers
from tests.simulation.world import MS, S, Timeline

TTL_NS = 2 * S
RENEW_NS = 400 * MS
POLL_NS = 500 * MS


@dataclass
class LeaseStore:
    """The store's lease: its holder, term and expiry.

    Attributes:
        is_away: the store has lost its quorum and does not reply.
    """

    checkers: Checkers
    holder: str = ""
    term: int = 0
    expires_ns: int = 0
    is_away: bool = False

    def claim(self, name: str, now_ns: int) -> bool:
        """Acquire the lease if it is free, with a new term; return whether it was."""
        if self.holder not in ("", name) and now_ns < self.expires_ns:
            return False
        self.holder, self.term, self.expires_ns = name, self.term + 1, now_ns + TTL_NS
        self.checkers.took_leader_state(name, self.term)
        return True

    def renew(self, name: str, term: int, now_ns: int) -> bool:
        """Renew the lease; False if it has expired or has another holder."""
        if not self.fence(name, term) or now_ns >= self.expires_ns:
            return False
        self.expires_ns = now_ns + TTL_NS
        return True

    def resign(self, name: str, term: int) -> None:
        """Release the lease if this coordinator still holds it."""
        if self.fence(name, term):
            self.holder = ""

    def fence(self, name: str, term: int) -> bool:
        """Return whether the store accepts a write of this coordinator and term."""
        return (self.holder, self.term) == (name, term)


class Candidate:
    """One coordinator's part of the election: waits, claims, renews, and stops in time.

    Attributes:
        term: the term of its last successful claim.
        is_cut: coordinator and store do not reach each other.
        is_running: its process is up and not frozen.
    """

    def __init__(self, timeline: Timeline, store: LeaseStore, name: str) -> None:
        """Create a candidate that is down; `begin` starts it."""
        self.timeline = timeline
        self.store = store
        self.name = name
        self.term = 0
        self.is_cut = False
        self.is_running = False
        self.lead: Callable[[], None]
        self.stop: Callable[[], None]
        self._valid_until_ns = 0
        self._stands = False
        self._was_paused = False
        self._life = 0

    def begin(self) -> None:
        """Start: wait for the lease."""
        self._life += 1
        self.is_running, self._stands, self._valid_until_ns = True, False, 0
        self._later(self.timeline.between(0, POLL_NS), self._poll)

    def end(self, *, resigns: bool = False) -> None:
        """End with the process; with `resigns`, release the lease, as in a clean shutdown."""
        if resigns and self.reaches_store():
            self.store.resign(self.name, self.term)
        self._life += 1
        self.is_running = self._stands = False

    def freeze(self, frozen: bool, paused_ns: int = 0) -> None:
        """Stop or continue; its own clock was paused for `paused_ns`."""
        self.is_running = not frozen
        self._valid_until_ns += paused_ns
        self._was_paused = self._was_paused or paused_ns > 0

    def is_valid(self) -> bool:
        """Return whether it may act: by its own clock, its lease has not expired."""
        return self._stands and self.timeline.now_ns < self._valid_until_ns

    def reaches_store(self) -> bool:
        """Return whether the store would reply to a request."""
        return not self.is_cut and not self.store.is_away

    def write(self, term: int) -> bool:
        """Write to the store under a term; False if it is unreachable, or rejects the term."""
        if not self.reaches_store() or not self.store.fence(self.name, term):
            return False
        self.store.checkers.wrote(self.name, term)
        return True

    def command(self) -> None:
        """Check that it is the leader when it sends an order to an agent."""
        if not self._was_paused:
            self.store.checkers.commanded(self.name, self.term, self.store.term)

    def over(self) -> None:
        """End its term and wait for the lease again."""
        if self._stands:
            self._stands = False
            self._later(self.timeline.between(MS, POLL_NS), self._poll)

    def _later(self, delay_ns: int, action: Callable[[], None]) -> None:
        life = self._life

        def ring() -> None:
            if life == self._life:
                action()

        self.timeline.after(delay_ns, ring)

    def _poll(self) -> None:
        if self._stands:
            return
        began_ns = self.timeline.now_ns
        if not self.is_running or not self.reaches_store():
            self._later(POLL_NS, self._poll)
        elif self.store.claim(self.name, began_ns):
            self.term, self._stands, self._was_paused = self.store.term, True, False
            self._valid_until_ns = began_ns + TTL_NS
            self._later(RENEW_NS, self._renew)
            self.lead()
        else:
            self._later(POLL_NS, self._poll)

    def _renew(self) -> None:
        """Request a renewal; its validity counts from now, before the store receives it."""
        if not self._stands:
            return
        if not self.is_running:
            self._later(RENEW_NS, self._renew)
            return
        if not self.is_valid():
            self.stop()
            return
        began_ns, term = self.timeline.now_ns, self.term
        if self.reaches_store():
            self._later(self.timeline.between(MS, 20 * MS), lambda: self._renewed(began_ns, term))
        self._later(RENEW_NS, self._renew)

    def _renewed(self, began_ns: int, term: int) -> None:
        if not self._stands or term != self.term or not self.reaches_store():
            return
        if self.store.renew(self.name, term, self.timeline.now_ns):
            self._valid_until_ns = max(self._valid_until_ns, began_ns + TTL_NS)
        elif self.is_running:
            self.stop()
