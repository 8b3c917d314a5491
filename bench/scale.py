"""How large a cluster one coordinator holds: processor, memory, and how soon everybody knows.

    python bench/scale.py --agents 1000 --agents 5000 --agents 10000

The coordinator is the real one, a process with a SQLite store. An agent here is a connection and a
stream of its own; its one worker is played: it is ready at once and trains as soon as it is
announced. Several hundred agents share a process, and all of them share the machine with the
coordinator, which goes first (`nice`). So they speak through frames.py, which costs a quarter of
gRPC's client in Python; `--client grpc` has them connect and speak with the code of real agents.
The processor time of the coordinator and of all agents stands beside the seconds. With
`--silence 6` there are a quarter of the default's pings.

    rest       processor of the coordinator, and of the agents, connected and with nothing to do
    MiB        memory of the coordinator then
    submit     from the call until the last worker has been told to start, and of its group
    death      from a worker's exit, as its agent tells it, until the last one knows that its group
               is over, which in a small cluster is told with the next group;
               with `--deaths 5` the median of five, and the range
    next group from then on until the last one knows the next group
    node       both from the end of an agent's stream; the grace for its return is in it
    storm      the coordinator is killed and started anew: until the last agent is welcome again
    bytes      of an announcement

With `--page` something else is measured: what a job's page and the telemetry that it shows cost the
coordinator while all agents train, in percent of a core, and the bytes that a browser receives.

In brackets: processor seconds of the coordinator and of the agents until then (in a storm without
the agents'), and commits of the store until all is quiet again.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import platform
import resource
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import psutil
from played_agents import CLIENTS
from rich.console import Console
from rich.table import Table

from elastic.client.jobs import Client
from elastic.core.config import CoordinatorConfig, JobSpec
from elastic.core.facts import Entry, EntryKind, JobId
from elastic.runtime.rpc import SILENCE_S

PLAYERS = Path(__file__).with_name("played_agents.py")
AGENTS_PER_PROCESS = 500
PROCESSES_MAX = 8
"""More of them would only take turns."""
CONNECTING_AT_ONCE = 400
"""In all processes together, unless told otherwise: each connects as soon as it can, and here they
share two cores with the pings of those that are connected, which must be answered in time."""
WAIT_S = 300.0
POLL_S = 0.05
PAGE_ROUNDS = 3
SETTLE_S = 3.0
REST_S = 10.0
NICE = 10
"""Of the agents: the coordinator shares its machine with nobody, as a rule."""
OWN_FILES = 256
"""That a coordinator needs beside its connections."""


# ------------------------------------------------------------------------------------- the agents


@dataclass(frozen=True)
class How:
    """What silence agents allow, who speaks for them, how many connect at once and how many die."""

    silence_s: float
    client: str
    at_once: int
    deaths: int = 1


class Crowd:
    """All agents, in their processes."""

    def __init__(self, address: str, agents: int, how: How) -> None:
        self._holders = []
        each = max(AGENTS_PER_PROCESS, -(-agents // PROCESSES_MAX))
        firsts = range(0, agents, each)
        for first in firsts:
            number, at_once = min(each, agents - first), how.at_once // len(firsts)
            numbers = [str(number) for number in (first, number, at_once, how.silence_s)]
            command = [sys.executable, str(PLAYERS), address, *numbers, how.client]
            self._holders.append(
                subprocess.Popen(
                    ["nice", "-n", str(NICE), *command],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )

    def ask(self, command: str, holder: int | None = None) -> list[Any]:
        """Send a command to all processes, or one; return what they answer."""
        chosen = self._holders if holder is None else [self._holders[holder]]
        for one in chosen:
            assert one.stdin is not None
            one.stdin.write(command + "\n")
            one.stdin.flush()
        return [json.loads(one.stdout.readline()) for one in chosen if one.stdout is not None]

    def wait_welcome(self, agents: int, since_ns: int = 0) -> int:
        """Wait until so many agents were welcome; return when the last was."""
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            states = self.ask(f"welcome {since_ns}")
            if sum(count for count, _ in states) >= agents:
                return int(max(last_ns for _, last_ns in states))
            time.sleep(POLL_S)
        raise click.ClickException("agents did not connect")

    def wait_generation(self, workers: int, above: int = 0) -> tuple[int, int]:
        """Wait until so many are in one group above a generation; return when, and its number."""
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            states = self.ask("state")
            newest = max(one["told"][0] for one in states)
            knowing = sum(one["told"][1] for one in states if one["told"][0] == newest)
            if newest > above and knowing >= workers:
                return int(max(one["last_ns"] for one in states)), int(newest)
            time.sleep(POLL_S)
        raise click.ClickException(f"{workers} workers did not come into one group above {above}")

    def end_reported_ns(self, workers: int, otherwise_ns: int) -> int:
        """Return when the last knew that the group before the newest is over; see `Tally.over`."""
        counts, moments = zip(*(one["over"] for one in self.ask("state")), strict=True)
        return int(max(moments)) if sum(counts) >= workers else otherwise_ns

    def largest_message(self) -> int:
        """Return the bytes of the largest of the newest messages to an agent."""
        return int(max(one["bytes"] for one in self.ask("state")))

    def cpu_s(self) -> float:
        """Return the processor time that all agents have used."""
        times = [psutil.Process(holder.pid).cpu_times() for holder in self._holders]
        return float(sum(one.user + one.system for one in times))

    def close(self) -> None:
        """End all processes."""
        for holder in self._holders:
            holder.kill()
            holder.wait()


# -------------------------------------------------------------------------------- the coordinator


class Coordinator:
    """A real coordinator."""

    def __init__(self, folder: Path, silence_s: float, *, has_page: bool = False) -> None:
        self._folder = folder
        self._more = ["--silence", str(silence_s)]
        if has_page:
            self._more += ["--http", "127.0.0.1:0"]
        self.address, self.page = "127.0.0.1:0", ""
        self.start()

    def start(self) -> None:
        """Start it, again at the same address."""
        ready = self._folder / "ready"
        ready.unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "elastic.coord.cli", "serve", "--listen", self.address),
                *("--store", f"sqlite:{self._folder}/coord.sqlite", "--ready-file", str(ready)),
                *("--log-level", "error", *self._more),
            ],
            stdout=subprocess.DEVNULL,
        )
        until = time.monotonic() + WAIT_S
        while not ready.exists():
            if self.process.poll() is not None or time.monotonic() > until:
                raise click.ClickException("the coordinator did not start")
            time.sleep(POLL_S)
        words = dict(word.partition("=")[::2] for word in ready.read_text().split())
        self.address, self.page = words["address"], words.get("page", "")
        self.usage = psutil.Process(self.process.pid)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()

    def cpu_s(self) -> float:
        """Return the processor time that it has used."""
        times = self.usage.cpu_times()
        return float(times.user + times.system)

    def revision(self) -> int:
        """Return how many commits its store has seen."""
        with sqlite3.connect(f"file:{self._folder}/coord.sqlite?mode=ro", uri=True) as store:
            row = store.execute("SELECT value FROM numbers WHERE name = 'revision'").fetchone()
        return int(row[0])


class Phase:
    """What one part cost: seconds until all knew, processor seconds until then, and commits."""

    def __init__(self, coordinator: Coordinator, crowd: Crowd) -> None:
        self._both = (coordinator, crowd)
        self._before = [one.cpu_s() for one in self._both]
        self.cpu_s: list[float] = []
        self.seconds, self.reported_s, self.commits = 0.0, 0.0, 0

    def ends(self, began_ns: int, last_ns: int, reported_ns: int = 0) -> None:
        """All know the next group, and knew earlier, maybe, that the one before is over."""
        self.seconds = (last_ns - began_ns) / 1e9
        self.reported_s = (reported_ns - began_ns) / 1e9
        self.cpu_s = [one.cpu_s() - s for one, s in zip(self._both, self._before, strict=True)]

    def __str__(self) -> str:
        """Return the table's cell."""
        own, agents = self.cpu_s
        return f"{self.seconds:.2f} s ({own:.2f} + {agents:.2f} s, {self.commits})"


