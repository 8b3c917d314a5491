"""Opens the store that a URL names.

Rule: only this module chooses the backend; a backend's module is imported only when named.

    sqlite:PATH                    one file; sqlite:///abs/path is the same as sqlite:/abs/path
    etcd://HOST[:PORT],.../ROOT    a cluster; port 2379 and root "elastic" if none are given
    memory:                        state ends with the process
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from elastic.errors import ConfigError
from elastic.store.interface import Store

if TYPE_CHECKING:
    from elastic.store.etcd_link import EtcdAccess

ETCD_PORT = 2379
EXPECTED = "expected sqlite:PATH, etcd://host:port,host:port[/prefix], or memory:"


async def open_store(
    url: str, *, access: EtcdAccess | Callable[[], EtcdAccess] | None = None
) -> Store:
    """Open the store that `url` names; the caller closes it.

    Args:
        url: as in the module's docstring.
        access: user and certificates for etcd, or a function that returns the present ones; never
            part of a URL, which others can read.

    Raises:
        ConfigError: the URL is invalid.
        UsageError: the file is in use by another process, or cannot be opened.
        StoreError: the file is damaged, or belongs to another program.
    """
    scheme, colon, rest = url.partition(":")
    if not colon:
        raise ConfigError(f"store {url!r}: {EXPECTED}")
    if access is not None and scheme != "etcd":
        raise ConfigError(
            f"store {url!r} takes no user and no certificates (--store-...); only etcd does"
        )
    if scheme == "memory":
        if rest:
            raise ConfigError(f"store {url!r}: nothing follows 'memory:'; {EXPECTED}")
        from elastic.store.memory import MemoryStore

        return MemoryStore()
    if scheme == "sqlite":
        path = sqlite_path(url)
        from elastic.store.sqlite import sqlite_store

        return await sqlite_store(path)
    if scheme == "etcd":
        endpoints, root = etcd_address(url)
        from elastic.store.etcd import EtcdStore
        from elastic.store.etcd_wire import DEFAULT_ROOT

        return EtcdStore(endpoints, root=root or DEFAULT_ROOT, access=access)
    raise ConfigError(f"store {url!r} has the unknown kind {scheme!r}; {EXPECTED}")


def sqlite_path(url: str) -> Path:
    """Return the file that a sqlite: URL names.

    Raises:
        ConfigError: no file, a host, or a path with "~", which only a shell expands.
    """
    text = url.removeprefix("sqlite:")
    if text.startswith("//"):
        if not text.startswith("///"):
            raise ConfigError(
                f"store {url!r} names a host; expected sqlite:/absolute/path or sqlite:path"
            )
        text = text[2:]
    if not text or text.endswith("/") or "\0" in text:
        raise ConfigError(f"store {url!r} names no file; expected sqlite:PATH")
    if text.startswith("~"):
        raise ConfigError(f"store {url!r}: ~ is not replaced here; write out the path")
    return Path(text)


def etcd_address(url: str) -> tuple[tuple[str, ...], str]:
    """Return the endpoints that an etcd:// URL names, each once, and its root ("" for none).

    Raises:
        ConfigError: no endpoint, an invalid one, or a user in the URL.
    """
    text = url.removeprefix("etcd:")
    if not text.startswith("//"):
        raise ConfigError(f"store {url!r}: {EXPECTED}")
    hosts, _, root = text[2:].partition("/")
    if "@" in hosts:
        # The error does not quote the URL, which may contain a password.
        raise ConfigError(
            "the etcd URL has a user in it; pass user and password from a file: --store-user"
        )
    if any(mark in root for mark in "?#") or any(not c.isprintable() for c in root):
        raise ConfigError(f"store {url!r}: prefix {root!r} is no plain path; {EXPECTED}")
    endpoints = dict.fromkeys(_endpoint(url, part.strip()) for part in hosts.split(","))
    return tuple(endpoints), root.strip("/")


def _endpoint(url: str, text: str) -> str:
    """Return host:port for one of the members."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(ETCD_PORT)
    bracketed = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if bracketed else host
    if not bare or any(c.isspace() or c in "[]/" for c in bare) or (":" in bare and not bracketed):
        raise ConfigError(f"store {url!r}: {text!r} is no host:port; {EXPECTED}")
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise ConfigError(f"store {url!r}: port {port!r} is not a number from 1 to 65535")
    return f"{host}:{port}"
