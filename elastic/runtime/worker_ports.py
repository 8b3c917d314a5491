"""The ports on which a node's workers, and the agent's copies, may listen: `--worker-ports`.

Workers get the range in their environment, because a spare listens on nothing before it has a job.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from elastic.errors import ConfigError
from elastic.runtime.listening import family_of

VARIABLE = "ELASTIC_WORKER_PORTS"
FLAG = "--worker-ports"
PORT_MIN, PORT_MAX = 1024, 65535
PORTS_OF_A_WORKER = 8
"""A worker listens on five at most: its store, its direct connections, gloo's of its group and
of the one before, and the store of a program (`--no-python`), or a feeder's own. The others are for
the worker that takes its place while it ends."""


@dataclass(frozen=True)
class PortRange:
    """The ports from `low` to `high`; both are 0 where the system chooses."""

    low: int = 0
    high: int = 0

    @staticmethod
    def of(text: str) -> PortRange:
        """Read "LOW-HIGH", or "" for any port; ConfigError if it is neither."""
        if not text:
            return ANY_PORT
        low, _, high = text.partition("-")
        is_plain = all(one.isascii() and one.isdigit() for one in (low, high))
        if not is_plain or not PORT_MIN <= int(low) <= int(high) <= PORT_MAX:
            raise ConfigError(
                f"{FLAG} {text!r}: expected LOW-HIGH with {PORT_MIN} <= LOW <= HIGH <= "
                f"{PORT_MAX}, such as 29400-29499"
            )
        return PortRange(int(low), int(high))

    def __str__(self) -> str:
        return f"{self.low}-{self.high}"

    def __bool__(self) -> bool:
        return self != ANY_PORT

    def check_room(self, num_workers: int) -> None:
        """Check that so many workers, and the agent, find enough ports.

        Raises:
            ConfigError: they do not.
        """
        size = self.high - self.low + 1
        if self and size < ports_needed(num_workers):
            raise ConfigError(
                f"{FLAG} {self} has {size} ports: {num_workers} workers and their agent need "
                f"{ports_needed(num_workers)} ({PORTS_OF_A_WORKER} for each worker, and 1); widen "
                f"it, or run fewer --workers"
            )

    def __iter__(self) -> Iterator[int]:
        """Yield all ports, in an order of this process's own, so that few attempts fail."""
        size = self.high - self.low + 1
        first = os.getpid() * PORTS_OF_A_WORKER
        return (self.low + (first + step) % size for step in range(size))


ANY_PORT = PortRange()


def ports_needed(num_workers: int) -> int:
    """Return how many ports a node with so many workers needs."""
    return PORTS_OF_A_WORKER * num_workers + 1


def listen_within(ports: PortRange, host: str, *, backlog: int) -> socket.socket:
    """Return a socket that listens at this address, on a free port of the range.

    Args:
        ports: the range.
        host: the address.
        backlog: connections that may wait for `accept`.

    Raises:
        OSError: this machine does not have the address, or all of these ports are in use.
    """
    for port in ports:
        try:
            # Two that bind the same port at once both may, and only one of them then listens.
            return socket.create_server((host, port), family=family_of(host), backlog=backlog)
        except OSError as error:
            if not ports or error.errno != errno.EADDRINUSE:
                raise
    raise all_taken(ports)


def all_taken(ports: PortRange) -> OSError:
    """Return the error for a range without a free port."""
    size = ports.high - ports.low + 1
    return OSError(
        errno.EADDRINUSE,
        f"all {size} ports of {FLAG} {ports} on this node are in use (each worker needs up to "
        f"{PORTS_OF_A_WORKER}, its agent 1)",
    )


def remedy(error: OSError) -> str:
    """Return what to do about an address on which one cannot listen."""
    if error.errno == errno.EADDRINUSE:
        return f"give the agent a wider {FLAG}, or one that nothing else uses"
    return "give the agent --host with an address of this machine that the other nodes can reach"
