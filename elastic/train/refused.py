"""Parts of Ray Train that are unsupported by design, refused by name with an alternative."""

from __future__ import annotations

from typing import NoReturn

_TORCH = "write the loop in PyTorch, and use train.torch.TorchTrainer"
_LIBRARY = "run the library in a train function, with train.DataParallelTrainer"
PARTS = {
    "elastic.train.tensorflow": _TORCH,
    "elastic.train.jax": _TORCH,
    "elastic.train.horovod": _TORCH,
    "elastic.train.xgboost": _LIBRARY,
    "elastic.train.lightgbm": _LIBRARY,
    "elastic.train.NCCLHangError": "a hung worker is replaced: FailureConfig(hang_timeout_s=...)",
    "elastic.train.torch.TorchCheckpoint": "Checkpoint.from_dict({'model': model.state_dict()})",
    "elastic.train.torch.accelerate": "torch.autocast, and torch.amp.GradScaler",
    "elastic.train.torch.backward": "loss.backward()",
}
"""Module or name, as it would be called here -> what to do instead."""


def refuse(name: str) -> NoReturn:
    """Explain why something is missing; as an ImportError, which `from ... import` passes on."""
    raise ImportError(
        f"{name}: Ray has it, and there is none here: {PARTS[name]} (docs/migrate-from-ray.md)"
    )
