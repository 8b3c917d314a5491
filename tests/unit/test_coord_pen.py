"""Writing to an agent: in order, one at a time, at once where nothing is under way."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import pytest

from elastic.coord.server_agents import StreamWriter
from elastic.coord.sessions import Session, Sessions
from elastic.core.messages import CoordinatorMessage, Probe, Release
from elastic.wire.codec_stream import TO_AGENT

pytestmark = pytest.mark.anyio


class Stream:
    """Takes a message when it is told to; as gRPC's context, no second one while one waits."""

    def __init__(self) -> None:
        self.taken: list[CoordinatorMessage] = []
        self.waiting: asyncio.Future[None] | None = None
        self.is_broken = False

    async def write(self, data: bytes) -> None:
        if self.is_broken:
            raise grpc.aio.UsageError("RPC already finished.")
        assert self.waiting is None
        self.taken.append(TO_AGENT.decode(data))
        self.waiting = asyncio.get_running_loop().create_future()
        await self.waiting
        self.waiting = None

    async def goes_on(self) -> None:
        assert self.waiting is not None
        self.waiting.set_result(None)
        await asyncio.sleep(0)


def opened() -> tuple[Session, Stream]:
    session, stream = Sessions().open("peer"), Stream()
    context: Any = stream
    session.on_news(StreamWriter(session, context).write_on)
    return session, stream


async def test_what_cannot_be_sent_is_passed_over() -> None:
    session, stream = opened()
    session.send(Probe(2**70))
    session.send(Release("next"))
    assert stream.taken == [Release("next")]


async def test_a_session_is_cut_when_its_last_words_are_out() -> None:
    session, stream = opened()
    session.send(Release("last"))
    session.send(Release("words"))
    session.close("over")
    await stream.goes_on()
    assert not session.is_cut()
    await stream.goes_on()
    assert session.is_cut()
    assert stream.taken == [Release("last"), Release("words")]
    assert session.reason == "over"


async def test_a_write_that_is_cancelled_ends_the_stream() -> None:
    session, stream = opened()
    session.send(Release("0"))
    assert stream.waiting is not None
    stream.waiting.cancel()
    await session.wait_cut()
    session.send(Release("1"))
    assert stream.taken == [Release("0")]
