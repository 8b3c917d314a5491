"""Thousands of agents without workers, for benches: what real ones say, at next to no cost.

    python bench/played_agents.py ADDRESS FIRST NUMBER AT_ONCE SILENCE_S CLIENT

Each agent has a connection and a stream of its own and plays one worker, which is ready at once and
trains as soon as it is announced. Commands come on stdin, answers go out as JSON on stdout.

Rule: it says what an agent says when an agent says it, and answers when it is its turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import anyio
from frames import GrpcStream

from elastic.core.config import AgentConfig, ns
from elastic.core.facts import (
    ExitCause,
    ExitKind,
    JobId,
    Node,
    NodeId,
    WorkerId,
    WorkerPhase,
    WorkerReport,
)
from elastic.core.messages import Hello, Progress, WorkerUpdate
from elastic.core.policy.pacing import answer_after_ns, telemetry_every_ns, telemetry_offset_ns
from elastic.core.telemetry import Goodput, Telemetry
from elastic.errors import ElasticError
from elastic.runtime.rpc import call_metadata, parse_endpoint
from elastic.runtime.stream import ClientStream, open_stream
from elastic.wire.codec_stream import ATTACH_METHOD, FROM_AGENT
from elastic.wire.generated.elastic.v1 import agent_pb2

CLIENTS = ("frames", "grpc")
"""Who speaks for an agent: frames.py, or gRPC's own client as in a real agent."""
MEMBER_NS = ns(AgentConfig.spread_s_per_member)
STEPS_PER_S = 20


class FramesClient:
    """A stream by frames.py."""

    def __init__(self, on_message: Callable[[bytes], None]) -> None:
        self._ended = asyncio.Event()
        self._stream = GrpcStream(ATTACH_METHOD, call_metadata(), on_message, self._ended.set)

    async def run(self, address: str, _: float, first: bytes) -> None:
        """Connect, say the first message, and return when the stream has ended."""
        host, port = parse_endpoint(address)
        try:
            await asyncio.get_running_loop().create_connection(lambda: self._stream, host, port)
        except OSError:
            return
        self._stream.send(first)
        await self._ended.wait()

    def send(self, data: bytes) -> None:
        """Send a message."""
        self._stream.send(data)

    def close(self) -> None:
        """Drop the connection."""
        self._stream.close()


class GrpcClient:
    """A stream as a real agent opens it."""

    def __init__(self, on_message: Callable[[bytes], None]) -> None:
        self._on_message = on_message
        self._out: asyncio.Queue[bytes] = asyncio.Queue()
        self._stream: ClientStream | None = None

    async def run(self, address: str, silence_s: float, first: bytes) -> None:
        """Connect, say the first message, and return when the stream has ended."""
        with contextlib.suppress(ElasticError):
            self._stream = await open_stream(address, ATTACH_METHOD, silence_s=silence_s)
            self._out.put_nowait(first)
            writing = asyncio.create_task(self._write(self._stream))
            try:
                while (data := await self._stream.read()) is not None:
                    self._on_message(data)
            finally:
                writing.cancel()
                await self._stream.close()

    async def _write(self, stream: ClientStream) -> None:
        with contextlib.suppress(ElasticError):
            while True:
                await stream.write(await self._out.get())

    def send(self, data: bytes) -> None:
        """Send a message."""
        self._out.put_nowait(data)

    def close(self) -> None:
        """End the stream."""
        if self._stream is not None:
            self._closing = asyncio.create_task(self._stream.close())


class Tally:
    """What the agents of one process have been told.

    Attributes:
        told: how many know of each generation.
        last_ns: when the last one heard of a generation.
        over: how many heard of the end of a generation before they heard of the next one, and when
            the last of them did.
        bytes_in: of the newest announcement.
    """

    def __init__(self) -> None:
        self.told: dict[int, int] = {}
        self.over: dict[int, tuple[int, int]] = {}
        self.last_ns = self.bytes_in = 0

    def receives_end(self, generation: int) -> None:
        """Count one that hears that a generation is over."""
        known, _ = self.over.get(generation, (0, 0))
        self.over[generation] = known + 1, time.monotonic_ns()

    def receives(self, generation: int, size: int) -> None:
        """Count one that hears of a generation."""
        self.told[generation] = self.told.get(generation, 0) + 1
        self.last_ns, self.bytes_in = time.monotonic_ns(), size


