"""A real coordinator process for tests, agents that say what a test tells them, and users."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import anyio
import grpc
import grpc.aio

from elastic.coord.server import CLUSTER, JOBS
from elastic.core.config import JobSpec
from elastic.core.facts import Entry, EntryKind, JobId, Node, NodeId, WorkerPhase, WorkerReport
from elastic.core.messages import (
    AgentMessage,
    Announce,
    CoordinatorMessage,
    Hello,
    StartWorker,
    Welcome,
    WorkerUpdate,
)
from elastic.core.view import JobView
from elastic.runtime.rpc import Metadata, call_metadata, channel_options
from elastic.runtime.services import caller_of
from elastic.wire.codec_jobs import (
    ClusterStatus,
    JobEvent,
    job_event_from_proto,
    job_from_proto,
    log_chunk_from_proto,
    status_from_proto,
    submit_request,
)
from elastic.wire.codec_stream import ATTACH_METHOD, FROM_AGENT, TO_AGENT
from elastic.wire.generated.elastic.v1 import jobs_pb2
from tests.patience import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]
Message = TypeVar("Message", bound=CoordinatorMessage)


@dataclass
class Coordinator:
    """`elastic-coord serve` as a process; a context manager that leaves nothing running."""

    folder: Path
    store: str = "memory:"
    listen: str = "127.0.0.1:0"
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    stdout: Path | None = None
    stderr: int | None = None
    process: subprocess.Popen[bytes] | None = None
    address: str = ""

    def __enter__(self) -> Coordinator:
        self.start()
        self.wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def ready_file(self) -> Path:
        return self.folder / "ready"

    def start(self) -> None:
        """Start without waiting."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.ready_file.unlink(missing_ok=True)
        command = [
            *(sys.executable, "-m", "elastic.coord.cli", "serve", "--listen", self.listen),
            *("--store", self.store, "--ready-file", str(self.ready_file), *self.args),
        ]
        path = self.folder / "log"
        with path.open("ab") as log, (self.stdout or path).open("ab") as out:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, cwd=ROOT,
                stderr=log if self.stderr is None else self.stderr, env={**os.environ, **self.env},
            )  # fmt: skip

    def wait_ready(self) -> None:
        """Wait until it answers requests; later starts listen on the same address."""
        until = time.monotonic() + DEADLINE_S
        while not self.ready_file.exists():
            assert self.process is not None
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < until, self.log()
            time.sleep(0.01)
        line = self.ready_file.read_text()
        self.address = next(w for w in line.split() if w.startswith("address=")).partition("=")[2]
        self.listen = self.address

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def wait_logged(self, text: str, *, times: int = 1) -> None:
        """Wait until the log holds `text` so many times."""
        until = time.monotonic() + DEADLINE_S
        while self.log().count(text) < times:
            assert time.monotonic() < until, self.log()
            time.sleep(0.01)

    def kill(self, number: int = signal.SIGKILL) -> int:
        """Signal it and return its exit code; 0 if that was done before."""
        if self.process is None:
            return 0
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(DEADLINE_S)
        self.process = None
        return code


def node(node_id: str = "n1", incarnation: int = 1, slots: int = 2) -> Node:
    return Node(NodeId(node_id), incarnation, "127.0.0.1", slots)


def spec(name: str, *, payload: bytes = b"", workers: tuple[int, int] = (1, 1)) -> JobSpec:
    entry = Entry(EntryKind.FUNCTION, "train", payload=payload)
    low, high = workers
    return JobSpec(job_id=JobId(""), name=name, entry=entry, min_workers=low, max_workers=high)


