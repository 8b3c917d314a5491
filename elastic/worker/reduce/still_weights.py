"""Weights stay as they are while the micro-batches of a step are computed.

What forward or a loop's body does to them there is done for each micro-batch that a rank has, so
that it would depend on the number of ranks: an average of weights kept in forward, a first step of
two, a clamp between two optimizers. It would also stay of a step that is done again.

Rule: each weight's version is read twice in a step, and who sets `.data` says so; what is changed
within a `.data` that was read torch does not count.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from elastic.errors import UsageError

_VERSION: Any = torch.Tensor._version  # type: ignore[attr-defined]


class StillWeights:
    """Weights that nothing may change from the beginning of a step until it is complete."""

    def __init__(self, weights: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Look at nothing yet.

        Args:
            weights: with their names; sharded ones and other special kinds are left out.
        """
        self._names: dict[torch.Tensor, str] = {}
        for name, one in weights:
            if type(one) is nn.Parameter:
                self._names.setdefault(one, name)
        self._versions: list[int] = []
        self._replaced: list[str] = []

    def begin_step(self) -> None:
        """What the weights are now is what the step is computed with."""
        self._versions, self._replaced = self._now(), []

    def data_set(self, weight: torch.Tensor, value: torch.Tensor) -> None:
        """A script gives a weight these values, which it does not have yet."""
        if weight in self._names and value.data_ptr() != weight.data_ptr():
            self._replaced.append(self._names[weight])

    def check(self) -> None:
        """Refuse a step in which something has changed them.

        Raises:
            UsageError: naming one.
        """
        now = self._now()
        if now == self._versions and not self._replaced:
            return
        versions = zip(self._names.values(), now, self._versions, strict=True)
        changed = [name for name, one, before in versions if one != before]
        changed = list(dict.fromkeys(changed + self._replaced))
        raise UsageError(
            f"{changed[0]}{f' and {len(changed) - 1} more' if len(changed) > 1 else ''}: forward, "
            f"or code before the step was complete, has changed weights, which happens as often as "
            f"this rank has micro-batches: leave that to an optimizer that is prepared "
            f"(prepare_optimizer), or change weights, and averages of them, where train.stepped() "
            f"is true"
        )

    def _now(self) -> list[int]:
        return list(map(_VERSION.__get__, self._names))
