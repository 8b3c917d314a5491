"""The coordinator's credentials for etcd: a certificate, a user, and the trusted authority.

Rule: secrets come from files, which are checked every few seconds. A renewed file is used from the
next connection on; an unreadable one leaves the previous contents in use.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread

from elastic.errors import ConfigError, UsageError
from elastic.runtime.access import FILE_BYTES_MAX, TlsFiles, WatchedFiles, warn_if_open
from elastic.store.etcd_link import EtcdAccess

POLL_S = 2.0


@dataclass(frozen=True, kw_only=True)
class StoreFiles:
    """The files with credentials for the store.

    Attributes:
        ca: the authority of the servers' certificates; None for connections without TLS.
        cert, key: our own certificate, if the servers require one; both or neither.
        user: file with USER:PASSWORD, None for no user.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    user: Path | None = None

    def __post_init__(self) -> None:
        """Refuse incomplete sets of files."""
        if (self.cert is None) != (self.key is None):
            raise ConfigError("--store-cert and --store-key: pass both, or neither")
        if self.cert is not None and self.ca is None:
            raise ConfigError(
                "--store-cert without --store-ca: a client must know who signed the "
                "certificates of etcd's members"
            )

    def read(self) -> EtcdAccess:
        """Return the current contents of the files.

        Raises:
            UsageError: one of them is not usable.
        """
        texts = TlsFiles(self.cert, self.key, self.ca).read()
        username, password = _read_user(self.user) if self.user is not None else ("", "")
        return EtcdAccess(username, password, ca=texts.ca, certificate=texts.cert, key=texts.key)


class StoreAccess:
    """The current credentials for the store."""

    def __init__(self, files: StoreFiles) -> None:
        """Read the files.

        Raises:
            UsageError: one of them is not usable.
        """
        self._files = WatchedFiles(
            "store_access", (files.ca, files.cert, files.key, files.user), files.read
        )

    def now(self) -> EtcdAccess:
        """Return the current credentials without reading a file; an object per content."""
        return self._files.content

    async def keep(self) -> None:
        """Poll the files; never returns."""
        while True:
            await anyio.to_thread.run_sync(self._files.reload, abandon_on_cancel=True)
            await anyio.sleep(POLL_S)


def _read_user(path: Path) -> tuple[str, str]:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(FILE_BYTES_MAX).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--store-user {path}: {error}; expected a readable text file") from error
    username, colon, password = text.partition(":")
    if not colon or not username or not password or "\n" in text:
        raise UsageError(f"--store-user {path}: expected one line, USER:PASSWORD of an etcd user")
    warn_if_open(path)
    return username, password
