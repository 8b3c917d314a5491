"""The training API, shaped like ray.train: what scripts import.

Names only; each is loaded when it is first used, so that importing this package loads neither
torch nor grpc.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic.train.checkpoint import (
        Checkpoint,
        ReportedCheckpoint,
        ReportedCheckpointStatus,
    )
    from elastic.train.config import (
        CheckpointConfig,
        FailureConfig,
        PeerReplication,
        RunConfig,
        ScalingConfig,
    )
    from elastic.train.loop import epochs, get_logged, log, register, stepped, steps
    from elastic.train.preemption import PreemptionInfo, get_preemption_info
    from elastic.train.result import Result
    from elastic.train.session import (
        CheckpointConsistencyMode,
        CheckpointUploadMode,
        TrainContext,
        get_all_reported_checkpoints,
        get_checkpoint,
        get_context,
        is_driver,
        report,
    )
    from elastic.train.validation import ValidationConfig, ValidationTaskConfig

_HOME = {
    "Checkpoint": "checkpoint",
    "CheckpointConfig": "config",
    "CheckpointConsistencyMode": "session",
    "CheckpointUploadMode": "session",
    "FailureConfig": "config",
    "PeerReplication": "config",
    "PreemptionInfo": "preemption",
    "ReportedCheckpoint": "checkpoint",
    "ReportedCheckpointStatus": "checkpoint",
    "Result": "result",
    "RunConfig": "config",
    "ScalingConfig": "config",
    "TrainContext": "session",
    "ValidationConfig": "validation",
    "ValidationTaskConfig": "validation",
    "get_all_reported_checkpoints": "session",
    "get_checkpoint": "session",
    "get_context": "session",
    "get_preemption_info": "preemption",
    "epochs": "loop",
    "get_logged": "loop",
    "is_driver": "session",
    "log": "loop",
    "register": "loop",
    "report": "session",
    "stepped": "loop",
    "steps": "loop",
    "working": "session",
}
_SUBMODULES = ("accelerate", "collective", "huggingface", "lightning", "torch")

__all__ = [
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointConsistencyMode",
    "CheckpointUploadMode",
    "FailureConfig",
    "PeerReplication",
    "PreemptionInfo",
    "ReportedCheckpoint",
    "ReportedCheckpointStatus",
    "Result",
    "RunConfig",
    "ScalingConfig",
    "TrainContext",
    "ValidationConfig",
    "ValidationTaskConfig",
    "epochs",
    "get_all_reported_checkpoints",
    "get_checkpoint",
    "get_context",
    "get_logged",
    "get_preemption_info",
    "is_driver",
    "log",
    "register",
    "report",
    "stepped",
    "steps",
    "working",
]


def __getattr__(name: str) -> Any:
    """Load a name from its module on first use."""
    if name in _HOME:
        return getattr(importlib.import_module(f"elastic.train.{_HOME[name]}"), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"elastic.train.{name}")
    raise AttributeError(f"module 'elastic.train' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return what can be imported from here."""
    return sorted([*__all__, *_SUBMODULES])
