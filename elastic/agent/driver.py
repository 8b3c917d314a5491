"""The loop that owns the agent's state machine: events in, effects performed in order, deadlines.

Rule: only this module calls `step`. Events are posted here, on the event loop, and processed one at
a time; performing an effect never waits.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import anyio

from elastic.agent.address_book import AddressBook
from elastic.agent.arenas import Arenas
from elastic.agent.copy_host import CopyHost
from elastic.agent.copy_pusher import CopyPusher
from elastic.agent.figures import Figures
from elastic.agent.link import Link, LinkCallbacks
from elastic.agent.link_prober import LinkProber
from elastic.agent.local_snapshots import LocalSnapshots
from elastic.agent.log_follow import LogFollowers
from elastic.agent.logs import Logs
from elastic.agent.processes import ChildProcesses, SpareCommand
from elastic.core.config import NS_PER_S, AgentConfig
from elastic.core.copy_messages import Replicate
from elastic.core.events.agent import (
    AgentEffect,
    AgentEvent,
    Connect,
    Disconnect,
    DrainSignalled,
    ExitAgent,
    HandleCopy,
    Kill,
    OpenLog,
    ProbeLinks,
    ProcessExited,
    SendCoordinator,
    SendProcess,
    ShowStacks,
    Spawn,
)
from elastic.core.events.shared import Note, Tick
from elastic.core.facts import Node
from elastic.core.machine.agent import AgentMachine
from elastic.core.messages import Assign
from elastic.errors import InvariantViolation, check
from elastic.runtime.access import Access
from elastic.runtime.clock import Clock
from elastic.runtime.eventlog import EventLog, note_text
from elastic.runtime.worker_ports import ANY_PORT, PortRange

log = logging.getLogger(__name__)

EVENTS_MAX = 100_000
"""Queued events. All come from bounded reads between two turns of the loop, so that reaching this
means that the loop itself is stuck."""
END_S_MAX = 5.0
"""Timeout for killed processes to exit, and again for their output to be read."""
FLUSH_S_MAX = 1.0


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """Everything an agent is started with.

    Attributes:
        endpoints: "host:port" of each coordinator that may lead.
        access: credentials for coordinators.
        node: this node's id, address, resources and labels.
        devices: accelerators, as CUDA_VISIBLE_DEVICES entries.
        config: times and limits.
        launch: how a spare is started.
        log_dir: where the output of workers goes.
        run_dir: private directory, whose disk is watched; None for none.
        book: endpoints learned by an earlier run; None to remember none.
        event_log: file of the event log, None for none.
        worker_ports: on which workers and copies listen.
    """

    endpoints: tuple[str, ...]
    access: Access
    node: Node
    devices: tuple[str, ...]
    config: AgentConfig
    launch: SpareCommand
    log_dir: Path
    event_log: Path | None
    run_dir: Path | None = None
    book: AddressBook | None = None
    worker_ports: PortRange = ANY_PORT

    @property
    def folders(self) -> tuple[Path, ...]:
        """Return the directories whose free disk space is watched."""
        return (self.log_dir, *([self.run_dir] if self.run_dir else []))


class AgentDriver:
    """Owns one state machine and performs its effects; runs on one event loop, in the main thread.

    Attributes:
        figures: metrics for Prometheus.
    """

    def __init__(self, settings: AgentSettings, *, clock: Clock, draws: random.Random) -> None:
        """Build everything, start nothing.

        Args:
            settings: see `AgentSettings`.
            clock: for the machine's time and the event log.
            draws: source of the jitter between attempts to connect.

        Raises:
            ConfigError: a TLS file is invalid.
        """
        node = settings.node
        self._clock = clock
        self.figures = Figures()
        self._arenas = Arenas()
        own = LocalSnapshots(node.node_id, self._arenas)
        self._copies = CopyHost(node.host, self.post, own=own, ports=settings.worker_ports)
        self._machine = AgentMachine(
            node, settings.config, settings.devices, copies_at=self._copies.address
        )
        self._events: deque[AgentEvent] = deque()
        self._wake = asyncio.Event()
        self._exit: ExitAgent | None = None
        self._logs = Logs(settings.log_dir, node.node_id)
        self._processes = ChildProcesses(settings.launch, self._logs, self.post)
        self._pushing = CopyPusher(self._arenas, self.post)
        self._reaching = LinkProber(self.post)
        callbacks = LinkCallbacks(
            post=self.post,
            on_follow=lambda request: self._followers.handle(request),
            on_end=lambda: self._followers.stop_all(),
            draw=draws.random,
            on_learned=settings.book.keep if settings.book else lambda endpoints: None,
        )
        self._link = Link(
            settings.endpoints,
            learned=settings.book.learned if settings.book else (),
            access=settings.access,
            callbacks=callbacks,
            clock=clock,
        )
        self._followers = LogFollowers(self._logs, self._link.send_lines)
        self._event_log: EventLog | None = None
        if settings.event_log is not None:
            process = f"agent:{node.node_id}"
            self._event_log = EventLog(settings.event_log, process=process, clock=clock)

    def post(self, event: AgentEvent) -> None:
        """Queue an event; from callbacks and tasks of this event loop only."""
        check(len(self._events) < EVENTS_MAX, f"{EVENTS_MAX} events wait for the agent's machine")
        self._events.append(event)
        self._wake.set()

    def drain(self, reason: str, timeout_s: float) -> None:
        """Leave the cluster within this time; at once with 0."""
        self.post(DrainSignalled(reason, round(timeout_s * NS_PER_S)))

    async def run(self) -> ExitAgent:
        """Run until the machine returns `ExitAgent`; all processes have been killed by then.

        Raises:
            InvariantViolation: a bug; all processes have been killed here too.
        """
        try:
            self._step(Tick())
            while self._exit is None:
                await self._wait()
                self._step(self._events.popleft() if self._events else Tick())
            return self._exit
        finally:
            with anyio.CancelScope(shield=True):
                await self._end()

    async def _wait(self) -> None:
        """Wait for an event, or for the machine's next deadline."""
        if self._events:
            return
        self._wake.clear()
        deadline_ns = self._machine.next_deadline_ns()
        if deadline_ns is None:
            await self._wake.wait()
            return
        with anyio.move_on_after(max(0, deadline_ns - self._clock.monotonic_ns()) / NS_PER_S):
            await self._wake.wait()

    def _step(self, event: AgentEvent) -> None:
        if isinstance(event, ProcessExited):
            # Not in `post`: the machine may still assign a job to it before this event's turn.
            self._arenas.exited(event.process_id, event.cause)
        self.figures.count_event(event)
        for effect in self._machine.step(event, self._clock.monotonic_ns()):
            self.figures.count_effect(effect)
            self._perform(effect)

    def _perform(self, effect: AgentEffect) -> None:
        match effect:
            case SendProcess(process_id, Assign() as assign):
                folder = str(self._logs.path_of(assign).parent)
                snapshots = self._arenas.give(assign.spec.job_id, process_id)
                extended = dataclasses.replace(assign, log_dir=folder, snapshots=snapshots)
                self._processes.send(process_id, extended)
            case SendProcess(process_id, message):
                self._processes.send(process_id, message)
            case SendCoordinator(session, answer):
                self._link.send(session, answer)
            case Note():
                self._log_note(effect)
            case Spawn(process_id, job_id, entry):
                self._processes.spawn(process_id, job_id, entry)
            case OpenLog(process_id, assign):
                self._processes.open_log(process_id, assign)
            case Kill(process_id, reason):
                self._processes.kill(process_id, reason)
            case ShowStacks(process_id):
                self._processes.show_stacks(process_id)
            case Connect(session):
                self._link.connect(session)
            case Disconnect(session):
                self._link.disconnect(session)
            case HandleCopy(order):
                if isinstance(order, Replicate):
                    self._pushing.order(order)
                else:
                    self._copies.order(order)
            case ProbeLinks(order):
                self._reaching.order(order)
            case ExitAgent():
                self._exit = effect
            case _:
                never(effect)

    def _log_note(self, note: Note) -> None:
        log.info("%s", note_text(note))
        if self._event_log is not None:
            self._event_log.write(note)

    async def _end(self) -> None:
        """Kill processes, read their last output, send queued messages: each with a timeout."""
        self._reaching.close()
        self._pushing.close()
        self._copies.close()
        await self._processes.close(END_S_MAX)
        self._arenas.close()
        await self._logs.close(END_S_MAX)
        await self._followers.finish(FLUSH_S_MAX)
        await self._link.close(FLUSH_S_MAX)
        if self._event_log is not None:
            self._event_log.close()


def never(effect: NoReturn) -> NoReturn:
    """Reject an effect that this driver does not handle; mypy checks that there is none."""
    raise InvariantViolation(f"the agent's machine asked for {effect!r}, which no one performs")
