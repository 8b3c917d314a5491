"""Columns that are the folders in which files lie: "year=2024/", or the names of classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from urllib.parse import unquote

from elastic.data.files import ANONYMOUS, DataError, filesystem_of
from elastic.errors import UsageError

MISSING = "__HIVE_DEFAULT_PARTITION__"
"""Name of a folder whose rows have no value."""


@dataclass(frozen=True)
class Partitioning:
    """Which folders are columns.

        data.read_images(root, partitioning=Partitioning("dir", root, ["class"]))

    Attributes:
        style: "hive": folders like "year=2024"; "dir": all folders below `base_dir`, in order.
        base_dir: folders above it are no columns; of "dir" it has to be given.
        field_names: of the columns; of "dir" they have to be given.
        field_types: int, float, bool or str by name; text by default.
    """

    style: str
    base_dir: str | None = None
    field_names: Sequence[str] | None = None
    field_types: Mapping[str, type] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the style.

        Raises:
            UsageError: it is another one, or "dir" lacks names or the folder.
        """
        if self.style not in ("hive", "dir"):
            raise UsageError(f"Partitioning({self.style!r}): expected 'hive' or 'dir'")
        if self.style == "dir" and not (self.base_dir and self.field_names):
            raise UsageError(
                "Partitioning('dir'): expected base_dir=, the folder above the columns, and "
                "field_names=, their names"
            )

    def of(self, path: str) -> dict[str, Any]:
        """Return the columns of a file's rows, each with its value.

        Args:
            path: of the file, as it is listed.

        Raises:
            DataError: the file lies in more or fewer folders than there are names, or a value is
                not of its type.
        """
        folders = self._below(path.replace(ANONYMOUS, "://", 1)).split("/")[:-1]
        if self.style == "hive":
            pairs = [one.partition("=")[::2] for one in folders if one.partition("=")[1]]
            found = {name: unquote(value) for name, value in pairs if name}
        else:
            names = self.field_names or ()
            if len(folders) != len(names):
                raise DataError(
                    f"elastic.data: {path} lies in the folders {folders} below {self.base_dir}: "
                    f"expected one for each of {[*names]}"
                )
            found = dict(zip(names, folders, strict=True))
        return {name: self._typed(name, value, path) for name, value in found.items()}

    def _below(self, path: str) -> str:
        return path.removeprefix(self._root) if self.base_dir else path

    @cached_property
    def _root(self) -> str:
        fs, root = filesystem_of(self.base_dir or "")
        return str(fs.unstrip_protocol(root)).rstrip("/") + "/"

    def _typed(self, name: str, value: str, path: str) -> Any:
        kind = self.field_types.get(name, str)
        try:
            if value == MISSING:
                return None
            return value.lower() == "true" if kind is bool else kind(value)
        except ValueError as error:
            raise DataError(
                f"elastic.data: {path}: folder {name}={value!r}: expected {kind.__name__}"
            ) from error
