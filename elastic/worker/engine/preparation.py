"""What a train function hands over before its loop: the objects that the run's state consists of.

Rule: all of it is there before the loop begins, in the same order on every worker.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from elastic.worker.engine import usage_errors
from elastic.worker.engine.engine_parts import RunningLoop
from elastic.worker.engine.prepared_optimizers import EngineSteps, adopt_optimizer, adopt_scheduler
from elastic.worker.state.train_state import Stateful, TrainState


class ObjectRegistry:
    """The part of the step engine that takes objects.

    Attributes:
        state: the prepared and registered objects.
    """

    def __init__(self) -> None:
        self.state = TrainState()
        self._loop: RunningLoop | None = None

    @property
    def has_begun(self) -> bool:
        """Return whether the loop over epochs runs, so that nothing is taken any more."""
        return self._loop is not None

    def add_model(self, model: nn.Module) -> None:
        """Let a model's parameters and buffers be part of the run's state."""
        usage_errors.check_early("prepare_model", self.has_begun)
        self.state.models.append(model)

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer step once for each step; UsageError if it is prepared already."""
        usage_errors.check_early("prepare_optimizer", self.has_begun)
        adopt_optimizer(optimizer, cast("EngineSteps", self))
        self.state.optimizers.append(optimizer)

    def add_scheduler(self, scheduler: Any) -> None:
        """Let a scheduler step once for each step or epoch; UsageError if it is none."""
        usage_errors.check_early("prepare_scheduler", self.has_begun)
        adopt_scheduler(scheduler, cast("EngineSteps", self))
        self.state.schedulers.append(scheduler)

    def add_scaler(self, scaler: Stateful) -> None:
        """Let a scaler's state be part of the run's; known at its first use."""
        self.state.add_scaler(scaler)

    def register(self, name: str, thing: Stateful, *, is_own: bool = False) -> None:
        """Let an object of the user's own be part of the run's state; see `TrainState.register`."""
        usage_errors.check_early("train.register", self.has_begun)
        self.state.register(name, thing, is_own=is_own)
