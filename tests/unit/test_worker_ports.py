"""`--worker-ports`: everything that a worker listens on is in the range, or the error says why."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from elastic.agent.cli import Flags, main, read_settings
from elastic.agent.copy_server import CopyServer
from elastic.agent.copy_store import CopyStore
from elastic.errors import ConfigError, GroupError
from elastic.runtime.worker_ports import VARIABLE, PortRange, ports_needed
from elastic.worker.group.gloo_sockets import socket_inodes
from elastic.worker.group.group import GroupSpec, ProcessGroups
from elastic.worker.group.peer_sockets import PeerAddress, PeerSockets
from elastic.worker.group.store_server import StoreServer
from elastic.worker.process.program import _open_store

HOST = "127.0.0.1"
FOUR = 4


@pytest.fixture
def four() -> PortRange:
    """Four neighbours that are free, below the ports that the kernel gives away."""
    while True:
        low = random.randrange(20000, 30000)
        with ExitStack() as stack:
            try:
                for port in range(low, low + FOUR):
                    stack.enter_context(socket.create_server((HOST, port)))
            except OSError:
                continue
        return PortRange(low, low + FOUR - 1)


@pytest.fixture
def taken(four: PortRange) -> Iterator[PortRange]:
    with ExitStack() as stack:
        for port in four:
            stack.enter_context(socket.create_server((HOST, port)))
        yield four


def listening() -> set[int]:
    """Return the ports on which this process listens."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    mine = socket_inodes()
    return {
        int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and int(row[9]) in mine
    }


def of_one(server: StoreServer, ports: PortRange) -> GroupSpec:
    """A group of one worker, which leads it."""
    server.admit(1, "secret")
    return GroupSpec(
        1, 0, 1, server.address, "gloo", HOST, timeout_s=60.0, job_id="j", key="secret", ports=ports
    )


def settings_of(*args: str) -> object:
    with main.make_context("elastic-agent", ["--coord", "localhost:1", *args]) as context:
        return read_settings(Flags(**context.params), {})


@pytest.mark.parametrize("text", ["1", "5-", "a-b", "-", "30-20", "0-99", "80-90", "30000-70000"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected LOW-HIGH"):
        PortRange.of(text)


def test_an_agent_refuses_a_range_that_is_too_small_for_its_workers() -> None:
    needed = ports_needed(3)
    with pytest.raises(ConfigError, match=rf"29400-29409 has 10 ports: 3 workers .* {needed} "):
        settings_of("--workers", "3", "--worker-ports", "29400-29409")


def test_an_agent_gives_its_workers_the_range() -> None:
    settings = settings_of("--workers", "3", "--worker-ports", "29400-29499")
    assert settings.worker_ports == PortRange(29400, 29499)  # type: ignore[attr-defined]
    assert settings.launch.env[VARIABLE] == "29400-29499"  # type: ignore[attr-defined]


def test_all_that_a_worker_and_its_agent_listen_on_is_in_the_range(four: PortRange) -> None:
    before = listening()
    groups = ProcessGroups()
    store = StoreServer(HOST, four)
    sockets = PeerSockets(PeerAddress(HOST, ports=four))
    copies = CopyServer(HOST, CopyStore(lambda: None), ports=four)
    groups.form(of_one(store, four))  # gloo's
    try:
        assert listening() - before == set(four)
    finally:
        groups.close()
        copies.close()
        sockets.close()
        store.close()


def test_programs_find_their_store_in_the_range(four: PortRange) -> None:
    store = _open_store(HOST, four)
    assert store.port in set(four)


def test_a_range_without_a_free_port_is_named_with_what_is_needed(
    taken: PortRange, caplog: pytest.LogCaptureFixture
) -> None:
    says = rf"all 4 ports of --worker-ports {taken} .* in use \(each worker needs up to 8, its"
    with pytest.raises(GroupError, match=says):
        StoreServer(HOST, taken)
    with pytest.raises(OSError, match=says):
        PeerSockets(PeerAddress(HOST, ports=taken))
    with pytest.raises(GroupError, match=says):
        _open_store(HOST, taken)
    assert CopyServer(HOST, CopyStore(lambda: None), ports=taken).address == ""
    assert f"--worker-ports {taken}" in caplog.text
    groups, store = ProcessGroups(), StoreServer(HOST)
    with pytest.raises(GroupError, match=says):
        groups.form(of_one(store, taken))
    groups.close()
    store.close()
