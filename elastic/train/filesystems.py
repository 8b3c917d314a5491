"""Converts users' file systems, of fsspec or pyarrow, into paths that all processes can open.

Rule: pyarrow is used only for its own objects; nothing here needs it installed.
"""

from __future__ import annotations

import sys
from typing import Any

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.dirfs import DirFileSystem

from elastic.errors import ConfigError, UsageError

KNOWN = "a file system of fsspec or pyarrow.fs, such as fsspec.filesystem('s3')"


def as_fsspec(filesystem: Any, path: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return a file system as one of fsspec, and the path in it.

    Args:
        filesystem: of fsspec or pyarrow.
        path: inside it, or its URL.

    Raises:
        ConfigError: it is something else.
        UsageError: fsspec has no such file system here.
    """
    if isinstance(filesystem, DirFileSystem):
        return as_fsspec(filesystem.fs, f"{filesystem.path}/{path.lstrip('/')}")
    if isinstance(filesystem, fsspec.AbstractFileSystem):
        return filesystem, str(filesystem._strip_protocol(path))
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
    protocol = {"local": "file", "gcs": "gs", "abfs": "abfs"}.get(
        filesystem.type_name, filesystem.type_name
    )
    try:
        found, inside = url_to_fs(path if "://" in path else f"{protocol}://{path}")
    except (ImportError, ValueError) as error:
        raise UsageError(
            f"filesystem={filesystem!r} ({filesystem.type_name}): {error}; expected one that "
            f"fsspec can open as {protocol}://"
        ) from error
    return found, str(inside)


def url_in(filesystem: Any, path: str) -> str:
    """Return the URL, or local path, by which any process can open a path in a file system.

    Raises:
        ConfigError: it is no file system.
        UsageError: fsspec has none of this kind here.
    """
    found, inside = as_fsspec(filesystem, path)
    if "file" in found.protocol or found.protocol == "file":
        return inside
    return str(found.unstrip_protocol(inside))
