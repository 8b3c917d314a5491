"""The devices of this worker."""

from __future__ import annotations

import torch

from elastic.train.session import require_context


def get_device() -> torch.device:
    """Return this worker's device: its GPU, or the CPU if it has none.

    Raises:
        UsageError: called outside a train function.
    """
    return _devices("get_device")[0]


def get_devices() -> list[torch.device]:
    """Return all devices of this worker; a worker with several GPUs sees them as cuda:0, ...

    Raises:
        UsageError: called outside a train function.
    """
    return _devices("get_devices")


def _devices(what: str) -> list[torch.device]:
    context = require_context(what)
    device = torch.device(context.device)
    if device.type != "cuda":
        return [device]
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
