"""What one iteration of a loop asks for and has to wait: for other optimizers of the same step.

Steps of one global batch all start from the same weights: otherwise what the second optimizer of a
GAN does would depend on how many micro-batches a rank computes.

Rule: what waits is done in the order in which it was asked for, with the gradients and the scale
that it was asked with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch

from elastic.errors import UsageError

Call = Callable[[], Any]
SCALING = ("grad_scale", "found_inf")
"""What a GradScaler leaves on an optimizer that scales by itself, as fused ones do, for one call
of its `step`."""


class PendingOptimizerSteps:
    """The optimizers that were asked to step, and what belongs to the same step."""

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._gradients: dict[int, torch.Tensor | None] = {}
        self._last: dict[int, Call] = {}

    def __contains__(self, optimizer: object) -> bool:
        return id(optimizer) in self._optimizers

    def add(self, optimizer: torch.optim.Optimizer, real: Call) -> None:
        """Remember that this step is due, with the gradients as they are now.

        UsageError if some of them are of this rank alone.
        """
        parameters, gradients = parameters_of(optimizer), self._gradients
        if any(one.grad is not None and id(one) in gradients for one in parameters):
            raise UsageError(
                "two prepared optimizers have the same parameter, and backward() has given it a "
                "gradient after the first of them has stepped: call backward() before both, or let "
                "only one of them have it"
            )
        scaling = {name: vars(optimizer)[name] for name in SCALING if name in vars(optimizer)}

        def step() -> None:
            for parameter in parameters:
                if id(parameter) in gradients:
                    parameter.grad = gradients[id(parameter)]
            # Not there any more if others were waited for.
            gone = [name for name in scaling if name not in vars(optimizer)]
            vars(optimizer).update(scaling)
            try:
                real()
            finally:
                for name in gone:
                    del vars(optimizer)[name]

        self._calls.append(step)
        self._optimizers[id(optimizer)] = optimizer

    def add_call(self, call: Call) -> None:
        """Do this, too, once all of the step is done; such as a scheduler's step."""
        self._calls.append(call)

    def at_end(self, thing: object, call: Call | None) -> None:
        """Do this when the iteration is over, instead of what was to be done for this thing."""
        self._last.pop(id(thing), None)
        if call is not None:
            self._last[id(thing)] = call

    def bits(self, optimizers: Sequence[torch.optim.Optimizer]) -> int:
        """Return which of these were asked to step, one bit for each."""
        return sum(1 << number for number, one in enumerate(optimizers) if one in self)

    def hold_back(
        self, optimizer: torch.optim.Optimizer, shared: Iterable[torch.nn.Parameter]
    ) -> None:
        """Put its gradients away, where `zero_grad` and later backward calls do not reach them.

        It has stepped before others of the same step. Copies are left to read, but of parameters
        that are `shared`.
        """
        several = {id(parameter) for parameter in shared}
        for parameter in parameters_of(optimizer):
            held = self._gradients.setdefault(id(parameter), parameter.grad)
            parameter.grad = None
            if held is not None and id(parameter) not in several:
                # Without memory for that the loop has to do without.
                with suppress(RuntimeError):
                    parameter.grad = held.detach().clone()

    def do(self) -> None:
        for call in self._calls:  # Hooks of optimizers may add calls.
            call()
        self._forget_steps()

    def end(self) -> None:
        """The iteration is over, and its step is committed."""
        calls, self._last = list(self._last.values()), {}
        for call in calls:
            call()

    def forget(self) -> None:
        self._forget_steps()
        self._last = {}

    def _forget_steps(self) -> None:
        self._calls, self._optimizers, self._gradients = [], {}, {}


def has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step would do more than forget: some gradient is there that is not zero."""
    found = [one.grad for one in parameters_of(optimizer) if one.grad is not None]
    return any(type(one) is not torch.Tensor or one.is_sparse or bool(one.any()) for one in found)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [one for group in optimizer.param_groups for one in group["params"]]
