"""A certificate authority for one cluster, and the certificates that it signs for each process.

Rule: a certificate names its holder as the URI elastic://ROLE/NAME, and is valid for nothing else:
a user's certificate cannot serve, and a node's names no host, so that it serves only other agents,
which check the URI. Keys are generated here, with mode 600, and are never printed. There is no
revocation: certificates are short-lived, and a new authority invalidates all of them.

    DIR/ca.key                      the authority: keep it off the nodes
    DIR/NAME/{ca.crt,tls.crt,tls.key}   the files of one process: its --tls-dir
"""

from __future__ import annotations

import datetime
import ipaddress
import secrets
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from elastic.coord.roles import Role, caller_of_uri, caller_uri
from elastic.core.config import check_name
from elastic.errors import ConfigError, UsageError
from elastic.runtime.access import CA_FILE, CERT_FILE, KEY_FILE, replace_file

CA_KEY_FILE = "ca.key"
COORDINATOR = "coordinator"
CA_DAYS = 3650
CERT_DAYS = 90
DAYS_MAX = 36_500
CLOCKS_DIFFER = datetime.timedelta(minutes=10)
"""A certificate is valid from this long before its creation: other clocks may be behind."""
CLIENT = (ExtendedKeyUsageOID.CLIENT_AUTH,)
SERVER = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
SERVING = (Role.ADMIN, Role.NODE)
"""Roles that serve: agents fetch copies from each other."""
Authority = tuple[x509.Certificate, ec.EllipticCurvePrivateKey]


@dataclass(frozen=True, kw_only=True)
class CertificateRequest:
    """A certificate to be signed.

    Attributes:
        name: of the node, user or program; a node can attach only under this name.
        role: what it may do.
        hosts: names and addresses at which it serves; for the coordinator only.
        days: its validity.
    """

    name: str
    role: Role
    hosts: tuple[str, ...] = ()
    days: float = CERT_DAYS


def init_authority(
    folder: Path, hosts: tuple[str, ...], now: datetime.datetime, days: float = CERT_DAYS
) -> Path:
    """Create an authority and the coordinator's certificate; return the folder of the latter.

    Raises:
        UsageError: an authority exists already, or the folder cannot be written.
    """
    # A key without a certificate was left by an interrupted `init`.
    if (folder / CA_FILE).exists():
        raise UsageError(
            f"{folder / CA_FILE} exists: a new authority would lock out all that was issued; "
            f"choose another folder, or renew the coordinator's certificate with "
            f"'elastic-coord certs issue {folder} --name {COORDINATOR} --role admin --host ...'"
        )
    wanted = CertificateRequest(name=COORDINATOR, role=Role.ADMIN, hosts=hosts, days=days)
    sans = _sans(wanted)  # Refused before anything is written.
    _check_days(wanted, now, now + datetime.timedelta(days=CA_DAYS))
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name(
        [x509.NameAttribute(NameOID.COMMON_NAME, f"elastic-torch authority {secrets.token_hex(4)}")]
    )
    cert = (
        _begun(name, key.public_key(), now, CA_DAYS)
        .issuer_name(name)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    _make_folder(folder)
    # The certificate last: an `init` interrupted before it can be repeated.
    _write(folder / CA_KEY_FILE, _pem_key(key), 0o600)
    _write(folder / CA_FILE, _pem(cert), 0o644)
    return _sign(folder, wanted, sans, now)


def issue(folder: Path, wanted: CertificateRequest, now: datetime.datetime) -> Path:
    """Sign a certificate with a new key; return its folder. It replaces one of the same name.

    Raises:
        UsageError: the folder has no authority, a name or host is not valid, or the name has a
            certificate of another role.
    """
    _check_role(folder / wanted.name, wanted)
    return _sign(folder, wanted, _sans(wanted), now)


def _sign(
    folder: Path, wanted: CertificateRequest, sans: list[x509.GeneralName], now: datetime.datetime
) -> Path:
    ca, ca_key = _authority(folder)
    _check_days(wanted, now, ca.not_valid_after_utc)
    key = ec.generate_private_key(ec.SECP256R1())
    # With a space: if there are no host names, some clients use the common name as one.
    called = f"{wanted.role.value} {wanted.name}"[:64]
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, called)])
    cert = (
        _begun(subject, key.public_key(), now, wanted.days)
        .issuer_name(ca.subject)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage(SERVER if wanted.role in SERVING else CLIENT), critical=False
        )
        .add_extension(x509.SubjectAlternativeName(sans), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
        )
        .sign(ca_key, hashes.SHA256())
    )
    target = folder / wanted.name
    _make_folder(target)
    # A reader between these two writes finds a pair that does not match, and rereads.
    _write(target / KEY_FILE, _pem_key(key), 0o600)
    _write(target / CERT_FILE, _pem(cert), 0o644)
    _write(target / CA_FILE, _pem(ca), 0o644)
    return target


