"""Checks names from other sources before they become paths.

Rule: no name of a file, a folder or a checkpoint leads out of its directory (no path traversal),
whether it comes from another worker, a marker or a script. `Files` and `RunDirectory` call this.
"""

from __future__ import annotations

from elastic.errors import StorageError

SHOWN_CHARS = 100


def check_inside(name: str) -> str:
    """Return the name if it is a relative path, with slashes, that stays below its directory.

    Raises:
        StorageError: it leads elsewhere, or is no valid path.
    """
    parts = name.split("/")
    if "\0" in name or not all(parts) or not {".", ".."}.isdisjoint(parts):
        raise StorageError(
            f"the name {name[:SHOWN_CHARS]!r} leads elsewhere: expected a path below the "
            f"directory, without '..' and without a slash at its beginning or end"
        )
    return name


def check_one(what: str, name: str) -> str:
    """Return the name if it is a single component, without slashes.

    Raises:
        StorageError: it has several components, or is empty.
    """
    if "/" in name or "\\" in name:
        raise StorageError(f"{what} {name[:SHOWN_CHARS]!r}: expected one name, without slashes")
    return check_inside(name)
