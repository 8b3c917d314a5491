"""What a check says: how bad it is, what was found, and one line of what to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class CheckLevel(Enum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    """Training works, and something about it will surprise."""
    FAIL = "fail"
    """Training does not work here."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: of the thing, two or three words.
        found: what is there, with its values.
        fix: one line of what to do, "" where nothing is.
    """

    name: str
    level: CheckLevel
    found: str
    fix: str = ""


def ok(name: str, found: str) -> Check:
    """Return a thing that is well."""
    return Check(name, CheckLevel.OK, found)


def warn(name: str, found: str, fix: str) -> Check:
    """Return a thing that will surprise."""
    return Check(name, CheckLevel.WARN, found, fix)


def fail(name: str, found: str, fix: str) -> Check:
    """Return a thing that keeps training from working."""
    return Check(name, CheckLevel.FAIL, found, fix)
