"""How much `on_error="skip"` has left out."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class SkippedCounts:
    """Numbers of items that were left out in this process, by kind.

    Attributes:
        most: in one pass: what is read again is left out again, and is the same.
    """

    most: dict[str, int] = field(default_factory=dict)
    _now: dict[str, int] = field(default_factory=dict)

    def begin_pass(self) -> None:
        self._now = {}

    def add(self, what: str) -> int:
        """Count one more, and return the most so far."""
        count = self._now[what] = self._now.get(what, 0) + 1
        self.most[what] = max(count, self.most.get(what, 0))
        return self.most[what]
