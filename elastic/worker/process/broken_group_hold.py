"""Where a script meets a group that broke: the thread that does is held there.

A script would continue with an error that it takes for its own: `except Exception: continue`
around a step leaves out what is left of an epoch, and saves that. It gets none: the process is
about to be replaced, and until then nothing of it runs that could act on half an answer.

Rule: only what came out of a lost connection is held back. All other errors are the script's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from elastic.worker.group.c10d import look_up, private_names


@contextmanager
def held_back(met: Callable[[BaseException], None]) -> Iterator[None]:
    """Have errors of collectives checked by `met` before a script sees them, for a block.

    It is called in the thread that met one, and does not return if that is held there.
    """
    undo: list[tuple[Any, str, Any]] = []
    for owner, name in (
        (private_names().work, "wait"),
        # What waits in C++: a barrier that names who is late, the comparison that
        # DistributedDataParallel begins with, its reduction, and its buffers.
        (dist, "monitored_barrier"),
        (distributed_c10d, "monitored_barrier"),
        (DistributedDataParallel, "__init__"),
        (torch.autograd, "_engine_run_backward"),
        (DistributedDataParallel, "_pre_forward"),
        (DistributedDataParallel, "_post_forward"),
    ):
        real = look_up(owner, name)
        undo.append((owner, name, real))
        setattr(owner, name, _checked_at(real, met))
    try:
        yield
    finally:
        for owner, name, real in reversed(undo):
            setattr(owner, name, real)


def _checked_at(real: Callable[..., Any], met: Callable[[BaseException], None]) -> Any:
    @functools.wraps(real)
    def call(*args: Any, **named: Any) -> Any:
        try:
            return real(*args, **named)
        except RuntimeError as error:
            met(error)
            raise

    return call
