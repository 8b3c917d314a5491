"""Where the time of workers goes: each moment of each worker is charged to one category, once.

The coordinator sees when a worker starts, waits, trains and ends; how the time inside a train
function was spent only the worker knows, and tells about once a second. So the account of a worker
that trains lags: what was not told yet is charged to nothing, until it is told or the worker does
something else.

Rule: what is charged to a worker is the time from its first moment to `since_ns`, to the
nanosecond, whatever workers say and whenever it comes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

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
from elastic.core.world import WorkerPhase

NOTHING = (0,) * len(FIELDS)
TOLD = -1
"""Stands for the category of a worker that trains: it tells itself."""


@dataclass(frozen=True)
class Situation:
    """What is known of a worker, as far as it says what its time goes into.

    Attributes:
        phase: of the worker.
        is_leaving: it was told to end, or its node drains.
        has_trained: in this or an earlier group.
        has_group: its job's newest group stands, or comes together.
    """

    phase: WorkerPhase
    is_leaving: bool = False
    has_trained: bool = False
    has_group: bool = False


def category(now: Situation) -> int:
    """Return what a worker's time goes into, `TOLD` where only the worker knows."""
    if now.phase is WorkerPhase.TRAINING:
        return TOLD  # Also of one that is to leave: it trains on to the next boundary.
    if now.is_leaving or now.phase in (WorkerPhase.FINISHED, WorkerPhase.EXITED):
        return DRAIN
    if now.phase is WorkerPhase.STARTING:
        return START
    if now.phase is WorkerPhase.READY and not now.has_group:
        return BELOW_MIN
    return REFORM if now.has_trained else START


def untold(following: int) -> int:
    """Return what the rest is charged to that a worker had not told when it stopped training.

    Args:
        following: the category of what it does next; `REDONE` if it is gone.
    """
    return REFORM if following in (BELOW_MIN, START) else following


def split(told: Sequence[int], before: Sequence[int], room_ns: int) -> tuple[int, ...]:
    """Return what is to be charged to each category, `room_ns` in all at most.

    Args:
        told: where the worker's time went so far, as it says.
        before: the same, as it said before.
        room_ns: how much of its time is not charged yet.
    """
    news = [max(0, now - then) for now, then in zip(told, before, strict=True)]
    total = sum(news)
    if total <= room_ns:
        return tuple(news)
    # Its clock begins when it is told of its group, ours when we hear that it trains.
    scaled = [one * room_ns // total for one in news]
    scaled[news.index(max(news))] += room_ns - sum(scaled)
    return tuple(scaled)


@dataclass
class Account:
    """The account of one worker.

    Attributes:
        category: what its time goes into now.
        since_ns: its time up to here is charged.
        told: what it has said of itself so far; None of one that we hear of when it trains already.
        has_trained: it has been in a group.
    """

    category: int
    since_ns: int
    told: tuple[int, ...] | None = NOTHING
    has_trained: bool = False


@dataclass
class Ledger:
    """The accounts of a job's workers, added up.

    Attributes:
        charged: by category, nanoseconds.
        furthest: where in the run any worker of the job was.
        again_until: steps up to here were done before the newest group; it may do them again.
    """

    charged: list[int] = field(default_factory=lambda: [0] * len(FIELDS))
    furthest: tuple[int, int] = (0, 0)
    again_until: tuple[int, int] = (0, 0)

    def total(self) -> Goodput:
        """Return what was charged so far."""
        return Goodput(*self.charged)

    def at(self, accounts: Iterable[Account], now_ns: int) -> tuple[Goodput, int]:
        """Return what is known now, and the nanoseconds that workers have not told of yet."""
        charged, unreported_ns = [*self.charged], 0
        for account in accounts:
            if account.category == TOLD:
                unreported_ns += now_ns - account.since_ns
            else:
                charged[account.category] += now_ns - account.since_ns
        return Goodput(*charged), unreported_ns

    def group_formed(self) -> None:
        """Another group begins, maybe at a step that was done before."""
        self.again_until = self.furthest

    def move(self, account: Account, to: int, now_ns: int) -> None:
        """Charge what a worker did until now; from here on it does something else."""
        if account.category != to:
            self._charge(account, untold(to), now_ns)
            account.category = to
            account.has_trained = account.has_trained or to == TOLD

    def close(self, account: Account, now_ns: int, *, is_lost: bool) -> None:
        """Charge the rest of a worker that is gone; of one that was lost it is done again."""
        self._charge(account, REDONE if is_lost else DRAIN, now_ns)

    def _charge(self, account: Account, unreported_to: int, now_ns: int) -> None:
        place = unreported_to if account.category == TOLD else account.category
        self.charged[place] += now_ns - account.since_ns
        account.since_ns = now_ns

    def hear(self, account: Account, told: Goodput, place: tuple[int, int], now_ns: int) -> None:
        """Take what a worker says of itself.

        Args:
            account: of the worker.
            told: where its time went so far.
            place: the step that it does next.
            now_ns: the moment.
        """
        times, before = told.times(), account.told
        account.told = times if before is None else tuple(map(max, times, before))
        if account.category == TOLD and before is not None:
            parts = list(split(times, before, now_ns - account.since_ns))
            account.since_ns += sum(parts)
            if place <= self.again_until and any(place):
                parts[REDONE] += parts[PRODUCTIVE]
                parts[PRODUCTIVE] = 0
            self.charged = [sum(pair) for pair in zip(self.charged, parts, strict=True)]
        self.furthest = max(self.furthest, place)
