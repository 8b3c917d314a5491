"""Prepares output of workers for the screen: complete lines, with tracebacks held back.

Rule: a traceback is held for a while, because the one that ended the job is shown last and only
once, with the job's end. One of a broken group was caused by another process: it is in the worker's
log, and is not shown. Nothing else is omitted.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from elastic.core.broken import reports_of_broken
from elastic.wire.codec_jobs import LogChunk

TRACEBACK = "Traceback (most recent call last):"
TRACEBACK_START = re.compile(rf'{re.escape(TRACEBACK)}|^  File ".+", line \d+$', re.MULTILINE)
"""Where a traceback begins; that of a syntax error in the script itself has no headline."""
LINKS = ("During handling of the above exception", "The above exception was the direct cause")
"""Lines between the tracebacks of a chain, which counts as one traceback here."""
HOLD_S = 3.0
HELD_CHARS_MAX = 200_000
LINE_CHARS_MAX = 16_384


@dataclass
class _WorkerOutput:
    """One worker's output that is not shown yet.

    Attributes:
        begun: a line without its end.
        held: lines from a traceback on.
        held_since_ns: when that began.
    """

    prefix: str
    begun: str = ""
    held: str = ""
    held_since_ns: int = 0


class LineCutter:
    """Cuts the output of several workers into lines, in the order of their arrival.

    Attributes:
        shows_prefix: each line begins with whose it is, as "[gen4 r3 gpu-07] ".
        holds_tracebacks: whether they wait, see above.
    """

    def __init__(
        self,
        *,
        shows_prefix: bool,
        holds_tracebacks: bool = True,
        prefix: Callable[[LogChunk], str] | None = None,
    ) -> None:
        """Begin empty.

        Args:
            shows_prefix: see the class.
            holds_tracebacks: see the class.
            prefix: what a worker's lines begin with, if not as the class has it.
        """
        self.shows_prefix = shows_prefix
        self._prefix = prefix or prefix_of
        self.holds_tracebacks = holds_tracebacks
        self._outputs: dict[str, _WorkerOutput] = {}

    def take(self, chunk: LogChunk, now_ns: int) -> str:
        """Return what can be shown now: complete lines (unless one is very long).

        Without prefixes and held tracebacks, that is all output immediately.
        """
        if not (self.shows_prefix or self.holds_tracebacks):
            return chunk.text
        output = self._outputs.setdefault(chunk.worker_id, _WorkerOutput(""))
        output.prefix = self._prefix(chunk) if self.shows_prefix else ""
        text = output.begun + chunk.text
        cut = text.rfind("\n") + 1
        if len(text) - cut > LINE_CHARS_MAX:
            cut = len(text)
        text, output.begun = text[:cut], text[cut:]
        text, was_held, output.held = output.held + text, bool(output.held), ""
        if not self.holds_tracebacks:
            return self._shown(output, text)
        text = without_noticed(text)
        found = TRACEBACK_START.search(text)
        if found is None or len(text) - found.start() > HELD_CHARS_MAX:
            return self._shown(output, text)
        start = text.rfind("\n", 0, found.start()) + 1  # It may follow "[rank0]: ".
        if not was_held:
            output.held_since_ns = now_ns
        output.held = text[start:]
        return self._shown(output, text[:start])

    def overdue(self, now_ns: int) -> str:
        """Return the tracebacks that were held for long enough."""
        return "".join(
            self._released(output)
            for output in self._outputs.values()
            if output.held and now_ns - output.held_since_ns > HOLD_S * 1e9
        )

    def flush(self, traceback: str) -> str:
        """Return all that is left, except a traceback that is shown elsewhere.

        Args:
            traceback: the failure that ended the job, "" for none.
        """
        shown = ""
        for output in self._outputs.values():
            text, output.held, output.begun = output.held + output.begun, "", ""
            if traceback:
                before, _, after = text.partition(traceback.rstrip("\n"))
                text = before + after.lstrip("\n")
            if text.strip():
                shown += self._shown(output, text if text.endswith("\n") else text + "\n")
        return shown

    def _released(self, output: _WorkerOutput) -> str:
        text, output.held = without_noticed(output.held, is_all=True), ""
        return self._shown(output, text)

    def _shown(self, output: _WorkerOutput, text: str) -> str:
        if not output.prefix or not text:
            return text
        # Not splitlines(): a progress bar that overwrites itself with \r is one line.
        lines = text.removesuffix("\n").split("\n")
        return "".join(f"{output.prefix}{line}\n" for line in lines)


def without_noticed(text: str, *, is_all: bool = False) -> str:
    """Return complete lines without the tracebacks that end in the error of a broken group.

    Args:
        text: what one worker printed.
        is_all: nothing follows that might belong to the last one.
    """
    kept: list[str] = []
    lines = text.splitlines(keepends=True)
    at = 0
    while at < len(lines):
        end = _end_of_traceback(lines, at, is_all) if TRACEBACK in lines[at] else at
        block = lines[at : max(end, at + 1)]
        prefix = lines[at].partition(TRACEBACK)[0]
        if end == at or not any(reports_of_broken(line.removeprefix(prefix)) for line in block):
            kept += block
        at += len(block)
    return "".join(kept)


def _end_of_traceback(lines: list[str], start: int, is_all: bool) -> int:
    """Return the index behind a chain of tracebacks; `start` if more of it may come."""
    prefix = lines[start].partition(TRACEBACK)[0]  # torch puts "[rank0]: " before each line.
    at, is_open = start + 1, True
    while at < len(lines):
        line = lines[at].removeprefix(prefix)
        if is_open and not line.startswith((" ", "\t")):
            is_open = False  # The exception itself.
        elif not is_open and line.strip() and TRACEBACK in line:
            is_open = True
        elif not is_open and line.strip() and not line.startswith(LINKS):
            return at
        at += 1
    return at if is_all and not is_open else start


def prefix_of(chunk: LogChunk) -> str:
    """Return "[gen4 r3 gpu-07] "; a worker without a rank is named instead."""
    who = f"r{chunk.rank} {chunk.node_id}" if chunk.rank >= 0 else chunk.worker_id
    return f"[gen{chunk.generation} {who}] "
