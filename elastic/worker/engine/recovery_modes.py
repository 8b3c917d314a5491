"""How a training loop comes from one group into the next: in place, or by being called again.

Rule: the loop knows no more of the worker's main loop than `GroupProvider`, and the main loop no
more of the loop's state than `ResumeState`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from elastic.core.facts import NO_GENERATION, Generation
from elastic.core.policy.cursor import NO_STEP, Cursor
from elastic.core.policy.program_points import ProgramPoint
from elastic.worker.base.interrupt import GroupChanged
from elastic.worker.data.stream_book import StreamBook
from elastic.worker.engine.logbook import Logbook
from elastic.worker.state.train_state import State


class ReenterRequested(GroupChanged):
    """The train function must be called again in the group that is formed; state is kept for it."""


class GroupProvider(Protocol):
    """Where groups come from: the worker's main loop, or nowhere in a run of one process."""

    def rejoin(self, generation: int, error: BaseException | None, at_boundary: bool) -> Any:
        """Leave a group that is over, and have `StepEngine.enter` called in the next one.

        `error` came out of it, None if it was left by order; `at_boundary` all members leave it.
        """
        ...

    def must_leave(self, generation: int) -> bool:
        """Return whether we are ordered to leave this group."""
        ...

    def is_group_over(self, generation: int) -> bool:
        """Return whether this group is over by order, or has lost a member or a communicator."""
        ...

    def has_failed(self, generation: int) -> bool:
        """Return whether a collective of this group may have failed in the script's code."""
        ...

    def defer(self, on: bool) -> None:
        """While on, do not interrupt the train function for a new group: it will ask."""
        ...

    def declare(self, *, in_place: bool) -> None:
        """Report whether the train function stays in its loop when the group changes."""
        ...


@dataclass(frozen=True)
class ResumeState:
    """What a call of the train function leaves to the next one in this process.

    Attributes:
        generation: the group that has agreed on it already, 0 if none has.
        program_points: in this group, where each member runs code of its own again, by rank.
        steps: committed in the run.
        streams: what is known of a dataset that is read as streams.
        calls_late: the loop calls collectives of its own after its optimizers have stepped.
        begun: the last epoch whose code before the pass has run, -1 if none.
        begun_step: the last whole step whose code before its micro-batches has run.
        cut: how the data is cut, empty if unknown.
        agreed_in: the newest group whose members had the run's state with this one, 0 for none.
        committed_in: the group in which the newest step in it was committed, 0 for none.
    """

    state: State
    cursor: Cursor
    logbook: Logbook
    generation: int = 0
    program_points: tuple[ProgramPoint, ...] = ()
    steps: int = 0
    streams: StreamBook = field(default_factory=StreamBook)
    calls_late: bool = False
    begun: int = -1
    begun_step: Cursor = NO_STEP
    cut: dict[str, Any] = field(default_factory=dict)
    agreed_in: Generation = NO_GENERATION
    committed_in: Generation = NO_GENERATION
