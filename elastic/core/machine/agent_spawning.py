"""How soon an agent may try to start a process again after an attempt failed.

Rule: attempts in progress at the same time fail together, and count as one failure.
"""

from __future__ import annotations

from elastic.core.config import AgentConfig, ns

SPAWN_PAUSE_S_MIN = 0.1
SPAWN_PAUSE_S_MAX = 30.0
DOUBLINGS_MAX = 40


class SpawnBackoff:
    """A row of failures, and the pause that follows from its length.

    Attributes:
        num_failures: in a row; 0 after a success.
        not_before_ns: no attempt before this moment.
        detail: text of the newest failure.
    """

    def __init__(self, config: AgentConfig) -> None:
        self.num_failures = 0
        self.not_before_ns = 0
        self.detail = ""
        self._failures_max = config.spawn_failures_max
        self._failed_ns: int | None = None

    def succeeded(self) -> None:
        """A process got warm: what failed before is forgotten."""
        self.num_failures = 0
        self.not_before_ns = 0
        self._failed_ns = None

    def failed(self, spawned_ns: int, detail: str, now_ns: int) -> None:
        self.detail = detail
        if self._failed_ns is not None and spawned_ns <= self._failed_ns:
            return
        self._failed_ns = now_ns
        self.num_failures += 1
        doublings = min(self.num_failures - 1, DOUBLINGS_MAX)
        pause_ns = min(ns(SPAWN_PAUSE_S_MAX), ns(SPAWN_PAUSE_S_MIN) << doublings)
        self.not_before_ns = now_ns + pause_ns

    def has_given_up(self) -> bool:
        """Return whether so many failed in a row that only a waiting worker is worth a try."""
        return self.num_failures >= self._failures_max
