"""A process that is in each group of its job without any step, as feeders are.

Rule: it has no state, and serves others meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from math import inf
from typing import NoReturn

from elastic.errors import GroupError, StorageError
from elastic.worker.base.mailboxes import WAIT_SLICE_S
from elastic.worker.engine.outcome import is_group_broken
from elastic.worker.engine.step_engine import StepEngine
from elastic.worker.group.c10d import default_group, default_store
from elastic.worker.group.member_links import connect, share_bytes

log = logging.getLogger(__name__)

AGAIN_S = 5.0
"""Until what storage did not take is written again."""


def stay(engine: StepEngine, mine: bytes, entered: Callable[[tuple[bytes, ...]], None]) -> NoReturn:
    """Be in each group of the job until the process ends.

    Args:
        engine: of this call of the train function.
        mine: what the other members are to know of this one; not empty.
        entered: called on rank 0 in each group, with everyone's, by rank; again after a while if
            storage fails, since that is no reason to end.
    """
    groups = engine.groups
    groups.declare(in_place=True)
    groups.defer(True)
    if engine.context.join is not None:
        engine.context.join()
    while True:
        generation, members, error = engine.context.generation, None, None
        try:
            with engine.context.activity.waiting():
                connect(default_group(), default_store(), engine.context.reach)
                members = share_bytes(default_group(), mine)
        except (RuntimeError, GroupError) as failure:
            if not (engine.must_leave() or is_group_broken(failure)):
                raise
            error = None if engine.must_leave() else failure
        engine.context.activity.reset()  # From here on it makes no steps that it is judged by.
        is_asked = members is not None and _attend(engine, members, entered)
        groups.rejoin(generation, error, is_asked)


def _attend(
    engine: StepEngine,
    members: tuple[bytes, ...],
    entered: Callable[[tuple[bytes, ...]], None],
) -> bool:
    """Be in this group until it is over; return whether we were asked to leave it."""
    context = engine.context
    write_at = 0.0 if context.world_rank == 0 else inf
    while not engine.must_leave():
        if time.monotonic() >= write_at:
            try:
                entered(members)
                write_at = inf
            except StorageError as failure:
                log.warning("not_written pause_s=%.0f error=%r", AGAIN_S, str(failure))
                write_at = time.monotonic() + AGAIN_S
        time.sleep(WAIT_SLICE_S)
        if context.link.leave_request(context.generation) is not None:
            return True
    return False
