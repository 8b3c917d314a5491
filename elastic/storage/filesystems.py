"""Converts users' file systems, of fsspec or pyarrow, into URLs that all processes can open.

Rule: pyarrow is used only for its own objects; nothing here needs it installed. What a file system
was made with, such as keys, is remembered with the URL (`storage.options`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from elastic.errors import ConfigError, UsageError
from elastic.storage.options import options_of, remember

KNOWN = "a file system of fsspec or pyarrow.fs, such as fsspec.filesystem('s3')"
IN_QUERY = ("endpoint_override", "region", "scheme")
"""What Ray takes from the query of an S3 URL, as pyarrow does."""
S3_NAMES = {
    "access_key": "key",
    "secret_key": "secret",
    "session_token": "token",
    "anonymous": "anon",
}
"""Option of pyarrow's S3FileSystem -> of s3fs."""


def as_fsspec(filesystem: Any, path: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return a file system as one of fsspec, and the path in it; remember its options.

    Raises:
        ConfigError: it is something else, or was made with what cannot be sent to workers.
        UsageError: fsspec has no such file system here.
    """
    if isinstance(filesystem, DirFileSystem):
        return as_fsspec(filesystem.fs, f"{filesystem.path}/{path.lstrip('/')}")
    if isinstance(filesystem, fsspec.AbstractFileSystem):
        inside = str(filesystem._strip_protocol(path))
        if not isinstance(filesystem, LocalFileSystem):
            remember(filesystem.unstrip_protocol(inside), _made_with(filesystem))
        return filesystem, inside
    arrow: Any = sys.modules.get("pyarrow.fs")
    if arrow is None or not isinstance(filesystem, arrow.FileSystem):
        raise ConfigError(f"filesystem={filesystem!r}: expected {KNOWN}")
    if isinstance(filesystem, arrow.SubTreeFileSystem):
        inside = f"{filesystem.base_path.rstrip('/')}/{path.lstrip('/')}".rstrip("/")
        return as_fsspec(filesystem.base_fs, inside)
    if isinstance(filesystem, arrow.PyFileSystem):
        wrapped = getattr(filesystem.handler, "fs", None)
        if wrapped is None:
            raise ConfigError(f"filesystem={filesystem!r}: expected {KNOWN}")
        return as_fsspec(wrapped, path)
    kind = filesystem.type_name
    protocol = {"local": "file", "gcs": "gs"}.get(kind, kind)
    url = path if "://" in path else f"{protocol}://{path}"
    if kind == "s3":
        remember(url, _s3_options(filesystem.__reduce__()[1][0]))
    return opened(url, f"filesystem={filesystem!r} ({kind})")


def opened(url: str, what: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return the file system of a path or URL, and the path in it.

    Args:
        url: such as "s3://bucket/path".
        what: it was given as, for the error.

    Raises:
        UsageError: fsspec has no such file system here.
    """
    try:
        found, inside = url_to_fs(url, **options_of(url))
    except (ImportError, ValueError) as error:
        raise UsageError(
            f"{what}: {error}; expected one that fsspec can open as {url.partition(':')[0]}://"
        ) from error
    return found, str(inside)


def _made_with(filesystem: fsspec.AbstractFileSystem) -> dict[str, Any]:
    if filesystem.storage_args:
        raise ConfigError(
            f"filesystem={filesystem!r}: it was made with arguments without names, which cannot be "
            f"sent to workers: name them, such as s3fs.S3FileSystem(key=..., secret=...)"
        )
    return dict(filesystem.storage_options)


def _s3_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of pyarrow's S3FileSystem as s3fs names them.

    Raises:
        ConfigError: it assumes a role.
    """
    if given.get("role_arn"):
        raise ConfigError(
            "filesystem: pyarrow's S3FileSystem(role_arn=...) cannot be sent to workers: expected "
            "keys, or a profile in the environment of the nodes (AWS_PROFILE)"
        )
    options = {ours: given[name] for name, ours in S3_NAMES.items() if given.get(name)}
    if endpoint := given.get("endpoint_override"):
        scheme = given.get("scheme") or "https"
        options["endpoint_url"] = endpoint if "://" in endpoint else f"{scheme}://{endpoint}"
    if given.get("region"):
        options["client_kwargs"] = {"region_name": given["region"]}
    return options


def url_in(filesystem: Any, path: str) -> str:
    """Return the URL, or local path, by which any process can open a path in a file system.

    Raises:
        ConfigError: it is no file system, or was made with what cannot be sent to workers.
        UsageError: fsspec has none of this kind here.
    """
    found, inside = as_fsspec(filesystem, path)
    return inside if isinstance(found, LocalFileSystem) else str(found.unstrip_protocol(inside))


def without_query(url: str) -> str:
    """Return an S3 URL without "?endpoint_override=...", which is remembered; others as they are.

    Raises:
        ConfigError: the query has something else, or the storage of such a URL takes none.
    """
    bare, mark, query = url.partition("?")
    scheme = bare.partition("://")[0] if "://" in bare else ""
    if not mark or scheme in ("", "http", "https"):
        return url
    given = dict(parse_qsl(query))
    if scheme != "s3" or not given or not given.keys() <= set(IN_QUERY):
        raise ConfigError(
            f"{url}: expected no settings after ?, or of an s3:// URL {', '.join(IN_QUERY)}; put "
            f"others into the environment of the script and of the nodes"
        )
    remember(bare, _s3_options(given))
    return bare
