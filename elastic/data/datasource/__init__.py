"""Ray's home of `Partitioning` and `FileShuffleConfig`."""

from __future__ import annotations

from elastic.data.context import FileShuffleConfig
from elastic.data.datasource.partitioning import Partitioning

__all__ = ["FileShuffleConfig", "Partitioning"]
