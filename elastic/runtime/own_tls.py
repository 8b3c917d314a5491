"""TLS between agents without certificates of the cluster: the server makes a self-signed one.

Each agent process makes a new certificate, and its key never leaves the process. The client accepts
only the certificate with the fingerprint that the coordinator reported, and then authenticates
itself by the job's key. This protects against eavesdroppers, and against a man in the middle as
long as the connections to the coordinator are not intercepted.

Rule: a client with a fingerprint never uses plain text, and accepts no other certificate. TLS 1.3
only, without session resumption.
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
"""RFC 5280's value for a certificate without expiry: this one ends with its agent."""
BEGAN = b"20200101000000Z"
"""Not checked, because clocks of nodes differ."""
# The curve P-256 of FIPS 186-4.
PRIME = 2**256 - 2**224 + 2**192 + 2**96 - 1
ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
BASE = (
    0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5,
)
SEQUENCE = 0x30
# Object identifiers in DER.
SUBJECT_NAME = bytes.fromhex("0603550403")
EC_KEY = bytes.fromhex("06072a8648ce3d0201")
P256 = bytes.fromhex("06082a8648ce3d030107")
ECDSA_SHA256 = bytes.fromhex("06082a8648ce3d040302")


class ConnectionTls(Protocol):
    """Interface of TLS for a connection: `PeerTls`, `OwnCertificate` or `PinnedCertificate`."""

    def wrap(self, sock: socket.socket, *, is_client: bool) -> ssl.SSLSocket:
        """Return the TLS socket; the given one is detached then."""

    def greet(self, sock: ssl.SSLSocket) -> None:
        """Perform the handshake and verify the other side, before any data is sent."""


class OwnCertificate:
    """The server side: a key and a certificate of this process alone.

    Attributes:
        fingerprint: SHA-256 of the certificate, hexadecimal.
    """

    def __init__(self) -> None:
        """Make both; OSError if there is no memory for it."""
        certificate, key = _make()
        self.fingerprint = hashlib.sha256(
            ssl.PEM_cert_to_DER_cert(certificate.decode())
        ).hexdigest()
        self._context = _context(ssl.PROTOCOL_TLS_SERVER)
        self._context.num_tickets = 0
        # The library reads only files: use an anonymous one in memory.
        descriptor = os.memfd_create("elastic-key", os.MFD_CLOEXEC)
        try:
            os.write(descriptor, certificate + key)
            self._context.load_cert_chain(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)

    def wrap(self, sock: socket.socket, *, is_client: bool) -> ssl.SSLSocket:
        """Return the TLS socket; the given one is detached then."""
        return wrapped(self._context, sock, is_client=is_client)

    def greet(self, sock: ssl.SSLSocket) -> None:
        """Present the certificate; the client authenticates by the job's key after this.

        Raises:
            NotAuthorized: the other side speaks no TLS, or no TLS 1.3.
            OSError: the connection broke, or timed out.
        """
        _shake_hands(sock)


class PinnedCertificate:
    """The client side: accepts exactly one certificate."""

    def __init__(self, fingerprint: str) -> None:
        """Accept the certificate of this SHA-256, hexadecimal."""
        self._fingerprint = fingerprint.lower()
        self._context = _context(ssl.PROTOCOL_TLS_CLIENT)

    def wrap(self, sock: socket.socket, *, is_client: bool) -> ssl.SSLSocket:
        """Return the TLS socket; the given one is detached then."""
        return wrapped(self._context, sock, is_client=is_client)

    def greet(self, sock: ssl.SSLSocket) -> None:
        """Perform the handshake, and compare the server's certificate with the fingerprint.

        Raises:
            NotAuthorized: the certificate is another one.
            OSError: the connection broke, or timed out.
        """
        _shake_hands(sock)
        shown = hashlib.sha256(sock.getpeercert(binary_form=True) or b"").hexdigest()
        if shown != self._fingerprint:
            raise NotAuthorized(
                f"the certificate that is shown has the fingerprint {shown[:16]}..., the "
                f"coordinator has sent {self._fingerprint[:16]}...: the agent there was started "
                f"anew, and the coordinator is about to send its new one, or it is another one"
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
    context.verify_mode = ssl.CERT_NONE  # Verified by the fingerprint, which is stricter.
    return context


def _make() -> tuple[bytes, bytes]:
    """Return a new certificate and its key on the curve P-256, PEM.

    The standard library cannot make keys, and this alone does not justify another dependency. Only
    the public point is computed here; OpenSSL checks it against the key when it loads both. The
    signature is never checked: the client compares the whole certificate.
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
    """Return `secret` times the curve's base point, by double and add."""
    found: tuple[int, int] | None = None
    for bit in f"{secret:b}":
        found = _sum(found, found)
        if bit == "1":
            found = _sum(found, BASE)
    if found is None:
        raise ValueError("a key of 0")
    return found


def _sum(one: tuple[int, int] | None, other: tuple[int, int] | None) -> tuple[int, int] | None:
    """Add two points of the curve; None is the point at infinity."""
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
