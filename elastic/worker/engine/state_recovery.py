"""How a member of a new group comes to the state of the run: from others, from memory, or storage.

All members send each other one table: who they are, how far they have come, what they lack. Nobody
decides: each computes the same from it (`core.policy.recovery`), and sends its state to those that
it is to (`worker.state.transfer`), or receives one.

Rule: state is what a member holds that has trained. Only where none has, or a later group has saved
a newer one, is a snapshot or a checkpoint read, and only where there is none does the run begin. If
some cannot train together, all raise the same error, and none waits for one that has given up.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from elastic.core.policy.cursor import Cursor
from elastic.core.policy.program_points import ProgramPoint, next_program_points
from elastic.core.policy.recovery import (
    PassPosition,
    RunPosition,
    SavedPosition,
    is_outdated,
    plan_transfers,
)
from elastic.core.policy.seeds import derive
from elastic.core.policy.streams import Data, StreamPlan
from elastic.errors import StorageError, UsageError
from elastic.worker.base.spans import span
from elastic.worker.engine.checkpoint_schedule import CheckpointScheduler
from elastic.worker.engine.run_state import RunState
from elastic.worker.group.c10d import default_group, default_store
from elastic.worker.group.member_links import connect, share_bytes
from elastic.worker.group.peer_sockets import PeerAddress
from elastic.worker.state.train_state import State, TrainState
from elastic.worker.state.transfer import transfer

NUMBERS = struct.Struct("<16q")
"""What a member reports of itself, before what it knows of streams of data."""


@dataclass(frozen=True)
class RecoveryResult:
    """Where the members of a group stand once they have met.

    Attributes:
        cursors: of each member, by rank.
        program_points: where each member will run code of its own again, by rank.
        num_bytes: of state that we sent or received.
    """

    cursors: tuple[Cursor, ...]
    program_points: tuple[ProgramPoint, ...]
    num_bytes: int


def catch_up(
    run: RunState,
    checkpoints: CheckpointScheduler,
    in_pass: Callable[[Cursor], PassPosition],
    reach: PeerAddress,
    *,
    put: Callable[[State], None],
) -> RecoveryResult:
    """Find out who is how far, connect directly, and give everyone the same state.

    Args:
        run: what we have of it.
        checkpoints: reads what was saved.
        in_pass: returns where in the pass the loop is with the state of a cursor.
        reach: how the others reach us.
        put: makes a state ours.

    Raises:
        RuntimeError: the group broke.
        UsageError: members cannot train together; all of them raise it.
        StorageError: there are checkpoints, and none can be read.
    """
    group = default_group()
    connect(group, default_store(), reach)

    def meet(*, begins: bool) -> list[MemberInfo]:
        """Return everyone's entry of the table, by rank."""
        where = in_pass(run.cursor)  # A state that was read may be of another step.
        position = run.position(where, checkpoints.newest_saved(), checkpoints.held())
        if begins and checkpoints.is_sharded:
            # Of these none could send the beginning: each has made its own rows.
            position = replace(position, has_state=True)
        mine = MemberInfo(
            position,
            _model_print(run.objects),
            _data_print(run.data),
            torch.get_num_threads(),
            run.objects.reduced_print(),
            checkpoints.memory(),
            run.streams.sent(run.cursor),
        )
        members = report_all(group, mine)
        check_alike(members)
        return members

    members = meet(begins=False)
    checkpoints.agree_on_memory([one.memory for one in members])
    positions = [one.position for one in members]
    nobody_has_state = not any(one.has_state for one in positions)
    if nobody_has_state or is_outdated(positions):
        try:
            saved = checkpoints.restore(group)
        except StorageError:
            if nobody_has_state:
                raise
            saved = None  # All raise it alike: the newest that some have will do.
        if saved is not None:
            put(saved)
        members = meet(begins=True)
        positions = [one.position for one in members]
    plan = plan_transfers(positions).value
    with span("transfer"):
        state, num_bytes = transfer(group, plan, checkpoints.take)
    sender = plan.sender_to(group.rank())
    if sender is not None and members[sender].threads != torch.get_num_threads():
        torch.set_num_threads(members[sender].threads)
    run.streams.receive(one.streams for one in members)
    if state is not None:
        put(state)
    if min(plan.cursors) < max(plan.cursors):  # The same on all members.
        checkpoints.agree_on_number(group)
    return RecoveryResult(plan.cursors, next_program_points(positions, plan), num_bytes)


