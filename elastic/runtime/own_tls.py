"""TLS between agents that have no certificate of the cluster: one that the answering agent made.

It is made anew with each agent, and its key never leaves the process. Nobody signs it: whoever
calls looks for exactly the certificate whose fingerprint the coordinator has told it, and who calls
proves by the job's key that it may. Whoever only listens learns nothing, and who stands between
the two is found out, as long as nobody stands between them and the coordinator.

Rule: who was told a fingerprint never talks in the clear, and to nobody who shows another one.
TLS 1.3 alone, and no session is taken up again.
"""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
import socket
import ssl
from typing import Protocol

from elastic.errors import NotAuthorized
from elastic.runtime.peer_tls import HANDSHAKE_S, wrapped

FOREVER = b"99991231235959Z"
"""As RFC 5280 writes that a certificate has no end: this one goes with its agent."""
BEGAN = b"20200101000000Z"
"""Clocks of nodes differ; nobody looks at it."""
# The curve P-256 of FIPS 186-4.
PRIME = 2**256 - 2**224 + 2**192 + 2**96 - 1
ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
BASE = (
    0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5,
)
SEQUENCE = 0x30
# Object identifiers, as DER writes them.
SUBJECT_NAME = bytes.fromhex("0603550403")
EC_KEY = bytes.fromhex("06072a8648ce3d0201")
P256 = bytes.fromhex("06082a8648ce3d030107")
ECDSA_SHA256 = bytes.fromhex("06082a8648ce3d040302")


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
    """Return a new certificate and its key on the curve P-256, PEM.

    The standard library uses keys and makes none, and no other package is worth its size for this.
    Here only the public point is computed, and OpenSSL compares it with the key when it loads both.
    Nobody looks at the signature: who calls compares the whole certificate.
    """
    secret = 1 + secrets.randbelow(ORDER - 1)
    x, y = _public_point(secret)
    name = _der(SEQUENCE, _der(0x31, _der(SEQUENCE, SUBJECT_NAME, _der(0x0C, b"elastic-torch"))))
    signed = _der(
        SEQUENCE,
        _der(0xA0, _number(2)),
        _number(1 + secrets.randbits(64)),
        _der(SEQUENCE, ECDSA_SHA256),
        name,
        _der(SEQUENCE, *(_der(0x18, moment) for moment in (BEGAN, FOREVER))),
        name,
        _der(
            SEQUENCE,
            _der(SEQUENCE, EC_KEY, P256),
            _der(0x03, b"\0\4" + x.to_bytes(32, "big") + y.to_bytes(32, "big")),
        ),
    )
    unsigned = _der(0x03, b"\0" + _der(SEQUENCE, _number(1), _number(1)))
    certificate = _der(SEQUENCE, signed, _der(SEQUENCE, ECDSA_SHA256), unsigned)
    key = _der(SEQUENCE, _number(1), _der(0x04, secret.to_bytes(32, "big")), _der(0xA0, P256))
    return _pem("CERTIFICATE", certificate), _pem("EC PRIVATE KEY", key)


def _public_point(secret: int) -> tuple[int, int]:
    """Return `secret` times the curve's base point."""
    found: tuple[int, int] | None = None
    for bit in f"{secret:b}":
        found = _sum(found, found)
        if bit == "1":
            found = _sum(found, BASE)
    if found is None:
        raise ValueError("a key of 0")
    return found


def _sum(one: tuple[int, int] | None, other: tuple[int, int] | None) -> tuple[int, int] | None:
    """Add two points; None is zero."""
    if one is None or other is None:
        return one or other
    (x1, y1), (x2, y2) = one, other
    if x1 == x2 and (y1 + y2) % PRIME == 0:
        return None
    if one == other:
        slope = (3 * x1 * x1 - 3) * pow(2 * y1, -1, PRIME)
    else:
        slope = (y2 - y1) * pow(x2 - x1, -1, PRIME)
    x = (slope * slope - x1 - x2) % PRIME
    return x, (slope * (x1 - x) - y1) % PRIME


def _der(tag: int, *parts: bytes) -> bytes:
    content = b"".join(parts)
    size = len(content)
    length = bytes([size]) if size < 0x80 else b"\x82" + size.to_bytes(2, "big")
    if 0x80 <= size < 0x100:
        length = b"\x81" + bytes([size])
    return bytes([tag]) + length + content


def _number(value: int) -> bytes:
    return _der(0x02, value.to_bytes(value.bit_length() // 8 + 1, "big"))


def _pem(kind: str, der: bytes) -> bytes:
    text = base64.encodebytes(der).decode()
    return f"-----BEGIN {kind}-----\n{text}-----END {kind}-----\n".encode()
