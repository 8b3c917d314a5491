"""A bounded history of a machine's last events, for errors; and the construction of notes.

Rule: remembering an event costs only a reference; events are turned into text only for the error
of a broken invariant.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from enum import Enum

from elastic.core.events.shared import Note

STORY_EVENTS_MAX = 64
TEXT_CHARS_MAX = 80
DEPTH_MAX = 3
NS_PER_MS = 1_000_000


class EventHistory:
    """The last events of one machine, oldest first.

    Events are frozen values, so keeping them is as good as keeping their text, and cheaper.
    """

    def __init__(self) -> None:
        self._events: deque[tuple[int, object]] = deque(maxlen=STORY_EVENTS_MAX)

    def add(self, now_ns: int, event: object) -> None:
        """Remember that `event` came at `now_ns`; the oldest one is forgotten for it."""
        self._events.append((now_ns, event))

    def lines(self) -> tuple[str, ...]:
        """Return one line per remembered event: milliseconds, then the event in brief."""
        return tuple(
            f"{now_ns / NS_PER_MS:.3f} ms {brief(event)}" for now_ns, event in self._events
        )


def brief(value: object, depth: int = 0) -> str:
    """Return one line of bounded size about a value; large parts are named by size only.

    A job's pickled entry may have megabytes, so `repr` is not an option.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        name = type(value).__name__
        if depth >= DEPTH_MAX:
            return f"{name}(...)"
        parts = []
        for field in dataclasses.fields(value):
            part = getattr(value, field.name)
            if part != field.default:
                parts.append(f"{field.name}={brief(part, depth + 1)}")
        return f"{name}({', '.join(parts)})"
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, str):
        cut = value if len(value) <= TEXT_CHARS_MAX else value[:TEXT_CHARS_MAX] + "..."
        return repr(cut)
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if isinstance(value, tuple):
        return f"<{len(value)} items>" if value else "()"
    return str(value)[:TEXT_CHARS_MAX]


def note(name: str, job_id: str = "", **fields: object) -> Note:
    """Return a `Note` whose fields are printed in the order given; empty ones are left out."""
    pairs = tuple((key, str(value)) for key, value in fields.items() if value not in ("", None))
    return Note(name, job_id, pairs)
