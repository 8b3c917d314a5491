"""The one private part of autograd that this package touches: where every backward call begins."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from elastic.worker.group.c10d import look_up


def around_backward(
    surround: Callable[[], Any], *, scale: Callable[[], float] = lambda: 1.0
) -> Callable[[], None]:
    """Have every outermost backward call of this process surrounded by a context manager.

    Reentrant checkpointing calls backward within backward; only the outer call is surrounded.

    Args:
        surround: returns a new context manager.
        scale: returns what the gradients that backward begins with are multiplied by.

    Returns:
        A function that ends this.

    Raises:
        GroupError: this torch lacks the place.
    """
    real = look_up(torch.autograd, "_engine_run_backward")
    # Of the thread that asks: for a device, inner calls come from a thread of autograd's own.
    task_id = look_up(torch._C, "_current_graph_task_id")

    @functools.wraps(real)
    def run(*args: Any, **named: Any) -> Any:
        # Without a call to accumulate into, as torch.autograd.grad, no gradient is ours.
        if task_id() != -1 or not named.get("accumulate_grad", True):
            return real(*args, **named)
        with surround():
            factor = scale()
            if factor != 1.0:
                first = tuple(None if one is None else one * factor for one in args[1])
                args = (args[0], first, *args[2:])
            return real(*args, **named)

    torch.autograd._engine_run_backward = run  # type: ignore[attr-defined]

    def undo() -> None:
        if torch.autograd._engine_run_backward is run:  # type: ignore[attr-defined]
            torch.autograd._engine_run_backward = real  # type: ignore[attr-defined]

    return undo
