"""The coordinator's loop: gRPC's queue is found, and its bytes are taken at once."""

from __future__ import annotations

import asyncio
import socket

import grpc.aio

from elastic.coord.loop import Loop


class PollerCompletionQueue:
    """As gRPC's: a reader that takes one byte, then all that is done."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.reader, self.writer = socket.socketpair()
        self.done: list[int] = []
        self.turns: list[list[int]] = []
        self.empty = asyncio.Event()
        loop.add_reader(self.reader, self.handle)

    def finish(self, number: int) -> None:
        self.done.append(number)
        self.writer.send(b"1")

    def handle(self) -> None:
        assert self.reader.recv(1) == b"1"
        self.turns.append(self.done)
        self.done = []
        self.empty.set()


def test_all_that_is_done_is_taken_in_one_turn_and_what_comes_later_in_another() -> None:
    async def play() -> list[list[int]]:
        loop = asyncio.get_running_loop()
        queue = PollerCompletionQueue(loop)
        for numbers in ((1, 2, 3), (4,), (5, 6)):
            queue.empty.clear()
            for number in numbers:
                queue.finish(number)
            await asyncio.wait_for(queue.empty.wait(), 10)
        for _ in range(10):
            await asyncio.sleep(0)
        loop.remove_reader(queue.reader)
        queue.reader.close()
        queue.writer.close()
        return queue.turns

    with asyncio.Runner(loop_factory=Loop) as runner:
        assert runner.run(play()) == [[1, 2, 3], [4], [5, 6]]


def test_the_queue_of_grpc_is_found() -> None:
    async def serve() -> int:
        server = grpc.aio.server()
        server.add_insecure_port("127.0.0.1:0")
        await server.start()
        await server.stop(None)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Loop)
        return loop.num_queues

    with asyncio.Runner(loop_factory=Loop) as runner:
        assert runner.run(serve()) == 1
