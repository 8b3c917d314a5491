"""Ray's names for Arrow's types: `DataType.int64()` is `pyarrow.int64()`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from elastic.data.batches import arrow

_NAMES = {"bool": "bool_", "list": "list_", "map": "map_", "fixed_size_list": "list_"}
"""Ray's name of a type -> pyarrow's, where it is another one."""


class _Types(type):
    def __getattr__(cls, name: str) -> Callable[..., Any]:
        """Return pyarrow's function that makes a type.

        Raises:
            AttributeError: it has none.
        """
        found = None if name.startswith("_") else getattr(arrow(), _NAMES.get(name, name), None)
        if found is None:
            raise AttributeError(f"DataType.{name}: pyarrow has no such type")
        return found


class DataType(metaclass=_Types):
    """Types of columns, all of them pyarrow's: `int32`, `string`, `list`, `struct`, ...."""

    @staticmethod
    def from_arrow(arrow_type: Any) -> Any:
        """Return the type itself."""
        return arrow_type

    @staticmethod
    def from_numpy(numpy_dtype: Any) -> Any:
        """Return the type of an array of NumPy."""
        return arrow().from_numpy_dtype(numpy_dtype)

    @staticmethod
    def infer_dtype(value: Any) -> Any:
        """Return the type of a value."""
        return arrow().scalar(value).type

    @staticmethod
    def tensor(shape: Sequence[int], dtype: Any) -> Any:
        """Return the type of arrays of a shape."""
        return arrow().fixed_shape_tensor(dtype, shape)

    @staticmethod
    def temporal(temporal_type: str, unit: str | None = None, tz: str | None = None) -> Any:
        """Return the type "timestamp", "duration", "date32", "date64", "time32" or "time64"."""
        make = getattr(arrow(), temporal_type)
        given = [one for one in (unit, tz) if one is not None]
        return make(*(given or ["us"] if temporal_type in ("timestamp", "duration") else given))
