"""Ray's home of `Partitioning`."""

from __future__ import annotations

from elastic.data.datasource.partitioning import Partitioning

__all__ = ["Partitioning"]
