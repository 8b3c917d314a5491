"""The result type of every policy: a value, the reason for it, and when to decide again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

Value = TypeVar("Value")


@dataclass(frozen=True)
class Decision(Generic[Value]):
    """What to do, why in one line for people, and when it may change by itself.

    Attributes:
        reason: key facts and numbers; shown by `status`, logged when it changes. Contains no
            ages, because those change without an event.
        wake_ns: when the same facts give another decision, None for never.
    """

    value: Value
    reason: str
    wake_ns: int | None = None
