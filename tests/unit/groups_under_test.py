"""Members of a group that are threads of this process, and what links ask of their groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.patience import DEADLINE_S


class Group:
    """As much of a process group as links ask for."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = (lambda: rank), (lambda: size)


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Do all of these, each in a thread of its own."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result(DEADLINE_S) for future in [threads.submit(call) for call in calls]]
