"""Weights stay as they are while the micro-batches of a step are computed.

What forward or a loop's body does to them there is done for each micro-batch that a rank has, so
that it would depend on the number of ranks: an average of weights kept in forward, a first step of
two, a clamp between two optimizers. It would also stay of a step that is done again. What a loop's
body does behind the step, it does so often, too, unless it asks whether the step is done.

Rule: a weight has changed if its version has, if its `.data` was set, or if it has other values
than when its `.data` was read. What is changed within a `.data` that a script has kept is not seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from elastic.errors import UsageError
from elastic.worker.state.checksums import checksum_of, checksum_there, flat_bytes

TWO_STEPS = (
    "what needs gradients at two sets of weights, as SAM, takes two steps "
    "(docs/how-to/training-loop.md)"
)
_VERSION: Any = torch.Tensor._version  # type: ignore[attr-defined]


class StillWeights:
    """Weights that nothing may change from one moment to another, such as within a step."""

    def __init__(self, weights: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._names: dict[torch.Tensor, str] = {}
        for name, one in weights:
            if type(one) is nn.Parameter:
                self._names.setdefault(one, name)
        self._versions: list[int] = []
        self._replaced: list[str] = []
        self._read: dict[torch.Tensor, Any] = {}
        self._is_on = False

    def begin(self) -> None:
        """What the weights are now is what they are to be later."""
        self._versions = self._now()
        self._replaced = []
        self._read = {}
        self._is_on = True

    def end(self) -> None:
        self._is_on = False

    def data_set(self, weight: torch.Tensor, value: torch.Tensor) -> None:
        """A script gives a weight these values, which it does not have yet."""
        if self._is_on and weight in self._names and value.data_ptr() != weight.data_ptr():
            self._replaced.append(self._names[weight])

    def data_read(self, weight: torch.Tensor) -> None:
        """A script reads the `.data` of a weight, and may change it there."""
        if self._is_on and weight in self._names and weight not in self._read:
            self._read[weight] = _print(weight)

    def check(self) -> None:
        """Refuse a step in which something has changed them; the UsageError names one."""
        changed = self.changed()
        if changed:
            raise UsageError(
                f"{changed}: forward, or code before the step was complete, has changed weights, "
                f"which happens as often as this rank has micro-batches: leave that to an "
                f"optimizer that is prepared (prepare_optimizer), or change weights, and averages "
                f"of them, where train.stepped() is true; {TWO_STEPS}"
            )

    def check_after(self) -> None:
        """Refuse a loop's body that has changed them behind the step, without asking for that."""
        changed = self.changed()
        if changed:
            raise UsageError(
                f"{changed}: code after optimizer.step() has changed weights in an iteration that "
                f"did not ask whether the step is done: with fewer workers a rank has several "
                f"iterations in a step, and would change them in each: write "
                f"'if train.stepped(): ...' around it"
            )

    def changed(self) -> str:
        """Return which weights have changed since `begin`, "" if none has; they may from now on."""
        if not self._is_on:
            return ""
        self._is_on, now = False, self._now()
        if now == self._versions and not self._replaced and not self._read:
            return ""
        versions = zip(self._names.values(), now, self._versions, strict=True)
        names = [name for name, one, before in versions if one != before]
        names += self._replaced
        names += [self._names[one] for one, was in self._read.items() if bool(_print(one) != was)]
        first, *more = dict.fromkeys(names) or [""]
        return f"{first} and {len(more)} more" if more else first

    def _now(self) -> list[int]:
        return list(map(_VERSION.__get__, self._names))


def _print(weight: torch.Tensor) -> Any:
    """Return what differs where values do; on a device it is computed there, without a wait."""
    flat = flat_bytes(weight)
    return checksum_of(flat.numpy()) if flat.device.type == "cpu" else checksum_there(weight)