def _check_days(
    wanted: CertificateRequest, now: datetime.datetime, until: datetime.datetime
) -> None:
    if not 0 < wanted.days <= DAYS_MAX:
        raise ConfigError(f"--days {wanted.days:g}: expected more than 0, at most {DAYS_MAX}")
    if now + datetime.timedelta(days=wanted.days) > until:
        raise UsageError(
            f"--days {wanted.days:g} is past the end of the authority itself, {until:%Y-%m-%d}; "
            f"ask for fewer, or make a new authority"
        )


def _check_role(target: Path, wanted: CertificateRequest) -> None:
    """Refuse to replace a certificate by one of another role: its process would lose access."""
    try:
        cert = x509.load_pem_x509_certificate((target / CERT_FILE).read_bytes())
        names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound):
        return
    for uri in names.get_values_for_type(x509.UniformResourceIdentifier):
        caller = caller_of_uri(uri)
        if caller is not None and caller.role is not wanted.role:
            raise UsageError(
                f"{target} holds a certificate of role {caller.role.value}, and its users "
                f"would lose that: choose another --name, ask for --role {caller.role.value}, or "
                f"move the folder away"
            )


def _authority(folder: Path) -> Authority:
    try:
        ca = x509.load_pem_x509_certificate((folder / CA_FILE).read_bytes())
        key = serialization.load_pem_private_key((folder / CA_KEY_FILE).read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(
            f"no authority in {folder} ({error}); make one with 'elastic-coord certs init {folder}'"
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != ca.public_key():
        raise UsageError(
            f"{folder / CA_KEY_FILE} is not the key of {folder / CA_FILE}: expected the two files "
            f"that 'elastic-coord certs init' wrote together"
        )
    return ca, key


def _sans(wanted: CertificateRequest) -> list[x509.GeneralName]:
    check_name("certificate", wanted.name)
    if wanted.hosts and wanted.role is not Role.ADMIN:
        raise UsageError(
            f"--host {wanted.hosts[0]} for role {wanted.role.value}: only a coordinator (role "
            f"{Role.ADMIN.value}) is connected to by name"
        )
    if not wanted.hosts and wanted.role is Role.ADMIN:
        raise UsageError(
            "a coordinator's certificate without --host: name every host name and address under "
            "which agents and users reach it"
        )
    names: list[x509.GeneralName] = [
        x509.UniformResourceIdentifier(caller_uri(wanted.role, wanted.name))
    ]
    for host in wanted.hosts:
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host.strip("[]"))))
        except ValueError:
            names.append(_dns_name(host))
    return names


def _dns_name(host: str) -> x509.DNSName:
    bare = host.removeprefix("*.")
    if not bare or not all(
        part and part.isascii() and part.replace("-", "").replace("_", "").isalnum()
        for part in bare.split(".")
    ):
        raise UsageError(f"--host {host!r}: expected a host name or an IP address, without a port")
    return x509.DNSName(host)


def _begun(
    subject: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime.datetime, days: float
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCKS_DIFFER)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _key_usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, key_cert_sign=signs, crl_sign=False,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _pem(cert: x509.Certificate) -> bytes:
    return cert.public_bytes(serialization.Encoding.PEM)


def _pem_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"folder {folder} cannot be made: {error}") from error


def _write(path: Path, data: bytes, mode: int) -> None:
    """Replace a file atomically; other users can never open it before its mode is set."""
    try:
        replace_file(path, data, mode)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error}") from error
