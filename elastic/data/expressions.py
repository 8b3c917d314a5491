"""Expressions of columns, for `Dataset.filter(expr=...)` and `with_column`: those of pyarrow.

ds.filter(expr=(col("age") > 30) & ~col("name").is_null())
ds.with_column("double", col("x") * lit(2.0))
"""

from __future__ import annotations

from typing import Any


def col(name: str) -> Any:
    """Return the values of a column, as a `pyarrow.compute.Expression`."""
    return __import__("pyarrow.compute").compute.field(name)


def lit(value: Any) -> Any:
    """Return a constant, as a `pyarrow.compute.Expression`."""
    return __import__("pyarrow.compute").compute.scalar(value)
