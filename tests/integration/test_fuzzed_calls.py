"""Every method of a coordinator with messages that nobody meant: refused in order, or harmless.

The coordinator runs in this process, so that its log is ours to read. A seed tells all that is
sent: the same ones in each run, and fresh ones with the slow tests.
"""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import grpc.aio
import psutil
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from elastic.coord.roles import RULES
from elastic.coord.serve import ServeOptions, serve
from elastic.core.messages import Hello
from elastic.core.telemetry import Goodput
from elastic.runtime.rpc import call_metadata
from elastic.wire.codec_jobs import job_from_proto
from elastic.wire.codec_stream import ATTACH_METHOD, FROM_AGENT
from elastic.wire.generated.elastic.v1 import agent_pb2, jobs_pb2
from tests.integration.coordinator import ScriptedAgent, User, node, spec
from tests.patience import DEADLINE_S

pytestmark = pytest.mark.anyio
FILES = (agent_pb2, jobs_pb2, health_pb2, reflection_pb2)
METHODS = {
    f"/{service.full_name}/{method.name}": method
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
REFUSALS = {
    "INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "FAILED_PRECONDITION", "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED", "UNIMPLEMENTED",
}  # fmt: skip
OWN_ERROR = "Internal error from Core"
"""What a client of gRPC's tells of itself when a call ends while it sends; INTERNAL, too."""
EACH = 8
"""Calls of a method in the short tests."""
GROWN_BYTES_MAX = 256 << 20
TEXTS = (
    "", "waiting", "waiting-2", "none", "bad", "\0", "\x1b]0;owned\x07\x1b[2J", "a b\n", "../../up",
    "\u202e\u00e9" * 40, "%s%n{0}", "x" * 101, "y" * 3000, "z" * 70_000,
)  # fmt: skip
"""Two jobs, and what no name is; the last is above the limit of most methods."""
NUMBERS = (0, 1, -1, 2, 50, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63), 2**64 - 1)
REALS = (0.0, -1.0, 0.5, 1e308, float("nan"), float("inf"), -float("inf"))
RANGES = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_ENUM: (-(2**31), 2**31 - 1),
}
UNKNOWN_FIELD = b"\xf8\xff\x03\x05"
DEPTH_MAX = 5