@dataclass(frozen=True)
class MemberInfo:
    """What a member reports of itself when a group meets.

    Attributes:
        model: fingerprint of what it prepared, 0 <= it < 2**63.
        data: fingerprint of its data and batch, 0 if it does not know them yet.
        threads: CPU threads of one operation; their number can change the last bit of a sum.
        reduced: fingerprint of the parameters whose gradients it reduces.
        memory: which memory of its node it has for snapshots, 0 for none.
        streams: what it knows of streams of data, see `StreamBook.sent`.
    """

    position: RunPosition
    model: int
    data: int
    threads: int
    reduced: int = 0
    memory: int = 0
    streams: bytes = b""


def report_all(group: Any, mine: MemberInfo) -> list[MemberInfo]:
    """Exchange what everyone reports of itself; returns it by rank.

    Raises:
        RuntimeError: the group broke.
    """
    position = mine.position
    row = NUMBERS.pack(
        position.has_state,
        position.cursor.epoch,
        position.cursor.step,
        position.epoch_steps,
        position.in_pass,
        position.generation,
        position.committed,
        *position.saved,
        position.held,
        position.committed_in,
        mine.model,
        mine.data,
        mine.threads,
        mine.reduced,
        mine.memory,
    )
    members = []
    for text in share_bytes(group, row + mine.streams):
        has_state, epoch, step, epoch_steps, in_pass, generation, *others = NUMBERS.unpack_from(
            text
        )
        committed, taken_in, saved, held, committed_in, *rest = others
        model, data, threads, reduced, memory = rest
        position = RunPosition(
            has_state=bool(has_state),
            cursor=Cursor(epoch, step),
            epoch_steps=epoch_steps,
            in_pass=PassPosition(in_pass),
            generation=generation,
            committed=committed,
            saved=SavedPosition(taken_in, saved),
            held=held,
            committed_in=committed_in,
        )
        members.append(
            MemberInfo(position, model, data, threads, reduced, memory, text[NUMBERS.size :])
        )
    return members


def _model_print(state: TrainState) -> int:
    """Return a number that is equal where the same parameters were prepared, frozen or not."""
    parts = []
    for unit in state.units(every=True).values():
        for name, parameter in unit.parameters:
            parts += [zlib.crc32(name.encode()), *parameter.shape, *parameter.stride()]
    return derive(len(parts), *parts)


def _data_print(data: Data | None) -> int:
    """Return a number that is equal where the same data is cut in the same way; 0 for unknown."""
    if data is None:
        return 0
    if isinstance(data, StreamPlan):
        return data.fingerprint
    flags = int(data.shuffle) + 2 * int(data.drop_last)
    sizes = (data.num_samples, data.micro_batch_size, data.num_micro_batches)
    return derive(data.seed, *sizes, flags) | 1


def check_alike(members: Sequence[MemberInfo]) -> None:
    """Refuse members that cannot train together.

    Raises:
        UsageError: they have prepared different parameters or data.
    """
    for rank, one in enumerate(members):
        if one.model != members[0].model:
            raise UsageError(
                f"rank {rank} has prepared other parameters than rank 0 (their names, shapes "
                f"or strides differ): every worker must build the same model from the same config"
            )
    # Ahead of a pass some have unfrozen what others are still to; within it all have.
    within: dict[Cursor, tuple[int, int]] = {}
    for rank, one in enumerate(members):
        if one.position.in_pass is PassPosition.NO:
            continue
        first, reduced = within.setdefault(one.position.cursor, (rank, one.reduced))
        if one.reduced != reduced:
            raise UsageError(
                f"rank {rank} and rank {first} began epoch {one.position.cursor.epoch} with other "
                f"frozen parameters: whether requires_grad is set must not depend on a loss, or on "
                f"anything else that a rank has for itself; let it depend on the epoch, or on "
                f"train.get_logged()"
            )
    # Epochs may have loaders of their own, and a member may be in the next epoch already.
    by_epoch: dict[int, dict[int, int]] = {}
    for rank, one in enumerate(members):
        if one.data:
            by_epoch.setdefault(one.position.cursor.epoch, {})[one.data] = rank
    known = max(by_epoch.values(), key=len, default={})
    if len(known) > 1:
        raise UsageError(
            f"ranks {', '.join(map(str, sorted(known.values())))} have data sets of different "
            f"length, or other batch sizes, seeds or shuffling: every worker must prepare the same "
            f"loader from the same data"
        )
