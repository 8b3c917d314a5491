"""Elastic training for PyTorch: machines die, training goes on.

Rule: names only, and lazy. Importing `elastic` loads neither torch nor grpc; a name loads what it
needs when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from elastic.version import __version__

if TYPE_CHECKING:
    from elastic import data, train, tune
    from elastic.train.cluster import (
        available_resources,
        cluster_resources,
        init,
        is_initialized,
        nodes,
        shutdown,
    )
    from elastic.train.remote import ObjectRef, get, remote

__all__ = [
    "ObjectRef",
    "__version__",
    "available_resources",
    "cluster_resources",
    "data",
    "get",
    "init",
    "is_initialized",
    "nodes",
    "remote",
    "shutdown",
    "train",
    "tune",
]

_HOME = {
    "ObjectRef": "elastic.train.remote",
    "available_resources": "elastic.train.cluster",
    "cluster_resources": "elastic.train.cluster",
    "get": "elastic.train.remote",
    "init": "elastic.train.cluster",
    "is_initialized": "elastic.train.cluster",
    "nodes": "elastic.train.cluster",
    "remote": "elastic.train.remote",
    "shutdown": "elastic.train.cluster",
}
"""The module of each public function."""
_NOT_HERE = {
    "put": "pass values as arguments, and large ones as paths in storage",
    "wait": "elastic.get(refs, timeout=...) waits for all of them",
    "kill": "elastic stop JOB ends what a call runs as",
    "cancel": "elastic stop JOB ends what a call runs as",
    "get_actor": "there are no actors; train.DataParallelTrainer runs a group of workers",
    "method": "there are no actors; train.DataParallelTrainer runs a group of workers",
    "timeline": "elastic status JOB and the event logs show what happened when",
    "get_runtime_context": "train.get_context() has the job, the rank and the node",
}
"""Functions that Ray has and this has not, on purpose -> what to do instead."""
_NO_SUCH_PART = {
    "air": "elastic.train and elastic.tune have its names",
    "rllib": "reinforcement learning is a train function like any other",
    "serve": "models are not served here",
    "util": "train.collective has barrier, broadcast and a store",
    "workflow": "each step is a job: elastic submit, or elastic.remote",
}
"""The same of modules; as an ImportError, because `from` turns others into one without a word."""


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562).

    Raises:
        AttributeError: the package has no such name.
        ImportError: it has no such part; the message names what to use instead.
    """
    if name in ("data", "train", "tune"):
        return import_module(f"elastic.{name}")
    if name in _NOT_HERE:
        raise AttributeError(
            f"elastic.{name}: Ray has it, and there is none here: {_NOT_HERE[name]} "
            f"(docs/migrate-from-ray.md)"
        )
    if name in _NO_SUCH_PART:
        raise ImportError(
            f"elastic.{name}: Ray has it, and there is none here: {_NO_SUCH_PART[name]} "
            f"(docs/migrate-from-ray.md)"
        )
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names too that are not loaded yet."""
    return sorted({*globals(), *__all__})
