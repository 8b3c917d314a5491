"""Credentials of a process for a coordinator, and how it verifies the coordinator.

Rule: tokens and certificates come from files and are read again for each connection, so that a
replaced one is used without a restart. No secret is ever logged.
"""

from __future__ import annotations

import contextlib
import logging
import os
import ssl
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from elastic.errors import ConfigError, UsageError

if TYPE_CHECKING:
    import grpc

log = logging.getLogger(__name__)

CA_FILE = "ca.crt"
CERT_FILE = "tls.crt"
KEY_FILE = "tls.key"
"""File names in the folder of `--tls-dir`, as in a Kubernetes TLS secret."""
TLS_FLAGS = ("tls_dir", "tls_cert", "tls_key", "tls_ca")
FILE_BYTES_MAX = 64 * 1024
PEM_BYTES_MAX = 4 * 1024 * 1024
"""More than a system's bundle of all authorities."""

Command = TypeVar("Command", bound=Callable[..., Any])
Content = TypeVar("Content")


@dataclass(frozen=True)
class TlsTexts:
    """Contents of the files at one moment, PEM; b"" for a file that was not named."""

    cert: bytes
    key: bytes
    ca: bytes


@dataclass(frozen=True)
class TlsFiles:
    """Paths of certificates.

    Attributes:
        cert, key: of this process, both or neither; None on a client that sends a token instead.
        ca: authority that signs the other side's certificate. A client always has one. A server
            with one requires client certificates; one without does not authenticate clients by TLS.
    """

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    def __post_init__(self) -> None:
        """Refuse half of a pair."""
        if (self.cert is None) != (self.key is None):
            raise ConfigError(
                f"TLS certificate {self.cert} with key {self.key}: pass both, --tls-cert and "
                f"--tls-key, or a folder with both as --tls-dir"
            )

    @property
    def paths(self) -> tuple[Path | None, ...]:
        """Return the paths of certificate, key and authority."""
        return (self.cert, self.key, self.ca)

    def read(self) -> TlsTexts:
        """Read and check the files.

        Raises:
            ConfigError: a file is missing, is not PEM, or key and certificate do not belong
                together (they are being replaced at this moment, or were mixed up).
        """
        texts = self._read_once()
        if self.cert is not None and self.key is not None:
            _check_pair(self.cert, self.key)
        if self.ca is not None:
            _check_ca(self.ca)
        if texts != self._read_once():
            raise ConfigError(f"TLS files {self.cert} and {self.key} are being replaced right now")
        return texts

    def _read_once(self) -> TlsTexts:
        return TlsTexts(*(read_pem(path) for path in self.paths))


@dataclass(frozen=True)
class Access:
    """Credentials of a client.

    Attributes:
        token: join token, "" for none.
        token_file: file of the token, read again for each connection; overrides `token`.
        tls: certificates, None for plain text.
    """

    token: str = field(default="", repr=False)
    token_file: Path | None = None
    tls: TlsFiles | None = None

    def __post_init__(self) -> None:
        """Refuse TLS without an authority to verify the server."""
        if self.tls is not None and self.tls.ca is None:
            raise ConfigError(
                "TLS without --tls-ca: a client must know who signed the coordinator's "
                "certificate; pass the ca.crt that 'elastic-coord certs init' wrote"
            )

    def current_token(self) -> str:
        """Return the token, read from its file if there is one; UsageError if that is not valid."""
        return read_token_file(self.token_file) if self.token_file is not None else self.token

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """Read the files, and return credentials for a channel; None for plain text.

        Raises:
            ConfigError: a file is not valid.
        """
        if self.tls is None:
            return None
        import grpc

        texts = self.tls.read()
        return grpc.ssl_channel_credentials(
            root_certificates=texts.ca,
            private_key=texts.key or None,
            certificate_chain=texts.cert or None,
        )


def as_access(access: Access | str) -> Access:
    """Return an access; a string is a token."""
    return Access(access) if isinstance(access, str) else access


def find_access(
    token_file: str = "",
    *,
    tls_dir: str = "",
    tls_cert: str = "",
    tls_key: str = "",
    tls_ca: str = "",
) -> Access:
    """Return the access that flags name, and check every file; "" is a flag not given.

    Args:
        token_file: holds the join token.
        tls_dir: holds ca.crt, and tls.crt and tls.key if this process has a certificate.
        tls_cert: certificate, instead of the folder's tls.crt.
        tls_key: of the certificate, instead of the folder's tls.key.
        tls_ca: authority of the other side's certificate, instead of the folder's ca.crt.

    Raises:
        UsageError: a file is not valid.
    """
    tls = find_tls(tls_dir, tls_cert=tls_cert, tls_key=tls_key, tls_ca=tls_ca)
    access = Access(token_file=Path(token_file).absolute() if token_file else None, tls=tls)
    access.current_token()
    if tls is not None:
        tls.read()
    return access


def find_tls(
    tls_dir: str = "", *, tls_cert: str = "", tls_key: str = "", tls_ca: str = ""
) -> TlsFiles | None:
    """Return the TLS files that flags name, None if no flag was given; see `find_access`."""
    if not (tls_dir or tls_cert or tls_key or tls_ca):
        return None
    root = Path(tls_dir).absolute()

    def path(given: str, name: str) -> Path | None:
        if given:
            return Path(given).absolute()
        return root / name if tls_dir and (name == CA_FILE or _is_there(root)) else None

    return TlsFiles(path(tls_cert, CERT_FILE), path(tls_key, KEY_FILE), path(tls_ca, CA_FILE))


def _is_there(root: Path) -> bool:
    """Return whether a folder holds a certificate or a key; a missing half is refused later."""
    return (root / CERT_FILE).exists() or (root / KEY_FILE).exists()


