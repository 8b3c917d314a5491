"""Summarises the loss of workers in one line: which, why, and how long training was interrupted.

Rule: it is printed at the first step of the next group. After `SOON_S` it is printed without that:
a new worker imports and builds its model first, and a script may train without our steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.client.text_format import duration, workers

SOON_S = 2.0
NAMED_MAX = 4


@dataclass
class LossSummary:
    """Lost workers, and the next group, until both were printed."""

    _gone: list[str] = field(default_factory=list)
    _since_ns: int = 0
    _at_unix_ns: int = 0
    _is_reported: bool = False
    _next: tuple[int, int] = (0, 0)
    _formed_after_ns: int | None = None

    def __bool__(self) -> bool:
        """Return whether there is a loss that is not printed with what follows it."""
        return bool(self._gone)

    def add(self, who: str, cause: str, *, at_unix_ns: int, now_ns: int) -> None:
        """Take a loss; `at_unix_ns` is when it was noticed, by the coordinator's wall clock."""
        if not self._gone:
            self._since_ns = now_ns
            self._at_unix_ns = at_unix_ns
            self._is_reported = False
        self._next, self._formed_after_ns = (0, 0), None
        self._gone.append(f"{who}, {cause}")

    def formed(self, generation: int, size: int) -> None:
        """Take the group that follows, of so many workers."""
        self._next, self._formed_after_ns = (generation, size), None

    def trains(self, generation: int, *, at_unix_ns: int, now_ns: int) -> None:
        """Take that all workers of a group have called the train function."""
        if self._gone and self._follows(generation):
            self._since_ns, self._formed_after_ns = now_ns, at_unix_ns - self._at_unix_ns

    def steps(self, generation: int, size: int, pause_ns: int) -> str:
        """Return the line that ends this loss, "" if that group is not the one that follows."""
        if not self._follows(generation):
            return ""
        pause = duration(pause_ns, digits=2)
        what = f"training paused for {pause} and continues with {workers(size)}"
        who = f"lost {self._names()}: " if self._gone and not self._is_reported else ""
        self._gone.clear()
        self._next = (0, 0)
        return f"{who}{what} (generation {generation})"

    def overdue(self, now_ns: int, *, is_over: bool = False) -> str:
        """Return a line for a loss that still costs time, once; "" before that."""
        is_due = is_over or now_ns - self._since_ns >= SOON_S * 1e9
        if not self._gone or not is_due:
            return ""
        who = "" if self._is_reported else f"lost {self._names()}"
        self._is_reported = True
        if self._formed_after_ns is None:
            return who
        generation, size = self._next
        self._gone.clear()
        after = duration(self._formed_after_ns, digits=2)
        formed = f"{workers(size)} formed generation {generation} after {after}"
        return f"{who}: {formed}" if who else formed

    def _follows(self, generation: int) -> bool:
        following, _ = self._next
        return 0 < following <= generation

    def _names(self) -> str:
        named, more = self._gone[:NAMED_MAX], len(self._gone) - NAMED_MAX
        return "; ".join(named) + (f"; and {more} more" if more > 0 else "")
