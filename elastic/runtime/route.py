"""The address of this machine that others reach it at: that of the kernel's route to them."""

from __future__ import annotations

import socket

DISCARD_PORT = 9


def address_towards(host: str, port: int = DISCARD_PORT) -> str:
    """Return the local address of the route to a host, a loopback one for a loopback one.

    Nothing is sent.

    Raises:
        OSError: the name does not resolve (`socket.gaierror`), or no route leads there.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    failure = OSError("no address")
    # IPv4 first: "localhost" has both, and gloo's and NCCL's defaults work better with it.
    for family, kind, protocol, _, address in sorted(found, key=lambda f: f[0] != socket.AF_INET):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(address)
                return str(probe.getsockname()[0])
            except OSError as error:
                failure = error
    raise failure
