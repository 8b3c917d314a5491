"""How a member of a new group comes to the state of the run: from others, from memory, or storage.

Rule: state is what a member holds that has trained. Only where none has, or a later group has saved
a newer one, is a snapshot or a checkpoint read, and only where there is none does the run begin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from elastic.core.policy.cursor import Cursor
from elastic.core.policy.recovery import PassPosition
from elastic.errors import StorageError
from elastic.worker.engine.checkpoint_schedule import CheckpointScheduler
from elastic.worker.engine.group_sync import SyncResult, synchronize
from elastic.worker.engine.run_state import RunState
from elastic.worker.group.c10d import default_group
from elastic.worker.group.peer_sockets import PeerAddress
from elastic.worker.reduce.reducer import OptimizerUnit
from elastic.worker.state.train_state import State


def catch_up(
    run: RunState,
    checkpoints: CheckpointScheduler,
    in_pass: Callable[[Cursor], PassPosition],
    units: Sequence[OptimizerUnit],
    reach: PeerAddress,
    *,
    put: Callable[[State], None],
) -> SyncResult:
    """Find out who is how far, and give everyone the same state.

    Args:
        run: what we have of it.
        checkpoints: reads what was saved.
        in_pass: returns where in the pass the loop is with the state of a cursor.
        units: the parameters that we have prepared.
        reach: how the others reach us.
        put: makes a state ours.

    Raises:
        RuntimeError: the group broke.
        UsageError: members cannot train together.
        StorageError: there are checkpoints, and none can be read.
    """
    group = default_group()

    def sync(begins: bool) -> SyncResult:
        where = in_pass(run.cursor)  # A state that was read may be of another step.
        here = run.position(where, checkpoints.newest_saved(), checkpoints.held())
        if begins and checkpoints.is_sharded:
            # Of these none could send the beginning: each has made its own rows.
            here = replace(here, has_state=True)
        return synchronize(
            group,
            here,
            units,
            run.data,
            checkpoints.take,
            reach,
            begins=begins,
            shared=run.streams.sent(run.cursor),
            memory=checkpoints.memory(),
        )

    synced = sync(False)
    checkpoints.agree_on_memory(synced.memories)
    if synced.nobody_has_state or synced.is_outdated:
        try:
            saved = checkpoints.restore(group)
        except StorageError:
            if synced.nobody_has_state:
                raise
            saved = None  # All raise it alike: the newest that some have will do.
        if saved is not None:
            put(saved)
        synced = sync(True)
    run.streams.receive(synced.shared)
    if synced.state is not None:
        put(synced.state)
    if min(synced.cursors) < max(synced.cursors):  # The same on all members.
        checkpoints.agree_on_number(group)
    return synced
