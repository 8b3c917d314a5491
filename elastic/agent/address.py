"""Finds the address of this host that other nodes' workers should use.

Rule: it is the source address of the route to the coordinator.
"""

from __future__ import annotations

import socket

from elastic.errors import CoordinatorUnreachable
from elastic.runtime.route import address_towards
from elastic.runtime.rpc import parse_endpoint


def address_towards_any(endpoints: tuple[str, ...]) -> str:
    """Return the local address of the route to the first endpoint that has one.

    Raises:
        CoordinatorUnreachable: none has; the error is that of the first.
    """
    failure: CoordinatorUnreachable | None = None
    for endpoint in endpoints:
        try:
            return address_towards(*parse_endpoint(endpoint))
        except socket.gaierror as error:
            why = f"its name does not resolve: {error}"
            failure = failure or CoordinatorUnreachable(endpoint, why)
        except OSError as error:
            failure = failure or CoordinatorUnreachable(endpoint, f"no route: {error}")
    raise failure or CoordinatorUnreachable("(none)", "no endpoint was given")
