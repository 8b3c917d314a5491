"""What the `elastic-agent` command checks before anything starts, and the codes it ends with."""

from __future__ import annotations

import socket

import pytest

from elastic.agent.cli import EXIT_REFUSED, check_host, exit_code, open_metrics
from elastic.errors import Unavailable, UsageError


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_an_address_of_this_machine_is_taken(host: str) -> None:
    check_host(host)


@pytest.mark.parametrize(
    "host", ["203.0.113.1", "2001:db8::1", "nowhere.invalid", "a..b", "[127.0.0.1]"]
)
def test_an_address_that_this_machine_does_not_have_is_refused_by_name(host: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_host(host)
    assert f"--host {host}: workers could not listen there (" in str(caught.value)
    assert "expected an address or name of this machine" in str(caught.value)


def test_a_metrics_port_in_use_is_no_bug_of_ours() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(Unavailable) as caught:
        open_metrics(str(other.getsockname()[1]))
    assert exit_code(caught.value) == EXIT_REFUSED
