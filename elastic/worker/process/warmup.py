"""What a spare does before it has a job: everything slow that needs no job.

Rule: a spare must not touch CUDA. The driver reads CUDA_VISIBLE_DEVICES when it is first asked
for anything, and a spare does not know its devices yet.
"""

from __future__ import annotations

import gc
import importlib
import os
import weakref
from contextlib import suppress
from pathlib import Path

import torch

from elastic.errors import GroupError, InvariantViolation
from elastic.worker.group.gloo_port import find_bind

DRIVERS = tuple(map(Path, ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")))
"""One is there where a driver is loaded that torch could start: NVIDIA's, WSL's, AMD's."""

MORE_TO_IMPORT = (
    "encodings.idna",
    "fsspec.implementations.local",
    "numpy",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.nn.parallel",
    "torch.utils.data.distributed",
    # Ours: a forked spare would import them for itself, on the way to its first order.
    "elastic.worker.process.control",
    "elastic.worker.process.runner",
    "elastic.train.torch",
    "elastic.tune.session",
)
"""Imported by every worker or nearly every train function, and not by `import torch`."""


def warm_up(*, chooses_ports: bool = False) -> None:
    """Import what training needs, and do a first step, which imports more (2.2 s in all).

    Args:
        chooses_ports: gloo will have to listen within a range.
    """
    # Lets torch.cuda.is_available() check without starting the driver.
    os.environ.update(PYTORCH_NVML_BASED_CUDA_CHECK="1")
    for name in MORE_TO_IMPORT:
        importlib.import_module(name)
    if chooses_ports:
        with suppress(GroupError):  # It is raised again when a group forms.
            find_bind()
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    optimizer = torch.optim.Adam([weight])
    # The first backward counts the devices of every kind, which would start the driver.
    if not (any(path.exists() for path in DRIVERS) or torch.xpu._is_compiled()):
        torch.autograd.backward((weight @ torch.ones(2)).sum())
        optimizer.step()
        optimizer.zero_grad()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise InvariantViolation("CUDA was started in the process that workers are forked from")
    # Of what is imported nothing need be undone where a worker ends: torch would unregister its
    # libraries, one by one, for 40 ms.
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        finalizer.atexit = False
    # What is loaded now stays for good: collections between two generations need not visit it.
    gc.collect()
    gc.freeze()