class PlayedAgent:
    """One agent with one worker."""

    def __init__(self, number: int, tally: Tally, make: type[FramesClient | GrpcClient]) -> None:
        self.node = Node(NodeId(f"n{number:05d}"), 1, "127.0.0.1", 1)
        self.report: WorkerReport | None = None
        self.welcome_ns = self.generation = self.rank = self.world_size = 0
        self._tally = tally
        self._make = make
        self._client: FramesClient | GrpcClient | None = None
        self._welcome = asyncio.Event()
        self._gone = False

    async def live(self, address: str, gate: asyncio.Semaphore, silence_s: float) -> None:
        """Connect, and connect again, until the node dies."""
        wait_s = 0.1
        while not self._gone:
            self._welcome.clear()
            await self._attach(address, gate, silence_s)
            if self._welcome.is_set():
                wait_s = 0.1
            # As real agents do: not all at the same moment.
            wait_s = min(2.0, wait_s * 2)
            jitter = (hash(self.node.node_id) % 1000) / 1000
            await asyncio.sleep(wait_s * (0.5 + jitter))

    async def _attach(self, address: str, gate: asyncio.Semaphore, silence_s: float) -> None:
        """Hold one stream until it ends; the gate is for those that are not welcome yet."""
        self._client = self._make(self._take)
        workers = (self.report,) if self.report is not None else ()
        hello = FROM_AGENT.encode(Hello(self.node, workers))
        async with gate:
            life = asyncio.create_task(self._client.run(address, silence_s, hello))
            welcome = asyncio.create_task(self._welcome.wait())
            await asyncio.wait((life, welcome), return_when=asyncio.FIRST_COMPLETED)
            welcome.cancel()
        await life

    def _take(self, data: bytes) -> None:
        message = agent_pb2.CoordinatorToAgent.FromString(data)
        kind = message.WhichOneof("body")
        if kind == "welcome":
            self.welcome_ns = time.monotonic_ns()
            self._welcome.set()
        elif kind == "refusal":
            sys.exit(f"not welcome: {message}")
        elif kind == "start_worker":
            self._start(message.start_worker)
        elif kind == "announce" and self.report is not None:
            self._join(message.announce.assignment, len(data))
        elif kind == "leave_group" and self.report is not None:
            self._leave(message.leave_group)

    def _start(self, order: Any) -> None:
        self._tell(
            WorkerReport(
                WorkerId(order.worker_id),
                JobId(order.spec.job_id),
                WorkerPhase.READY,
                store_address="127.0.0.1:1",
                pid=1,
            )
        )

    def _leave(self, order: Any) -> None:
        """Say that the worker is out, unless that has time: then the next group is sooner here."""
        assert self.report is not None
        if not order.follows:
            self._tell(replace(self.report, phase=WorkerPhase.READY))
        elif order.generation == self.generation:
            self._tally.receives_end(self.generation)

    def _join(self, place: Any, size: int) -> None:
        """Count it, and say that the worker trains when it is its turn, as real agents do."""
        assert self.report is not None
        if self.generation != place.generation:
            self.generation = place.generation
            self.rank, self.world_size = place.rank, place.world_size
            self._tally.receives(self.generation, size)
        report = self.report = replace(
            self.report, phase=WorkerPhase.TRAINING, generation=self.generation, in_place=True
        )
        after_ns = answer_after_ns(place.rank, place.world_size, MEMBER_NS)
        if not after_ns:
            self._tell(report)
            return

        def answer() -> None:
            if self.report is report:
                self._tell(report)

        asyncio.get_running_loop().call_later(after_ns / 1e9, answer)

    def _tell(self, report: WorkerReport) -> None:
        self.report = report
        if self._client is not None:
            self._client.send(FROM_AGENT.encode(WorkerUpdate(report)))

    async def send_telemetry(self) -> None:
        """Report steps as often, and in the same turn, as an agent passes them on."""
        every_ns = telemetry_every_ns(self.rank, self.world_size, MEMBER_NS)
        every_s = max(1.0, every_ns / 1e9)
        await asyncio.sleep(telemetry_offset_ns(self.rank, self.world_size, every_ns) / 1e9)
        steps = 0
        while not self._gone:
            if self.report is not None and self._client is not None:
                steps += STEPS_PER_S
                self._client.send(FROM_AGENT.encode(self._progress(self.report, steps)))
            await asyncio.sleep(every_s)

    def _progress(self, report: WorkerReport, steps: int) -> Progress:
        wait_ms = 50 + steps * 7919 % 100
        logged = json.dumps({"loss": 1 / steps, "accuracy": 1 - 1 / steps})
        telemetry = Telemetry(
            steps=STEPS_PER_S,
            wall_ns=10**9,
            data_wait_ns=wait_ms * 10**6 // 4,
            compute_ns=(1000 - wait_ms) * 10**6,
            exchange_ns=wait_ms * 10**6,
            straggler_wait_ns=wait_ms * 10**6 // 2,
            bytes_sent=STEPS_PER_S << 20,
            samples=STEPS_PER_S * 64,
            straggler=steps % 7,
            step=steps,
            num_epochs=10,
            num_steps=10**6,
            logged="" if self.rank else logged,
        )
        spent = Goodput(productive_ns=steps * 45 * 10**6, straggler_wait_ns=steps * 5 * 10**6)
        return Progress(report.worker_id, self.generation, steps, time.time_ns(), spent, telemetry)

    def lose_worker(self) -> None:
        """Let the worker be killed."""
        if self.report is not None:
            exit_ = ExitCause(ExitKind.SIGNAL, 9)
            self._tell(replace(self.report, phase=WorkerPhase.EXITED, exit=exit_))
            self.report = None

    def is_gone(self) -> bool:
        """Return whether the node is dead."""
        return self._gone

    def die(self) -> None:
        """Let the node be gone."""
        self._gone = True
        if self._client is not None:
            self._client.close()


