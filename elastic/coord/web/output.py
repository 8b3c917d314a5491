"""Streams the output of a job's workers to a page: complete lines, cleaned, at a limited rate.

Rule: if output comes faster than `BYTES_PER_S`, only the newest lines are sent, with the number of
lines skipped; files on the nodes have all of it.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field

import anyio

from elastic.coord.server_context import ServiceContext
from elastic.coord.server_jobs import LogRequest
from elastic.coord.web.html import clean_output
from elastic.core.config import NS_PER_S
from elastic.core.facts import JobId, WorkerId

TAIL_LINES = 200
TAIL_WAIT_S = 3.0
TICK_S = 1.0
BYTES_PER_S = 64_000
LINE_CHARS_MAX = 2000
PARTIAL_CHARS_MAX = 1 << 16
NEW_WORKERS_S = 0.25

Line = tuple[float, int, int, str, str]
"""Unix seconds (0 if unknown), generation and rank at that time (-1 for none), node, and text."""


@dataclass
class OutputFilter:
    """Selects the output to show."""

    ranks: tuple[int, ...] = ()
    contains: str = ""

    @classmethod
    def of(cls, query: Mapping[str, str]) -> OutputFilter:
        """Parse the fields of a form; parts that are not ranks are ignored."""
        ranks = tuple(
            int(part) for part in query.get("rank", "").split(",")[:64] if part.strip().isdecimal()
        )
        return cls(ranks, contains=query.get("contains", "")[:200])


@dataclass
class Lines:
    """Joins chunks of output to complete lines."""

    contains: str
    _partial: dict[WorkerId, str] = field(default_factory=dict)

    def take(self, reader: LogRequest) -> list[Line]:
        """Return the lines that are complete now."""
        lines: list[Line] = []
        for chunk in reader.chunks():
            text = self._partial.get(chunk.worker_id, "") + chunk.text
            text, _, rest = text.rpartition("\n")
            self._partial[chunk.worker_id] = rest[-PARTIAL_CHARS_MAX:]
            if text:
                at_s, where = round(chunk.unix_ns / NS_PER_S, 3), chunk.node_id
                lines += [
                    (at_s, chunk.generation, chunk.rank, where, line[:LINE_CHARS_MAX])
                    for line in clean_output(text).split("\n")
                ]
        return [line for line in lines if self.contains in line[-1]]


def head(line: Line) -> str:
    """Return the prefix of a line: "[g4 r3 gpu-07]"."""
    _, generation, rank, node, _ = line
    return f"[g{generation} r{rank} {node}]" if rank >= 0 else f"[{node}]"


async def output_stream(
    context: ServiceContext, job_id: JobId, query: Mapping[str, str]
) -> AsyncGenerator[str, None]:
    """Yield messages with the newest lines, then with new ones, until the job has ended.

    Raises:
        NotLeading: this coordinator does not lead, or no longer.
    """
    wanted, driver = OutputFilter.of(query), context.driver
    lines = Lines(wanted.contains)
    with (
        context.follows.merged() as merged,
        driver.watchers.subscribe(job_id, on_note=merged.wake) as notes,
    ):
        reader = LogRequest(
            context, job_id, merged, follow=True, tail_lines=TAIL_LINES, ranks=wanted.ranks
        )
        going_on, waiting, sent_ns = True, list[Line](), 0
        while going_on:
            context.stay_with(driver)
            notes.take()
            going_on = reader.subscribe_new()
            waiting += lines.take(reader)
            context.follows.make_room(merged)
            now_ns = context.clock.monotonic_ns()
            if now_ns - sent_ns >= TICK_S * NS_PER_S or not going_on:
                sent_ns = now_ns
                yield _message(by_time(waiting))
                waiting = []
            if going_on:
                await anyio.sleep(NEW_WORKERS_S)
    yield f"data: {json.dumps({'end': True})}\n\n"


def by_time(lines: list[Line]) -> list[Line]:
    """Sort lines of several workers by time; one without a time stays behind its predecessor."""
    moments: list[float] = []
    for line in lines:
        moments.append(line[0] or (moments[-1] if moments else 0.0))
    return [line for _, line in sorted(zip(moments, lines, strict=True), key=lambda pair: pair[0])]


def _message(lines: list[Line]) -> str:
    """Return the newest of these lines that fit into one message; a comment if there are none."""
    if not lines:
        return ": \n\n"
    kept, size = 0, 0
    for line in reversed(lines):
        size += len(json.dumps(line))
        if size > BYTES_PER_S:
            break
        kept += 1
    output = {"lines": lines[len(lines) - kept :], "skipped": len(lines) - kept}
    return f"data: {json.dumps(output)}\n\n"


async def newest_lines(
    context: ServiceContext, job_id: JobId, query: Mapping[str, str]
) -> list[Line]:
    """Return the newest lines that arrive within `TAIL_WAIT_S`.

    Raises:
        NotLeading: this coordinator does not lead.
    """
    wanted = OutputFilter.of(query)
    lines, found = Lines(wanted.contains), list[Line]()
    with context.follows.merged() as merged:
        reader = LogRequest(
            context, job_id, merged, follow=False, tail_lines=TAIL_LINES, ranks=wanted.ranks
        )
        with anyio.move_on_after(TAIL_WAIT_S):
            while reader.subscribe_new():
                found += lines.take(reader)
                context.follows.make_room(merged)
                await merged.wait(NEW_WORKERS_S)
        found += lines.take(reader)
    return found
