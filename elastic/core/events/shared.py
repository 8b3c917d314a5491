"""Events and effects that all state machines share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tick:
    """The machine's deadline has come; an earlier tick is harmless."""


@dataclass(frozen=True)
class Note:
    """A line for the event log; drivers log it, count it, and send it to watchers.

    Attributes:
        name: event name such as "group_formed"; lower case with underscores.
        job_id: the job it concerns, "" for none.
        fields: (name, value) pairs in the order they are printed.
    """

    name: str
    job_id: str = ""
    fields: tuple[tuple[str, str], ...] = ()
