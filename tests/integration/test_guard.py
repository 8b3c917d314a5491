"""The guard in a server of its own, with limits that a test can reach."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import anyio
import grpc
import grpc.aio
import pytest

from elastic.coord.audit import Audit
from elastic.coord.leader_state import LeaderState, Term
from elastic.coord.server_context import answering
from elastic.coord.server_guard import AccessRules, Guard
from elastic.coord.server_limits import ServerLimits
from elastic.errors import Refused
from elastic.runtime.clock import SystemClock
from elastic.runtime.rpc import call_metadata, channel_options, server_options
from elastic.wire.generated.elastic.v1 import jobs_pb2
from tests.patience import DEADLINE_S, wait_for_async

pytestmark = pytest.mark.anyio
WATCH, GET = "/elastic.v1.Jobs/Watch", "/elastic.v1.Jobs/Get"
SUBMIT = "/elastic.v1.Jobs/Submit"
SMALL = ServerLimits(
    streams_per_caller_max=1,
    requests_per_caller_max=1,
    rate_per_s=0.001,
    burst=5.0,
    request_s_max=0.2,
    stall_s_max=0.2,
)


@dataclass
class Small:
    """A server with one stream, one request, and one method that nobody thought of."""

    limits: ServerLimits
    ended: list[str] = field(default_factory=list)
    address: str = ""
    is_busy: bool = False

    async def watch(self, request: Any, context: Any) -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"x" * 100_000
        finally:
            self.ended.append("watch")

    async def get(self, request: jobs_pb2.GetJobRequest, context: Any) -> bytes:
        if request.job == "slow":
            self.is_busy = True
            await anyio.sleep_forever()
        return b"job"

    @answering
    async def submit(self, request: jobs_pb2.SubmitRequest) -> bytes:
        if request.spec.name == "slow":
            self.is_busy = True
            await anyio.sleep_forever()
        raise Refused("no such jobs")


@asynccontextmanager
async def serving(limits: ServerLimits = SMALL) -> AsyncIterator[Small]:
    small = Small(limits)
    clock = SystemClock()
    leader_state, nobody = LeaderState("test", clock), cast("Any", None)
    leader_state.enter(Term(nobody, nobody, since_ns=0), lambda: True)
    audit = Audit(None, process="test", clock=clock)
    guard = Guard(AccessRules(), audit, clock, leader_state, limits=limits)
    server = grpc.aio.server(interceptors=(guard,), options=server_options())
    methods = {
        "Watch": grpc.unary_stream_rpc_method_handler(small.watch),
        "Get": grpc.unary_unary_rpc_method_handler(small.get, jobs_pb2.GetJobRequest.FromString),
        "Submit": grpc.unary_unary_rpc_method_handler(
            small.submit, jobs_pb2.SubmitRequest.FromString
        ),
        "Forgotten": grpc.unary_unary_rpc_method_handler(small.get),
    }
    handler = grpc.method_handlers_generic_handler("elastic.v1.Jobs", methods)
    server.add_generic_rpc_handlers((handler,))
    small.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield small
    finally:
        with anyio.CancelScope(shield=True):
            await server.stop(None)


@asynccontextmanager
async def calling(small: Small) -> AsyncIterator[Callable[..., Any]]:
    """Give what begins a call of a method with one message."""
    async with grpc.aio.insecure_channel(small.address, options=channel_options()) as channel:

        def begin(method: str, message: bytes = b"") -> Any:
            opened = channel.unary_stream(method)
            return opened(message, metadata=call_metadata(), timeout=DEADLINE_S)

        yield begin


async def ending(call: Any) -> str:
    """Return "OK" or the status and its text; all that comes is read."""
    with anyio.fail_after(DEADLINE_S):
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
    return "OK"


async def test_a_reader_that_stalls_loses_its_stream_and_its_place() -> None:
    async with serving() as small, calling(small) as begin:
        stalled = begin(WATCH)
        await wait_for_async(lambda: small.ended)
        assert "took nothing" in await ending(stalled)
        reads = begin(WATCH)
        with anyio.fail_after(DEADLINE_S):
            assert await reads.read() == b"x" * 100_000, "its place is free again"
        reads.cancel()


async def test_a_second_stream_above_the_limit_of_one_caller_is_refused() -> None:
    async with serving(ServerLimits(streams_per_caller_max=1)) as small, calling(small) as begin:
        first = begin(WATCH)
        with anyio.fail_after(DEADLINE_S):
            await first.read()
        assert (await ending(begin(WATCH))).startswith("RESOURCE_EXHAUSTED: ipv4:127.0.0.1 has 1")
        first.cancel()
        await wait_for_async(lambda: small.ended)


async def test_a_second_request_above_the_limit_of_one_caller_is_refused() -> None:
    async with serving() as small, calling(small) as begin:
        slow = begin(GET, jobs_pb2.GetJobRequest(job="slow").SerializeToString())
        await wait_for_async(lambda: small.is_busy)
        assert "requests open at once" in await ending(begin(GET))
        slow.cancel()


async def test_a_caller_that_asks_too_fast_is_refused_and_others_are_not() -> None:
    async with serving() as small, calling(small) as begin:
        answers = [await ending(begin(GET)) for _ in range(6)]
        assert answers[:5] == ["OK"] * 5
        assert answers[5].startswith("RESOURCE_EXHAUSTED")
        assert "times a second" in answers[5]


async def test_a_request_whose_message_never_comes_is_given_up() -> None:
    async with (
        serving() as small,
        grpc.aio.insecure_channel(small.address, options=channel_options()) as channel,
    ):
        silent: Any = channel.stream_stream(GET)(metadata=call_metadata(), timeout=DEADLINE_S)
        ended = await ending(silent)
        assert ended.startswith("INVALID_ARGUMENT")
        assert "sent no request" in ended


async def test_bytes_that_are_no_request_are_refused_by_the_methods_name() -> None:
    async with serving() as small, calling(small) as begin:
        ended = await ending(begin(GET, b"\xff\xff\xff"))
        assert ended.startswith("INVALID_ARGUMENT")
        assert GET in ended
        assert await ending(begin(GET)) == "OK"


async def test_a_method_without_a_rule_is_refused_although_it_is_served() -> None:
    async with serving() as small, calling(small) as begin:
        ended = await ending(begin("/elastic.v1.Jobs/Forgotten"))
        assert ended.startswith("PERMISSION_DENIED")


async def test_a_submission_is_not_read_before_its_turn() -> None:
    limits = ServerLimits(submissions_at_once=1, submission_wait_s_max=0.05)
    async with serving(limits) as small, calling(small) as begin:
        slow = jobs_pb2.SubmitRequest(spec={"name": "slow"}).SerializeToString()
        first = begin(SUBMIT, slow)
        await wait_for_async(lambda: small.is_busy)
        assert "takes 1 submissions at once" in await ending(begin(SUBMIT, slow))
        assert await ending(begin(GET, b"")) == "OK", "others need no turn"
        first.cancel()
        last = ""
        with anyio.fail_after(DEADLINE_S):
            while "no such jobs" not in last:
                last = await ending(begin(SUBMIT, b""))


async def test_a_refused_function_does_not_wait_for_the_garbage_collector() -> None:
    def held() -> list[object]:
        # Not isinstance: things of torch's, asked for their class, warn.
        return [thing for thing in gc.get_objects() if type(thing) is jobs_pb2.SubmitRequest]

    gc.collect()
    gc.disable()
    try:
        async with serving() as small, calling(small) as begin:
            request = jobs_pb2.SubmitRequest(spec={"name": "large"}).SerializeToString()
            for _ in range(3):
                assert "no such jobs" in await ending(begin(SUBMIT, request))
            await wait_for_async(lambda: not held())
    finally:
        gc.enable()
