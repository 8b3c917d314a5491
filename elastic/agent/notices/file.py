"""A watched file: any process that can write it can make this node leave.

The file's appearance is the notice. It may hold a JSON object, {"deadline_s": 30, "reason": "..."},
both optional; any other text is the reason. A file that exists when the agent starts is ignored
until it changes.

An annotations file of Kubernetes (a downward-API volume) is watched likewise: the annotation
`elastic-torch/drain`, with seconds as its value, is the notice. It counts at the start too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import anyio

from elastic.agent.notices.source import Notice, Notify

POLL_S = 0.5
SETTLE_S = 0.05
SETTLE_POLLS_MAX = 20
TEXT_CHARS_MAX = 4096
ANNOTATION = "elastic-torch/drain"


@dataclass(frozen=True)
class WatchedFile:
    """One watched file.

    Attributes:
        is_annotations: it is Kubernetes' file of annotations, not a notice itself.
    """

    path: Path
    is_annotations: bool = False
    poll_s: float = POLL_S

    @property
    def name(self) -> str:
        """Return its name in --notices."""
        return f"{'kubernetes' if self.is_annotations else 'file'}:{self.path}"

    async def watch(self, notify: Notify) -> None:
        """Call `notify` with a notice whenever the file appears or changes."""
        read: Callable[[str], Notice | None] = _annotation if self.is_annotations else _notice
        before = await anyio.to_thread.run_sync(self._text, abandon_on_cancel=True)
        if self.is_annotations:
            before = None  # A drain requested before this agent started applies to it too.
        while True:
            text = await anyio.to_thread.run_sync(self._text, abandon_on_cancel=True)
            if text != before:
                text = await self._settled(text)
            if text is not None and text != before:
                notice = read(text)
                if notice is not None:
                    notify(notice)
            before = text
            await anyio.sleep(self.poll_s)

    async def _settled(self, text: str | None) -> str | None:
        """Return the file's text once it is stable: its writer may not be done.

        A partial text may lack the deadline, and the deadline of a notice is never extended.
        """
        for _ in range(SETTLE_POLLS_MAX):
            await anyio.sleep(SETTLE_S)
            before, text = text, await anyio.to_thread.run_sync(self._text, abandon_on_cancel=True)
            if text == before:
                break
        return text

    def _text(self) -> str | None:
        """Return the file's text, None if it cannot be read."""
        try:
            with self.path.open(encoding="utf-8", errors="replace") as file:
                return file.read(TEXT_CHARS_MAX)
        except OSError:
            return None


def _notice(text: str) -> Notice:
    try:
        fields = json.loads(text)
    except ValueError:
        fields = {"reason": " ".join(text.split())[:200]}
    if not isinstance(fields, dict):
        fields = {}
    reason = fields.get("reason")
    return Notice(
        reason if isinstance(reason, str) and reason else "the notice file appeared",
        within_s=_seconds(fields.get("deadline_s")),
    )


def _annotation(text: str) -> Notice | None:
    """Find the annotation in lines of NAME="VALUE"; None if it is missing."""
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if name.strip() == ANNOTATION and equals:
            seconds = _seconds(value.strip().strip('"').removesuffix("s"))
            return Notice(f"Kubernetes annotation {ANNOTATION}", within_s=seconds)
    return None


def _seconds(value: object) -> float | None:
    """Parse a number of seconds >= 0; None for anything else, which means no deadline."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        seconds = float(value)
    except (ValueError, OverflowError):
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None
