"""Mutual TLS between agents: both present their node's certificate, signed by the cluster's CA.

Rule: an agent with a certificate never uses plain text, neither as client nor as server. Files are
checked for each connection, and read again when they changed; if they are not valid, the previous
ones stay in use. TLS 1.3 only: no renegotiation, and no session resumption without a certificate.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from pathlib import Path

from elastic.errors import ConfigError, NotAuthorized
from elastic.runtime.access import TlsFiles, WatchedFiles
from elastic.runtime.certificates import read_shown

HANDSHAKE_S = 5.0
"""Timeout of the handshake."""
NODE_URIS = ("elastic://node/", "elastic://admin/")
"""Accepted certificates: copies are between agents and workers, so a user's is refused."""


class PeerTls:
    """One node's side of TLS with other nodes; every method may be called by any thread."""

    def __init__(self, files: TlsFiles) -> None:
        """Read the files.

        Raises:
            ConfigError: one of them is not valid, or certificate or authority is missing.
        """
        if files.ca is None or files.cert is None:
            raise ConfigError("TLS between agents needs a certificate, its key and the authority")
        self._paths = files.paths
        self._contexts = WatchedFiles("certificate", files.paths, lambda: _contexts(files))

    @staticmethod
    def of(files: TlsFiles | None) -> PeerTls | None:
        """Return the TLS of an agent with a certificate, None for one without."""
        if files is None or files.cert is None or files.ca is None:
            return None
        return PeerTls(files)

    @staticmethod
    def at(paths: Sequence[str]) -> PeerTls | None:
        """Return the agent's TLS by its paths, None for none; ConfigError if a file is wrong."""
        return PeerTls(TlsFiles(*(Path(path) for path in paths))) if paths else None

    @property
    def paths(self) -> tuple[str, ...]:
        """Return the paths of certificate, key and authority, for this node's workers."""
        return tuple(str(path) for path in self._paths)

    def wrap(self, sock: socket.socket, *, is_client: bool) -> ssl.SSLSocket:
        """Return the TLS socket, with the present files; the given socket is detached then."""
        self._contexts.reload()
        client, server = self._contexts.content
        return wrapped(client if is_client else server, sock, is_client=is_client)

    def greet(self, sock: ssl.SSLSocket) -> None:
        """Perform the handshake, and check that the other side's certificate is a node's.

        Raises:
            NotAuthorized: the other side has no valid node certificate of this cluster.
            OSError: the connection broke, or timed out.
        """
        sock.settimeout(HANDSHAKE_S)
        try:
            sock.do_handshake()
        except ssl.SSLError as error:
            raise refused(error) from error
        shown = read_shown(sock.getpeercert(binary_form=True) or b"")
        if not any(uri.startswith(NODE_URIS) for uri in shown.uris):
            raise NotAuthorized(
                f"the {shown} that the other side shows is for {shown.uris or 'nobody'}, expected "
                f"one of role node ('elastic-coord certs issue --role node')"
            )


def _contexts(files: TlsFiles) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Read the files, and return the contexts of a client and of a server."""
    files.read()
    try:
        client = _context(files, ssl.PROTOCOL_TLS_CLIENT)
        server = _context(files, ssl.PROTOCOL_TLS_SERVER)
    except (OSError, ValueError) as error:
        raise ConfigError(f"TLS files of this agent: {error}") from error
    server.num_tickets = 0
    return client, server


def _context(files: TlsFiles, kind: int) -> ssl.SSLContext:
    context = ssl.SSLContext(kind)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # A node is identified by its certificate's URI, because node addresses change.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(files.ca)
    if files.cert is not None:
        context.load_cert_chain(files.cert, files.key, password=lambda: b"")
    return context


def wrapped(context: ssl.SSLContext, sock: socket.socket, *, is_client: bool) -> ssl.SSLSocket:
    """Return the TLS socket, before the handshake; the given one is detached then."""
    return context.wrap_socket(sock, server_side=not is_client, do_handshake_on_connect=False)


def refused(error: ssl.SSLError) -> NotAuthorized:
    """Return the error for a failed TLS handshake."""
    reason = getattr(error, "verify_message", "") or error.reason or str(error)
    return NotAuthorized(
        f"TLS with the other agent fails ({reason}): both need a certificate of role node that one "
        f"authority has signed and that is not over ('elastic-coord certs issue --role node')"
    )
