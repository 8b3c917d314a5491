"""Transfers of training state between the members of a newly formed group.

Rule: every member decides from the same table, so that no further communication is needed. The most
advanced members have the state of the run; all others, and new members, receive it. Members differ
by at most one step: no member commits a step without the whole group. Only a group without anybody
of the one that came furthest may be behind what was saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from elastic.core.policy.cursor import Cursor
from elastic.core.policy.decision import Decision
from elastic.core.world import NO_GENERATION, Generation


class SavedPosition(NamedTuple):
    """An automatic checkpoint, or a copy of a snapshot.

    Attributes:
        generation: of the group that took it, 0 for none.
        steps: committed in the run when it was taken.
    """

    generation: Generation = NO_GENERATION
    steps: int = 0


@dataclass(frozen=True)
class RunPosition:
    """The position of one member in the run.

    Attributes:
        has_state: it holds the run's state: it began the run, received it, or loaded it.
        cursor: the next step that it would commit.
        epoch_steps: steps of the cursor's epoch; 0 while unknown, as that of an iterable dataset is
            up to its last step.
        is_inside: it is in a pass over this epoch's data; the code before the pass has run.
        generation: of the newest group whose members had its state.
        committed: steps of the run in its state.
        saved: the newest state that it knows in storage, or on a node without members.
        held: steps of the newest snapshot in its node's memory, -1 for none.
    """

    has_state: bool = False
    cursor: Cursor = field(default_factory=Cursor)
    epoch_steps: int = 0
    is_inside: bool = False
    generation: Generation = NO_GENERATION
    committed: int = 0
    saved: SavedPosition = field(default_factory=SavedPosition)
    held: int = -1


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

    Args:
        positions: by rank; at least one has state.
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

    Args:
        positions: by rank; at least one.
    """
    steps = max(position.epoch_steps for position in positions)

    def weights(position: RunPosition) -> tuple[bool, Cursor]:
        cursor = position.cursor
        if steps and cursor.step >= steps and position.is_inside:
            cursor = Cursor(cursor.epoch + 1, 0)
        return position.has_state, cursor

    best = max(weights(position) for position in positions)
    holders = [rank for rank, one in enumerate(positions) if weights(one) == best]
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


class CodePlace(NamedTuple):
    """A place of the script's own code in the run; places are in the order of the run.

    Attributes:
        cursor: the next step to be committed there.
        is_behind: behind the pass over that epoch.
    """

    cursor: Cursor
    is_behind: bool = False


def next_code_places(
    positions: Sequence[RunPosition], transfers: TransferPlan
) -> tuple[CodePlace, ...]:
    """Return the first place at which each member will run code of its own again, by rank.

    A member inside a pass has run all code at its cursor: it continues with the next step, or
    behind the pass. One that begins, or that receives the state of another epoch, runs the code
    before that epoch's pass.

    Args:
        positions: as given to `plan_transfers`.
        transfers: its result.
    """
    steps = max(position.epoch_steps for position in positions)
    places = []
    for position, cursor in zip(positions, transfers.cursors, strict=True):
        is_inside = position.is_inside and position.cursor.epoch == cursor.epoch
        # While the end is unknown to all, no member is past it.
        has_more = cursor.step < steps or not steps
        if is_inside and has_more:
            places.append(CodePlace(Cursor(cursor.epoch, cursor.step + 1)))
        else:
            places.append(CodePlace(cursor, is_behind=is_inside))
    return tuple(places)
