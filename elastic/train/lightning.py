"""Lightning's Trainer: workers come and go beneath `trainer.fit()`, which never notices.

    def train_func(config):
        trainer = Trainer(strategy=RayDDPStrategy(), plugins=[RayLightningEnvironment()], ...)
        trainer = prepare_trainer(trainer)
        trainer.fit(module, train_dataloaders=loader)

    TorchTrainer(train_func, scaling_config=ScalingConfig(num_workers=(2, 8))).fit()

Lightning's loop has one iteration for each optimizer step, whatever the number of workers: the
strategy computes all micro-batches of one in `training_step`, and `self.log` is told once, of the
mean over the step. Rule: Lightning sees one process, for what it asks of others would not hold any
more after the group has changed.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Callback, LightningModule, Trainer, strategies
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.plugins import environments
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.rank_zero import rank_zero_only as rank_zero_only_here
from torch.utils.data import DataLoader

from elastic.errors import UsageError
from elastic.train.checkpoint import Checkpoint
from elastic.train.devices import get_device
from elastic.train.loaders import PreparedLoader, prepare_data_loader
from elastic.train.session import report, require_context, require_engine, require_place
from elastic.worker.context import current
from elastic.worker.stepping import Step

__all__ = [
    "DDPStrategy",
    "FSDPStrategy",
    "LightningEnvironment",
    "RayDDPStrategy",
    "RayFSDPStrategy",
    "RayLightningEnvironment",
    "RayTrainReportCallback",
    "TrainReportCallback",
    "prepare_trainer",
]


class RayLightningEnvironment(environments.LightningEnvironment):
    """Says that the processes are there already, and how many they are."""

    @property
    def creates_processes_externally(self) -> bool:
        """Return that Lightning starts none."""
        return True

    def world_size(self) -> int:
        """Return the workers of the group that stands."""
        return require_place("RayLightningEnvironment").world_size

    def set_world_size(self, size: int) -> None:
        """The group knows better."""

    def global_rank(self) -> int:
        """Return this worker's rank."""
        return _rank()

    def set_global_rank(self, rank: int) -> None:
        """The group knows better."""

    def local_rank(self) -> int:
        """Return this worker's rank on its node."""
        return require_context("RayLightningEnvironment").local_rank

    def node_rank(self) -> int:
        """Return the rank of this worker's node."""
        return require_context("RayLightningEnvironment").node_rank

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Whatever the Trainer was told of devices and nodes, the group decides."""

    def teardown(self) -> None:
        """Leave the environment variables alone."""


class RayDDPStrategy(strategies.SingleDeviceStrategy):
    """Data-parallel training in place: automatic optimization, with one optimizer.

    A step has `batch_size * accumulate_grad_batches` samples for each worker of the largest group,
    at any number of workers; Lightning itself accumulates nothing then. Validation and test: every
    worker goes through all samples, each once.
    """

    strategy_name = "elastic"

    def __init__(
        self,
        *,
        global_batch_size: int | None = None,
        weigh: Callable[[Any], Any] | None = None,
        **named: Any,
    ) -> None:
        """Be of this worker.

        Args:
            global_batch_size: samples of a step, if it is to be another number.
            weigh: what a micro-batch counts, as in `prepare_data_loader`.
            named: of DistributedDataParallel (`find_unused_parameters`, ...): the step engine has
                no need of them.
        """
        del named
        super().__init__(device=get_device())
        self._global_batch_size, self._weigh = global_batch_size, weigh
        self._accumulated = 1
        self._fit: _Fit | None = None
        self.take_place()

    # ------------------------------------------------------------------- one process

    def take_place(self) -> int:
        """Take this worker's rank, as it is now; the first one writes, and shows progress."""
        context = require_context("RayDDPStrategy")
        self.global_rank, self.local_rank = _rank(), context.local_rank
        for one in (rank_zero_only, rank_zero_only_here):
            vars(one)["rank"] = self.global_rank
        return self.global_rank

    @property
    def is_global_zero(self) -> bool:
        """Return whether this worker is the first one now."""
        return self.global_rank == 0

    # ------------------------------------------------------------------- the life of a fit

    def setup(self, trainer: Trainer) -> None:
        """Build what is trained, and refuse what cannot be trained so.

        Raises:
            UsageError: manual optimization, several optimizers, several loaders.
        """
        module = trainer.lightning_module
        if trainer.state.fn == "fit" and not module.automatic_optimization:
            raise UsageError(
                f"RayDDPStrategy: {type(module).__name__} has automatic_optimization=False: it "
                f"steps by itself, for its own micro-batches; write the loop yourself ('for step "
                f"in train.steps(loader)'), or let Lightning optimize"
            )
        super().setup(trainer)
        if trainer.state.fn != "fit":
            return
        if len(self.optimizers) != 1:
            raise UsageError(
                f"RayDDPStrategy: configure_optimizers of {type(module).__name__} returned "
                f"{len(self.optimizers)} optimizers, expected one: write the loop yourself ('for "
                f"step in train.steps(loader)'), where there may be several"
            )
        self._accumulated, trainer.accumulate_grad_batches = trainer.accumulate_grad_batches, 1

    def process_dataloader(self, dataloader: Any) -> Any:
        """Let what is trained with be dealt out in steps; everything is built: begin."""
        trainer = self._the_trainer()
        if not trainer.training:
            return dataloader
        if not isinstance(dataloader, DataLoader):
            raise UsageError(
                f"RayDDPStrategy: train_dataloaders is a {type(dataloader).__name__}: expected one "
                f"torch.utils.data.DataLoader that is not prepared"
            )
        size = self._global_batch_size
        if size is None and dataloader.batch_size is not None:
            workers = require_context("RayDDPStrategy").max_workers
            size = dataloader.batch_size * self._accumulated * workers
        prepared = prepare_data_loader(
            dataloader, global_batch_size=size, weigh=self._weigh, move_to_device=False
        )
        if self._fit is None:
            self._fit = _Fit(trainer, self)
        self._fit.loader = prepared
        return _Steps(self._fit, prepared)

    def on_train_end(self) -> None:
        """Leave the last epoch with all others."""
        if self._fit is not None:
            self._fit.end()

    def teardown(self) -> None:
        """Leave it also if it was over before it began here."""
        if self._fit is not None and sys.exc_info()[0] is None:
            self._fit.end()
        super().teardown()

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
        return batch if isinstance(batch, Step) else super().batch_to_device(batch, device)

    def training_step(self, *args: Any, **named: Any) -> Any:
        """Compute all micro-batches of a step: forward, backward, and the reduction."""
        step, *others = args
        if not isinstance(step, Step) or self._fit is None:
            return super().training_step(*args, **named)
        module, output = self._the_trainer().lightning_module, None

        def compute(batch: Any) -> dict[str, Any]:
            nonlocal output
            batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
            batch = self.batch_to_device(batch)
            with _told(module) as told:
                output = super(RayDDPStrategy, self).training_step(batch, *others, **named)
            loss = output["loss"] if isinstance(output, Mapping) else output
            if loss is None:
                raise UsageError(
                    f"{type(module).__name__}.training_step returned None: a micro-batch cannot be "
                    f"left out; return a loss of zero (loss * 0)"
                )
            super(RayDDPStrategy, self).backward(loss, self.optimizers[0])
            step.add(samples=extract_batch_size(batch))
            self._fit.told.update(told)  # type: ignore[union-attr]
            return {LOSS: loss, **{name: value for name, (value, _) in told.items()}}

        averages = step.run(compute)
        self._fit.computed(averages, int(step.sums.get("samples", 1)))
        loss = torch.tensor(averages.get(LOSS, 0.0), device=self.root_device)
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    def backward(self, closure_loss: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        """Have the gradients again that were there before Lightning has zeroed them."""
        if self._fit is None:
            return super().backward(closure_loss, *args, **named)
        self._fit.put_gradients()
        return closure_loss


class RayFSDPStrategy(strategies.FSDPStrategy):
    """Torch's FSDP by Lightning, as with Ray Train: from checkpoint to checkpoint.

    Nobody else has the rows of a worker that is lost, so that the train function is called again,
    and goes on from `train.get_checkpoint()`; see `RayTrainReportCallback`.
    """

    @property
    def root_device(self) -> torch.device:
        """Return this worker's device."""
        return get_device()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Return which part of the data is this worker's, also where nodes are uneven."""
        place = require_place("RayFSDPStrategy")
        return {"num_replicas": place.world_size, "rank": place.world_rank}


class RayTrainReportCallback(Callback):
    """Reports what was logged, with a checkpoint, at the end of each epoch of training."""

    CHECKPOINT_NAME = "checkpoint.ckpt"

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report; all workers do, and the first one brings the file."""
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        metrics |= {"epoch": trainer.current_epoch, "step": trainer.global_step}
        with tempfile.TemporaryDirectory() as folder:
            trainer.save_checkpoint(Path(folder, self.CHECKPOINT_NAME), weights_only=False)
            has_file = any(Path(folder).iterdir())
            report(metrics, checkpoint=Checkpoint.from_directory(folder) if has_file else None)


DDPStrategy, FSDPStrategy = RayDDPStrategy, RayFSDPStrategy
LightningEnvironment, TrainReportCallback = RayLightningEnvironment, RayTrainReportCallback


def prepare_trainer(trainer: Trainer) -> Trainer:
    """Return the Trainer, if it can train with the group.

    Raises:
        UsageError: it has another strategy.
    """
    if not isinstance(trainer.strategy, (RayDDPStrategy, RayFSDPStrategy)):
        raise UsageError(
            f"prepare_trainer: the Trainer has the strategy {type(trainer.strategy).__name__}: "
            f"write Trainer(strategy=RayDDPStrategy(), plugins=[RayLightningEnvironment()], ...)"
        )
    return trainer


LOG_ARGUMENTS = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx")
"""Of `LightningModule.log`, after the name and the value."""
LOSS = "loss of the step"
"""Beside the names that users log."""


def _rank() -> int:
    """Return this worker's rank; one that has no place yet is not the first."""
    context = current()
    return 0 if context is None else context.world_rank if context.join is None else 1


@contextmanager
def _told(module: LightningModule) -> Iterator[dict[str, tuple[Any, dict[str, Any]]]]:
    """Take what is logged inside, by name: the value, and how it is to be logged."""
    told: dict[str, tuple[Any, dict[str, Any]]] = {}

    def log(name: str, value: Any, *args: Any, **named: Any) -> None:
        if args:
            named = dict(zip(LOG_ARGUMENTS, args, strict=False)) | named
        if not isinstance(value, (int, float)) and not torch.is_tensor(value):
            raise UsageError(
                f"self.log({name!r}, ...) in training_step: a {type(value).__name__} adds up what "
                f"this worker alone has seen; log numbers, which are averaged over the step, and "
                f"let metrics objects look at validation data"
            )
        told[name] = value, {**named, "batch_size": None}

    vars(module)["log"] = log
    try:
        yield told
    finally:
        del vars(module)["log"]


class _Steps:
    """Lightning's loader: of whole steps."""

    def __init__(self, fit: _Fit, loader: PreparedLoader) -> None:
        self._fit, self._loader = fit, loader

    def __len__(self) -> int:
        """Return the steps of an epoch.

        Raises:
            UsageError: they are not known.
        """
        steps = self._loader.steps_per_epoch()
        if not steps:
            raise UsageError(
                "RayDDPStrategy: an iterable dataset, whose epochs have no known length: Lightning "
                "reads ahead then; use a dataset with __len__, or write the loop yourself ('for "
                "step in train.steps(loader)')"
            )
        return steps

    def __iter__(self) -> Iterator[Step]:
        """Begin an epoch."""
        return self._fit.steps(self._loader)

    def __getattr__(self, name: str) -> Any:
        """Pass everything else on."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._loader, name)


class _Fit:
    """One call of `trainer.fit`.

    Attributes:
        told: what training_step has logged in the step at hand, by name.
        loader: deals out what is trained with.
    """

    def __init__(self, trainer: Trainer, strategy: RayDDPStrategy) -> None:
        """Begin where the run stands; everything of it is built."""
        self.told: dict[str, tuple[Any, dict[str, Any]]] = {}
        self._trainer: Any = trainer
        self._strategy = strategy
        self._engine = require_engine("RayDDPStrategy")
        self._gradients: list[torch.Tensor | None] = []
        self._steps: Iterator[Step] = iter(())
        self.loader: PreparedLoader | None = None
        self._results: dict[str, Any] = {}
        # Until the loop asks for its first step: what this worker has received.
        self._received: Mapping[str, Any] | None = None
        self._is_new, self._is_open, self._passed = True, False, -1
        self._parameters = [
            one for group in strategy.optimizers[0].param_groups for one in group["params"]
        ]
        module = trainer.lightning_module
        before = module._on_before_batch_transfer

        def transfer(batch: Any, **named: Any) -> Any:
            return batch if isinstance(batch, Step) else before(batch, **named)

        vars(module)["_on_before_batch_transfer"] = transfer
        engine, fit = self._engine, self._trainer.fit_loop
        engine.add_model(module)
        engine.add_optimizer(strategy.optimizers[0])
        for config in strategy.lr_scheduler_configs:
            engine.add_scheduler(config.scheduler)
        engine.register("lightning.Trainer", self, is_own=True)
        total = fit.max_epochs if fit.max_epochs not in (None, -1) else sys.maxsize
        self._epochs = engine.epochs(total, trainer.current_epoch)
        self._epoch = next(self._epochs, sys.maxsize)
        progress: Any = fit.epoch_progress.current
        progress.ready = progress.started = progress.processed  # It is begun by the loop.
        self._take_place(begins=True)

    # ------------------------------------------------------------------- epochs and steps

    def steps(self, loader: PreparedLoader) -> Iterator[Step]:
        """Yield the steps of Lightning's present epoch that are left to do."""
        if self._is_new and self._received is not None:
            self.load_state_dict(self._received)  # Again: the loop has set its counters to zero.
        self._is_new, self._received = False, None
        self._leave_epoch()
        epoch = self._trainer.current_epoch
        while self._epoch < epoch:
            if self._passed < self._epoch:
                self._pass_gate(loader)
            self._epoch = next(self._epochs, sys.maxsize)
        self._steps, self._is_open = loader.steps(), True
        for step in self._steps:
            self._take_place()
            self.told = {}
            yield step

    def _leave_epoch(self) -> None:
        """Pass the end of the epoch with the others, also if Lightning has left it before."""
        if self._is_open:
            self._engine.end_epoch()
            next(self._steps, None)
            self._is_open, self._passed = False, self._epoch

    def _pass_gate(self, loader: PreparedLoader) -> None:
        """Pass the end of an epoch that was over when this worker came."""
        for _ in loader.steps():
            raise UsageError(
                f"Lightning is in epoch {self._trainer.current_epoch}, the run is in epoch "
                f"{self._epoch}: let trainer.fit begin where the run stands, without ckpt_path"
            )

    def end(self) -> None:
        """Lightning is on its own again."""
        self._leave_epoch()
        if self._engine.has_begun and self._passed < self._epoch and self.loader is not None:
            self._pass_gate(self.loader)
        self._epoch = next(self._epochs, sys.maxsize)
        close = getattr(self._epochs, "close", None)
        if close is not None:
            close()

    # ------------------------------------------------------------------- a step

    def computed(self, averages: Mapping[str, float], samples: int) -> None:
        """Tell Lightning what was logged, of the whole step; and keep its gradients."""
        trainer, module = self._trainer, self._trainer.lightning_module
        for name, (value, named) in self.told.items():
            like = value.detach() if torch.is_tensor(value) else torch.tensor(float(value))
            mean = torch.tensor(averages.get(name, float(like)), device=like.device)
            module.log(name, mean, **{**named, "batch_size": samples, "sync_dist": False})
        results = trainer._results
        results.batch_size = samples
        for key in [key for key in self._results if key in results]:
            _add(results[key], self._results.pop(key))
        self._gradients = [one.grad for one in self._parameters]
        self._take_place()

    def put_gradients(self) -> None:
        """Let `p.grad` be the step's gradient."""
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        self._gradients = []

    def _take_place(self, *, begins: bool = False) -> None:
        """Let Lightning know which worker this is now."""
        before = self._strategy.global_rank
        if self._strategy.take_place() == 0 and before and not begins:
            for one in self._trainer.callbacks:
                if isinstance(one, ProgressBar):
                    one.enable()
                    one.on_train_start(self._trainer, self._trainer.lightning_module)
                    one.on_train_epoch_start(self._trainer, self._trainer.lightning_module)

    # ------------------------------------------------------------------- what is in the run's state

    def state_dict(self) -> dict[str, Any]:
        """Return what Lightning and its callbacks have counted, as after whole steps."""
        trainer = self._trainer
        loop, connector = trainer.fit_loop.epoch_loop, trainer._logger_connector
        optimization = loop.automatic_optimization.optim_progress
        done = optimization.optimizer.step.state_dict()
        return copy.deepcopy(
            {
                "epochs": trainer.fit_loop.epoch_progress.state_dict(),
                "batches": _whole(loop.batch_progress.state_dict()),
                "validated": loop.val_loop.batch_progress.state_dict(),
                "schedulers": loop.scheduler_progress.state_dict(),
                "steps": _whole(done),
                "zeroed": _whole(optimization.optimizer.zero_grad.state_dict(), done),
                "stepped": loop._batches_that_stepped,
                "stops": trainer.should_stop,
                "callback_metrics": dict(connector._callback_metrics),
                "logged_metrics": dict(connector._logged_metrics),
                "bar_metrics": dict(connector._progress_bar_metrics),
                "results": {
                    key: {name: getattr(one, name) for name in _names(one)}
                    for key, one in loop._results.items()
                    if not one.has_reset and one.meta.on_epoch
                },
                "callbacks": {one.state_key: one.state_dict() for one in trainer.callbacks},
            }
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from another's."""
        self._received = state
        state, trainer = copy.deepcopy(dict(state)), self._trainer
        fetcher = trainer.fit_loop._data_fetcher
        if fetcher is not None:
            fetcher.fetched = state["batches"]["current"]["completed"]
        loop, connector = trainer.fit_loop.epoch_loop, trainer._logger_connector
        optimization = loop.automatic_optimization.optim_progress
        trainer.fit_loop.epoch_progress.load_state_dict(state["epochs"])
        loop.batch_progress.load_state_dict(state["batches"])
        loop.val_loop.batch_progress.load_state_dict(state["validated"])
        loop.scheduler_progress.load_state_dict(state["schedulers"])
        optimization.optimizer.step.load_state_dict(state["steps"])
        optimization.optimizer.zero_grad.load_state_dict(state["zeroed"])
        loop._batches_that_stepped = state["stepped"]
        trainer.should_stop = state["stops"]
        connector._callback_metrics.update(state["callback_metrics"])
        connector._logged_metrics.update(state["logged_metrics"])
        connector._progress_bar_metrics.update(state["bar_metrics"])
        self._results = {}
        for key, values in state["results"].items():
            if key in loop._results:
                vars(loop._results[key]).update(values)
            else:
                self._results[key] = values  # It is not known yet how they are to be added up.
        for one in trainer.callbacks:
            if state["callbacks"].get(one.state_key):
                one.load_state_dict(state["callbacks"][one.state_key])


def _whole(progress: Mapping[str, Any], done: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return counters as they are between steps: all that was begun is done.

    Args:
        progress: of Lightning.
        done: counters that tell how much is, if others do.
    """
    return {
        name: dict.fromkeys(part, (done or progress)[name]["completed"])
        if isinstance(part, Mapping)
        else part
        for name, part in progress.items()
    }


def _names(metric: Any) -> list[str]:
    return ["value", "cumulated_batch_size"] if metric.meta.is_mean_reduction else ["value"]


def _add(metric: Any, before: Mapping[str, Any]) -> None:
    """Add to what was logged in an epoch what was so before this worker came."""
    metric._computed = None
    if metric.meta.is_mean_reduction or metric.meta.is_sum_reduction:
        for name, value in before.items():
            setattr(metric, name, value + getattr(metric, name))
    else:
        metric.value = metric.meta.reduce_fx(before["value"], metric.value)
