"""Server sockets, bound before a daemon reports that it is ready."""

from __future__ import annotations

import socket

from elastic.errors import Unavailable
from elastic.runtime.rpc import format_endpoint


def bind(host: str, port: int, what: str, remedy: str) -> socket.socket:
    """Return a bound TCP socket that does not listen yet.

    Args:
        host: to listen on.
        port: 0 for a free one.
        what: the service, for the error text.
        remedy: how to fix a failure, for the error text.

    Raises:
        Unavailable: the address cannot be bound.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
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
