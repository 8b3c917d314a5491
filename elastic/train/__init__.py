"""The public training API that scripts import, shaped like ray.train.

Each name is loaded on first use, so that importing this package loads neither torch nor grpc.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from elastic.train import refused

if TYPE_CHECKING:
    from elastic.errors import ControllerError, PreemptionError, WorkerGroupError
    from elastic.errors import TrainingFailed as TrainingFailedError
    from elastic.train.checkpoint import (
        Checkpoint,
        ReportedCheckpoint,
        ReportedCheckpointStatus,
    )
    from elastic.train.config import (
        BackendConfig,
        CheckpointConfig,
        DataConfig,
        FailureConfig,
        LoggingConfig,
        PeerReplication,
        RunConfig,
        ScalingConfig,
        SyncConfig,
        TrainRunContext,
        UserCallback,
    )
    from elastic.train.datasets import TRAIN_DATASET_KEY, get_dataset_shard
    from elastic.train.evaluating import gather_for_metrics
    from elastic.train.failures import UserExceptionWithTraceback
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
    from elastic.train.trainer import DataParallelTrainer
    from elastic.train.validation import ValidationConfig, ValidationFn, ValidationTaskConfig

_HOME = {
    "BackendConfig": "config",
    "DataConfig": "config",
    "DataParallelTrainer": "trainer",
    "LoggingConfig": "config",
    "SyncConfig": "config",
    "TrainRunContext": "config",
    "UserCallback": "config",
    "UserExceptionWithTraceback": "failures",
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
    "TRAIN_DATASET_KEY": "datasets",
    "TrainContext": "session",
    "ValidationConfig": "validation",
    "ValidationFn": "validation",
    "ValidationTaskConfig": "validation",
    "get_all_reported_checkpoints": "session",
    "get_checkpoint": "session",
    "get_context": "session",
    "get_dataset_shard": "datasets",
    "get_preemption_info": "preemption",
    "gather_for_metrics": "evaluating",
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
_ERRORS = {
    "ControllerError": "ControllerError",
    "PreemptionError": "PreemptionError",
    "TrainingFailedError": "TrainingFailed",
    "WorkerGroupError": "WorkerGroupError",
}
"""Ray's names for what the runtime raises."""
_SUBMODULES = ("accelerate", "collective", "huggingface", "lightning", "torch")
__all__ = [
    "TRAIN_DATASET_KEY",
    "BackendConfig",
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointConsistencyMode",
    "CheckpointUploadMode",
    "ControllerError",
    "DataConfig",
    "DataParallelTrainer",
    "FailureConfig",
    "LoggingConfig",
    "PeerReplication",
    "PreemptionError",
    "PreemptionInfo",
    "ReportedCheckpoint",
    "ReportedCheckpointStatus",
    "Result",
    "RunConfig",
    "ScalingConfig",
    "SyncConfig",
    "TrainContext",
    "TrainRunContext",
    "TrainingFailedError",
    "UserCallback",
    "UserExceptionWithTraceback",
    "ValidationConfig",
    "ValidationFn",
    "ValidationTaskConfig",
    "WorkerGroupError",
    "epochs",
    "gather_for_metrics",
    "get_all_reported_checkpoints",
    "get_checkpoint",
    "get_context",
    "get_dataset_shard",
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
    if name in _ERRORS:
        return getattr(importlib.import_module("elastic.errors"), _ERRORS[name])
    if name in _SUBMODULES:
        return importlib.import_module(f"elastic.train.{name}")
    if f"{__name__}.{name}" in refused.PARTS:
        refused.refuse(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return what can be imported from here."""
    return sorted([*__all__, *_SUBMODULES])
