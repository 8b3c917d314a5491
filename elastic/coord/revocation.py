"""What an authority has issued, and the list of what it took back.

Rule: a certificate is kept in FOLDER/issued before anybody has it, so that none is forgotten when
its name is to be locked out. The list is signed by the authority, counts beside its ca.crt, and
only grows.

    DIR/issued/SERIAL.crt   every certificate that was issued
    DIR/ca.crl              those that were revoked; a copy lies in each DIR/NAME
"""

from __future__ import annotations

import datetime
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from elastic.coord.roles import caller_of_uri
from elastic.core.config import NS_PER_S
from elastic.errors import NotFound, UsageError
from elastic.runtime.access import CA_FILE, CERT_FILE, replace_file
from elastic.runtime.certificates import CRL_FILE, CertificateSummary, read_revoked, read_shown

ISSUED = "issued"
"""The folder of certificates; no name of one."""
Authority = tuple[x509.Certificate, ec.EllipticCurvePrivateKey]


@dataclass(frozen=True, kw_only=True)
class IssuedCertificate:
    """One certificate of an authority.

    Attributes:
        shown: what it says.
        name, role: whom it is for; "" if it does not say so.
        revoked_ns: Unix time at which it was taken back, 0 if it was not.
    """

    shown: CertificateSummary
    name: str
    role: str
    revoked_ns: int

    def why_over(self, now_ns: int) -> str:
        """Return why it opens nothing any more, "" if it does."""
        if self.revoked_ns:
            return "revoked"
        return "expired" if now_ns >= self.shown.until_ns else ""


def keep_issued(folder: Path, cert: x509.Certificate) -> None:
    """Keep a certificate that is about to be handed out.

    Raises:
        OSError: it cannot be written; nobody must have it then.
    """
    (folder / ISSUED).mkdir(mode=0o700, exist_ok=True)
    data = cert.public_bytes(serialization.Encoding.PEM)
    replace_file(folder / ISSUED / f"{cert.serial_number:x}.crt", data, 0o644)


def list_issued(folder: Path) -> tuple[IssuedCertificate, ...]:
    """Return all certificates of an authority, in the order of name and end.

    Those of versions that kept none are found where they were written, until they are replaced.

    Raises:
        UsageError: there is no authority in the folder.
        ConfigError: its list of revoked ones is damaged.
    """
    try:
        ca = x509.load_pem_x509_certificate((folder / CA_FILE).read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(
            f"no authority in {folder} ({error}); make one with 'elastic-coord certs init {folder}'"
        ) from error
    revoked = _revoked(folder)
    found: dict[int, IssuedCertificate] = {}
    for path in sorted([*folder.glob(f"{ISSUED}/*.crt"), *folder.glob(f"*/{CERT_FILE}")]):
        try:
            shown = read_shown(path.read_bytes())
        except (OSError, ValueError, UsageError):
            continue  # Half of one that was being written, or none of ours.
        if shown.issuer != ca.subject.public_bytes():
            continue
        callers = [caller for uri in shown.uris if (caller := caller_of_uri(uri)) is not None]
        name, role = (callers[0].name, callers[0].role.value) if callers else ("", "")
        revoked_ns = revoked.get((shown.issuer, shown.serial), 0)
        found[shown.serial] = IssuedCertificate(
            shown=shown, name=name, role=role, revoked_ns=revoked_ns
        )
    return tuple(sorted(found.values(), key=lambda one: (one.name, one.shown.until_ns)))


def revoke(
    folder: Path, wanted: str, authority: Authority, now: datetime.datetime
) -> tuple[IssuedCertificate, ...]:
    """Take back the certificate of this serial number, or all of this name; returns them.

    Raises:
        NotFound: there is none, or all are over already.
        UsageError: the list cannot be written.
    """
    now_ns = int(now.timestamp()) * NS_PER_S
    with alone(folder):
        taken = tuple(
            one
            for one in list_issued(folder)
            if wanted.lower().lstrip("0") == f"{one.shown.serial:x}" or wanted == one.name
            if not one.why_over(now_ns)
        )
        if not taken:
            if text := current_list(folder):
                # Whoever did this before may have been killed in the middle.
                hand_out(folder, text)
            raise NotFound(
                f"no certificate that holds has the serial number or name {wanted!r} in {folder}; "
                f"see 'elastic-coord certs list {folder}'"
            )
        text = _signed_list(folder, taken, authority, now)
        hand_out(folder, text)
    return taken


def hand_out(folder: Path, text: bytes) -> None:
    """Write the list beside the authority, and where those who use its certificates look.

    Raises:
        UsageError: it cannot be written.
    """
    copies = [found.parent / CRL_FILE for found in sorted(folder.glob(f"*/{CA_FILE}"))]
    for path in (folder / CRL_FILE, *copies):
        try:
            replace_file(path, text, 0o644)
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error}") from error


def current_list(folder: Path) -> bytes:
    """Return the list as it stands, b"" if nothing was ever revoked.

    Raises:
        ConfigError: it is damaged.
    """
    _revoked(folder)
    path = folder / CRL_FILE
    return path.read_bytes() if path.exists() else b""


def _revoked(folder: Path) -> dict[tuple[bytes, int], int]:
    path = folder / CRL_FILE
    return read_revoked(path, folder / CA_FILE) if path.exists() else {}


def _signed_list(
    folder: Path, taken: tuple[IssuedCertificate, ...], authority: Authority, now: datetime.datetime
) -> bytes:
    ca, key = authority
    before = _revoked(folder)
    now_ns = int(now.timestamp()) * NS_PER_S
    after = {serial: moment_ns for (_, serial), moment_ns in before.items()}
    after |= {one.shown.serial: now_ns for one in taken}
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(ca.subject)
        .last_update(now)
        # The next one comes when somebody is locked out, and until then this one is the newest.
        .next_update(ca.not_valid_after_utc)
        .add_extension(x509.CRLNumber(len(after)), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False
        )
    )
    for serial, moment_ns in sorted(after.items()):
        moment = datetime.datetime.fromtimestamp(moment_ns // NS_PER_S, datetime.timezone.utc)
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(moment)
        builder = builder.add_revoked_certificate(entry.build())
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Let one process at a time change or hand out the list.

    Raises:
        UsageError: the folder cannot be written.
    """
    try:
        lock = os.open(folder / f".{CRL_FILE}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise UsageError(f"{folder / CRL_FILE} cannot be written: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
