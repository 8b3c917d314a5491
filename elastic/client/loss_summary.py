"""Summarises the loss of workers in one line: which, why, and how long training was interrupted.

Rule: it is printed when training continues, or after `SOON_S` if it does not.
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

    def __bool__(self) -> bool:
        """Return whether training is interrupted because of a loss, as far as known."""
        return bool(self._gone)

    def add(self, who: str, cause: str, *, at_unix_ns: int, now_ns: int) -> None:
        """Take a loss; `at_unix_ns` is when it was noticed, by the coordinator's wall clock."""
        if not self._gone:
            self._since_ns, self._at_unix_ns = now_ns, at_unix_ns
            self._is_reported, self._next = False, (0, 0)
        self._gone.append(f"{who}, {cause}")

    def formed(self, generation: int, size: int) -> None:
        """Take the group that follows, of so many workers."""
        self._next = (generation, size)

    def trains(self, generation: int, at_unix_ns: int) -> str:
        """Return the line that ends this loss, "" if that group is not the one that follows."""
        following, size = self._next
        if not self._gone or generation < following or not following:
            return ""
        pause = duration(at_unix_ns - self._at_unix_ns, digits=2)
        what = f"training paused for {pause} and continues with {workers(size)}"
        who = "" if self._is_reported else f"lost {self._names()}: "
        self._gone.clear()
        return f"{who}{what} (generation {generation})"

    def overdue(self, now_ns: int, *, is_over: bool = False) -> str:
        """Return a line for a loss that still costs time, once; "" before that."""
        is_due = is_over or now_ns - self._since_ns >= SOON_S * 1e9
        if not self._gone or self._is_reported or not is_due:
            return ""
        self._is_reported = True
        return f"lost {self._names()}"

    def _names(self) -> str:
        named, more = self._gone[:NAMED_MAX], len(self._gone) - NAMED_MAX
        return "; ".join(named) + (f"; and {more} more" if more > 0 else "")