def answer(command: list[str], agents: list[PlayedAgent], tally: Tally) -> Any:
    """Do what a command says and return what is to be printed."""
    if command[0] == "state":
        newest = max(tally.told.items(), default=(0, 0))
        over = tally.over.get(newest[0] - 1, (0, 0))
        known = {"told": newest, "last_ns": tally.last_ns, "bytes": tally.bytes_in}
        return {**known, "over": over}
    if command[0] == "telemetry":
        return len(agents)
    if command[0] == "welcome":
        welcome = [agent.welcome_ns for agent in agents if not agent.is_gone()]
        return sum(moment > int(command[1]) for moment in welcome), max(welcome)
    now_ns, agent = time.monotonic_ns(), agents[int(command[1])]
    if command[0] == "lose":
        agent.lose_worker()
    else:
        agent.die()
    return now_ns


async def hold(
    address: str, first: int, number: int, at_once: int, silence_s: float, client: str
) -> None:
    """Hold agents, and answer commands until stdin ends."""
    gate, tally = asyncio.Semaphore(at_once), Tally()
    make: type[FramesClient | GrpcClient] = FramesClient if client == "frames" else GrpcClient
    agents = [PlayedAgent(first + index, tally, make) for index in range(number)]
    loop = asyncio.get_running_loop()
    tasks = [asyncio.create_task(agent.live(address, gate, silence_s)) for agent in agents]
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = line.split()
        if command[0] == "telemetry":
            tasks += [asyncio.create_task(agent.send_telemetry()) for agent in agents]
        print(json.dumps(answer(command, agents, tally)), flush=True)
    for task in tasks:
        task.cancel()


if __name__ == "__main__":
    where, *numbers, silence, who = sys.argv[1:]
    anyio.run(hold, where, *(int(text) for text in numbers), float(silence), who)
