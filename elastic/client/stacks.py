"""The command `elastic stack`: the stack of each rank, grouped by equal stacks.

Workers write their stacks to their output, as they do when a hang is found; they are read there.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass

import click

from elastic.client.jobs import Client
from elastic.client.plain import plain
from elastic.client.terminal import ClusterTarget, output_option, print_json
from elastic.client.values import parse_ranks
from elastic.core.facts import WorkerId
from elastic.errors import NotFound

THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):")
FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
BEGIN = "/elastic/worker/process/entry.py:"
"""Calls user code; what is below is the same for all."""
TAIL_LINES = 1000
"""Of each worker's output: its stacks are at the end of it."""
PAUSE_S = 0.2
WAIT_S = 10.0


@dataclass(frozen=True)
class Dump:
    """The stacks that one worker wrote.

    Attributes:
        unix_ns: its agent's clock when it began.
        threads: the frames of each, innermost first; the last one is the main thread.
    """

    unix_ns: int
    rank: int
    threads: tuple[tuple[str, ...], ...]


@click.command()
@click.argument("job")
@click.option(
    "--rank", "ranks", default="", callback=parse_ranks, metavar="R,...",
    help="Only these ranks of the newest group.",
)  # fmt: skip
@click.option(
    "-a", "--all", "all_threads", is_flag=True, help="All threads, not the main one alone."
)
@output_option
@click.pass_obj
def stack(
    target: ClusterTarget, job: str, ranks: tuple[int, ...], all_threads: bool, output: str
) -> None:
    """Show where the ranks of JOB (id or name) stand now."""
    with target.connect() as client:
        view = client.get(job)
        job_id = view.record.spec.job_id
        before = newest_dumps(client, job_id)
        requested = client.stacks(job_id, ranks=ranks)
        if not requested:
            which = f" with rank {', '.join(map(str, ranks))}" if ranks else ""
            phase = view.record.phase.value
            raise NotFound(f"stack {job}: no worker{which} now; the job is {phase}")
        found = _await(client, job_id, requested, before)
    missing = sorted(set(requested) - set(found))
    if output == "json":
        stacks = {
            w: {"rank": d.rank, "threads": list(map(list, d.threads))} for w, d in found.items()
        }
        print_json({"workers": stacks, "silent": missing})
        return
    for names, frames in grouped(found, all_threads=all_threads):
        click.echo(f"{names}:")
        for frame in frames:
            click.echo(f"  {plain(frame)}")
    for worker_id in missing:
        click.echo(f"worker {worker_id} wrote no stacks within {WAIT_S:g} s", err=True)


def newest_dumps(client: Client, job_id: str) -> dict[WorkerId, Dump]:
    texts: dict[WorkerId, list[tuple[int, int, str]]] = {}
    with client.logs(job_id, tail=TAIL_LINES) as chunks:
        for chunk in chunks:
            lines = texts.setdefault(chunk.worker_id, [])
            lines += [(chunk.unix_ns, chunk.rank, line) for line in chunk.text.splitlines()]
    found = {worker_id: last_dump(lines) for worker_id, lines in texts.items()}
    return {worker_id: dump for worker_id, dump in found.items() if dump is not None}


def last_dump(lines: Iterable[tuple[int, int, str]]) -> Dump | None:
    """Return the last stacks among lines of (moment, rank, text), None if there are none.

    Python writes the thread that was interrupted, which is the main one, at the end.
    """
    dump: Dump | None = None
    threads: list[list[str]] = []
    is_whole = True
    for unix_ns, rank, line in lines:
        frame = FRAME.match(line)
        if THREAD.match(line):
            if is_whole or not threads:
                threads, begun = [], (unix_ns, rank)
            threads.append([])
            is_whole = line.startswith("Current thread")
        elif frame and threads:
            threads[-1].append(f"{frame['function']} ({frame['file']}:{frame['line']})")
            if is_whole:
                dump = Dump(*begun, tuple(map(tuple, threads)))
        elif line.strip():
            threads, is_whole = [], True
    return dump


def _of_user(frames: tuple[str, ...]) -> tuple[str, ...]:
    """Return the frames of a main thread down to the one in which user code begins."""
    ours = (number for number, frame in enumerate(frames) if BEGIN in frame)
    return frames[: next(ours, len(frames))]


def _await(
    client: Client, job_id: str, requested: Iterable[WorkerId], before: dict[WorkerId, Dump]
) -> dict[WorkerId, Dump]:
    """Wait until all asked workers have written, up to a timeout; return the stacks found."""
    deadline, seen = time.monotonic() + WAIT_S, dict[WorkerId, Dump]()
    while True:
        now = newest_dumps(client, job_id)
        fresh = {w: now[w] for w in requested if w in now and now[w] != before.get(w)}
        # Twice the same, so that none of it is still in transit.
        if (set(fresh) == set(requested) and fresh == seen) or time.monotonic() >= deadline:
            return fresh
        seen = fresh
        time.sleep(PAUSE_S)


def grouped(found: dict[WorkerId, Dump], *, all_threads: bool) -> list[tuple[str, tuple[str, ...]]]:
    """Return groups of ranks with equal stacks: "ranks 0, 2, 3" and the frames."""
    places: dict[tuple[str, ...], list[str]] = {}
    for worker_id, dump in sorted(found.items(), key=lambda pair: (pair[1].rank, pair[0])):
        chosen = dump.threads if all_threads else (_of_user(dump.threads[-1]),)
        frames = tuple(frame for thread in chosen for frame in (*thread, ""))[:-1]
        who = f"rank {dump.rank}" if dump.rank >= 0 else str(worker_id)
        places.setdefault(frames, []).append(who)
    return [(", ".join(names), frames) for frames, names in places.items()]
