"""Reads serial number, expiry and URIs of a peer's certificate.

Rule: TLS has verified the certificate; here it is only parsed, with no more of DER than these
fields need. Anything unexpected is refused.
"""

from __future__ import annotations

import datetime
import functools
import ssl
from collections.abc import Iterator
from dataclasses import dataclass

from elastic.core.config import NS_PER_S
from elastic.errors import ConfigError

REMEMBERED = 20_000
"""Cached certificates: each node and user presents its own at every connection."""
INTEGER, OCTET_STRING, OBJECT_ID, SEQUENCE = 0x02, 0x04, 0x06, 0x30
VERSION, EXTENSIONS, URI = 0xA0, 0xA3, 0x86
TIME_FORMATS = {0x17: "%y%m%d%H%M%SZ", 0x18: "%Y%m%d%H%M%SZ"}
ALTERNATIVE_NAMES = bytes([0x55, 0x1D, 0x11])
"""Object identifier 2.5.29.17 (subjectAltName) in DER."""
Element = tuple[int, bytes]
"""Tag and content."""


@dataclass(frozen=True)
class CertificateSummary:
    """The fields of a certificate that are used here.

    Attributes:
        serial: serial number, unique per authority.
        until_ns: Unix time of its expiry.
        uris: subject alternative names that are URIs; they name its owner.
    """

    serial: int
    until_ns: int
    uris: tuple[str, ...]

    def __str__(self) -> str:
        """Return the text for logs and errors: its serial number in hexadecimal."""
        return f"certificate {self.serial:x}"


@functools.lru_cache(maxsize=REMEMBERED)
def read_shown(data: bytes) -> CertificateSummary:
    """Parse a certificate, PEM or DER; ConfigError if it is not valid."""
    try:
        is_pem = data.startswith(b"-----BEGIN ")
        der = ssl.PEM_cert_to_DER_cert(data.decode("ascii")) if is_pem else data
        return _summary(der)
    except (ValueError, LookupError, StopIteration, OverflowError) as error:
        raise ConfigError(f"a certificate that cannot be read: {error}") from error


def _summary(der: bytes) -> CertificateSummary:
    """Parse RFC 5280's Certificate, whose first element is the signed part (TBSCertificate)."""
    signed = _elements(_content(_elements(_content(_elements(der), SEQUENCE)), SEQUENCE))
    parts = [part for part in signed if part[0] != VERSION]
    (serial_tag, serial), (validity_tag, validity) = parts[0], parts[3]
    if (serial_tag, validity_tag) != (INTEGER, SEQUENCE):
        raise ValueError("no serial number, or no time for which it holds")
    _, (kind, until) = _elements(validity)
    ends = datetime.datetime.strptime(until.decode("ascii"), TIME_FORMATS[kind])
    seconds = int(ends.replace(tzinfo=datetime.timezone.utc).timestamp())
    uris = [uri for tag, extensions in parts if tag == EXTENSIONS for uri in _uris(extensions)]
    return CertificateSummary(int.from_bytes(serial, "big"), seconds * NS_PER_S, tuple(uris))


def _uris(extensions: bytes) -> Iterator[str]:
    for _, extension in _elements(_content(_elements(extensions), SEQUENCE)):
        (id_tag, which), *_, (value_tag, value) = _elements(extension)
        if (id_tag, which, value_tag) != (OBJECT_ID, ALTERNATIVE_NAMES, OCTET_STRING):
            continue
        for tag, name in _elements(_content(_elements(value), SEQUENCE)):
            if tag == URI:
                yield name.decode("ascii")


def _content(elements: Iterator[Element], tag: int) -> bytes:
    found, content = next(elements)
    if found != tag:
        raise ValueError(f"tag {found:#x} where {tag:#x} is expected")
    return content


def _elements(data: bytes) -> Iterator[Element]:
    """Yield consecutive DER elements; all tags used here are one byte."""
    at = 0
    while at < len(data):
        tag, length, begin = data[at], data[at + 1], at + 2
        if length & 0x80:
            begin += length & 0x7F
            length = int.from_bytes(data[at + 2 : begin], "big")
        at = begin + length
        if at > len(data):
            raise ValueError(f"{len(data)} bytes, and {at} are announced")
        yield tag, data[begin:at]
