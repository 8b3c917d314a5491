"""The strategy that computes all micro-batches of a step where Lightning expects one batch."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Trainer, strategies
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.utilities.rank_zero import rank_zero_only as rank_zero_only_here
from torch.utils.data import DataLoader
from torchmetrics import Metric

from elastic.errors import UsageError
from elastic.train.datasets import ShardBatches
from elastic.train.devices import get_device
from elastic.train.lightning.environment import current_rank
from elastic.train.lightning.fit import LOSS, Fit, Logged, StepBatch, Steps, taken_log
from elastic.train.loaders import PreparedLoader, prepare_data_loader
from elastic.train.session import require_context

NOT_HERE = (
    r"It is recommended to use `self\.log\(.*sync_dist=True",
    r"You're resuming from a checkpoint that ended before the epoch ended",
)
"""Lightning's warnings that do not hold with this strategy: logged values are those of the whole
step on every worker, and the loader continues at the checkpoint's step."""
CLOCK = "clocks of workers differ, and one that joins has begun later"


class RayDDPStrategy(strategies.SingleDeviceStrategy):
    """Data-parallel training in place: automatic optimization, with one optimizer.

    A step has `batch_size * accumulate_grad_batches` samples for each worker of the largest group,
    at any number of workers; Lightning itself accumulates nothing then. Validation and test: every
    worker processes all samples, each once.
    """

    strategy_name = "elastic"

    def __init__(
        self,
        *,
        global_batch_size: int | None = None,
        weigh: Callable[[Any], Any] | None = None,
        **named: Any,
    ) -> None:
        """Set up the strategy; outside of a worker, too: it may be pickled to one.

        Args:
            global_batch_size: samples of a step, to override the default above.
            weigh: returns the weight of a micro-batch, as in `prepare_data_loader`.
            named: of DistributedDataParallel (`find_unused_parameters`, ...): ignored, the step
                engine does not need them.
        """
        del named
        super().__init__()
        self._global_batch_size, self._weigh = global_batch_size, weigh
        self._accumulated = 1
        self._fit: Fit | None = None

    # ------------------------------------------------------------------- one process

    @property
    def root_device(self) -> torch.device:
        """Return this worker's device."""
        return get_device()

    def set_world_ranks(self) -> None:
        """Take this worker's rank; called when a Trainer gets the strategy."""
        self.take_place()

    def take_place(self) -> int:
        """Update and return this worker's rank; the first one writes and shows progress."""
        context = require_context("RayDDPStrategy")
        self.global_rank, self.local_rank = current_rank(), context.local_rank
        for one in (rank_zero_only, rank_zero_only_here):
            vars(one)["rank"] = self.global_rank
        return self.global_rank

    @property
    def is_global_zero(self) -> bool:
        """Return whether this worker is the first one now."""
        return self.global_rank == 0

    # ------------------------------------------------------------------- start and end of a fit

    def setup_environment(self) -> None:
        """Let the Trainer count in steps before the module asks for their number.

        UsageError at what decides by a clock of its own, and callbacks that change optimizers or
        accumulation.
        """
        super().setup_environment()
        trainer = self._the_trainer()
        if trainer.state.fn == "fit":
            refuse_callbacks(trainer)
            self._accumulated, trainer.accumulate_grad_batches = trainer.accumulate_grad_batches, 1
            count_in_steps(trainer, self._accumulated)

    def setup(self, trainer: Trainer) -> None:
        """Build module and optimizers, and refuse what this strategy cannot train.

        Raises:
            UsageError: manual optimization, or several optimizers.
        """
        for text in NOT_HERE:
            warnings.filterwarnings("ignore", message=text)
        module = trainer.lightning_module
        if trainer.state.fn == "fit" and not module.automatic_optimization:
            raise UsageError(
                f"RayDDPStrategy: {type(module).__name__} has automatic_optimization=False: it "
                f"steps by itself, for its own micro-batches; write the loop yourself ('for step "
                f"in train.steps(loader)'), or let Lightning optimize"
            )
        for part in module.modules():
            if isinstance(part, Metric):  # Every worker's has processed all samples.
                part.distributed_available_fn = _is_not
        super().setup(trainer)
        if trainer.state.fn != "fit":
            return
        if len(self.optimizers) != 1:
            raise UsageError(
                f"RayDDPStrategy: configure_optimizers of {type(module).__name__} returned "
                f"{len(self.optimizers)} optimizers, expected one: write the loop yourself ('for "
                f"step in train.steps(loader)'), where there may be several"
            )
        # As it was prepared for `trainer.estimated_stepping_batches`; the loop prepares another.
        trainer.fit_loop._combined_loader = None

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return a training loader as one of steps; starts the `Fit` once all is built.

        Of others each worker processes all samples.
        """
        trainer = self._the_trainer()
        if not trainer.training:
            return dataloader.whole() if isinstance(dataloader, ShardBatches) else dataloader
        prepared = self._prepared(dataloader)
        if not self.optimizers:
            return Steps(None, prepared)
        if self._fit is None:
            self._fit = Fit(trainer, self, self.take_place)
        self._fit.loader = prepared
        return Steps(self._fit, prepared)

    def _prepared(self, dataloader: Any) -> PreparedLoader:
        """Return the loader of a training loader's micro-batches."""
        if isinstance(dataloader, ShardBatches):
            return dataloader.loader()
        if not isinstance(dataloader, DataLoader):
            raise UsageError(
                f"RayDDPStrategy: train_dataloaders is a {type(dataloader).__name__}: expected one "
                f"torch.utils.data.DataLoader that is not prepared, or the batches of a dataset: "
                f"train.get_dataset_shard(name).iter_torch_batches(batch_size=...)"
            )
        size, number = self._global_batch_size, None
        if size is None:
            number = self._accumulated * require_context("RayDDPStrategy").max_workers
        return prepare_data_loader(
            dataloader,
            global_batch_size=size,
            batches_per_step=number,
            weigh=self._weigh,
            move_to_device=False,
        )

    def on_train_end(self) -> None:
        """End the last epoch with all others."""
        if self._fit is not None:
            self._fit.end()

    def teardown(self) -> None:
        """End the fit also if it was over before this worker started it."""
        fit, self._fit = self._fit, None
        if fit is not None:
            if sys.exc_info()[0] is None:
                fit.end()
            fit.close()
        super().teardown()

    # ------------------------------------------------------------------- files

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write a file on the first worker; if it is lost meanwhile, on the next first one."""
        if self._fit is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        save = self.checkpoint_io.save_checkpoint
        self._fit.files.write(
            filepath, partial(save, checkpoint, filepath, storage_options=storage_options)
        )

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a file, on the worker that writes them."""
        if self._fit is None:
            super().remove_checkpoint(filepath)
            return
        self._fit.files.remove(filepath, partial(self.checkpoint_io.remove_checkpoint, filepath))

    def _the_trainer(self) -> Trainer:
        module = self.lightning_module
        if module is None:
            raise UsageError("RayDDPStrategy: used without a Trainer")
        return module.trainer

    # ------------------------------------------------------------------- a step

    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Move a batch; a step's micro-batches are moved when they are computed."""
        return batch if isinstance(batch, StepBatch) else super().batch_to_device(batch, device)

    def training_step(self, *args: Any, **named: Any) -> Any:
        """Compute this rank's micro-batches of a step: forward, backward, and the reduction."""
        given, *others = args
        if not isinstance(given, StepBatch) or self._fit is None:
            return super().training_step(*args, **named)
        trainer, step, fit = self._the_trainer(), given.step, self._fit
        module, output = trainer.lightning_module, None
        logged: Logged = {}

        def compute(batch: Any) -> dict[str, Any]:
            nonlocal output
            fit.take_place()  # The group may have changed: see `Files`.
            batch = trainer.precision_plugin.convert_input(batch)
            batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
            batch = self.batch_to_device(batch)
            with taken_log(module, fit.metrics) as taken:
                output = super(RayDDPStrategy, self).training_step(batch, *others, **named)
                loss = output["loss"] if isinstance(output, Mapping) else output
                if loss is None:
                    raise UsageError(
                        f"{type(module).__name__}.training_step returned None: a micro-batch "
                        f"cannot be left out; return a loss of zero (loss * 0)"
                    )
                super(RayDDPStrategy, self).backward(loss, self.optimizers[0])
            step.add(**{"": 1}, **dict.fromkeys(taken, 1))
            logged.update(taken)
            return {LOSS: loss, **{name: value for name, (value, _) in taken.items()}}

        averages = step.run(compute)
        fit.computed(logged, averages, step.sums, step.samples)
        loss = torch.tensor(averages.get(LOSS, 0.0), device=self.root_device)
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    def backward(self, closure_loss: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        """Restore the step's gradients, which Lightning has zeroed."""
        if self._fit is None:
            return super().backward(closure_loss, *args, **named)
        self._fit.put_gradients()
        return closure_loss


def _is_not() -> bool:
    return False


def count_in_steps(trainer: Any, accumulated: int) -> None:
    """Divide numbers of batches, of which Lightning has one for each step here.

    UsageError if that leaves a part of a step.
    """
    for name in ("limit_train_batches", "val_check_interval"):
        batches = getattr(trainer, name)
        if not isinstance(batches, int) or trainer.fast_dev_run:
            continue
        if batches % accumulated:
            raise UsageError(
                f"RayDDPStrategy: {name}={batches} with accumulate_grad_batches={accumulated}: "
                f"expected a multiple, for whole steps, or a fraction"
            )
        setattr(trainer, name, batches // accumulated)


def refuse_callbacks(trainer: Any) -> None:
    """Refuse what goes another way on each worker, or changes what was prepared."""
    if trainer._val_check_time_interval is not None:
        raise _refused("val_check_interval as a time", f"a number of steps or a fraction; {CLOCK}")
    for one in trainer.callbacks:
        if isinstance(one, Timer) and one._duration is not None:
            raise _refused("max_time or a Timer with a duration", f"max_steps; {CLOCK}")
        if isinstance(one, ModelCheckpoint) and one._train_time_interval is not None:
            raise _refused("train_time_interval", f"every_n_train_steps; {CLOCK}")
        if isinstance(one, ModelCheckpoint) and one.save_last == "link":
            raise _refused("save_last='link'", "save_last=True: who dies may leave no link")
        if isinstance(one, (BatchSizeFinder, LearningRateFinder)):
            raise _refused(type(one).__name__, "it in a run of its own, and its result here")
        if isinstance(one, StochasticWeightAveraging):
            raise _refused("StochasticWeightAveraging", "WeightAveraging: it changes schedules")
        if isinstance(one, GradientAccumulationScheduler):
            raise _refused(
                "GradientAccumulationScheduler", "accumulate_grad_batches=n: steps have one size"
            )


def _refused(what: str, instead: str) -> UsageError:
    return UsageError(f"RayDDPStrategy: {what}: use {instead}")
