"""Transfers of training state between the members of a newly formed group.

Rule: every member decides from the same table, so that no further communication is needed. The most
advanced members have the state of the run; all others, and new members, receive it.

Members differ by at most one step: each commits a step once it has what it needs from the whole
group (`worker.reduce.commit_gate` says what), and the next one needs all of them again. So a step
in which a member is killed counts if one of those that are left has committed it: the others
receive its state. If none has, all do it again. A saved state can be newer than every member's only
if no member was in the group that got furthest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from elastic.core.facts import NO_GENERATION, Generation
from elastic.core.policy.cursor import Cursor
from elastic.core.policy.decision import Decision


class SavedPosition(NamedTuple):
    """An automatic checkpoint, or a copy of a snapshot.

    Attributes:
        generation: of the group that took it, 0 for none.
        steps: committed in the run when it was taken.
    """

    generation: Generation = NO_GENERATION
    steps: int = 0


class PassPosition(IntEnum):
    """Where in the pass over its epoch's data a member meets the others.

    NO: in none; the code before the pass is still to run. ITERATIONS: in a loop over micro-batches,
    whose code at the member's cursor has run. BETWEEN_STEPS: in a loop over whole steps, before the
    code with which the step at its cursor begins. WITHIN_STEP: behind that code.
    """

    NO = 0
    ITERATIONS = 1
    BETWEEN_STEPS = 2
    WITHIN_STEP = 3


@dataclass(frozen=True)
class RunPosition:
    """The position of one member in the run.

    Attributes:
        has_state: it holds the run's state: it began the run, received it, or loaded it.
        cursor: the next step that it would commit.
        epoch_steps: steps of the cursor's epoch; 0 while unknown, as that of an iterable dataset is
            up to its last step.
        in_pass: where in the pass over this epoch's data it is.
        generation: of the newest group whose members had its state.
        committed: steps of the run in its state.
        saved: the newest state that it knows in storage, or on a node without members.
        held: steps of the newest snapshot in its node's memory, -1 for none.
        committed_in: the group in which the newest step in its state was committed, 0 for none.
    """

    has_state: bool = False
    cursor: Cursor = field(default_factory=Cursor)
    epoch_steps: int = 0
    in_pass: PassPosition = PassPosition.NO
    generation: Generation = NO_GENERATION
    committed: int = 0
    saved: SavedPosition = field(default_factory=SavedPosition)
    held: int = -1
    committed_in: Generation = NO_GENERATION

    @property
    def is_inside(self) -> bool:
        """Return whether it is in a pass; the code before that has run."""
        return self.in_pass is not PassPosition.NO


@dataclass(frozen=True)
class TransferPlan:
    """The transfers between members.

    Attributes:
        pairs: (rank that receives, rank that sends), by receiving rank.
        cursors: of each member after the transfers, by rank.
    """

    pairs: tuple[tuple[int, int], ...]
    cursors: tuple[Cursor, ...]

    def receivers_from(self, rank: int) -> tuple[int, ...]:
        return tuple(receiver for receiver, sender in self.pairs if sender == rank)

    def sender_to(self, rank: int) -> int | None:
        """Return the rank that this one receives from, None if it needs nothing."""
        return dict(self.pairs).get(rank)


def is_outdated(positions: Sequence[RunPosition]) -> bool:
    """Return whether a group has saved a newer state than any member has.

    Where all who had the newest state are killed, a group may form without a worker of their nodes,
    and begin with less. The memory of those nodes comes with their next workers, and is newer, in
    whatever group it was taken. What is in storage, or on a node without members, each group has
    known when it formed: only what a later one has saved is news. What could not be read is not
    tried again in each group.
    """
    having = [position for position in positions if position.has_state]
    generation = max(position.generation for position in having)
    committed = max(position.committed for position in having)
    return any(
        position.held > committed
        or (position.saved.generation > generation and position.saved.steps > committed)
        for position in positions
    )


def plan_transfers(positions: Sequence[RunPosition]) -> Decision[TransferPlan]:
    """Decide which members send the state to which others.

    If no member has state yet, the run begins: all members get rank 0's initial weights.

    A member after the last step of an epoch and one before the first step of the next have the
    same weights, and nothing is sent between them: the former runs the code between the epochs by
    itself. Receivers receive from the latter, so that this code is not run twice. So does a member
    whose train function was called again after the last step: it would run that code alone, and its
    collectives would wait for members that are through with it.

    A member that was away may have committed a step that the others have done again, in a group of
    their own. Both states are right, and need not have the same bits: without "bitwise" the order
    of addition follows the group. It receives theirs.
    """
    steps = max(position.epoch_steps for position in positions)

    def progress_key(position: RunPosition) -> tuple[bool, Cursor, Generation]:
        cursor = position.cursor
        if steps and cursor.step >= steps and position.is_inside:
            cursor = Cursor(cursor.epoch + 1, 0)
        return position.has_state, cursor, position.committed_in

    best = max(progress_key(position) for position in positions)
    holders = [rank for rank, one in enumerate(positions) if progress_key(one) == best]
    if not best[0]:
        holders = [0]
    furthest = max(positions[rank].cursor for rank in holders)
    senders = [rank for rank in holders if positions[rank].cursor == furthest]
    behind = [rank for rank in range(len(positions)) if rank not in holders]
    pairs = tuple((rank, senders[index % len(senders)]) for index, rank in enumerate(behind))
    cursors = tuple(
        position.cursor if rank in holders else furthest for rank, position in enumerate(positions)
    )
    where = f"epoch {furthest.epoch} step {furthest.step}"
    if not pairs:
        return Decision(
            TransferPlan(pairs, cursors), f"all {len(positions)} members are at {where}"
        )
    names = ", ".join(f"{rank} from {sender}" for rank, sender in pairs)
    return Decision(TransferPlan(pairs, cursors), f"ranks receive the state of {where}: {names}")