@contextmanager
def phase(coordinator: Coordinator, crowd: Crowd) -> Iterator[Phase]:
    """Measure one part; what follows from it, such as reports of those that were told, too."""
    revision, found = coordinator.revision(), Phase(coordinator, crowd)
    yield found
    time.sleep(SETTLE_S)
    found.commits = coordinator.revision() - revision


@contextmanager
def running(
    agents: int, how: How, *, has_page: bool = False
) -> Iterator[tuple[Coordinator, Crowd]]:
    """Start a coordinator and its agents, and end them."""
    with tempfile.TemporaryDirectory() as folder:
        coordinator = Coordinator(Path(folder), how.silence_s, has_page=has_page)
        crowd = Crowd(coordinator.address, agents, how)
        try:
            yield coordinator, crowd
        finally:
            crowd.close()
            coordinator.kill()


def measure(agents: int, how: How, *, storm: bool) -> list[str]:
    """Return a row of the table."""
    with running(agents, how) as (coordinator, crowd):
        return [f"{agents}", *_cells(coordinator, crowd, agents, how.deaths, storm=storm)]


def _rest(coordinator: Coordinator, crowd: Crowd) -> list[str]:
    time.sleep(SETTLE_S)
    before, began = (coordinator.cpu_s(), crowd.cpu_s()), time.monotonic()
    time.sleep(REST_S)
    took_s = time.monotonic() - began
    own, agents = coordinator.cpu_s() - before[0], crowd.cpu_s() - before[1]
    memory = coordinator.usage.memory_info().rss / 2**20
    return [f"{100 * own / took_s:.0f} + {100 * agents / took_s:.0f} %", f"{memory:.0f}"]


