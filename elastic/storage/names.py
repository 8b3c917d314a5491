"""Names that came from elsewhere, before they become paths.

Rule: no name of a file, a folder or a checkpoint leads out of the directory that it is looked for
in, whoever wrote it: another worker, a marker, a script. `Files` and `RunDirectory` ask here.
"""

from __future__ import annotations

from elastic.errors import StorageError

SHOWN_CHARS = 100


def check_inside(name: str) -> str:
    """Return a relative path of slashes that stays below where it begins.

    Raises:
        StorageError: it does not, or cannot be a path.
    """
    parts = name.split("/")
    if "\0" in name or not all(parts) or not {".", ".."}.isdisjoint(parts):
        raise StorageError(
            f"the name {name[:SHOWN_CHARS]!r} leads elsewhere: expected a path below the "
            f"directory, without '..' and without a slash at its beginning or end"
        )
    return name


def check_one(what: str, name: str) -> str:
    """Return the name of something that lies directly in its directory.

    Raises:
        StorageError: it is a path, or nothing.
    """
    if "/" in name or "\\" in name:
        raise StorageError(f"{what} {name[:SHOWN_CHARS]!r}: expected one name, without slashes")
    return check_inside(name)
