"""Accelerate's Accelerator: its `prepare` returns objects that train with the group in place.

    accelerator = prepare_accelerator(Accelerator())
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for epoch in train.epochs(3):
        for batch in loader:                    # or: for step in train.steps(loader)
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

Rule: accelerate sees one process. A scheduler steps once per step, at any number of workers; every
worker reads all evaluation data, so that `gather_for_metrics` has all of it.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from elastic.errors import UsageError
from elastic.train.loaders import PreparedLoader, prepare_data_loader
from elastic.train.one_process import see_one_process, take_place
from elastic.train.session import require_engine, working
from elastic.worker.engine import usage_errors
from elastic.worker.engine.prepared_optimizers import is_training
from elastic.worker.engine.step_engine import StepEngine
from elastic.worker.engine.whole_step import WholeStep

__all__ = ["prepare_accelerator"]


def prepare_accelerator(
    accelerator: Accelerator,
    *,
    global_batch_size: int | None = None,
    weigh: Callable[[Any], Any] | None = None,
) -> Accelerator:
    """Make an Accelerator prepare objects for training by the group, whose workers may change.

    Call it before `accelerator.prepare`, and write the loop over epochs as `train.epochs(n)`.

    Args:
        accelerator: without FSDP or DeepSpeed, and without gradient_accumulation_steps.
        global_batch_size: samples of a step, as in `prepare_data_loader`.
        weigh: returns the weight of a micro-batch, as there.

    Returns:
        The same object.

    Raises:
        UsageError: outside a train function, prepared twice, or it shards or accumulates itself.
    """
    engine = require_engine("prepare_accelerator")
    if not isinstance(accelerator, Accelerator):
        raise UsageError(
            f"prepare_accelerator: expected an accelerate.Accelerator, got a "
            f"{type(accelerator).__name__}"
        )
    if isinstance(accelerator, _InGroup):
        raise UsageError("prepare_accelerator: this accelerator is prepared already")
    see_one_process(accelerator, "prepare_accelerator")
    cls = type(accelerator)
    accelerator.__class__ = type(cls.__name__, (_InGroup, cls), {"__module__": cls.__module__})
    accelerator._elastic = {"global_batch_size": global_batch_size, "weigh": weigh}
    accelerator._trackers_of = None
    engine.at_boundary = accelerator._take_place
    accelerator._saves = _Saves(accelerator.project_configuration)
    engine.register(NAME, accelerator._saves, is_own=True)
    return accelerator


NAME = "accelerate.Accelerator"
"""Of the number of saved states in the run's state."""
NO_TRIGGER = (
    "accelerator.{}(): each worker would ask itself alone, and some would leave the loop while "
    "others wait for them: write train.log(stop=float(condition)) for each batch, and leave the "
    "loop where train.get_logged().get('stop', 0) > 0, which is the same on all workers"
)