def _deaths(
    coordinator: Coordinator, crowd: Crowd, agents: int, deaths: int, generation: int
) -> tuple[list[str], int]:
    """Let workers die one after the other; return the cells, and the last group's number."""
    found = []
    for number in range(deaths):
        with phase(coordinator, crowd) as death:
            (began_ns,) = crowd.ask(f"lose {3 + number}", 0)
            last_ns, generation = crowd.wait_generation(agents - 1, generation)
            death.ends(began_ns, last_ns, crowd.end_reported_ns(agents - 1, last_ns))
            # The one that was lost is started again, and comes in.
            _, generation = crowd.wait_generation(agents, generation - 1)
        found.append(death)
    found.sort(key=lambda one: one.seconds)
    reported_s = sorted(one.reported_s for one in found)
    told = f"{reported_s[len(reported_s) // 2]:.2f} s"
    if deaths > 1:
        told += f" ({reported_s[0]:.2f} to {reported_s[-1]:.2f})"
    return [told, f"{found[len(found) // 2]}"], generation


class Reader:
    """A browser that has a job's page open."""

    def __init__(self, url: str) -> None:
        self.received = 0
        self._answer = urllib.request.urlopen(url, timeout=WAIT_S)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
            while data := self._answer.read1(1 << 16):
                self.received += len(data)

    def close(self) -> None:
        """Close the page."""
        self._answer.fp.raw._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()


def measure_page(agents: int, how: How) -> list[str]:
    """Return a row of the page's table."""

    def cpu_percent(seconds: float = REST_S) -> float:
        time.sleep(SETTLE_S)
        before, began = coordinator.cpu_s(), time.monotonic()
        time.sleep(seconds)
        return 100 * (coordinator.cpu_s() - before) / (time.monotonic() - began)

    with running(agents, how, has_page=True) as (coordinator, crowd):
        crowd.wait_welcome(agents)
        with Client(coordinator.address) as client:
            job_id = client.submit(spec_of(agents))
        crowd.wait_generation(agents)
        found = [[cpu_percent() for _ in range(PAGE_ROUNDS)], [], []]
        crowd.ask("telemetry")
        rates = []
        for _ in range(PAGE_ROUNDS):
            found[1].append(cpu_percent())
            reader = Reader(f"{coordinator.page.rstrip('/')}/jobs/{job_id}/stream")
            time.sleep(SETTLE_S)
            before, began = reader.received, time.monotonic()
            found[2].append(cpu_percent())
            rates.append((reader.received - before) / (time.monotonic() - began) / 1e3)
            reader.close()
        cells = [f"{statistics.median(one):.1f} %" for one in found]
        return [f"{agents}", *cells, f"{statistics.median(rates):.1f}"]


