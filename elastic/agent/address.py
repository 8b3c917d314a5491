"""Finds the address of this host that other nodes' workers should use.

Rule: the kernel's routing decides: it is the source address of the route to the coordinator. No
packet is sent to find it.
"""

from __future__ import annotations

import socket

from elastic.errors import CoordinatorUnreachable
from elastic.runtime.rpc import parse_endpoint


def address_towards(endpoint: str) -> str:
    """Return the local address of the route to `endpoint`; a loopback one for a loopback one.

    Raises:
        CoordinatorUnreachable: its name does not resolve, or no route leads there.
    """
    host, port = parse_endpoint(endpoint)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise CoordinatorUnreachable(endpoint, f"its name does not resolve: {error}") from error
    detail = "no address"
    # IPv4 first: "localhost" has both, and gloo's and NCCL's defaults work better with it.
    for family, kind, protocol, _, address in sorted(found, key=lambda f: f[0] != socket.AF_INET):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(address)
                return str(probe.getsockname()[0])
            except OSError as error:
                detail = f"no route: {error}"
    raise CoordinatorUnreachable(endpoint, detail)


def address_towards_any(endpoints: tuple[str, ...]) -> str:
    """Return the local address of the route to the first endpoint that has one.

    Raises:
        CoordinatorUnreachable: none has; the error is that of the first.
    """
    failure: CoordinatorUnreachable | None = None
    for endpoint in endpoints:
        try:
            return address_towards(endpoint)
        except CoordinatorUnreachable as error:
            failure = failure or error
    raise failure or CoordinatorUnreachable("(none)", "no endpoint was given")
