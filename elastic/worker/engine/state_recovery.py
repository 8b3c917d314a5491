"""How a member of a new group comes to the state of the run: from others, from memory, or storage.

Rule: state is what a member holds that has trained. Only where none has, or a later group has saved
a newer one, is a snapshot or a checkpoint read, and only where there is none does the run begin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from elastic.core.policy.cursor import Cursor
from elastic.core.policy.recovery import RunPosition
from elastic.core.policy.streams import Data
from elastic.errors import StorageError
from elastic.worker.engine.checkpoint_schedule import CheckpointScheduler
from elastic.worker.engine.group_sync import SyncResult, synchronize
from elastic.worker.group.c10d import default_group
from elastic.worker.group.peer_sockets import PeerAddress
from elastic.worker.reduce.reducer import OptimizerUnit
from elastic.worker.state.train_state import State


def catch_up(
    checkpoints: CheckpointScheduler,
    position: Callable[[], RunPosition],
    data: Data | None,
    units: Sequence[OptimizerUnit],
    reach: PeerAddress,
    *,
    put: Callable[[State], Cursor],
) -> tuple[SyncResult, Cursor]:
    """Find out who is how far, and give everyone the same state.

    Args:
        checkpoints: knows our state, and reads what was saved.
        position: returns how far we are.
        data: how the data is cut, None while that is not known.
        units: the parameters that we have prepared.
        reach: how the others reach us.
        put: makes a state ours, and returns its place.

    Returns:
        What came of it, and where we stand now.

    Raises:
        RuntimeError: the group broke.
        UsageError: members cannot train together.
        StorageError: there are checkpoints, and none can be read.
    """
    group, here = default_group(), position()

    def meet_again(begins: bool) -> SyncResult:
        return synchronize(
            group,
            here,
            units,
            data,
            lambda: checkpoints.take(here.cursor, data),
            reach,
            begins=begins,
            shared=checkpoints.known_streams(here.cursor),
            memory=checkpoints.memory(),
        )

    met = meet_again(False)
    checkpoints.agree_on_memory(met.memories)
    if met.nobody_has_state or met.is_outdated:
        try:
            saved = checkpoints.restore(group, here.cursor)
        except StorageError:
            if met.nobody_has_state:
                raise
            saved = None  # All raise it alike: the newest that some have will do.
        if saved is not None:
            put(saved)
        # Of a sharded model none could send the beginning: each has made its own rows.
        here = position()
        here = replace(here, has_state=here.has_state or checkpoints.is_sharded)
        met = meet_again(True)
    checkpoints.learn_streams(met.shared)
    cursor = here.cursor if met.state is None else put(met.state)
    if min(met.cursors) < max(met.cursors):  # The same on all members.
        checkpoints.agree_on_number(group)
    return met, cursor
