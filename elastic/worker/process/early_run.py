"""Running a train function before there is a group, up to where it needs one.

A worker that joins a running group builds its model and opens its data while the others train.
Whatever asks for its place in the group (rank, world size, a collective, torchrun's environment
variables) makes it join first: all functions of torch read the default group in one place, by
whatever name a script has kept them. That there will be a group is known: libraries ask for that
alone as they load models.

Rule: what user code sees of its place is never made up; it waits instead.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch.distributed import distributed_c10d

from elastic.worker.group.c10d import holders_of, private_names
from elastic.worker.process.environment import PLACE

PRINTS_BY_RANK = {
    "lightning.fabric.utilities.rank_zero": "RANK",
    "lightning_fabric.utilities.rank_zero": "RANK",
    "torchmetrics.utilities.prints": "LOCAL_RANK",
}
"""Modules that keep this variable from their import, in `rank_zero_only.rank`, to print and write
in one process. Without a place a process is not the first; it is given its rank with its place."""
NOT_FIRST = "1"
READERS = frozenset({"os", "collections.abc"})
"""Modules between the code that reads `os.environ` and its methods."""

_join: Callable[[], Any] | None = None


class _Environ(os._Environ):  # type: ignore[type-arg]
    """`os.environ` of a process without a place; to join makes it a plain one, also in here."""

    def __getitem__(self, key: str) -> str:
        if key in PLACE:
            if asks_to_print():
                return NOT_FIRST
            _join_first()
        return str(os._Environ.__getitem__(self, key))

    def __contains__(self, key: object) -> bool:
        if key in PLACE:
            if asks_to_print():
                return True
            _join_first()
        return os._Environ.__contains__(self, key)


def asks_to_print() -> bool:
    """Return whether one of `PRINTS_BY_RANK` reads `os.environ`, whose method calls this."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") in READERS:
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") in PRINTS_BY_RANK


def set_printing_rank(place: Mapping[str, str]) -> None:
    """Give `PRINTS_BY_RANK` the rank of this process's place; empty before it has one."""
    for name, variable in PRINTS_BY_RANK.items():
        decorator = getattr(sys.modules.get(name), "rank_zero_only", None)
        if decorator is not None:
            decorator.rank = int(place.get(variable, NOT_FIRST))


def _join_first() -> None:
    if _join is not None:
        _join()


@contextmanager
def joining_on_demand(join: Callable[[], Any]) -> Iterator[Callable[[], None]]:
    """Have torch.distributed and the environment call `join` before they answer for a group.

    Yields a function that puts everything back, which `join` calls first; done at the end in any
    case.
    """
    global _join
    places: list[tuple[Any, str, Any]] = []
    world = type(private_names().world)
    plain, asked, real = os.environ.__class__, world.default_pg, distributed_c10d.is_initialized

    def put(owner: Any, name: str, value: Any) -> None:
        places.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def default_pg(self: Any) -> Any:
        if threading.current_thread() is threading.main_thread():  # Others cannot join.
            _join_first()
        return asked.fget(self)

    def is_initialized() -> bool:
        # Modules that are imported meanwhile keep it.
        return _join is not None or real()

    def undo() -> None:
        global _join
        _join = None
        os.environ.__class__ = plain
        while places:
            setattr(*places.pop())

    put(world, "default_pg", property(default_pg, asked.fset))
    for owner in holders_of("is_initialized"):
        put(owner, "is_initialized", is_initialized)
    os.environ.__class__ = _Environ
    _join = join
    try:
        yield undo
    finally:
        undo()
