"""Batches on their way to a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


def moved(value: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
    """Return a batch with every tensor in it on the device, also those in lists, tuples, mappings.

    What has a method `to` is moved by that: a tokenizer's BatchEncoding, a graph's Batch. Other
    mappings come back as dicts, and other objects as they are.
    """
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=non_blocking)
    if isinstance(value, PackedSequence):  # A tuple, but one that must be moved as a whole.
        return value.to(device, non_blocking=non_blocking)  # type: ignore[arg-type]
    if not isinstance(value, dict) and callable(getattr(value, "to", None)):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: moved(one, device, non_blocking=non_blocking) for key, one in value.items()}
    if not isinstance(value, (list, tuple)):
        return value
    parts = [moved(part, device, non_blocking=non_blocking) for part in value]
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
