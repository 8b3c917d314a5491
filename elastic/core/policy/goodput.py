"""Goodput accounting: each nanosecond of each worker is booked under exactly one category.

The coordinator sees when a worker starts, waits, trains and ends. Only the worker knows how the
time inside a train function is spent, and reports it about once a second, in a large group every
half minute. So the account of a training worker lags: unreported time is not booked until it is
reported, maybe from the next group, or the worker is gone.

Rule: the time booked for a worker and its `late_ns` are exactly the time from its start to
`since_ns`, whatever workers report and whenever that arrives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from elastic.core.facts import WorkerPhase
from elastic.core.telemetry import (
    BELOW_MIN,
    DRAIN,
    FIELDS,
    PRODUCTIVE,
    REDONE,
    REFORM,
    START,
    Goodput,
)

NOTHING = (0,) * len(FIELDS)
REPORTED = -1
"""Category of a training worker: it reports the categories itself."""


@dataclass(frozen=True)
class Situation:
    """The facts about a worker that decide the category of its time.

    Attributes:
        is_leaving: it was ordered to end, or its node drains.
        has_trained: in this or an earlier group.
        has_group: its job has a group, or one is forming.
    """

    phase: WorkerPhase
    is_leaving: bool = False
    has_trained: bool = False
    has_group: bool = False


def category(now: Situation) -> int:
    """Return the category of a worker's time, `REPORTED` where only the worker knows."""
    if now.phase is WorkerPhase.TRAINING:
        return REPORTED  # Also if it must leave: it trains until the next boundary.
    if now.is_leaving or now.phase in (WorkerPhase.FINISHED, WorkerPhase.EXITED):
        return DRAIN
    if now.phase is WorkerPhase.STARTING:
        return START
    if now.phase is WorkerPhase.READY and not now.has_group:
        return BELOW_MIN
    return REFORM if now.has_trained else START


def split(reported: Sequence[int], before: Sequence[int], room_ns: int) -> tuple[int, ...]:
    """Return the time to book under each category, `room_ns` in all at most.

    Args:
        reported: the worker's reported time so far, by category.
        before: the same from its previous report.
        room_ns: how much of its time is not booked yet.
    """
    news = [max(0, now - then) for now, then in zip(reported, before, strict=True)]
    total = sum(news)
    if total <= room_ns:
        return tuple(news)
    # Its clock starts with the announcement, ours with its report that it trains.
    scaled = [one * room_ns // total for one in news]
    scaled[news.index(max(news))] += room_ns - sum(scaled)
    return tuple(scaled)


@dataclass
class Account:
    """The account of one worker.

    Attributes:
        since_ns: its time up to here is booked, except `late_ns`.
        late_ns: of that, it trained in an earlier group and has not reported it.
        reported: its reported time so far; None for one that already trained when first reported.
    """

    category: int
    since_ns: int
    late_ns: int = 0
    reported: tuple[int, ...] | None = NOTHING
    has_trained: bool = False


@dataclass
class Ledger:
    """The sums of the accounts of a job's workers.

    Attributes:
        booked: by category, nanoseconds.
        furthest: the furthest step that any worker of the job has reached.
        again_until: steps up to here were done before the newest group; it may repeat them.
    """

    booked: list[int] = field(default_factory=lambda: [0] * len(FIELDS))
    furthest: tuple[int, int] = (0, 0)
    again_until: tuple[int, int] = (0, 0)

    def total(self) -> Goodput:
        """Return the time booked so far."""
        return Goodput(*self.booked)

    def at(self, accounts: Iterable[Account], now_ns: int) -> tuple[Goodput, int]:
        """Return the goodput at `now_ns`, and the nanoseconds that workers have not reported."""
        booked, unreported_ns = [*self.booked], 0
        for account in accounts:
            unreported_ns += account.late_ns
            if account.category == REPORTED:
                unreported_ns += now_ns - account.since_ns
            else:
                booked[account.category] += now_ns - account.since_ns
        return Goodput(*booked), unreported_ns

    def group_formed(self) -> None:
        """Mark the steps done so far, because a new group may repeat some of them."""
        self.again_until = self.furthest

    def is_again(self, position: tuple[int, int]) -> bool:
        """Return whether the steps before this one were done before the newest group, too."""
        return any(position) and position <= self.again_until

    def move(self, account: Account, to: int, now_ns: int) -> None:
        """Book a worker's time until now, and change its category."""
        if account.category != to:
            self._book(account, now_ns)
            account.category = to
            account.has_trained = account.has_trained or to == REPORTED

    def close(self, account: Account, now_ns: int, *, is_lost: bool) -> None:
        """Book the remaining time of a worker that is gone; a lost one's work is repeated."""
        self._book(account, now_ns)
        self.booked[REDONE if is_lost else DRAIN] += account.late_ns
        account.late_ns = 0

    def _book(self, account: Account, now_ns: int) -> None:
        if account.category == REPORTED:
            account.late_ns += now_ns - account.since_ns
        else:
            self.booked[account.category] += now_ns - account.since_ns
        account.since_ns = now_ns

    def add_report(
        self, account: Account, reported: Goodput, position: tuple[int, int], now_ns: int
    ) -> None:
        """Book the time that a worker reports."""
        times, before = reported.times(), account.reported
        account.reported = times if before is None else tuple(map(max, times, before))
        if before is not None:
            trains_ns = now_ns - account.since_ns if account.category == REPORTED else 0
            parts = list(split(times, before, account.late_ns + trains_ns))
            late_ns = min(sum(parts), account.late_ns)
            account.since_ns += sum(parts) - late_ns
            account.late_ns -= late_ns
            if trains_ns:  # What it never reports of an earlier group, it spent on leaving it.
                self.booked[REFORM] += account.late_ns
                account.late_ns = 0
            if self.is_again(position):
                parts[REDONE] += parts[PRODUCTIVE]
                parts[PRODUCTIVE] = 0
            self.booked = [sum(pair) for pair in zip(self.booked, parts, strict=True)]
        self.furthest = max(self.furthest, position)
