"""One call of `trainer.fit`: its epochs and its steps, which Lightning's loop follows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers.utilities import _log_hyperparams
from lightning.pytorch.strategies import SingleDeviceStrategy
from torchmetrics import Metric

from elastic.errors import UsageError
from elastic.train.lightning.environment import note_at_loop
from elastic.train.lightning.files import Files
from elastic.train.lightning.state import TrainerState
from elastic.train.loaders import PreparedLoader
from elastic.train.session import require_engine
from elastic.worker.engine.whole_step import WholeStep

NAME = "lightning.Trainer"
"""Of a Trainer in the run's state."""
LOG_ARGUMENTS = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx")
"""Positional arguments of `LightningModule.log`, after the name and the value."""
MEANS = ("mean", "avg", torch.mean)
"""The values of `reduce_fx` that mean the mean."""
LOSS = "_loss"
"""Name of the loss among logged values; the "_" keeps it out of reports."""
Logged = dict[str, tuple[Any, dict[str, Any]]]
"""What training_step has logged, by name: the value, and its logging arguments."""


@contextmanager
def taken_log(module: LightningModule, metrics: Sequence[Metric]) -> Iterator[Logged]:
    """Capture what is logged inside.

    UsageError if that cannot be averaged, or metrics were updated.
    """
    logged: Logged = {}

    def log(name: str, value: Any, *args: Any, **named: Any) -> None:
        if args:
            named = dict(zip(LOG_ARGUMENTS, args, strict=False)) | named
        if not isinstance(value, (int, float)) and not torch.is_tensor(value):
            raise _adds_up(f"self.log({name!r}, ...)", value)
        if named.get("reduce_fx", "mean") not in MEANS:
            raise UsageError(
                f"self.log({name!r}, ..., reduce_fx={named['reduce_fx']!r}) in training_step: "
                f"what is logged there is averaged over the samples of a step and of an epoch: "
                f"leave reduce_fx out, and for a sum multiply the mean by the number of samples"
            )
        logged[name] = value, {**named, "batch_size": None}

    vars(module)["log"] = log
    before = [part._update_count for part in metrics]
    try:
        yield logged
    finally:
        del vars(module)["log"]
    for part, count in zip(metrics, before, strict=True):
        if part._update_count != count:
            raise _adds_up("update", part)


def _adds_up(what: str, metric: Any) -> UsageError:
    return UsageError(
        f"{what} in training_step: a {type(metric).__name__} adds up what this worker alone has "
        f"seen; log numbers, as torchmetrics.functional returns them, which are averaged over the "
        f"step, and use metrics objects for validation data only"
    )


class StepBatch:
    """What Lightning and its callbacks have for a batch: a step, which only training_step reads.

    It is no iterable: Lightning would look for its number of samples.
    """

    def __init__(self, step: WholeStep) -> None:
        self.step = step

    def __getitem__(self, index: Any) -> Any:
        """Refuse to be read."""
        raise UsageError(
            "a hook reads the batch of a training step: workers have only their own micro-batches "
            "of it, as the argument of training_step: read them there"
        )


