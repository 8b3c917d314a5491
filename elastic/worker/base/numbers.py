"""Numbers that are not Python's own: NumPy's, and tensors and arrays of one element."""

from __future__ import annotations

from typing import Any


def plain_number(value: Any) -> Any:
    """Return a number of another kind as Python's; anything else as it is."""
    if not hasattr(value, "item"):
        return value
    count = value.numel() if hasattr(value, "numel") else getattr(value, "size", None)
    return value.item() if count == 1 else value
