"""The parts of the step engine's state, each as long-lived as what it is named after.

Rule: where a group, a loop or an iteration begins anew, the part is replaced as a whole.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

import torch

from elastic.core.policy.cursor import Cursor
from elastic.core.policy.program_points import CodePart, ProgramPoint
from elastic.core.policy.recovery import PassPosition
from elastic.errors import UsageError
from elastic.worker.engine.logbook import PointCounter
from elastic.worker.engine.loop_guard import LoopGuard
from elastic.worker.engine.step_values import StepValues
from elastic.worker.reduce.reducer import OptimizerUnit, Reducer
from elastic.worker.reduce.sharded_reduce import Padding, ShardedReducer
from elastic.worker.reduce.step_share import MicroBatch, StepShare, WeighedShare


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What the user chose for one call of the train function.

    Attributes:
        seed: of shuffling, unless the loader brings its own.
        consistency: how gradients are added up, as in `RunConfig`.
        recovery: how this worker comes into the next group, as in `FailureConfig`.
    """

    seed: int = 0
    consistency: str = "bitwise"
    recovery: str = "auto"
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def with_those_of(self, options: Mapping[str, Any]) -> EngineOptions:
        """Return these, with what the library passed along with the train function."""
        return replace(
            self,
            consistency=str(options.get("consistency", self.consistency)),
            recovery=str(options.get("recovery", self.recovery)),
            metadata=dict(options.get("metadata", self.metadata)),
        )

    @property
    def is_in_place(self) -> bool:
        """Return whether the loop goes on in the next group, without being called again."""
        return self.recovery in ("auto", "in_place")


@dataclass(frozen=True)
class RunningLoop:
    """What is there while a loop over epochs runs, from its beginning to its end.

    Attributes:
        units: by the id of their optimizer.
        guard: refuses what the loop must not do.
        patches: of torch, undone at the end.
    """

    reducer: Reducer | ShardedReducer
    padding: Padding
    units: dict[int, OptimizerUnit]
    guard: LoopGuard
    patches: ExitStack

    def parameters(self) -> Iterator[torch.Tensor]:
        for unit in self.units.values():
            for _, parameter in unit.parameters:
                yield parameter

    def show_zeros(self) -> None:
        """Let loops read gradients of a step that others have done."""
        for parameter in self.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def close(self) -> None:
        self.reducer.close()
        self.patches.close()


class PassPhase(Enum):
    """Where the script's code is with the pass over an epoch's data.

    LEFT: it has left the pass before its end. PASSED: all members have committed its last step.
    """

    AHEAD = auto()
    OPEN = auto()
    LEFT = auto()
    PASSED = auto()


@dataclass
class EpochLoop:
    """How far the loop over epochs has come.

    Attributes:
        total: epochs of the whole run.
        epoch: whose code runs, None outside of the loop.
        has_head: the state that we were given already holds what the script's code between the head
            of this epoch and its pass does; what that code does here is undone before the pass.
        pass_phase: where that code is with the pass over its data.
        by_steps: its data is read as whole steps, see `train.steps`.
        begun: the step whose micro-batches were asked for last in such a loop, until it is left.
        ends: the step at hand is the epoch's last one.
        open_pass: the pass over the data that was opened last, if it is alive.
        cut: what is wrong with where a pass was left, None if nothing is.
        others_asked_s: when it was asked last whether others are in it, in which we are not yet.
    """

    total: int = 0
    epoch: int | None = None
    has_head: bool = False
    pass_phase: PassPhase = PassPhase.AHEAD
    by_steps: bool = False
    begun: Cursor | None = None
    ends: bool = False
    open_pass: weakref.ref[Generator[Any, None, None]] | None = None
    cut: UsageError | None = None
    is_over: bool = False
    others_asked_s: float = 0.0

    @property
    def is_behind(self) -> bool:
        """Return whether the code behind the pass runs."""
        return self.epoch is not None and self.pass_phase is PassPhase.PASSED

    def in_pass(self, cursor: Cursor) -> PassPosition:
        """Return where in the pass a member meets the others with the state of this cursor."""
        if self.epoch != cursor.epoch:
            return PassPosition.NO
        if not self.by_steps:
            return PassPosition.ITERATIONS
        return PassPosition.WITHIN_STEP if self.begun == cursor else PassPosition.BETWEEN_STEPS

    def program_point(self, cursor: Cursor, *, in_step: bool) -> ProgramPoint:
        """Return the point of the script's code; `in_step` is behind a step's first micro-batch."""
        if self.pass_phase is PassPhase.AHEAD:
            return ProgramPoint(Cursor(cursor.epoch, 0))
        if self.pass_phase in (PassPhase.PASSED, PassPhase.LEFT):
            return ProgramPoint(cursor, CodePart.END)
        begins = self.pass_phase is PassPhase.OPEN and self.by_steps and not in_step
        return ProgramPoint(cursor, CodePart.BEGIN if begins else CodePart.BETWEEN)

    def close_pass(self) -> None:
        """End a pass that the script still holds and reads no more, as `break` ends others."""
        open_pass = self.open_pass() if self.open_pass is not None else None
        if open_pass is not None:
            open_pass.close()


@dataclass(frozen=True)
class OptimizerCall:
    """A call of an optimizer's `step`.

    Attributes:
        real: what the optimizer's own class does in it.
    """

    optimizer: torch.optim.Optimizer
    real: Callable[[], Any]


@dataclass
class Iteration:
    """One iteration of the loop over micro-batches.

    Attributes:
        batch: the micro-batch at hand, None between two.
        share: our part of the step that it belongs to.
        calls: what optimizers that were asked to step in it do, by id.
    """

    batch: MicroBatch | None = None
    share: StepShare | WeighedShare | None = None
    calls: dict[int, OptimizerCall] = field(default_factory=dict)


@dataclass
class PresentGroup:
    """What the engine knows of the group that it is in; the next one begins with nothing of it.

    Attributes:
        program_points: where each member runs code of its own next, by rank.
        reports, evaluations: counts what we have reported and evaluated in it.
        stepped: which optimizers had gradients in its newest step, as bits.
        rates: a print of their learning rates then.
        noted: the step that was reported before its iteration was over, None for none.
        is_leaving: all members leave it at this boundary.
        error: what broke it, None if nothing did, or if the reducer knows.
        reagrees_in_place: ranks differ, as all of them know, and they meet again in it.
    """

    program_points: tuple[ProgramPoint, ...] = ()
    values: StepValues = field(default_factory=lambda: StepValues(None))
    reports: PointCounter = field(default_factory=PointCounter)
    evaluations: PointCounter = field(default_factory=PointCounter)
    stepped: int = 0
    rates: int = 0
    noted: Cursor | None = None
    is_leaving: bool = False
    error: BaseException | None = None
    reagrees_in_place: bool = False

    def next_report(self, here: ProgramPoint) -> tuple[str, int]:
        """Count a report that is made at this point; return its name, and how many vote on it.

        Names are in order as text, too. Members that had come further when this group was formed
        have made this report before.
        """
        number = self.reports.next(here)
        at = here.cursor
        voters = sum(1 for one in self.program_points if one <= here)
        return f"e{at.epoch:05d}-s{at.step:07d}-{here.part.value}{number}", voters
