"""What the `elastic-agent` command checks as it starts, its exit codes, and signals to it."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from elastic.agent.cli import EXIT_REFUSED, ShutdownTrigger, check_host, exit_code, open_metrics
from elastic.errors import Unavailable, UsageError


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_an_address_of_this_machine_is_taken(host: str) -> None:
    check_host(host)


@pytest.mark.parametrize(
    "host",
    ["203.0.113.1", "2001:db8::1", "nowhere.invalid", "a..b", "[127.0.0.1]", "0.0.0.0", "::"],
)
def test_an_address_that_this_machine_does_not_have_is_refused_by_name(host: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_host(host)
    assert f"--host {host}: workers could not be reached there (" in str(caught.value)
    assert "expected an address or name of this machine" in str(caught.value)


def test_a_metrics_port_in_use_is_no_bug_of_ours() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(Unavailable) as caught:
        open_metrics(str(other.getsockname()[1]))
    assert exit_code(caught.value) == EXIT_REFUSED


class PlayedDriver:
    """Notes what drains it."""

    def __init__(self) -> None:
        self.drains: list[tuple[str, float]] = []

    def drain(self, reason: str, timeout_s: float) -> None:
        self.drains.append((reason, timeout_s))


def test_a_terminal_that_closes_twice_does_not_cut_its_drain_short() -> None:
    """The shell sends SIGHUP to its jobs, and the kernel once the shell is gone."""
    played: Any = PlayedDriver()
    stopping = ShutdownTrigger(30.0)
    stopping.attach(played)
    stopping.on_hangup()
    stopping.on_hangup()
    assert played.drains == [("SIGHUP", 30.0)]
    stopping.on_signal("SIGTERM")
    assert played.drains[1:] == [("SIGTERM", 0.0)]
