"""Values of options that click does not know: "2:8", "CPU=2,GPU=1", "0,3".

Rule: an invalid value is a usage error that names the option and the expected format.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from datetime import datetime

import click


def parse_num_workers(_: click.Context, __: click.Parameter, text: str) -> tuple[int, int]:
    """Read "4" or "2:8" as (min, max)."""
    low, colon, high = text.partition(":")
    try:
        least, most = int(low), int(high if colon else low)
    except ValueError:
        raise click.BadParameter(f"{text!r}: expected a number, or MIN:MAX such as 2:8") from None
    if not 1 <= least <= most:
        raise click.BadParameter(f"{text!r}: expected 1 <= MIN <= MAX")
    return least, most


def parse_amounts(_: click.Context, __: click.Parameter, text: str) -> dict[str, float]:
    """Read "CPU=2,GPU=1" as amounts by name."""
    amounts: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _equals, amount = part.partition("=")
        try:
            amounts[_new_name(name, amounts)] = float(amount)
        except ValueError:
            raise click.BadParameter(
                f"{part!r}: expected NAME=AMOUNT, each name once, such as CPU=2,GPU=1"
            ) from None
    return amounts


def parse_pairs(_: click.Context, __: click.Parameter, texts: Iterable[str]) -> dict[str, str]:
    """Read several NAME=VALUE; the value may be empty and may hold anything."""
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        try:
            if not equals or "\0" in text:
                raise ValueError
            pairs[_new_name(name, pairs)] = value
        except ValueError:
            raise click.BadParameter(f"{text!r}: expected NAME=VALUE, each name once") from None
    return pairs


def parse_duration(_: click.Context, __: click.Parameter, text: str | None) -> float | None:
    """Read "30", "30s", "2m" or "1h" as seconds; None for what was not given."""
    if text is None:
        return None
    unit = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:], 0.0)
    try:
        seconds = float(text[:-1] if unit else text) * (unit or 1.0)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise click.BadParameter(f"{text!r}: expected seconds, or such as 30s, 2m or 1h")
    return seconds


def parse_pattern(
    _: click.Context, __: click.Parameter, text: str | None
) -> re.Pattern[str] | None:
    """Read a regular expression; None for what was not given."""
    try:
        return re.compile(text) if text is not None else None
    except re.error as error:
        raise click.BadParameter(f"{text!r}: no regular expression: {error}") from None


def parse_since(context: click.Context, option: click.Parameter, text: str) -> int:
    """Read "5m" or "2026-11-25T10:00" as nanoseconds since 1970; "" is 0, the beginning."""
    if not text:
        return 0
    try:
        return round(datetime.fromisoformat(text).astimezone().timestamp() * 1e9)
    except ValueError:
        days = text.removesuffix("d") if text.endswith("d") else ""
        seconds = parse_duration(context, option, f"{days}h" if days else text)
        return time.time_ns() - round((seconds or 0.0) * (24 if days else 1) * 1e9)


def parse_ranks(_: click.Context, __: click.Parameter, text: str) -> tuple[int, ...]:
    """Read "0,3" as ranks; "" is all of them."""
    parts = [part.strip() for part in text.split(",")] if text else []
    if any(not part.isdecimal() or int(part) >= 2**31 for part in parts):
        raise click.BadParameter(f"{text!r}: expected ranks such as 0 or 0,3")
    return tuple(dict.fromkeys(int(part) for part in parts))


def _new_name(name: str, known: Iterable[str]) -> str:
    name = name.strip()
    if not name or name in known:
        raise ValueError(name)
    return name