def spec_of(agents: int) -> JobSpec:
    """Return a job of all agents."""
    return JobSpec(
        job_id=JobId(""),
        name="scale",
        entry=Entry(EntryKind.SCRIPT, "train.py"),
        min_workers=agents // 2,
        max_workers=agents,
    )


def _cells(
    coordinator: Coordinator, crowd: Crowd, agents: int, deaths: int, *, storm: bool
) -> list[str]:
    crowd.wait_welcome(agents)
    rest = _rest(coordinator, crowd)
    with phase(coordinator, crowd) as submit, Client(coordinator.address) as client:
        began_ns = time.monotonic_ns()
        client.submit(spec_of(agents))
        last_ns, generation = crowd.wait_generation(agents)
        submit.ends(began_ns, last_ns)
    size = crowd.largest_message()
    death, generation = _deaths(coordinator, crowd, agents, deaths, generation)
    with phase(coordinator, crowd) as node:
        (began_ns,) = crowd.ask("die 5", 0)
        last_ns, _ = crowd.wait_generation(agents - 1, generation)
        node.ends(began_ns, last_ns)
    cells = [*rest, f"{submit}", *death, f"{node}"]
    return [*cells, _storm(coordinator, crowd, agents) if storm else "", f"{size}"]


def _storm(coordinator: Coordinator, crowd: Crowd, agents: int) -> str:
    """Start the coordinator anew, and let all come back but the one that died."""
    revision = coordinator.revision()
    coordinator.kill()
    began_ns = time.monotonic_ns()
    coordinator.start()
    storm_s = (crowd.wait_welcome(agents - 1, began_ns) - began_ns) / 1e9
    cpu_s = coordinator.cpu_s()
    time.sleep(SETTLE_S)
    return f"{storm_s:.1f} s ({cpu_s:.1f} s, {coordinator.revision() - revision})"


def check_files(agents: int) -> None:
    """Refuse to begin when the coordinator could not hold so many connections."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < agents + OWN_FILES:
        raise click.ClickException(
            f"{agents} agents need {agents + OWN_FILES} open files in the coordinator, the hard "
            f"limit is {hard}: raise it (ulimit -Hn), or measure fewer"
        )


@click.command()
@click.option("--agents", "counts", type=int, multiple=True, help="Default: 1000.")
@click.option("--storm/--no-storm", default=True, help="Restart the coordinator, too.")
@click.option("--silence", type=float, default=SILENCE_S, show_default=True, help="Seconds.")
@click.option("--client", type=click.Choice(CLIENTS), default="frames", show_default=True)
@click.option("--at-once", type=int, default=CONNECTING_AT_ONCE, help="Agents that connect.")
@click.option("--deaths", type=click.IntRange(1), default=1, help="Of workers: the median counts.")
@click.option("--page", is_flag=True, help="What telemetry and an open page cost, instead.")
def main(
    counts: tuple[int, ...],
    storm: bool,
    silence: float,
    client: str,
    at_once: int,
    deaths: int,
    page: bool,
) -> None:
    """Measure a coordinator with many agents."""
    check_files(max(counts, default=0))
    if page:
        table = Table("agents", "they train", "with telemetry", "and the page open", "page, KB/s")
        for agents in counts or (1000,):
            table.add_row(*measure_page(agents, How(silence, client, at_once)))
        Console().print(table)
        return
    table = Table(
        "agents", "rest", "MiB", "submit", "death", "next group", "node", "storm", "bytes"
    )
    for agents in counts or (1000,):
        table.add_row(*measure(agents, How(silence, client, at_once, deaths), storm=storm))
    console = Console(width=180)
    grace = CoordinatorConfig.node_grace_s
    console.print(
        f"Python {platform.python_version()}, {os.cpu_count()} cores for coordinator and agents; "
        f"in brackets processor time of coordinator + agents, commits; node grace {grace:g} s, "
        f"--silence {silence:g} s, agents by {client}, {at_once} at once"
    )
    console.print(table)


if __name__ == "__main__":
    main()
