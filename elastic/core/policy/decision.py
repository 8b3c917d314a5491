"""The shape of every policy's answer: a value, the reason for it, and when to ask again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

Value = TypeVar("Value")


@dataclass(frozen=True)
class Decision(Generic[Value]):
    """What to do, why in one line for people, and when it may change by itself.

    Attributes:
        reason: key facts and numbers; shown by `status`, logged when it changes. Carries no
            ages, because those change without anything happening.
        wake_ns: the moment at which the same facts give another answer, None for never.
    """

    value: Value
    reason: str
    wake_ns: int | None = None
