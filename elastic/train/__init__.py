"""The public training API that scripts import, shaped like ray.train.

Each name is loaded on first use, so that importing this package loads neither torch nor grpc.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic.lazy import lazy_names, refuse_missing

if TYPE_CHECKING:
    from elastic.errors import ControllerError as ControllerError
    from elastic.errors import PreemptionError as PreemptionError
    from elastic.errors import WorkerGroupError as WorkerGroupError
    from elastic.train.checkpoint import Checkpoint as Checkpoint
    from elastic.train.checkpoint import ReportedCheckpoint as ReportedCheckpoint
    from elastic.train.checkpoint import ReportedCheckpointStatus as ReportedCheckpointStatus
    from elastic.train.config import BackendConfig as BackendConfig
    from elastic.train.config import CheckpointConfig as CheckpointConfig
    from elastic.train.config import DataConfig as DataConfig
    from elastic.train.config import FailureConfig as FailureConfig
    from elastic.train.config import LoggingConfig as LoggingConfig
    from elastic.train.config import PeerReplication as PeerReplication
    from elastic.train.config import RunConfig as RunConfig
    from elastic.train.config import ScalingConfig as ScalingConfig
    from elastic.train.config import SyncConfig as SyncConfig
    from elastic.train.config import TrainRunContext as TrainRunContext
    from elastic.train.config import UserCallback as UserCallback
    from elastic.train.datasets import TRAIN_DATASET_KEY as TRAIN_DATASET_KEY
    from elastic.train.datasets import get_dataset_shard as get_dataset_shard
    from elastic.train.evaluating import gather_for_metrics as gather_for_metrics
    from elastic.train.failures import TrainingFailedError as TrainingFailedError
    from elastic.train.failures import UserExceptionWithTraceback as UserExceptionWithTraceback
    from elastic.train.loop import epochs as epochs
    from elastic.train.loop import get_logged as get_logged
    from elastic.train.loop import log as log
    from elastic.train.loop import register as register
    from elastic.train.loop import stepped as stepped
    from elastic.train.loop import steps as steps
    from elastic.train.preemption import PreemptionInfo as PreemptionInfo
    from elastic.train.preemption import get_preemption_info as get_preemption_info
    from elastic.train.result import Result as Result
    from elastic.train.session import CheckpointConsistencyMode as CheckpointConsistencyMode
    from elastic.train.session import CheckpointUploadMode as CheckpointUploadMode
    from elastic.train.session import TrainContext as TrainContext
    from elastic.train.session import get_all_reported_checkpoints as get_all_reported_checkpoints
    from elastic.train.session import get_checkpoint as get_checkpoint
    from elastic.train.session import get_context as get_context
    from elastic.train.session import is_driver as is_driver
    from elastic.train.session import report as report
    from elastic.train.session import working as working
    from elastic.train.trainer import DataParallelTrainer as DataParallelTrainer
    from elastic.train.validation import ValidationConfig as ValidationConfig
    from elastic.train.validation import ValidationFn as ValidationFn
    from elastic.train.validation import ValidationTaskConfig as ValidationTaskConfig

_TORCH = "write the loop in PyTorch, and use train.torch.TorchTrainer"
_LIBRARY = "run the library in a train function, with train.DataParallelTrainer"
refuse_missing(
    __name__,
    {
        **dict.fromkeys(("tensorflow", "jax", "horovod"), _TORCH),
        **dict.fromkeys(("xgboost", "lightgbm"), _LIBRARY),
        "NCCLHangError": "a hung worker is replaced: FailureConfig(hang_timeout_s=...)",
        "torch.TorchCheckpoint": "Checkpoint.from_dict({'model': model.state_dict()})",
        "torch.accelerate": "torch.autocast, and torch.amp.GradScaler",
        "torch.backward": "loss.backward()",
    },
)
__getattr__, __dir__, __all__ = lazy_names(
    __name__, parts=("accelerate", "collective", "huggingface", "lightning", "torch")
)
