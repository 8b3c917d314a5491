"""An agent's metrics for Prometheus: phase, steps and step times of each of its workers.

Rule: they are collected from the agent's own events and effects, so a scrape costs the workers
nothing. A client of the address reads numbers, ranks and ids of jobs; no output, and it can change
nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from elastic.core.config import NS_PER_S
from elastic.core.events.agent import (
    AgentEffect,
    AgentEvent,
    ProcessExited,
    ProcessMessageReceived,
    SendProcess,
)
from elastic.core.facts import ExitKind, WorkerPhase
from elastic.core.messages import Announce, Assign, Progress, Warm, WorkerUpdate
from elastic.core.telemetry import Telemetry
from elastic.runtime.exposition import CONTENT_TYPE, Family, exposition
from elastic.runtime.listening import bind
from elastic.runtime.rpc import format_endpoint

log = logging.getLogger(__name__)

REQUEST_BYTES_MAX = 8192
REQUEST_S_MAX = 10.0
CONNECTIONS_MAX = 32
PARTS = ("wall", "data_wait", "compute", "exchange", "straggler_wait", "commit")


@dataclass
class _Worker:
    job: str
    rank: int = -1
    generation: int = 0
    phase: WorkerPhase = WorkerPhase.STARTING
    steps: int = 0
    telemetry: Telemetry = field(default_factory=Telemetry)


class Figures:
    """Metrics of an agent's processes."""

    def __init__(self) -> None:
        self._workers: dict[int, _Worker] = {}
        self._warm: set[int] = set()
        self._restarts: Counter[tuple[str, str]] = Counter()

    def count_event(self, event: AgentEvent) -> None:
        """Update the metrics from an event of the agent."""
        if isinstance(event, ProcessExited):
            self._warm.discard(event.process_id)
            worker = self._workers.pop(event.process_id, None)
            cause = event.cause
            is_in_order = cause.kind is ExitKind.STOPPED or (
                cause.kind is ExitKind.CODE and not cause.code
            )
            if worker is not None and not is_in_order:
                self._restarts[worker.job, cause.kind.value] += 1
        elif isinstance(event, ProcessMessageReceived):
            self._reported(event)

    def _reported(self, event: ProcessMessageReceived) -> None:
        message, worker = event.message, self._workers.get(event.process_id)
        if isinstance(message, Warm):
            self._warm.add(event.process_id)
        elif worker is None:
            return
        elif isinstance(message, WorkerUpdate):
            worker.phase = message.report.phase
        elif isinstance(message, Progress) and message.generation == worker.generation:
            worker.steps, worker.telemetry = message.steps, message.telemetry

    def count_effect(self, effect: AgentEffect) -> None:
        """Update the metrics from an effect of the agent."""
        if not isinstance(effect, SendProcess):
            return
        message = effect.message
        if isinstance(message, Assign):
            self._warm.discard(effect.process_id)
            self._workers[effect.process_id] = _Worker(message.spec.job_id)
        elif isinstance(message, Announce) and effect.process_id in self._workers:
            place, job = message.assignment, self._workers[effect.process_id].job
            self._workers[effect.process_id] = _Worker(job, place.rank, place.generation)

    def text(self) -> str:
        """Return all metrics in the Prometheus text format."""
        up = Family(
            "elastic_worker_up", "gauge", "1 for a worker that trains, 0 for one that waits."
        )
        steps = Family("elastic_worker_steps", "gauge", "Steps of a worker in its generation.")
        times = Family(
            "elastic_worker_step_seconds", "gauge",
            "Mean time of a worker's newest steps, about a second of them, and its parts.",
        )  # fmt: skip
        sent = Family(
            "elastic_worker_sent_bytes_per_second", "gauge", "Gradients that a worker sends."
        )
        for worker in self._workers.values():
            of = {"job": worker.job, "rank": worker.rank}
            up.add(worker.phase is WorkerPhase.TRAINING, **of)
            if worker.rank < 0:
                continue
            steps.add(worker.steps, **of)
            telemetry = worker.telemetry
            if telemetry.steps:
                for part in PARTS:
                    mean_s = getattr(telemetry, f"{part}_ns") / telemetry.steps / NS_PER_S
                    times.add(mean_s, **of, part=part)
                sent.add(telemetry.per_second(telemetry.bytes_sent), **of)
        restarts = Family(
            "elastic_worker_restarts_total", "counter",
            "Workers that ended otherwise than by order, by how.",
        )  # fmt: skip
        for (job, kind), count in sorted(self._restarts.items()):
            restarts.add(count, job=job, kind=kind)
        spares = Family("elastic_spares", "gauge", "Processes that are warm and have no job.")
        return exposition([up, steps, times, sent, restarts, spares.add(len(self._warm))])


class FiguresServer:
    """Serves `GET /metrics` only; slow clients are disconnected after `REQUEST_S_MAX`."""

    def __init__(self, host: str, port: int) -> None:
        """Bind.

        Raises:
            Unavailable: the address cannot be bound.
        """
        self._text: Callable[[], str] = str
        self._open = 0
        self._socket = bind(host, port, "--metrics", "free it, or choose another")
        self.address = format_endpoint(host, self._socket.getsockname()[1])

    async def run(self, text: Callable[[], str]) -> None:
        """Serve the return value of `text`, until cancelled."""
        self._text = text
        async with await asyncio.start_server(
            self._answer, sock=self._socket, limit=REQUEST_BYTES_MAX
        ) as server:
            log.info("metrics_served address=%s", self.address)
            await server.serve_forever()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open <= CONNECTIONS_MAX:
                await asyncio.wait_for(self._serve(reader, writer), REQUEST_S_MAX)
        except (OSError, EOFError, ValueError, asyncio.TimeoutError, asyncio.LimitOverrunError):
            pass  # The client is gone, slow, or does not speak HTTP.
        finally:
            self._open -= 1
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        words = head.split(b"\r\n", 1)[0].split(b" ")
        path = words[1].partition(b"?")[0] if len(words) == 3 else b""
        if words[0] == b"GET" and path == b"/metrics":
            status, body = "200 OK", self._text().encode()
        else:
            status, body = "404 Not Found", b"GET /metrics is all that is here\n"
        writer.write(
            f"HTTP/1.1 {status}\r\ncontent-type: {CONTENT_TYPE}\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
            + body
        )
        await writer.drain()
