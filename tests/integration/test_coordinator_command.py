"""The command `elastic-coord`: what it refuses, and what it shows."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.coordinator import (
    Coordinator,
    elastic_coord,
)


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """One coordinator for the tests that need nothing special; each uses names of its own."""
    with Coordinator(tmp_path_factory.mktemp("coordinator")) as running:
        yield running


def test_a_second_coordinator_on_one_file_or_one_address_ends_at_once(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 'coord.sqlite'}"
    with Coordinator(tmp_path / "c", store=store) as coordinator:
        same_file = elastic_coord("serve", "--listen", "127.0.0.1:0", "--store", store)
        assert same_file.returncode == 78, same_file.stderr
        same_port = elastic_coord("serve", "--listen", coordinator.address, "--store", "memory:")
        assert same_port.returncode == 69, same_port.stderr
        assert "another process listens there" in same_port.stderr


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["--listen", "0.0.0.0:0"], 78, "--insecure"),
        (["--listen", "[::]:0"], 78, "--token-file"),
        (["--listen", "127.0.0.1"], 78, "host:port"),
        (["--listen", "127.0.0.1:99999"], 78, "65535"),
        (["--store", "redis://x"], 78, "sqlite:PATH"),
        (["--token-file", "/nowhere/token"], 78, "/nowhere/token"),
        (["--store", "sqlite:/proc/nowhere/x.sqlite"], 78, "/proc/nowhere"),
        (["--no-such-option"], 2, "No such option"),
        (["--log-level", "loud"], 2, "loud"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_setting_is_refused_with_what_to_do(args: list[str], code: int, says: str) -> None:
    defaults = ["--listen", "127.0.0.1:0", "--store", "memory:"]
    done = elastic_coord("serve", *defaults, *args)
    assert (done.returncode, says in done.stderr) == (code, True), done.stderr
    assert "Traceback" not in done.stderr


def test_a_first_line_that_nobody_reads_ends_nobody(tmp_path: Path) -> None:
    with Coordinator(tmp_path, stdout=Path("/dev/full")) as coordinator:
        coordinator.wait_logged("ready_line_unwritable")
        done = elastic_coord("health", "--coord", coordinator.address)
        assert done.returncode == 0, done.stderr


@pytest.fixture
def full_pipe() -> Iterator[int]:
    """The end for writing of a pipe that nobody reads, and that takes nothing more."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    yield writing
    os.close(writing)
    os.close(reading)


def test_a_log_that_nobody_reads_keeps_nobody_from_answering_or_ending(
    tmp_path: Path, full_pipe: int
) -> None:
    with Coordinator(tmp_path, stderr=full_pipe) as coordinator:
        done = elastic_coord("health", "--coord", coordinator.address)
        assert done.returncode == 0, done.stderr
        assert coordinator.kill(signal.SIGTERM) == 0


def test_the_health_of_several_is_asked_of_all(coordinator: Coordinator) -> None:
    both = f"127.0.0.1:9,{coordinator.address}"
    done = elastic_coord("health", "--coord", both, "--timeout", "1")
    assert (done.returncode, done.stdout) == (69, f"{coordinator.address} SERVING\n")
    assert "no coordinator answers at 127.0.0.1:9" in done.stderr