class Fuzz:
    """Draws messages."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)

    def message(self, kind: Descriptor) -> bytes:
        """Return the bytes of one, for the most part of the right kind."""
        return self.damaged(self.filled(kind, 0).SerializeToString())

    def filled(self, kind: Descriptor, depth: int) -> Any:
        made: Any = GetMessageClass(kind)()
        for field in kind.fields:
            if depth >= DEPTH_MAX or self.dice.random() < 0.4:
                continue
            if field.is_repeated:
                many = [self.value(field, depth) for _ in range(self.dice.randrange(4))]
                getattr(made, field.name).extend(many)
            elif field.message_type is not None:
                getattr(made, field.name).CopyFrom(self.value(field, depth))
            else:
                setattr(made, field.name, self.value(field, depth))
        return made

    def value(self, field: FieldDescriptor, depth: int) -> Any:
        if field.message_type is not None:
            return self.filled(field.message_type, depth + 1)
        if field.type == FieldDescriptor.TYPE_STRING:
            return self.dice.choice(TEXTS[:5] if self.dice.random() < 0.5 else TEXTS)
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self.dice.randbytes(self.dice.choice((0, 10, 5000)))
        if field.type == FieldDescriptor.TYPE_BOOL:
            return self.dice.random() < 0.5
        if field.type in RANGES:
            low, high = RANGES[field.type]
            return self.dice.choice([number for number in NUMBERS if low <= number <= high])
        return self.dice.choice(REALS)

    def damaged(self, data: bytes) -> bytes:
        at = self.dice.randrange(len(data) + 1)
        some = self.dice.randbytes(self.dice.randrange(1, 20))
        return self.dice.choice([
            data, data, data, data + UNKNOWN_FIELD, data[:at], data[:at] + some + data[at:],
            data[:at] + some + data[at + len(some) :], data + data, some,
        ])  # fmt: skip


@asynccontextmanager
async def serving(caplog: pytest.LogCaptureFixture) -> AsyncIterator[str]:
    """Run a coordinator; check that it ends unharmed, in little memory, without a traceback."""
    before = psutil.Process().memory_info().rss
    ready: list[str] = []
    with caplog.at_level(logging.WARNING):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(
                serve, ServeOptions(listen=("127.0.0.1", 0), store="memory:"), ready.append
            )
            await wait_until(lambda: ready)
            address = next(word for word in ready[0].split() if word.startswith("address="))
            yield address.partition("=")[2]
            tasks.cancel_scope.cancel()
        gc.collect()  # What a task raised that nobody waited for is told at its end.
    assert not [one.getMessage() for one in caplog.records if one.exc_info]
    assert "Traceback" not in caplog.text
    assert psutil.Process().memory_info().rss - before < GROWN_BYTES_MAX


async def wait_until(condition: Callable[[], object]) -> None:
    with anyio.fail_after(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 (nothing tells of it)
            await anyio.sleep(0.001)


async def wait_state(user: User) -> list[object]:
    """Return what a refused call must not change; also after too many calls at once."""
    request = jobs_pb2.ListJobsRequest(include_ended=True)
    while True:
        try:
            jobs = await user.jobs.List(request, **user.options)
            status = (await user.status()).view
            break
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            await anyio.sleep(0.05)
    # The time that a job waits goes on, whatever is said.
    known = [replace(job_from_proto(job, 0).record, goodput=Goodput()) for job in jobs.jobs]
    return [known, status.cordons, [(one.node, one.phase) for one in status.nodes]]


async def ended(call: Any) -> str:
    """Read all that a call answers; return its status, "" if it ended while we still sent."""
    with anyio.fail_after(DEADLINE_S):
        try:
            while await call.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError:
            pass
        if await call.details() == OWN_ERROR:
            return ""
        return str((await call.code()).name)


async def fuzz_users_calls(address: str, fuzz: Fuzz, each: int) -> None:
    """Call all methods but the agents' in any order; nobody runs a job, so calls alone change it.

    Streams are left open for the time of one request.
    """
    methods = [name for name in METHODS if name in RULES and name != ATTACH_METHOD] * each
    fuzz.dice.shuffle(methods)
    async with User(address) as user:
        for name in ("waiting", "waiting-2"):
            await user.submit(spec(name, workers=(50, 50)))
        before = await wait_state(user)
        for name in methods:
            method = METHODS[name]
            data = fuzz.message(method.input_type)
            call: Any = user.channel.stream_stream(name)(
                iter([data]), metadata=call_metadata(), timeout=DEADLINE_S
            )
            code = "" if method.server_streaming else await ended(call)
            after = await wait_state(user)
            if not code and call.done():
                code = (await call.code()).name
            call.cancel()
            assert code in {"OK", "", *REFUSALS}, f"{name} {data[:300]!r}: {call}"
            if code in REFUSALS:
                assert after == before, f"{name} {data[:300]!r} was refused, and changed something"
            before = after
        assert await user.list(include_ended=False) is not None


async def fuzz_agents_calls(address: str, fuzz: Fuzz, streams: int) -> None:
    """Be agents, in any order of messages, beside an honest one that has trained all the time."""
    said = agent_pb2.DESCRIPTOR.message_types_by_name["AgentToCoordinator"]
    async with (
        ScriptedAgent(address, node("honest", slots=1)) as honest,
        User(address) as user,
    ):
        await honest.join()
        job = await user.submit(spec("trains"))
        await honest.train()
        before = (await user.get(job)).record
        for number in range(streams):
            hello = FROM_AGENT.encode(Hello(node("bad", number + 1)))
            words = [fuzz.message(said) for _ in range(fuzz.dice.randrange(5))]
            words.insert(0, fuzz.dice.choice([hello, hello, hello, fuzz.damaged(hello)]))
            if fuzz.dice.random() < 0.2:
                fuzz.dice.shuffle(words)
            attach = user.channel.stream_stream(ATTACH_METHOD)
            code = await ended(attach(iter(words), metadata=call_metadata(), timeout=DEADLINE_S))
            assert code in {"OK", "", *REFUSALS}, (code, words)
        after = (await user.get(job)).record
        assert replace(after, goodput=before.goodput) == before
        await user.stop(job)


def test_every_method_is_fuzzed() -> None:
    assert set(RULES) <= set(METHODS)


async def test_what_users_send_is_refused_in_order_or_harmless(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(caplog) as address:
        await fuzz_users_calls(address, Fuzz(0), EACH)


async def test_what_agents_send_is_refused_in_order_or_harmless(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(caplog) as address:
        await fuzz_agents_calls(address, Fuzz(2), 10 * EACH)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
async def test_fresh_messages_are_refused_in_order_or_harmless(
    caplog: pytest.LogCaptureFixture, fresh_seed: int, number: int
) -> None:
    async with serving(caplog) as address:
        await fuzz_users_calls(address, Fuzz(fresh_seed + number), 50 * EACH)
    async with serving(caplog) as address:
        await fuzz_agents_calls(address, Fuzz(fresh_seed + number), 500 * EACH)
