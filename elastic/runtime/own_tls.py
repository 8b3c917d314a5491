"""TLS between agents that have no certificate of the cluster: one that the answering agent made.

It is made anew with each agent, and its key never leaves the process. Nobody signs it: whoever
calls looks for exactly the certificate whose fingerprint the coordinator has told it, and who calls
proves by the job's key that it may. Whoever only listens learns nothing, and who stands between
the two is found out, as long as nobody stands between them and the coordinator.

Rule: who was told a fingerprint never talks in the clear, and to nobody who shows another one.
TLS 1.3 alone, and no session is taken up again.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import socket
import ssl
from typing import Protocol

from elastic.errors import NotAuthorized
from elastic.runtime.peer_tls import HANDSHAKE_S, wrapped

FOREVER = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.timezone.utc)
"""As RFC 5280 writes that a certificate has no end: this one goes with its agent."""
BEGAN = datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc)
"""Clocks of nodes differ; nobody looks at it."""


class ConnectionTls(Protocol):
    """How a connection is secured: `PeerTls`, `OwnCertificate` or `PinnedCertificate`."""

    def wrap(self, sock: socket.socket, *, is_client: bool) -> ssl.SSLSocket:
        """Return the socket over which TLS is to be spoken; the one given is empty then."""

    def greet(self, sock: ssl.SSLSocket) -> None:
        """Have the other side show who it is, before anything else is said."""


class OwnCertificate:
    """The answering side: a key and a certificate of this process alone.

    Attributes:
        fingerprint: SHA-256 of the certificate, hexadecimal.
    """

    def __init__(self) -> None:
        """Make both.

        Raises:
            OSError: there is no memory for it.
        """
        certificate, key = _make()
        self.fingerprint = hashlib.sha256(
            ssl.PEM_cert_to_DER_cert(certificate.decode())
        ).hexdigest()
        self._context = _context(ssl.PROTOCOL_TLS_SERVER)
        self._context.num_tickets = 0
        # The library reads files only: one that has no name, and no disk under it.
        descriptor = os.memfd_create("elastic-key", os.MFD_CLOEXEC)
        try:
            os.write(descriptor, certificate + key)
            self._context.load_cert_chain(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)

    def wrap(self, sock: socket.socket, *, is_client: bool) -> ssl.SSLSocket:
        """Return the socket over which TLS is to be spoken; the one given is empty then."""
        return wrapped(self._context, sock, is_client=is_client)

    def greet(self, sock: ssl.SSLSocket) -> None:
        """Show the certificate; who calls says who it is with the job's key, behind this.

        Raises:
            NotAuthorized: the other side speaks no TLS, or another one.
            OSError: the connection broke, or took too long.
        """
        _shake_hands(sock)


class PinnedCertificate:
    """The calling side: takes one certificate, and no other."""

    def __init__(self, fingerprint: str) -> None:
        """Take the certificate of this SHA-256, hexadecimal."""
        self._fingerprint = fingerprint.lower()
        self._context = _context(ssl.PROTOCOL_TLS_CLIENT)

    def wrap(self, sock: socket.socket, *, is_client: bool) -> ssl.SSLSocket:
        """Return the socket over which TLS is to be spoken; the one given is empty then."""
        return wrapped(self._context, sock, is_client=is_client)

    def greet(self, sock: ssl.SSLSocket) -> None:
        """Have the other side show its certificate, and that it has the key to it.

        Raises:
            NotAuthorized: it shows another one.
            OSError: the connection broke, or took too long.
        """
        _shake_hands(sock)
        shown = hashlib.sha256(sock.getpeercert(binary_form=True) or b"").hexdigest()
        if shown != self._fingerprint:
            raise NotAuthorized(
                f"the certificate that is shown has the fingerprint {shown[:16]}..., the "
                f"coordinator has told {self._fingerprint[:16]}...: the agent there was started "
                f"anew, and the coordinator is about to tell its new one, or it is another one"
            )


def _shake_hands(sock: ssl.SSLSocket) -> None:
    sock.settimeout(HANDSHAKE_S)
    try:
        sock.do_handshake()
    except ssl.SSLError as error:
        raise NotAuthorized(
            f"TLS with the other agent fails ({error.reason or error}): it speaks another TLS, or "
            f"none"
        ) from error


def _context(kind: int) -> ssl.SSLContext:
    context = ssl.SSLContext(kind)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # By the fingerprint, which is stricter.
    return context


def _make() -> tuple[bytes, bytes]:
    """Return a new certificate and its key, PEM."""
    # In an agent that has a certificate of the cluster, or is alone on its machine, never loaded.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "elastic-torch agent")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(BEGAN)
        .not_valid_after(FOREVER)
        .sign(key, hashes.SHA256())
    )
    return (
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )
