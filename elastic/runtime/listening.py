"""Server sockets: bound before a daemon reports that it is ready, and left alone when full."""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
import time

from elastic.errors import Unavailable
from elastic.runtime.rpc import format_endpoint

log = logging.getLogger(__name__)

NO_ROOM_S = 0.1
"""How long to accept nothing once this process may open no more files: until then `accept` fails at
once, and the connection that waits wakes its caller again and again."""
REPORTED_S = 60.0


class AcceptErrors:
    """The failed `accept` calls of one listener; logged once a minute."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._reported_at = -REPORTED_S

    def pause_s(self, error: OSError) -> float:
        """Return how long to accept nothing after this error, 0 if only its client is gone."""
        if isinstance(error, (BlockingIOError, ConnectionError)):
            return 0.0
        now = time.monotonic()
        if now - self._reported_at >= REPORTED_S:
            self._reported_at = now
            log.warning("accepts_nobody what=%r error=%r", self._what, str(error))
        return NO_ROOM_S


def family_of(host: str) -> int:
    """Return the family of an address; that of a name is IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def try_listen(host: str) -> int:
    """Listen on a free port of this address for a moment, as workers will; return the port.

    Raises:
        OSError: this machine does not have the address, or nobody could connect to it; or it is
            no name.
    """
    try:
        with socket.create_server((host, 0), family=family_of(host)) as server:
            address, port = server.getsockname()[:2]
    except UnicodeError as error:
        raise OSError(errno.EINVAL, str(error)) from error
    if ipaddress.ip_address(address).is_unspecified:
        raise OSError(errno.EADDRNOTAVAIL, "it stands for all addresses of a machine, and is none")
    return int(port)


def bind(host: str, port: int, what: str, remedy: str) -> socket.socket:
    """Return a bound TCP socket that does not listen yet; port 0 is a free one.

    Raises:
        Unavailable: the address cannot be bound.
    """
    bound = socket.socket(family_of(host))
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise Unavailable(
            f"cannot listen on {format_endpoint(host, port)} for {what} "
            f"({error.strerror or error}): {remedy}"
        ) from error
    return bound
