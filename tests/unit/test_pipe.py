"""The pipe between an agent and a worker process: both ends, and every way it can end."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import anyio
import pytest

from elastic.core.config import JobSpec
from elastic.core.facts import (
    Entry,
    EntryKind,
    Failure,
    JobId,
    WorkerId,
    WorkerPhase,
    WorkerReport,
)
from elastic.core.messages import (
    Assign,
    Ping,
    PipeToAgent,
    PipeToWorker,
    Pong,
    Stop,
    Warm,
    WorkerUpdate,
)
from elastic.errors import PeerError, Unavailable
from elastic.wire.async_pipe import BACKLOG_BYTES_MAX, AsyncPipe
from elastic.wire.codec_stream import TO_WORKER
from elastic.wire.frames import encode_frame
from elastic.wire.pipe import Pipe
from tests.patience import DEADLINE_S
from tests.strategies import SCRIPT

pytestmark = pytest.mark.anyio
SPEC = JobSpec(job_id=JobId("j1"), name="digits", entry=SCRIPT, min_workers=1, max_workers=2)
LARGE = replace(SPEC, entry=Entry(EntryKind.FUNCTION, "train", payload=bytes(4 * 1024 * 1024)))
ASSIGN = Assign(WorkerId("n1/1"), LARGE, "127.0.0.1")
LAST_WORDS = WorkerUpdate(
    WorkerReport(
        WorkerId("n1/1"),
        JobId("j1"),
        WorkerPhase.BROKEN,
        failure=Failure("ValueError", "bad", "Traceback\n" * 3000),
    )
)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    agent, worker = socket.socketpair()
    with agent, worker:
        yield agent, worker


async def received_by(pipe: AsyncPipe) -> list[PipeToAgent]:
    with anyio.fail_after(DEADLINE_S):
        return [message async for message in pipe]


async def test_both_ends_understand_each_other(ends: tuple[socket.socket, socket.socket]) -> None:
    agent, worker = AsyncPipe(ends[0], "process 1"), Pipe(ends[1])
    worker.send(Warm(pid=4711))
    with anyio.fail_after(DEADLINE_S):
        assert await agent.receive() == Warm(pid=4711)
    assert agent.send(Ping(1))
    assert agent.send(Ping(2))
    assert worker.receive(timeout_s=DEADLINE_S) == Ping(1)
    assert worker.receive(timeout_s=DEADLINE_S) == Ping(2)
    assert worker.receive(timeout_s=0) is None
    agent.close()


async def test_a_worker_that_does_not_read_never_holds_up_its_agent(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    agent, worker = AsyncPipe(ends[0], "process 1"), Pipe(ends[1])
    sent: list[PipeToWorker] = []

    def send_without_end() -> None:
        for number in itertools.count():
            message = ASSIGN if number % 2 == 0 else Ping(number)
            agent.send(message)
            sent.append(message)

    with pytest.raises(PeerError, match=r"process 1 does not read its pipe: .* kill it"):
        send_without_end()
    assert len(TO_WORKER.encode(ASSIGN)) < agent.backlog_bytes <= BACKLOG_BYTES_MAX
    # It reads after all: everything that was taken comes, whole and in order.
    with anyio.fail_after(DEADLINE_S):
        found = await asyncio.to_thread(
            lambda: [worker.receive(timeout_s=DEADLINE_S) for _ in sent]
        )
    assert found == sent
    assert agent.backlog_bytes == 0
    agent.close()


async def test_last_words_arrive_although_writing_failed(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    agent, worker = AsyncPipe(ends[0], "process 1"), Pipe(ends[1])
    assert agent.send(Ping(1))  # Never read: the socket reports a reset to the agent.
    worker.send(LAST_WORDS)
    worker.close()
    assert not agent.send(Ping(2))
    assert not agent.send(Stop("end", 0))
    assert await received_by(agent) == [LAST_WORDS]
    agent.close()


async def test_closing_ends_a_pending_receive(ends: tuple[socket.socket, socket.socket]) -> None:
    agent = AsyncPipe(ends[0], "process 1")
    received: list[PipeToAgent | None] = []

    async def listen() -> None:
        received.append(await agent.receive())

    with anyio.fail_after(DEADLINE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listen)
            await anyio.wait_all_tasks_blocked()
            agent.close()
            agent.close()
    assert received == [None]
    assert not agent.send(Ping(1))
    assert await agent.receive() is None
    assert ends[0].fileno() == -1


async def test_a_cancelled_receive_loses_nothing(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    agent, worker = AsyncPipe(ends[0], "process 1"), Pipe(ends[1])
    received: list[PipeToAgent | None] = []
    for number in range(50):
        listening = asyncio.ensure_future(agent.receive())
        # Between none and three turns of the loop, so that the cancel meets every stage.
        for turn in range(4):
            if turn == number % 4:
                worker.send(Pong(number))
            await asyncio.sleep(0)
        listening.cancel()
        try:
            received.append(await listening)
        except asyncio.CancelledError:
            continue
    worker.close()
    received += await received_by(agent)
    assert received == [Pong(number) for number in range(50)]
    agent.close()


# ------------------------------------------------------------------------------ the worker's end


def test_a_worker_hears_all_that_its_agent_said_before_it_died(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    worker = Pipe(ends[1])
    ends[0].sendall(
        encode_frame(TO_WORKER.encode(Ping(1))) + encode_frame(TO_WORKER.encode(Ping(2)))
    )
    ends[0].close()
    assert list(worker) == [Ping(1), Ping(2)]
    with pytest.raises(Unavailable, match="agent"):
        worker.receive()
    with pytest.raises(Unavailable, match="agent"):
        worker.send(Pong(1))


def test_nonsense_from_an_agent_is_refused(ends: tuple[socket.socket, socket.socket]) -> None:
    worker = Pipe(ends[1])
    ends[0].sendall(bytes(8))
    with pytest.raises(PeerError, match="the agent announced a frame of 0 bytes"):
        list(worker)


def test_closing_frees_a_thread_that_waits(ends: tuple[socket.socket, socket.socket]) -> None:
    worker = Pipe(ends[1])
    received: list[list[PipeToWorker]] = []
    thread = threading.Thread(target=lambda: received.append(list(worker)), daemon=True)
    thread.start()
    worker.close()
    thread.join(DEADLINE_S)
    assert received == [[]]
    with pytest.raises(Unavailable, match="closed"):
        worker.receive(timeout_s=0)
