"""A watched file: whoever can write it can let this node leave.

The file's appearance is the notice. It may hold a JSON object, {"deadline_s": 30, "reason": "..."},
both optional; anything else in it is its reason. A file that is there when the agent starts is old
news, and counts when it changes.

An annotations file of Kubernetes (a downward-API volume) is read likewise: the annotation
`elastic-torch/drain`, with seconds as its value, is the notice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import anyio

from elastic.agent.notices.source import Notice, Tell

POLL_S = 0.5
SETTLE_S = 0.05
SETTLE_POLLS_MAX = 20
TEXT_CHARS_MAX = 4096
ANNOTATION = "elastic-torch/drain"


@dataclass(frozen=True)
class WatchedFile:
    """One file.

    Attributes:
        is_annotations: it is Kubernetes' file of annotations, not a notice itself.
    """

    path: Path
    is_annotations: bool = False
    poll_s: float = POLL_S

    @property
    def name(self) -> str:
        """Return what --notices calls it."""
        return f"{'kubernetes' if self.is_annotations else 'file'}:{self.path}"

    async def watch(self, tell: Tell) -> None:
        """Tell of a notice whenever the file appears or says something else."""
        read: Callable[[str], Notice | None] = _annotation if self.is_annotations else _notice
        before = await anyio.to_thread.run_sync(self._text, abandon_on_cancel=True)
        if self.is_annotations:
            before = None  # A drain that was asked for before this agent came is meant for it too.
        while True:
            text = await anyio.to_thread.run_sync(self._text, abandon_on_cancel=True)
            if text != before:
                text = await self._settled(text)
            if text is not None and text != before:
                notice = read(text)
                if notice is not None:
                    tell(notice)
            before = text
            await anyio.sleep(self.poll_s)

    async def _settled(self, text: str | None) -> str | None:
        """Return what the file says once that stays so: whoever writes it may not be done.

        Half of what it will say may name no time, and the time of a notice never grows.
        """
        for _ in range(SETTLE_POLLS_MAX):
            await anyio.sleep(SETTLE_S)
            before, text = text, await anyio.to_thread.run_sync(self._text, abandon_on_cancel=True)
            if text == before:
                break
        return text

    def _text(self) -> str | None:
        """Return what the file says, None if there is none that can be read."""
        try:
            with self.path.open(encoding="utf-8", errors="replace") as file:
                return file.read(TEXT_CHARS_MAX)
        except OSError:
            return None


def _notice(text: str) -> Notice:
    try:
        said = json.loads(text)
    except ValueError:
        said = {"reason": " ".join(text.split())[:200]}
    if not isinstance(said, dict):
        said = {}
    reason = said.get("reason")
    return Notice(
        reason if isinstance(reason, str) and reason else "the notice file appeared",
        within_s=_seconds(said.get("deadline_s")),
    )


def _annotation(text: str) -> Notice | None:
    """Read one line of NAME="VALUE" for each annotation."""
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if name.strip() == ANNOTATION and equals:
            seconds = _seconds(value.strip().strip('"').removesuffix("s"))
            return Notice(f"Kubernetes annotation {ANNOTATION}", within_s=seconds)
    return None


def _seconds(value: object) -> float | None:
    """Read a number of seconds >= 0; None for anything else, as if nothing had been said."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        seconds = float(value)
    except (ValueError, OverflowError):
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None
