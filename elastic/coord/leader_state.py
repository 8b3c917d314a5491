"""The leadership state: whether this coordinator leads now, and which one does if not.

Rule: every handler of a call asks here each time and caches nothing, because a term may end at
any moment. The knowledge of another leader is as old as the last answer of the store.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import anyio

from elastic.coord.driver import Driver
from elastic.coord.history import History
from elastic.coord.leadership import LeaderKey, describe
from elastic.coord.log_fanout import LogFanout
from elastic.errors import NotLeading
from elastic.runtime.clock import Clock

FRESH_S = 2.0
"""A standby that got an answer from the store within this time is healthy."""


@dataclass(frozen=True)
class Term:
    """One term of leadership.

    Attributes:
        driver: runs the machine of this term; the next term has another.
        follows: passes on output of this term's agents.
        since_ns: when it began to serve requests, monotonic.
        history: of the jobs in it; None without a page.
    """

    driver: Driver
    follows: LogFanout
    since_ns: int
    history: History | None = None


class LeaderState:
    """Whether this coordinator leads, is a standby, or is ending.

    Attributes:
        name: of this coordinator.
        coordinators: known addresses of all coordinators of this store; empty if the store is
            not shared.
    """

    def __init__(self, name: str, clock: Clock) -> None:
        self.name = name
        self._clock = clock
        self._tenure: Term | None = None
        self._is_valid: Callable[[], bool] = lambda: False
        self._leader: LeaderKey | None = None
        self._seen_ns = 0
        self._ending = ""
        self._claim: tuple[int, int] | None = None
        self._news = anyio.Event()
        self.coordinators: tuple[str, ...] = ()

    # ------------------------------------------------------------ changes

    def saw(self, leader: LeaderKey | None) -> None:
        """Record the leader that was just read from the store, None for none."""
        changed = leader != self._leader
        self._leader, self._seen_ns = leader, self._clock.monotonic_ns()
        if changed:
            self._wake()

    def know(self, coordinators: tuple[str, ...]) -> None:
        """Record the addresses of all coordinators, and send changes to attached agents."""
        changed, self.coordinators = coordinators != self.coordinators, coordinators
        if changed and self._tenure is not None:
            self._tenure.driver.report_coordinators(coordinators)

    def claim(self, term: int) -> None:
        """Record that this coordinator leads and loads its journal; `enter` follows."""
        self._claim = term, self._clock.monotonic_ns()
        self._wake()

    def enter(self, tenure: Term, is_valid: Callable[[], bool]) -> None:
        """Begin to serve as the leader, for as long as `is_valid` returns True."""
        self._tenure, self._is_valid = tenure, is_valid
        self._leader = self._claim = None
        if self.coordinators:
            tenure.driver.report_coordinators(self.coordinators)
        self._wake()

    def leave(self) -> None:
        """Record that this coordinator no longer leads."""
        self._tenure = self._claim = None
        self._seen_ns = self._seen_ns and self._clock.monotonic_ns()
        self._wake()

    def end(self, why: str) -> None:
        """Record that this coordinator is about to end; refusals give `why`."""
        self._ending = why
        self._wake()

    # ------------------------------------------------------------ queries

    @property
    def tenure(self) -> Term | None:
        tenure = self._tenure
        return tenure if tenure is not None and not self._ending and self._is_valid() else None

    def require(self) -> Term:
        """Return the current term.

        Raises:
            NotLeading: this coordinator does not lead.
        """
        tenure = self.tenure
        if tenure is None:
            raise self.refusal()
        return tenure

    def leads(self, driver: Driver) -> bool:
        """Return whether this driver's term is still the current one."""
        tenure = self.tenure
        return tenure is not None and tenure.driver is driver

    def is_standby(self) -> bool:
        """Return whether this coordinator could take over: the store answers it."""
        return self.tenure is None and not self._ending and self._age_s() < FRESH_S

    def has_seen_store(self) -> bool:
        """Return whether the leader was ever read from a shared store."""
        return self._seen_ns > 0

    def refusal(self) -> NotLeading:
        """Return the error for a call: why this coordinator does not serve it, and who leads."""
        if self._ending:
            return NotLeading(self._ending)
        if self._claim is not None:
            term, since_ns = self._claim
            reads_s = (self._clock.monotonic_ns() - since_ns) / 1e9
            return NotLeading(
                f"coordinator {self.name} leads (term {term}), and has been reading its journal "
                f"for {reads_s:.1f} s; try again"
            )
        if not self._seen_ns:
            return NotLeading(f"coordinator {self.name} is starting; try again")
        age_s, leader = self._age_s(), self._leader
        me = f"coordinator {self.name} does not lead"
        if leader is None:
            who, hint = "no coordinator leads", ""
        else:
            who, hint = f"{describe(leader)} leads", "; ask that one"
        if age_s < FRESH_S:
            text = f"{me}: {who} (as of {age_s:.1f} s ago){hint}"
        else:
            silent = f"has received no answer from its store for {age_s:.0f} s"
            text = f"{me}, and {silent}; then {who}{hint}"
        if leader is None:
            return NotLeading(text)
        return NotLeading(text, leader=leader.address, term=leader.term)

    async def wait_news(self, term: int, timeout_s: float) -> None:
        """Wait until this coordinator leads, or knows of a leader after `term`, or ends."""
        with anyio.move_on_after(timeout_s):
            while self.tenure is None and not self._ending:
                if self._leader is not None and self._leader.term > term:
                    return
                await self._news.wait()

    async def wait_change(self, timeout_s: float) -> None:
        """Wait for a change of this state, or this long: ageing causes no wakeup."""
        with anyio.move_on_after(timeout_s):
            await self._news.wait()

    def _age_s(self) -> float:
        return (self._clock.monotonic_ns() - self._seen_ns) / 1e9 if self._seen_ns else 1e9

    def _wake(self) -> None:
        self._news.set()
        self._news = anyio.Event()
