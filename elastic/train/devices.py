"""The devices of this worker."""

from __future__ import annotations

import torch

from elastic.train.session import require_context


def get_device() -> torch.device:
    """Return this worker's device: its GPU, `cuda:LOCAL_RANK`, or the CPU if it has none.

    Raises:
        UsageError: called outside a train function.
    """
    return _devices("get_device")[0]


def get_devices() -> list[torch.device]:
    """Return all devices of this worker, one for each of its GPUs.

    The other GPUs that the process sees are those of its peers on this node.

    Raises:
        UsageError: called outside a train function.
    """
    return _devices("get_devices")


def _devices(what: str) -> list[torch.device]:
    context = require_context(what)
    return [torch.device(name) for name in context.devices or ("cpu",)]