class _InGroup(Accelerator):
    """Mixin that is put before an Accelerator's own class."""

    _elastic: dict[str, Any]
    _trackers_of: Callable[[], None] | None
    """Opens the trackers that the script has asked for."""
    _saves: _Saves

    def _take_place(self) -> None:
        """Set accelerate's rank to this worker's; one that becomes the first opens the trackers."""
        if take_place() and self._trackers_of is not None:
            self._trackers_of()

    def on_main_process(self, function: Callable[..., Any]) -> Any:  # type: ignore[override]
        """Decorate a function that only the worker calls that is the first one then."""
        return _where(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: Callable[..., Any]) -> Any:  # type: ignore[override]
        """Decorate a function that only the worker calls that is the first of its node then."""
        return _where(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: Callable[..., Any]) -> Any:
        """Decorate a function that only the first worker calls: accelerate sees one process."""
        return _where(lambda: self.is_last_process, function)

    def on_process(  # type: ignore[override]
        self, function: Callable[..., Any] | None = None, process_index: int | None = None
    ) -> Any:
        """Decorate a function that only the worker calls that has this rank then."""
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        return _where(lambda: self.process_index == process_index, function)

    def on_local_process(  # type: ignore[override]
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """Decorate a function that only the worker calls that has this rank on its node then."""
        if function is None:
            return functools.partial(self.on_local_process, local_process_index=local_process_index)
        return _where(lambda: self.local_process_index == local_process_index, function)

    @property
    def sync_gradients(self) -> bool:
        """Return whether this iteration is that of the step, the last of this worker's in it.

        Scripts clip there, and count their steps: whoever asks behind the optimizer's step, or in
        an iteration without one, asks what `train.stepped` answers.
        """
        engine = require_engine("accelerator.sync_gradients")
        is_of_step = engine.is_of_step()
        if engine.runs_after_step() or not is_of_step:
            engine.note_asked()
        return is_of_step and bool(self.gradient_state.sync_gradients)

    @sync_gradients.setter
    def sync_gradients(self, sync_gradients: bool) -> None:
        self.gradient_state._set_sync_gradients(sync_gradients)

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Begin an iteration; nothing is accumulated here."""
        del models
        self._do_sync()
        yield

    def save_state(self, output_dir: Any = None, *args: Any, **named: Any) -> Any:
        """Write the state on the first worker, or the first of each node; the others count it.

        Returns:
            The folder.
        """
        config = self.project_configuration
        if config.automatic_checkpoint_naming:
            output_dir = Path(config.project_dir, "checkpoints", f"checkpoint_{config.iteration}")
        if self.is_main_process or (config.save_on_each_node and self.is_local_main_process):
            if config.automatic_checkpoint_naming and self._saves.goes_on:
                shutil.rmtree(output_dir, ignore_errors=True)  # Of steps that are done again.
            with working("writes a checkpoint"):
                return super().save_state(output_dir, *args, **named)
        config.iteration += 1
        return Path(output_dir)

    def init_trackers(self, *args: Any, **named: Any) -> None:
        """Open the trackers on the first worker; also on each that becomes the first one later."""
        begin = super().init_trackers
        self._trackers_of = lambda: begin(*args, **named)
        if self.is_main_process:
            begin(*args, **named)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Add objects to what `save_state` writes, and to the run's state."""
        super().register_for_checkpointing(*objects)
        engine = require_engine("accelerator.register_for_checkpointing")
        for thing in objects:
            engine.register(f"{type(thing).__name__} {len(engine.state.registered)}", thing)

    def set_trigger(self) -> None:
        """Refuse what one worker would decide for itself."""
        raise UsageError(NO_TRIGGER.format("set_trigger"))

    def check_trigger(self) -> bool:
        """Refuse it, as `set_trigger`."""
        raise UsageError(NO_TRIGGER.format("check_trigger"))

    def prepare_model(
        self, model: nn.Module, device_placement: Any = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Add a model to the run's state, unless it is only evaluated."""
        made = super().prepare_model(model, device_placement, evaluation_mode)
        if not evaluation_mode:
            require_engine("accelerator.prepare").add_model(made)
        return made

    def prepare_optimizer(self, optimizer: Any, device_placement: Any = None) -> Any:
        """Make an optimizer step once per step of the group."""
        require_engine("accelerator.prepare").add_optimizer(optimizer)
        return super().prepare_optimizer(optimizer, device_placement)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Make a scheduler step once per step of the group."""
        require_engine("accelerator.prepare").add_scheduler(scheduler)
        return super().prepare_scheduler(scheduler)

    def prepare_data_loader(self, data_loader: Any, *args: Any, **named: Any) -> Any:
        """Make a loader yield micro-batches where it is used for training."""
        if not isinstance(data_loader, DataLoader):
            raise UsageError(
                f"accelerator.prepare: a loader is a {type(data_loader).__name__}: expected a "
                f"torch.utils.data.DataLoader that is not prepared"
            )
        whole = super().prepare_data_loader(data_loader, *args, **named)
        engine = require_engine("accelerator.prepare")
        return _Loader(engine, lambda: prepare_data_loader(data_loader, **self._elastic), whole)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Skip batches of a loader that is not used for training.

        Raises:
            UsageError: it is; a worker's batches of a step depend on the number of workers.
        """
        if not isinstance(dataloader, _Loader) or not dataloader.is_trained():
            return super().skip_first_batches(dataloader, num_batches)
        if not num_batches:
            return dataloader
        raise UsageError(
            f"accelerator.skip_first_batches(loader, {num_batches}): how many batches a worker "
            f"reads in a step depends on the number of workers, so that a count of them is no "
            f"place in an epoch: leave it out. A run that is started again resumes in the middle "
            f"of an epoch from its automatic checkpoints (RunConfig.checkpoint_config); a "
            f"checkpoint of your own, written after an epoch, by train.epochs(n, start=epoch + 1)"
        )


class _Saves:
    """How many states were saved, which names the next one's folder.

    Attributes:
        goes_on: the run has saved states before this worker was there.
    """

    def __init__(self, config: Any) -> None:
        self._config = config
        self.goes_on = False

    def state_dict(self) -> dict[str, int]:
        """Return their number."""
        return {"saved": self._config.iteration}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Count on from that of the others."""
        self._config.iteration, self.goes_on = state["saved"], True


class _Loader:
    """A loader: of micro-batches in training, else of all data."""

    def __init__(
        self, engine: StepEngine, prepare: Callable[[], PreparedLoader], whole: Any
    ) -> None:
        self._engine, self._prepare, self._whole = engine, prepare, whole

    def is_trained(self) -> bool:
        """Return whether batches read now are for training."""
        return _is_trained(self._engine)

    @cached_property
    def _prepared(self) -> PreparedLoader:
        """Return the prepared loader; created only for loaders used in training."""
        return self._prepare()

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass; UsageError if it is used for training outside of `train.epochs()`."""
        if not _is_trained(self._engine):
            return iter(self._whole)
        if not self._engine.has_begun:
            raise usage_errors.outside_epochs()
        return iter(self._prepared)

    def steps(self) -> Iterator[WholeStep]:
        """Begin a pass in steps; see `train.steps`."""
        return self._prepared.steps()

    def __len__(self) -> int:
        """Return the optimizer steps of an epoch, which schedulers need.

        While nothing is trained, as when models are in evaluation mode, the number of batches.
        """
        if not _is_trained(self._engine):
            return len(self._whole)
        return self._prepared.steps_per_epoch() or len(self._whole)

    def __getattr__(self, name: str) -> Any:
        """Pass everything else on to the whole loader."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._whole, name)


def _where(is_here: Callable[[], bool], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does nothing elsewhere; accelerate's decorators see one process."""

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        return function(*args, **named) if is_here() else None

    return call


def _is_trained(engine: StepEngine) -> bool:
    """Return whether batches read now are for training."""
    return torch.is_grad_enabled() and any(is_training(model) for model in engine.state.models)
