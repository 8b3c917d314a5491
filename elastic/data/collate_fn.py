"""Ray's base classes of what `iter_torch_batches(collate_fn=...)` takes: what they are called with.

A plain function is called with a dict of arrays.
"""

from __future__ import annotations

from typing import Any


class CollateFn:
    """Makes of a batch what the training loop receives.

    Attributes:
        batch_format: "numpy", "pandas" or "pyarrow": what it is called with.
    """

    batch_format = "numpy"

    def __call__(self, batch: Any) -> Any:
        """Return what the loop receives."""
        raise NotImplementedError


class NumpyBatchCollateFn(CollateFn):
    """Called with a dict of arrays."""


class PandasBatchCollateFn(CollateFn):
    """Called with a DataFrame."""

    batch_format = "pandas"


class ArrowBatchCollateFn(CollateFn):
    """Called with a pyarrow table."""

    batch_format = "pyarrow"
