"""The office of the leader: whether this coordinator holds it now, and who does if not.

Rule: everybody who answers calls asks here, each time, and keeps nothing: what was true a moment
ago may be over. What is known of another leader is as old as the last answer of the store.
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
"""A standby that heard from the store within this time is in order."""


@dataclass(frozen=True)
class Term:
    """One term in office.

    Attributes:
        driver: runs the machine of this term; the next term has another.
        follows: of this term's agents.
        since_ns: when it began to answer, monotonic.
        history: what happened to jobs in it; None where no page shows it.
    """

    driver: Driver
    follows: LogFanout
    since_ns: int
    history: History | None = None


class LeaderState:
    """What this coordinator is at the moment.

    Attributes:
        name: of this coordinator.
        coordinators: where all of this store answer, as far as is known; empty for a store that is
            not shared.
    """

    def __init__(self, name: str, clock: Clock) -> None:
        """Begin as one that does not know who leads.

        Args:
            name: of this coordinator.
            clock: for ages.
        """
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

    # ------------------------------------------------------------ what changes

    def saw(self, leader: LeaderKey | None) -> None:
        """The store was asked who leads, and named this one."""
        changed = leader != self._leader
        self._leader, self._seen_ns = leader, self._clock.monotonic_ns()
        if changed:
            self._tell()

    def know(self, coordinators: tuple[str, ...]) -> None:
        """These are the addresses of all coordinators; who is attached here is told."""
        changed, self.coordinators = coordinators != self.coordinators, coordinators
        if changed and self._tenure is not None:
            self._tenure.driver.report_coordinators(coordinators)

    def claim(self, term: int) -> None:
        """This coordinator leads under this term, and is reading its journal: `enter` follows."""
        self._claim = term, self._clock.monotonic_ns()
        self._tell()

    def enter(self, tenure: Term, is_valid: Callable[[], bool]) -> None:
        """This coordinator leads from now on, for as long as `is_valid` says so."""
        self._tenure, self._is_valid = tenure, is_valid
        self._leader = self._claim = None
        if self.coordinators:
            tenure.driver.report_coordinators(self.coordinators)
        self._tell()

    def leave(self) -> None:
        """It leads no more."""
        self._tenure = self._claim = None
        self._seen_ns = self._seen_ns and self._clock.monotonic_ns()
        self._tell()

    def end(self, why: str) -> None:
        """It is about to end: whoever asks is told so."""
        self._ending = why
        self._tell()

    # ------------------------------------------------------------ what is asked

    @property
    def tenure(self) -> Term | None:
        """Return the term that holds now, None if this coordinator does not lead."""
        tenure = self._tenure
        return tenure if tenure is not None and not self._ending and self._is_valid() else None

    def require(self) -> Term:
        """Return the term that holds now.

        Raises:
            NotLeading: none does.
        """
        tenure = self.tenure
        if tenure is None:
            raise self.refusal()
        return tenure

    def leads(self, driver: Driver) -> bool:
        """Return whether the term that this driver belongs to still holds."""
        tenure = self.tenure
        return tenure is not None and tenure.driver is driver

    def is_standby(self) -> bool:
        """Return whether this coordinator could take over: it hears from the store."""
        return self.tenure is None and not self._ending and self._age_s() < FRESH_S

    def has_seen_store(self) -> bool:
        """Return whether a shared store has said who leads, at any time."""
        return self._seen_ns > 0

    def refusal(self) -> NotLeading:
        """Return why this coordinator does not answer, and who may."""
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
            who, ask = "nobody leads", ""
        else:
            who, ask = f"{describe(leader)} leads", "; ask that one"
        if age_s < FRESH_S:
            text = f"{me}: {who} (as of {age_s:.1f} s ago){ask}"
        else:
            text = f"{me}, and has not heard from its store for {age_s:.0f} s; then {who}{ask}"
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
        """Wait until anything here is different, or this long: what grows old tells nobody."""
        with anyio.move_on_after(timeout_s):
            await self._news.wait()

    def _age_s(self) -> float:
        return (self._clock.monotonic_ns() - self._seen_ns) / 1e9 if self._seen_ns else 1e9

    def _tell(self) -> None:
        self._news.set()
        self._news = anyio.Event()
