"""Parts of Ray Train that are unsupported by design, refused by name with an alternative."""

from __future__ import annotations

from typing import NoReturn

_TORCH = "write the loop in PyTorch, and use train.torch.TorchTrainer"
_LIBRARY = "run the library in a train function, with train.DataParallelTrainer"
PARTS = {
    "tensorflow": _TORCH,
    "jax": _TORCH,
    "horovod": _TORCH,
    "xgboost": _LIBRARY,
    "lightgbm": _LIBRARY,
}
"""Module below `ray.train` -> what to do instead."""


def refuse(name: str) -> NoReturn:
    """Explain why a module is missing; as an ImportError, which `from ... import` passes on.

    Args:
        name: of the module, with or without its packages.

    Raises:
        ImportError: always.
    """
    name = name.rpartition(".")[2]
    raise ImportError(
        f"elastic.train.{name}: Ray has it, and there is none here: {PARTS[name]} "
        f"(docs/migrate-from-ray.md)"
    )