class Steps:
    """The loader that Lightning iterates over: of whole steps; without a fit, only their number."""

    def __init__(self, fit: Fit | None, loader: PreparedLoader) -> None:
        self._fit, self._loader = fit, loader

    def __len__(self) -> int:
        """Return the steps of an epoch; UsageError if they are not known."""
        steps = self._loader.steps_per_epoch()
        if not steps:
            raise UsageError(
                "RayDDPStrategy: an iterable dataset, whose epochs have no known length: Lightning "
                "reads ahead then; use a dataset with __len__, or write the loop yourself ('for "
                "step in train.steps(loader)')"
            )
        return steps

    def __iter__(self) -> Iterator[StepBatch]:
        return iter(()) if self._fit is None else self._fit.steps(self._loader)

    def __getattr__(self, name: str) -> Any:
        """Pass everything else on to the prepared loader."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._loader, name)


class Fit:
    """One call of `trainer.fit`.

    Attributes:
        loader: yields the training data.
        files: what only the first worker writes.
        state: of the Trainer, in the run's.
        metrics: in the module.
    """

    def __init__(
        self, trainer: Trainer, strategy: SingleDeviceStrategy, take_place: Callable[[], int]
    ) -> None:
        """Start from the run's state; module, optimizer and schedulers must be built.

        `take_place` tells the strategy its rank in its group, and returns it.
        """
        self._trainer: Any = trainer
        self._strategy, self._strategy_takes_place = strategy, take_place
        self._engine = require_engine("RayDDPStrategy")
        if NAME in self._engine.state.registered:
            raise UsageError(
                "RayDDPStrategy: trainer.fit for the second time in one call of the train "
                "function: the run has one loop over its epochs; find rates and batch sizes "
                "(Tuner, LearningRateFinder, BatchSizeFinder) before the run, and put a second "
                "fit into a run of its own"
            )
        self._gradients: list[torch.Tensor | None] = []
        # Those of the epoch that Lightning is in, None between two epochs.
        self._steps: Iterator[WholeStep] | None = None
        # False from when Lightning gets a step until training_step is through with it.
        self._is_computed = True
        # The newest epoch that this worker has ended with the others.
        self._passed = -1
        self.loader: PreparedLoader | None = None
        self._parameters = [
            one for group in strategy.optimizers[0].param_groups for one in group["params"]
        ]
        # Before the first exchange of state, from which all have the first worker's.
        self.files = Files(trainer)
        self.state = TrainerState(trainer, self.files)
        module = trainer.lightning_module
        self.metrics = [part for part in module.modules() if isinstance(part, Metric)]
        before = module._on_before_batch_transfer

        def transfer(batch: Any, **named: Any) -> Any:
            return batch if isinstance(batch, StepBatch) else before(batch, **named)

        vars(module)["_on_before_batch_transfer"] = transfer
        engine, fit = self._engine, self._trainer.fit_loop
        engine.add_model(module)
        engine.add_optimizer(strategy.optimizers[0])
        for config in strategy.lr_scheduler_configs:
            engine.add_scheduler(config.scheduler)
        engine.register(NAME, self.state, is_own=True)
        total = fit.max_epochs if fit.max_epochs not in (None, -1) else sys.maxsize
        done = self.state.resume()
        self._epochs = engine.epochs(total, trainer.current_epoch, done)
        note_at_loop()
        self._epoch = next(self._epochs, sys.maxsize)
        progress: Any = fit.epoch_progress.current
        progress.ready = progress.started = progress.processed  # The loop starts the epoch.
        self.take_place(begins=True)

    # ------------------------------------------------------------------- epochs and steps

    def steps(self, loader: PreparedLoader) -> Iterator[StepBatch]:
        """Yield the steps left in Lightning's present epoch.

        UsageError if Lightning has several loaders, or leaves out the step that it has.
        """
        loaders = self._trainer.fit_loop._combined_loader.iterables
        if not isinstance(loaders, Steps):
            raise UsageError(
                f"RayDDPStrategy: the training loaders are a {type(loaders).__name__}: expected "
                f"one: a step has samples of one loader; let one dataset return what all of them "
                f"do, or write the loop yourself ('for step in train.steps(loader)')"
            )
        self.state.begin_loop()
        self._leave_epoch()
        epoch = self._trainer.current_epoch
        while self._epoch < epoch:
            if self._passed < self._epoch:
                self._pass_gate(loader)
            self._epoch = next(self._epochs, sys.maxsize)
        self._steps = loader.steps()
        for step in self._steps:
            self.take_place()
            self._is_computed = False
            yield StepBatch(step)

    def _leave_epoch(self) -> None:
        """End the epoch with the others, also if Lightning has left it early."""
        if self._steps is None:
            return
        if not self._is_computed:
            raise UsageError(
                "RayDDPStrategy: Lightning has left out a step, as after an "
                "on_train_batch_start that returns -1: to end the training set "
                "trainer.should_stop = True on all workers, behind a step"
            )
        self._engine.end_epoch()
        next(self._steps, None)
        self._steps = None
        self._passed = self._epoch
        self.take_place()

    def _pass_gate(self, loader: PreparedLoader) -> None:
        """Pass the end of an epoch that was over when this worker joined."""
        for _ in loader.steps():
            raise UsageError(
                f"Lightning is in epoch {self._trainer.current_epoch}, the run is in epoch "
                f"{self._epoch}: let trainer.fit begin where the run stands, without ckpt_path"
            )

    def end(self) -> None:
        """End the last epoch and the loop over epochs."""
        self._leave_epoch()
        if self._engine.has_begun and self._passed < self._epoch and self.loader is not None:
            self._pass_gate(self.loader)
        self._epoch = next(self._epochs, sys.maxsize)
        close = getattr(self._epochs, "close", None)
        if close is not None:
            close()

    def close(self) -> None:
        """Give the module, its callbacks and loggers their own methods back."""
        self.files.close()
        vars(self._trainer.lightning_module).pop("_on_before_batch_transfer", None)

    # ------------------------------------------------------------------- a step

    def computed(
        self, logged: Logged, averages: Mapping[str, float], sums: Mapping[str, float], samples: int
    ) -> None:
        """Log the averages of the whole step in Lightning, and keep the step's gradients.

        Args:
            logged: by this worker, in its micro-batches of the step.
            averages: by name.
            sums: micro-batches that have logged a name, by name, and under "" all of them;
                nothing of a step that others did.
            samples: of the step.

        Raises:
            UsageError: not all micro-batches have logged the same names.
        """
        trainer, module = self._trainer, self._trainer.lightning_module
        for name, count in sums.items():
            if count != sums[""]:
                raise UsageError(
                    f"self.log({name!r}, ...): {count:.0f} of the {sums['']:.0f} micro-batches of "
                    f"a step have logged it: log the same names in every training_step, or with "
                    f"train.log, which averages over those that have"
                )
        for name, (value, named) in logged.items():
            like = value.detach() if torch.is_tensor(value) else torch.tensor(float(value))
            mean = torch.tensor(averages.get(name, float(like)), device=like.device)
            module.log(name, mean, **{**named, "batch_size": samples, "sync_dist": False})
        trainer._results.batch_size = samples
        self.state.add_results(trainer._results)
        self._gradients = [one.grad for one in self._parameters]
        self._is_computed = True
        self.files.written()
        self.take_place()

    def put_gradients(self) -> None:
        """Set `p.grad` to the step's gradient, for every parameter."""
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        self._gradients = []

    def take_place(self, *, begins: bool = False) -> None:
        """Update Lightning's rank; a worker that becomes the first one writes and shows progress.

        To be called before anything of a step is computed, too.
        """
        before, trainer = self._strategy.global_rank, self._trainer
        if self._strategy_takes_place() != 0 or not before:
            return
        self.files.take_over()
        if begins:
            _log_hyperparams(trainer)
        for one in trainer.callbacks:
            if isinstance(one, ProgressBar):
                one.enable()
                if not begins:
                    one.on_train_start(trainer, trainer.lightning_module)
                    one.on_train_epoch_start(trainer, trainer.lightning_module)
