"""Ray's home of `FilenameProvider`, `FileShuffleConfig` and `Partitioning`."""

from __future__ import annotations

from elastic.data.context import FileShuffleConfig
from elastic.data.datasource.filename_provider import FilenameProvider
from elastic.data.datasource.partitioning import Partitioning

__all__ = ["FileShuffleConfig", "FilenameProvider", "Partitioning"]
