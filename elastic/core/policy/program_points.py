"""Where each member's script runs code of its own next, once a group has formed.

Rule: every member computes all of them from the same table.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from elastic.core.policy.cursor import Cursor
from elastic.core.policy.recovery import PassPosition, RunPosition, TransferPlan


class CodePart(str, Enum):
    """Which of the script's code at a cursor; in the order of the run, which is that of the values.

    BETWEEN: behind the step before, or before the pass. BEGIN: with which a whole step begins. END:
    behind the pass.
    """

    BETWEEN = ""
    BEGIN = "begin"
    END = "end"


class ProgramPoint(NamedTuple):
    """A point of the script's own code in the run; points are in the order of the run.

    Attributes:
        cursor: the next step to be committed there; before a pass its first, also for a member that
            comes in the middle of it.
        part: of the code there.
    """

    cursor: Cursor
    part: CodePart = CodePart.BETWEEN


def next_program_points(
    positions: Sequence[RunPosition], transfers: TransferPlan
) -> tuple[ProgramPoint, ...]:
    """Return the first point at which each member will run code of its own again, by rank.

    A member in a loop over micro-batches has run all code at its cursor: it continues with the next
    step, or behind the pass. One in a loop over whole steps has run that with which the step at its
    cursor begins only within that step, and not if it receives the state of another step. One that
    begins, or that receives the state of another epoch, runs the code before that epoch's pass. So
    does one within a step that receives the state of before that step's code: it is called again.
    """
    steps = max(position.epoch_steps for position in positions)
    points = []
    for rank, (position, cursor) in enumerate(zip(positions, transfers.cursors, strict=True)):
        in_step = position.in_pass is PassPosition.WITHIN_STEP and position.cursor == cursor
        sender = transfers.sender_to(rank)
        is_sent_back = (
            in_step
            and sender is not None
            and positions[sender].in_pass is not PassPosition.WITHIN_STEP
        )
        if is_sent_back or not position.is_inside or position.cursor.epoch != cursor.epoch:
            point = ProgramPoint(Cursor(cursor.epoch, 0))
        elif steps and cursor.step >= steps:  # While the end is unknown to all, none is past it.
            point = ProgramPoint(cursor, CodePart.END)
        elif in_step or position.in_pass is PassPosition.ITERATIONS:
            point = ProgramPoint(Cursor(cursor.epoch, cursor.step + 1))
        else:
            point = ProgramPoint(cursor, CodePart.BEGIN)
        points.append(point)
    return tuple(points)