@dataclass
class ScriptedAgent:
    """One agent's stream; what it says, the test says.

    Attributes:
        received: messages that came and were not asked for yet.
    """

    address: str
    node: Node
    token: str = ""
    metadata: Metadata | None = None
    received: list[CoordinatorMessage] = field(default_factory=list)
    put_back: list[CoordinatorMessage] = field(default_factory=list)
    call: Any = None
    channel: Any = None

    async def __aenter__(self) -> ScriptedAgent:
        self.channel = grpc.aio.insecure_channel(self.address, options=channel_options())
        attach = self.channel.stream_stream(ATTACH_METHOD)
        metadata = call_metadata(self.token) if self.metadata is None else self.metadata
        self.call = attach(metadata=metadata, wait_for_ready=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.call.cancel()
        await self.channel.close()

    async def say(self, message: AgentMessage | bytes) -> None:
        data = message if isinstance(message, bytes) else FROM_AGENT.encode(message)
        with anyio.fail_after(DEADLINE_S):
            await self.call.write(data)

    async def hello(self, *workers: WorkerReport, **changes: Any) -> None:
        await self.say(replace(Hello(self.node, workers=workers), **changes))

    async def join(self, *workers: WorkerReport) -> None:
        """Say Hello and wait for Welcome."""
        await self.hello(*workers)
        await self.hear(Welcome)

    async def hear(self, kind: type[Message]) -> Message:
        """Return the next message of this kind; others are kept."""
        with anyio.fail_after(DEADLINE_S):
            while True:
                for message in self.received:
                    if isinstance(message, kind):
                        self.received.remove(message)
                        return message
                data = await self.call.read()
                assert isinstance(data, bytes), f"the stream ended, heard {self.received}"
                self.received.append(TO_AGENT.decode(data))

    async def end(self) -> tuple[str, str]:
        """Read to the end of the stream and return its status and details."""
        with anyio.fail_after(DEADLINE_S):
            try:
                while isinstance(data := await self.call.read(), bytes):
                    self.received.append(TO_AGENT.decode(data))
            except grpc.aio.AioRpcError:
                pass
            return (await self.call.code()).name, await self.call.details()

    async def ready(self) -> WorkerReport:
        """Take one worker from its start until it waits for a group."""
        start = await self.hear(StartWorker)
        report = WorkerReport(start.worker_id, start.spec.job_id, WorkerPhase.STARTING, pid=77)
        report = replace(report, phase=WorkerPhase.READY, store_address="127.0.0.1:1")
        await self.say(WorkerUpdate(report))
        return report

    async def form(self, report: WorkerReport) -> WorkerReport:
        """Take a worker into the next group that is announced to it, and into training."""
        while True:
            assignment = (await self.hear(Announce)).assignment
            if assignment.worker_id == report.worker_id:
                break
            self.put_back.append(Announce(assignment))
        self.received[:0], self.put_back = self.put_back, []
        for phase in (WorkerPhase.FORMING, WorkerPhase.TRAINING):
            report = replace(report, phase=phase, generation=assignment.generation)
            await self.say(WorkerUpdate(report))
        return report

    async def train(self) -> WorkerReport:
        """Take the only worker of a job from its start into training."""
        return await self.form(await self.ready())


class User:
    """The services as a user's process sees them."""

    def __init__(self, address: str, *, token: str = "", metadata: Metadata | None = None) -> None:
        self.channel = grpc.aio.insecure_channel(address, options=channel_options())
        self.jobs, self.cluster = (
            SimpleNamespace(**{one.name: caller_of(self.channel, one) for one in service.methods})
            for service in (JOBS, CLUSTER)
        )
        self.options = {
            "metadata": call_metadata(token) if metadata is None else metadata,
            "timeout": DEADLINE_S,
            "wait_for_ready": True,
        }

    async def __aenter__(self) -> User:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()

    async def submit(self, job: JobSpec) -> str:
        answer = await self.jobs.Submit(submit_request(job), **self.options)
        return str(answer.job_id)

    async def stop(self, job: str) -> None:
        await self.jobs.Stop(jobs_pb2.StopJobRequest(job=job), **self.options)

    async def get(self, job: str) -> JobView:
        answer = await self.jobs.Get(jobs_pb2.GetJobRequest(job=job), **self.options)
        return job_from_proto(answer, 0)

    async def list(self, *, include_ended: bool) -> list[str]:
        request = jobs_pb2.ListJobsRequest(include_ended=include_ended)
        answer = await self.jobs.List(request, **self.options)
        return [job.record.spec.name for job in answer.jobs]

    async def status(self) -> ClusterStatus:
        answer = await self.cluster.Status(jobs_pb2.StatusRequest(), **self.options)
        return status_from_proto(answer, 0)

    async def drain(self, node_id: str, timeout_s: float) -> None:
        request = jobs_pb2.DrainRequest(node=node_id, timeout_s=timeout_s)
        await self.cluster.Drain(request, **self.options)

    async def watch(self, job: str, into: list[JobEvent]) -> None:
        """Follow a job to its end."""
        call = self.jobs.Watch(jobs_pb2.WatchRequest(job=job), **self.options)
        async for event in call:
            # One by one: who asked looks at them as they come.
            into.append(job_event_from_proto(event, 0))  # noqa: PERF401

    async def logs(self, job: str, *, follow: bool = False, ranks: Sequence[int] = ()) -> list[Any]:
        request = jobs_pb2.LogsRequest(job=job, tail_lines=-1, follow=follow, ranks=ranks)
        return [log_chunk_from_proto(c) async for c in self.jobs.Logs(request, **self.options)]

    async def wait_job(self, job: str, condition: Any) -> JobView:
        """Ask until the job looks as wanted."""
        with anyio.fail_after(DEADLINE_S):
            while True:
                view = await self.get(job)
                if condition(view):
                    return view
                await anyio.sleep(0.02)

    async def wait_node(self, node_id: str, condition: Any) -> Any:
        """Ask until the node looks as wanted."""
        with anyio.fail_after(DEADLINE_S):
            while True:
                nodes = (await self.status()).view.nodes
                found = next((n for n in nodes if n.node.node_id == node_id), None)
                if condition(found):
                    return found
                await anyio.sleep(0.02)


def elastic_coord(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "elastic.coord.cli", *args],
        cwd=ROOT,
        env={**os.environ, **env},
        check=False,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