def read_token_file(path: str | Path) -> str:
    """Return the join token in a file, without surrounding space.

    Raises:
        UsageError: the file cannot be read, is empty, or its token is not valid in a header.
    """
    try:
        with open(path, encoding="utf-8") as file:
            token = file.read(FILE_BYTES_MAX).strip()
    except (OSError, UnicodeDecodeError) as error:
        make = (
            "; copy the one that the coordinator has, or make one for a new cluster: "
            f"(umask 077; openssl rand -hex 32 >{path})"
        )
        raise UsageError(
            f"token file {path}: {error}; expected a readable text file"
            f"{make if isinstance(error, FileNotFoundError) else ''}"
        ) from error
    if not token:
        raise UsageError(f"token file {path} is empty; write a long random word into it")
    if not token.isascii() or not token.isprintable() or any(c.isspace() for c in token):
        raise UsageError(
            f"token file {path}: expected one word of printable ASCII characters, nothing else"
        )
    warn_if_open(path)
    return token


_warned: set[str] = set()


def warn_if_open(path: str | Path) -> None:
    """Warn once per process and file that other users may read a secret.

    A file that another user owns may be readable by its group, as Kubernetes mounts secrets.
    """
    try:
        found = Path(path).stat()
    except OSError:
        return
    mode = stat.S_IMODE(found.st_mode)
    allowed = 0o040 if found.st_uid != os.geteuid() else 0
    if mode & 0o077 & ~allowed and str(path) not in _warned:
        _warned.add(str(path))
        log.warning("secret_file_open path=%s mode=%04o advice=%r", path, mode, f"chmod 600 {path}")


def file_signature(path: Path | None) -> object:
    """Return a value that changes when the file is replaced, None when there is no file.

    A symlink, as Kubernetes makes them for secrets, is followed.
    """
    try:
        found = path.stat() if path is not None else None
    except OSError:
        return None
    return (found.st_ino, found.st_mtime_ns, found.st_size) if found is not None else None


class WatchedFiles(Generic[Content]):
    """What some files hold, read again when one of them was replaced.

    Attributes:
        content: what they held when they were last usable.
    """

    def __init__(
        self, name: str, paths: Sequence[Path | None], read: Callable[[], Content]
    ) -> None:
        """Read them; raises what `read` raises.

        Args:
            name: of the contents, in the log.
            paths: the files; None is one that was not named.
            read: reads and checks all of them; raises UsageError if one is not usable.
        """
        self._name = name
        self._paths = tuple(paths)
        self._read = read
        self._complaint = ""
        self._seen = self._signature()
        self.content = read()

    def reload(self) -> bool:
        """Read them again if one was replaced; return whether the content is another one now.

        Files that are not usable are logged once, and leave the content as it is.
        """
        seen = self._signature()
        if seen == self._seen:
            return False
        try:
            found = self._read()
        except UsageError as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                log.error("%s_unusable error=%r", self._name, str(error))
            return False
        self._complaint = ""
        is_new = found != self.content
        self._seen = seen
        if is_new:
            self.content = found
            log.info(
                "%s_renewed paths=%s", self._name, ",".join(map(str, filter(None, self._paths)))
            )
        return is_new

    def _signature(self) -> tuple[object, ...]:
        return tuple(file_signature(path) for path in self._paths)


def replace_file(path: Path, data: bytes, mode: int) -> None:
    """Replace a file atomically and durably.

    Args:
        path: of the file; an existing one keeps its owner, group and mode.
        data: new content.
        mode: permissions of a new file.

    Raises:
        OSError: it cannot be written; the old file is unchanged.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    draft.unlink(missing_ok=True)
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            _keep_owner(fd, path)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make a rename durable, where the file system supports fsync of a directory."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _keep_owner(fd: int, path: Path) -> None:
    """Give a new file the owner, group and mode of the file that it will replace.

    The operator may be another user than the service. The service must still be able to read the
    file, or it keeps its old content, such as a revoked token.
    """
    try:
        old = path.stat()
    except OSError:
        return
    try:
        os.fchown(fd, old.st_uid, old.st_gid)
        os.fchmod(fd, stat.S_IMODE(old.st_mode))
    except OSError as error:
        log.warning(
            "owner_changed path=%s was=%d error=%r advice=%r", path, old.st_uid, str(error),
            "see that the coordinator can read it",
        )  # fmt: skip


def read_pem(path: Path | None) -> bytes:
    """Return the PEM text in a file, b"" for no file.

    Raises:
        ConfigError: it cannot be read, is too large, or is not PEM.
    """
    if path is None:
        return b""
    try:
        with path.open("rb") as file:
            text = file.read(PEM_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(
            f"TLS file {path}: {error.strerror}; expected what 'elastic-coord certs' wrote"
        ) from error
    if len(text) > PEM_BYTES_MAX:
        raise ConfigError(f"TLS file {path}: larger than {PEM_BYTES_MAX} bytes; name a smaller one")
    if b"-----BEGIN " not in text:
        raise ConfigError(f"TLS file {path}: expected PEM text, -----BEGIN ...")
    return text


def _check_pair(cert: Path, key: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        # Without a callback, OpenSSL would prompt on the terminal for an encrypted key's password.
        context.load_cert_chain(cert, key, password=lambda: b"")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"TLS certificate {cert} with key {key}: {error}; expected a certificate and its own "
            f"key, unencrypted"
        ) from error
    warn_if_open(key)


def _check_ca(ca: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(ca)
    except (OSError, ValueError) as error:
        raise ConfigError(f"TLS authority {ca}: {error}; expected a certificate") from error
