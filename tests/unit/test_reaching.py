"""An agent tries whether other nodes can be reached."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import pytest

from elastic.agent.link_prober import LinkProber
from elastic.core.events.agent import LinksProbed
from elastic.core.facts import JobId, NodeId
from elastic.core.messages import Link, LinksTried, TryLinks

pytestmark = pytest.mark.anyio
JOB = JobId("a")


@pytest.fixture
def silent() -> Iterator[str]:
    """Return an address that answers nobody: its queue is full, the kernel drops what comes."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(4):
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(server.getsockname())
        yield f"127.0.0.1:{server.getsockname()[1]}"


async def answer(addresses: dict[str, str], limit_s: float = 1.0) -> LinksTried:
    """Return what is found out about nodes at these addresses."""
    found: asyncio.Queue[LinksProbed] = asyncio.Queue()
    reaching = LinkProber(found.put_nowait, limit_s)
    links = tuple(Link(NodeId(name), address) for name, address in addresses.items())
    reaching.order(TryLinks(JOB, links))
    return (await found.get()).answer


async def test_who_listens_and_who_refuses_is_reached_and_who_is_silent_is_not(silent: str) -> None:
    with socket.socket() as gone, socket.socket() as listening:
        gone.bind(("127.0.0.1", 0))
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        there = f"127.0.0.1:{listening.getsockname()[1]}"
        refused = f"127.0.0.1:{gone.getsockname()[1]}"
        said = await answer({"a": there, "b": refused, "c": silent})
    assert said == LinksTried(JOB, (NodeId("a"), NodeId("b")), (NodeId("c"),))


@pytest.mark.parametrize(
    "address", ["", "host", "127.0.0.1:", "127.0.0.1:99999", "no such host:1", "a" * 70 + ".:1"]
)
async def test_an_address_that_means_nothing_is_not_told_either_way(address: str) -> None:
    assert await answer({"a": address}) == LinksTried(JOB)
