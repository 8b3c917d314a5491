"""What a certificate says that somebody showed, and the list of those that were taken back.

Rule: TLS has checked the certificate; here it is only read. The list (ca.crl beside ca.crt) counts
with the signature of that authority alone. One that is damaged or gone while a process runs leaves
what is known as it was: nobody is let in again because a file was lost.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from elastic.core.config import NS_PER_S
from elastic.errors import ConfigError
from elastic.runtime.access import file_signature, read_pem

if TYPE_CHECKING:
    from cryptography import x509

log = logging.getLogger(__name__)

CRL_FILE = "ca.crl"
"""Beside the authority's certificate, as `elastic-coord certs revoke` writes it."""
BEGIN_CRL = b"-----BEGIN X509 CRL-----"
REMEMBERED = 20_000
"""Certificates that were read before; each node and user shows its own again and again."""


@dataclass(frozen=True)
class CertificateSummary:
    """A certificate, as far as it matters here.

    Attributes:
        issuer: name of the authority, DER.
        serial: which of its certificates it is.
        until_ns: Unix time from which it holds no longer.
        uris: names of whom it is for.
    """

    issuer: bytes
    serial: int
    until_ns: int
    uris: tuple[str, ...]

    def __str__(self) -> str:
        """Return how people name it."""
        return f"certificate {self.serial:x}"


@functools.lru_cache(maxsize=REMEMBERED)
def read_shown(data: bytes) -> CertificateSummary:
    """Return what a certificate says, PEM or DER.

    Raises:
        ConfigError: it is none.
    """
    from cryptography import x509

    try:
        if data.startswith(b"-----BEGIN "):
            cert = x509.load_pem_x509_certificate(data)
        else:
            cert = x509.load_der_x509_certificate(data)
        try:
            names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            uris = tuple(names.get_values_for_type(x509.UniformResourceIdentifier))
        except x509.ExtensionNotFound:
            uris = ()
        until_ns = int(cert.not_valid_after_utc.timestamp()) * NS_PER_S
        return CertificateSummary(cert.issuer.public_bytes(), cert.serial_number, until_ns, uris)
    except Exception as error:  # Whatever the parser makes of strange bytes.
        raise ConfigError(f"a certificate that cannot be read: {error}") from error


class RevokedList:
    """The certificates of an authority that were taken back, as its file says now."""

    def __init__(self, ca: Path) -> None:
        """Read the list beside the authority's certificate; without a file it is empty.

        Raises:
            ConfigError: the file is no list of this authority: whoever starts with half a lock
                would let in who was locked out.
        """
        self._ca = ca
        self._path = ca.with_name(CRL_FILE)
        self._complaint = ""
        self._seen = file_signature(self._path)
        self._revoked: dict[tuple[bytes, int], int] = {}
        if self._seen is not None:
            self._revoked = read_revoked(self._path, ca)

    def look(self) -> list[int]:
        """Read the file again if it changed; returns the serial numbers that are new in it.

        Never raises: a file that is no good is said in the log and changes nothing.
        """
        seen = file_signature(self._path)
        if seen == self._seen:
            return []
        if seen is None:
            self._complain(f"{self._path} is gone; what was revoked stays so until the restart")
            return []
        try:
            found = read_revoked(self._path, self._ca)
        except ConfigError as error:
            self._complain(f"{error}; what was revoked stays so")
            return []
        before, self._revoked = self._revoked, {**self._revoked, **found}
        self._complaint, self._seen = "", seen
        if missing := len(before.keys() - found.keys()):
            # An older list was put back: whoever was locked out would be in again.
            self._complain(
                f"{self._path} lacks {missing} that were revoked; they stay so until the restart"
            )
        return [serial for issuer, serial in found if (issuer, serial) not in before]

    def why_over(self, shown: CertificateSummary, now_ns: int) -> str:
        """Return why a certificate opens nothing any more, "" if it does."""
        if (shown.issuer, shown.serial) in self._revoked:
            return f"{shown} was revoked"
        return f"{shown} has expired" if now_ns >= shown.until_ns else ""

    def _complain(self, text: str) -> None:
        if text != self._complaint:
            self._complaint = text
            log.error("revoked_list_unusable error=%r", text)


def read_revoked(path: Path, ca: Path) -> dict[tuple[bytes, int], int]:
    """Return (issuer, serial) of what a list holds -> Unix time in ns at which it was revoked.

    Args:
        path: one list or several, PEM; each signed by an authority in `ca`.
        ca: certificates of the authorities, PEM.

    Raises:
        ConfigError: it cannot be read, is damaged, or nobody in `ca` has signed it.
    """
    from cryptography import x509

    text = read_pem(path)
    try:
        authorities = x509.load_pem_x509_certificates(read_pem(ca))
        lists = [x509.load_pem_x509_crl(BEGIN_CRL + part) for part in text.split(BEGIN_CRL)[1:]]
        found = {}
        for one in lists:
            if not _is_signed(one, authorities):
                raise ValueError(f"no authority in {ca} has signed it")
            for entry in one:
                moment_ns = int(entry.revocation_date_utc.timestamp()) * NS_PER_S
                found[one.issuer.public_bytes(), entry.serial_number] = moment_ns
        if not lists:
            raise ValueError("it holds no list")
    except Exception as error:  # Whatever the parser makes of strange bytes.
        raise ConfigError(
            f"list of revoked certificates {path}: {error}; expected what 'elastic-coord certs "
            f"revoke' wrote for the authority in {ca}"
        ) from error
    return found


def _is_signed(
    one: x509.CertificateRevocationList, authorities: Iterable[x509.Certificate]
) -> bool:
    return any(
        one.issuer == ca.subject and one.is_signature_valid(ca.public_key())  # type: ignore[arg-type]
        for ca in authorities
    )
