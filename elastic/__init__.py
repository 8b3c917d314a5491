"""Elastic training for PyTorch: machines die, training goes on.

Rule: names only, and lazy. Importing `elastic` loads neither torch nor grpc; a name loads what it
needs when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic import train
    from elastic.train.cluster import init, is_initialized, shutdown

__version__ = "0.1.0"

__all__ = ["__version__", "init", "is_initialized", "shutdown", "train"]

_HOME = {
    "init": "elastic.train.cluster",
    "is_initialized": "elastic.train.cluster",
    "shutdown": "elastic.train.cluster",
}
"""Where each public function lives."""


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562).

    Raises:
        AttributeError: the package has no such name.
    """
    if name == "train":
        return import_module("elastic.train")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names too that are not loaded yet."""
    return sorted({*globals(), *__all__})
