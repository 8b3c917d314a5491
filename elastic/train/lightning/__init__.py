"""Lightning's Trainer: workers join and leave while `trainer.fit()` runs, unnoticed by it.

    def train_func(config):
        trainer = Trainer(strategy=RayDDPStrategy(), plugins=[RayLightningEnvironment()], ...)
        trainer = prepare_trainer(trainer)
        trainer.fit(module, train_dataloaders=loader)

    TorchTrainer(train_func, scaling_config=ScalingConfig(num_workers=(2, 8))).fit()

Lightning's loop has one iteration per optimizer step, at any number of workers: the strategy
computes all micro-batches of a step in `training_step`, and `self.log` is called once, with the
mean over the step. Rule: Lightning sees one process, because what it reads about others would be
outdated after the group has changed.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from elastic.errors import UsageError
from elastic.train.checkpoint import Checkpoint
from elastic.train.lightning.environment import RayLightningEnvironment
from elastic.train.lightning.strategy import RayDDPStrategy
from elastic.train.session import report
from elastic.train.validation import ValidationTaskConfig
from elastic.worker.checkpoint.delivery import CheckpointUploadMode

__all__ = [
    "DDPStrategy",
    "DeepSpeedStrategy",
    "FSDPStrategy",
    "LightningEnvironment",
    "RayDDPStrategy",
    "RayDeepSpeedStrategy",
    "RayFSDPStrategy",
    "RayLightningEnvironment",
    "RayTrainReportCallback",
    "TrainReportCallback",
    "prepare_trainer",
]


class RayTrainReportCallback(Callback):
    """Reports what was logged, with a checkpoint, at the end of each epoch of training."""

    CHECKPOINT_NAME = "checkpoint.ckpt"

    def __init__(
        self,
        checkpoint_upload_mode: CheckpointUploadMode | None = None,
        validation: bool | ValidationTaskConfig = False,
        checkpoint_frequency: int = 1,
    ) -> None:
        """Store what `train.report` is given with each checkpoint.

        Args:
            checkpoint_upload_mode: see `train.report`; None is SYNC.
            validation: see `train.report`.
            checkpoint_frequency: epochs from one report to the next.
        """
        super().__init__()
        self._mode = checkpoint_upload_mode or CheckpointUploadMode.SYNC
        self._validation = validation
        self._epochs = checkpoint_frequency

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report on all workers; the first one adds the file."""
        if (trainer.current_epoch + 1) % self._epochs:
            return
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        metrics |= {"epoch": trainer.current_epoch, "step": trainer.global_step}
        # Its folder is deleted with it: after the upload, which may go on in the background.
        checkpoint = Checkpoint.temporary(tempfile.mkdtemp())
        folder = Path(checkpoint.path)
        if trainer.is_global_zero:  # The folder is gone when another worker is the first one.
            trainer.save_checkpoint(folder / self.CHECKPOINT_NAME, weights_only=False)
        if not any(folder.iterdir()):
            report(metrics, checkpoint=None)
            return
        report(
            metrics,
            checkpoint=checkpoint,
            checkpoint_upload_mode=self._mode,
            validation=self._validation,
        )


LOOP = (
    "if no device holds the module, write the loop yourself ('for step in train.steps(loader)') "
    "with prepare_model(parallel_strategy='fsdp'), which resumes at the newest snapshot, or let "
    "'elastic run' run the script with Lightning's own strategy, from checkpoint to checkpoint; if "
    "one does, use RayDDPStrategy()"
)


class _Refused(RayDDPStrategy):
    """A strategy of Ray Train's that can be created, and that no Trainer takes."""

    reason = ""

    def __init__(self, *args: Any, **named: Any) -> None:
        del args, named
        super().__init__()

    def set_world_ranks(self) -> None:
        """Refuse the Trainer; the error names alternatives."""
        raise UsageError(f"{type(self).__name__}: {self.reason}: {LOOP}")


class RayFSDPStrategy(_Refused):
    """Ray Train's FSDP strategy; a Trainer with it is refused."""

    reason = "what Lightning counts cannot go back with the rows of a module to the newest snapshot"


class RayDeepSpeedStrategy(_Refused):
    """Ray Train's DeepSpeed strategy; a Trainer with it is refused."""

    reason = "DeepSpeed holds groups and shards by itself, which cannot change under it"


DDPStrategy, FSDPStrategy = RayDDPStrategy, RayFSDPStrategy
DeepSpeedStrategy = RayDeepSpeedStrategy
LightningEnvironment, TrainReportCallback = RayLightningEnvironment, RayTrainReportCallback


def prepare_trainer(trainer: Trainer) -> Trainer:
    """Return the Trainer, if it can train with the group.

    Raises:
        UsageError: it has another strategy.
    """
    if not isinstance(trainer.strategy, RayDDPStrategy):
        raise UsageError(
            f"prepare_trainer: the Trainer has the strategy {type(trainer.strategy).__name__}: "
            f"write Trainer(strategy=RayDDPStrategy(), plugins=[RayLightningEnvironment()], ...)"
        )
    return trainer
