"""What a training loop does in a step, and what the step's machine has its driver do.

Optimizers are named by numbers that the driver chooses. Where an event carries `is_broken`, the
driver asks once, right before it: the group is over by order, or has lost a member.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Refusal(Enum):
    """Why a call of the user's code cannot work in this phase of a step."""

    STEPPED_TWICE = "an optimizer was asked to step twice in one iteration"
    STEPPED_INSIDE = "an optimizer was asked to step before the step's micro-batches were computed"
    STEPPED_LATE = "an optimizer was asked to step once the step was committed"
    NOT_STEPPED = "an iteration ended in which no optimizer was asked to step"
    STEP_NOT_STEPPED = "a computed step was left without any optimizer's"
    STEP_NOT_COMPUTED = "a step was left whose micro-batches were not computed"
    STEP_RAISED = "an optimizer's step has raised, and the loop went on"


# ------------------------------------------------------------------------------------- events


@dataclass(frozen=True)
class LoopBegan:
    """A loop over epochs begins.

    Attributes:
        num_optimizers: prepared ones; a step is committed once all of them were asked.
    """

    num_optimizers: int


@dataclass(frozen=True)
class MicroBatchOpened:
    """The loop is given the next micro-batch.

    Attributes:
        is_last: it is this rank's last one in the step.
        of_whole_step: the loop is over steps, and computes all of one before it goes on.
    """

    is_last: bool
    of_whole_step: bool


@dataclass(frozen=True)
class MicroBatchComputed:
    """Forward and backward of a micro-batch of a whole step are through."""

    is_broken: bool


@dataclass(frozen=True)
class StepRequested:
    """The user's code calls `optimizer.step()`."""

    optimizer: int
    is_broken: bool


@dataclass(frozen=True)
class StepSkipped:
    """A gradient scaler has left out this optimizer's step, or has called it."""

    optimizer: int
    is_broken: bool


@dataclass(frozen=True)
class GradientsRequested:
    """A gradient scaler needs the gradients that this optimizer would step with."""

    optimizer: int
    is_broken: bool


@dataclass(frozen=True)
class CommitRequested:
    """What was asked until now is all of the step: of several optimizers some may be left out."""


@dataclass(frozen=True)
class EmptyStepRequested:
    """A computed step is to count without any optimizer's."""


@dataclass(frozen=True)
class IterationClosed:
    """The loop asks for more: the user's code for the last micro-batch, or step, is through."""

    is_first: bool
    is_broken: bool


@dataclass(frozen=True)
class GroupBroke:
    """An exchange outside of a step's own has failed, or ranks were found to differ."""


@dataclass(frozen=True)
class GroupLeft:
    """The group of the step that was under way is left."""


@dataclass(frozen=True)
class StepReceived:
    """The others have committed the step that we computed, and have sent us their state."""


@dataclass(frozen=True)
class PassLeft:
    """The loop over micro-batches, or steps, is left."""


# ------------------------------------------------------------------------------------- replies


@dataclass(frozen=True)
class GradientsSettled:
    """The reply to `SettleGradients`.

    Attributes:
        request: what the gradients were needed for.
        is_whole: they are of the whole step; if not, the group broke on the way.
    """

    request: StepRequested | StepSkipped | GradientsRequested
    is_whole: bool


@dataclass(frozen=True)
class StepSettled:
    """The reply to `SettleStep`: whether all that needs other ranks is done."""

    is_whole: bool


@dataclass(frozen=True)
class StepCommitted:
    """The reply to `Commit`: whether the weights have changed."""

    is_done: bool


StepEvent = (
    LoopBegan
    | MicroBatchOpened
    | MicroBatchComputed
    | StepRequested
    | StepSkipped
    | GradientsRequested
    | CommitRequested
    | EmptyStepRequested
    | IterationClosed
    | GroupBroke
    | GroupLeft
    | StepReceived
    | PassLeft
    | GradientsSettled
    | StepSettled
    | StepCommitted
)


# ------------------------------------------------------------------------------------- effects


@dataclass(frozen=True)
class SettleGradients:
    """Wait for the exchange of these gradients; reply by `GradientsSettled`."""

    request: StepRequested | StepSkipped | GradientsRequested


@dataclass(frozen=True)
class SettleStep:
    """Do all of the step that needs other ranks; reply by `StepSettled`."""


@dataclass(frozen=True)
class Commit:
    """Change the weights; reply by `StepCommitted`.

    Attributes:
        is_settled: what needs other ranks is done; if not, it is part of the commit.
    """

    is_settled: bool


@dataclass(frozen=True)
class CheckRates:
    """Refuse a learning rate that differs from the one in this step's earlier micro-batches."""

    optimizer: int


@dataclass(frozen=True)
class TakeGradients:
    """What backward gives this optimizer from here on is not of this micro-batch."""

    optimizer: int


@dataclass(frozen=True)
class KeepStep:
    """Remember the optimizer's call; it is done with the commit."""

    optimizer: int


@dataclass(frozen=True)
class HoldGradients:
    """Put gradients away until the commit: other optimizers of the step are still to be asked."""

    optimizer: int


@dataclass(frozen=True)
class Abandon:
    """The step is void: gradients count for nothing, buffers are put back."""


@dataclass(frozen=True)
class CloseStep:
    """The user's code for a committed step is through."""


@dataclass(frozen=True)
class CloseReceived:
    """The user's code for a step that others have committed is through."""


@dataclass(frozen=True)
class Refuse:
    """Raise what explains this to the user.

    Attributes:
        optimizer: whose call it was, -1 if it was none's.
    """

    reason: Refusal
    optimizer: int = -1


StepEffect = (
    SettleGradients
    | SettleStep
    | Commit
    | CheckRates
    | TakeGradients
    | KeepStep
    | HoldGradients
    | Abandon
    | CloseStep
    | CloseReceived
    | Refuse
)
