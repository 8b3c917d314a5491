"""Events and effects that every machine knows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tick:
    """The deadline that the machine asked for has come (or an earlier moment: harmless)."""


@dataclass(frozen=True)
class Note:
    """Something worth a line in the event log; drivers log it, count it, show it to watchers.

    Attributes:
        name: event name such as "group_formed"; lower case with underscores.
        job_id: the job it concerns, "" for none.
        fields: (name, value) pairs in the order they are printed.
    """

    name: str
    job_id: str = ""
    fields: tuple[tuple[str, str], ...] = ()
