"""Hugging Face's Trainer: workers join and leave while `trainer.train()` runs, unnoticed by it.

    def train_func(config):
        trainer = transformers.Trainer(model=model, args=args, train_dataset=data, ...)
        trainer = prepare_trainer(trainer)
        trainer.train()

    TorchTrainer(train_func, scaling_config=ScalingConfig(num_workers=(2, 8))).fit()

The Trainer's loop has one iteration per optimizer step, at any number of workers; together they
compute the step's micro-batches inside `training_step`. Rule: the Trainer's counters advance once
per step, and are the same on every worker.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.optimizer import AcceleratedOptimizer
from packaging.version import Version
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import (
    ExportableState,
    ProgressCallback,
    TrainerControl,
    TrainerState,
)
from transformers.trainer_utils import rotate_checkpoints

from elastic.core.policy.cursor import Cursor
from elastic.core.policy.data_plan import DataPlan
from elastic.errors import UsageError
from elastic.train.checkpoint import Checkpoint
from elastic.train.datasets import ShardBatches
from elastic.train.loaders import PreparedLoader, prepare_data_loader
from elastic.train.one_process import see_one_process, take_place
from elastic.train.session import report, require_context, require_engine, working
from elastic.train.trainer import TorchTrainer
from elastic.worker.data.loader import BY_SAMPLES
from elastic.worker.engine.whole_step import WholeStep

__all__ = [
    "RayTrainReportCallback",
    "TrainReportCallback",
    "TransformersTrainer",
    "prepare_trainer",
]

OLDEST = Version("5.8")
"""Of transformers; that of the extra `hf`."""
OF_THIS_WORKER = ("is_local_process_zero", "is_world_process_zero")
"""Fields of a `TrainerState` that belong to the worker, not to the run."""
COUNTED = (
    "_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step",
    "_initial_num_input_tokens_seen", "current_flos",
)  # fmt: skip
"""Counters of a Trainer outside of its state; a release has those that it needs."""
NAME = "transformers.Trainer"
"""Of the Trainer's counters in the run's state."""
LOGGED, LOGGED_MAX = "_logged:", 8
"""Prefix of names that `self.log` was given in a micro-batch, and how many there may be."""
DRAFT = "_checkpoint-"
"""Prefix of folders in which checkpoints are written; no Trainer takes them for checkpoints."""


def prepare_trainer(trainer: Trainer, *, global_batch_size: int | None = None) -> Trainer:
    """Make a Trainer train with the group, whose workers may join and leave at any time.

    Call it before `trainer.train()`. Losses, gradients, schedules, log history and callbacks are
    those of one process that trains with the whole global batch: padded and packed text is
    weighted by its tokens. A step has `per_device_train_batch_size * gradient_accumulation_steps`
    samples for each worker of the largest group, at any number of workers; the Trainer itself
    accumulates nothing then. Datasets may be torch's, or batches of the run's own, as with Ray:
    `train_dataset=train.get_dataset_shard("train").iter_torch_batches(batch_size=8)`, whose batch
    size then counts. Evaluation and prediction: every worker processes all samples, each once.
    Import this module before `TrainingArguments` are created: a worker that joins then builds model
    and data while the others train; otherwise they wait for it from there on.

    A run resumes from automatic checkpoints (`CheckpointConfig`); `save_strategy` also writes the
    Trainer's own, by one worker, and by the next one if it dies meanwhile.
    `trainer.train(resume_from_checkpoint=...)` begins a run at the step of such a one, with the
    samples that follow there; a run that is further continues from its own state.

    Args:
        trainer: any, including subclasses; its `training_step` and `compute_loss` see a
            micro-batch.
        global_batch_size: samples of a step, to override the default above.

    Returns:
        The same object.

    Raises:
        UsageError: outside a train function, prepared twice, its model is sharded by the
            library itself, or its collator has a seed of its own.
    """
    engine = require_engine("prepare_trainer")
    if not isinstance(trainer, Trainer):
        raise UsageError(
            f"prepare_trainer: expected a transformers.Trainer, got a {type(trainer).__name__}"
        )
    if isinstance(trainer, _InSteps):
        raise UsageError("prepare_trainer: this trainer is prepared already")
    if Version(transformers.__version__) < OLDEST:
        raise UsageError(
            f"prepare_trainer: transformers {transformers.__version__}: expected {OLDEST} or "
            f"newer, whose Trainer runs each epoch in a method of its own and accumulates no "
            f"gradients in its Accelerator: pip install 'transformers>={OLDEST}'"
        )
    see_one_process(trainer.accelerator, "prepare_trainer")
    args = trainer.args
    if args.auto_find_batch_size:
        raise UsageError(
            "prepare_trainer: auto_find_batch_size=True: the batch size decides which samples are "
            "trained with together, on all workers; set per_device_train_batch_size"
        )
    collator: Any = trainer.data_collator
    if hasattr(collator, "generator") and getattr(collator, "seed", None) is not None:
        raise UsageError(
            f"prepare_trainer: {type(collator).__name__}(seed={collator.seed}) draws from a "
            f"generator of each process, so that samples depend on which worker reads them: leave "
            f"seed= out; what is drawn then follows from the seed of the run and the sample"
        )
    if hasattr(trainer, "_buffered_inputs"):  # TRL's, of GRPO and the like.
        raise UsageError(
            f"prepare_trainer: {type(trainer).__name__} generates samples for several steps at "
            f"once and keeps them in its process, so that a worker that joins has none of them: "
            f"train without prepare_trainer, from checkpoint to checkpoint, as by 'elastic run'"
        )
    workers, batches = require_context("prepare_trainer").max_workers, trainer.train_dataset
    size, of_shard = args.train_batch_size, None
    if isinstance(batches, ShardBatches):
        size, of_shard = batches.batch_size, batches.global_batch_size
    size = global_batch_size or of_shard or size * args.gradient_accumulation_steps * workers
    args.gradient_accumulation_steps = 1
    args.average_tokens_across_devices = False  # Micro-batches are weighted by their tokens.
    seed = args.seed if args.data_seed is None else args.data_seed
    engine.options = replace(engine.options, seed=seed)
    cls = type(trainer)
    trainer.__class__ = type(cls.__name__, (_InSteps, cls), {"__module__": cls.__module__})
    trainer._elastic = _Run(trainer, size)  # type: ignore[attr-defined]
    trainer.callback_handler.callbacks.insert(0, trainer._elastic)  # type: ignore[attr-defined]
    return trainer


class _Run(TrainerCallback):
    """Connects a prepared Trainer to the run; called before all other callbacks.

    Attributes:
        global_batch: samples of a step.
        loader: yields the Trainer's training steps.
        draft: folder in which a checkpoint is being written by this worker.
        owed: the step of a checkpoint that another worker writes, 0 if there is none. Until that
            worker has computed the next step, it may die, and this one write the checkpoint.
        is_evaluated: the evaluation at the start of the run is done.
        logged: what `trainer.log` is given in the micro-batch at hand, None outside of one.
        is_called: `trainer.train()` was called.
        has_begun: it has read what it begins with.
        unread: why this worker could not read the checkpoint that the run began with; others may
            have removed it since, and their state is what counts.
    """

    def __init__(self, trainer: Trainer, global_batch: int) -> None:
        self.global_batch = global_batch
        self.loader: _Steps | None = None
        self.draft: str | None = None
        self.owed, self.is_evaluated = 0, False
        self.logged: dict[str, Any] | None = None
        self.is_called = self.has_begun = False
        self.unread: Exception | None = None
        self._trainer: Any = trainer
        self._engine = require_engine("prepare_trainer")
        self._epochs: Iterator[int] = iter(())
        self._epoch = -1
        self._steps: Iterator[WholeStep] = iter(())
        self._num_steps, self._stops = 0, False

    # ------------------------------------------------------------------- the run's state

    def state_dict(self) -> dict[str, Any]:
        """Return the Trainer's counters, its log, and its callbacks' state."""
        trainer = self._trainer
        state = dataclasses.asdict(trainer.state)
        return {
            "state": {name: value for name, value in state.items() if name not in OF_THIS_WORKER},
            "counted": {n: _plain(getattr(trainer, n)) for n in COUNTED if hasattr(trainer, n)},
            "stops": trainer.control.should_training_stop,
            "stops_epoch": trainer.control.should_epoch_stop,
            "owed": self.owed,
            "is_evaluated": self.is_evaluated,
            "callbacks": [
                one.state()["attributes"] if isinstance(one, ExportableState) else one.state_dict()
                for one in self._with_state()
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of another worker, or of a checkpoint."""
        trainer = self._trainer
        for name, value in state["state"].items():
            setattr(trainer.state, name, value)
        for name, value in state["counted"].items():
            mine = getattr(trainer, name)
            setattr(trainer, name, mine.new_tensor(value) if torch.is_tensor(mine) else value)
        self._stops = state["stops"]
        self._decide(state)
        self.owed, self.is_evaluated = state["owed"], state["is_evaluated"]
        for one, theirs in zip(self._with_state(), state["callbacks"], strict=True):
            if not isinstance(one, ExportableState):
                one.load_state_dict(theirs)
                continue
            for name, value in theirs.items():
                setattr(one, name, value)

    def follow(self) -> None:
        """Decide after a step that others did what they have decided after it."""
        self._decide(self._engine.state.late(NAME))

    def _decide(self, state: Mapping[str, Any]) -> None:
        control = self._trainer.control
        control.should_training_stop = state["stops"]
        control.should_epoch_stop = state["stops_epoch"]

    def _with_state(self) -> list[Any]:
        """Return the callbacks that have a state, in an order that is the same on all workers."""
        found = [
            one
            for one in self._trainer.callback_handler.callbacks
            if one is not self
            and (
                isinstance(one, ExportableState)
                or (hasattr(one, "state_dict") and hasattr(one, "load_state_dict"))
            )
        ]
        # The Trainer puts those of its own checkpoint behind the others.
        return sorted(found, key=lambda one: type(one).__name__)

    # ------------------------------------------------------------------- the Trainer's events

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Register what the Trainer has built, and continue from the run's state."""
        engine, trainer = self._engine, self._trainer
        self.has_begun = True
        optimizer: Any = trainer.optimizer
        engine.add_model(trainer.model)
        engine.add_optimizer(getattr(optimizer, "optimizer", optimizer))
        if isinstance(optimizer, AcceleratedOptimizer):
            optimizer.__setstate__({})  # With a scaler it has kept the method `step` of before.
        engine.add_scheduler(trainer.lr_scheduler)
        engine.register(NAME, self, is_own=True)
        engine.at_boundary = self.take_place
        begin = self._begin()
        self._epochs = engine.epochs(state.num_train_epochs, begin.epoch, begin.step)
        self._next_epoch()
        if self.unread is not None and not state.global_step:
            raise self.unread  # Nobody has got further, or has read it.
        if state.global_step and engine.cursor == Cursor() and not args.ignore_data_skip:
            raise UsageError(
                f"trainer.train(resume_from_checkpoint=...): the checkpoint is of step "
                f"{state.global_step} of an iterable dataset, and does not record which samples "
                f"were read up to it: start the same run again without it, which resumes from its "
                f"automatic checkpoints (RunConfig.checkpoint_config), or set "
                f"ignore_data_skip=True to begin at the first sample"
            )
        self.take_place(begins=True)

    def _begin(self) -> Cursor:
        """Return where the Trainer's own checkpoint was written, if it has loaded one."""
        trainer = self._trainer
        state = trainer.state
        if self.loader is None or not (steps := self.loader.steps_per_epoch()):
            return Cursor()
        if state.global_step >= state.max_steps:
            return Cursor(state.num_train_epochs)  # Also where `max_steps` ends within an epoch.
        epoch, step = divmod(state.global_step, steps)
        return Cursor(epoch, 0 if trainer.args.ignore_data_skip else step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Set the fraction of epochs done, counted in batches of the loader as by a Trainer."""
        cursor, data = self._engine.cursor, self._engine.data
        if isinstance(data, DataPlan):
            rest = 0 if data.drop_last else data.micro_batch_size - 1
            batches = (data.num_samples + rest) // data.micro_batch_size
            done = min(cursor.step * data.num_micro_batches, batches)
            state.epoch = cursor.epoch + done / batches
        else:
            state.epoch = cursor.epoch + cursor.step / state.max_steps

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Keep the Trainer from stopping after an epoch without steps left for a late joiner."""
        if not self._num_steps:
            control.should_training_stop = self._stops or state.global_step >= state.max_steps

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """End the loop over epochs."""
        self._next_epoch()
        close = getattr(self._epochs, "close", None)
        if close is not None:
            close()

    # ------------------------------------------------------------------- epochs and steps

    def _next_epoch(self) -> None:
        self._epoch = next(self._epochs, sys.maxsize)

    def has_epoch(self, epoch: int) -> bool:
        """Advance to this epoch; return whether any of it is left to do."""
        while self._epoch < epoch:
            self._next_epoch()
        return self._epoch == epoch

    def is_done(self) -> bool:
        """Return whether no epoch is left."""
        return self._epoch == sys.maxsize

    def is_over(self) -> bool:
        """Pass the end of an epoch all of whose steps were done when this worker joined.

        The others reach it after all code of that epoch, their evaluation included, whose log
        entry came with their state.
        """
        if self.loader is None or not (steps := self.loader.steps_per_epoch()):
            return False
        if self._engine.cursor.step < steps:
            return False
        next(self.loader.steps(), None)  # Started without the Trainer, which has nothing to do.
        state = self._trainer.state
        is_last = self._stops or state.global_step >= state.max_steps
        self._trainer.control.should_training_stop = is_last
        return True

    def steps(self, loader: PreparedLoader) -> Iterator[WholeStep]:
        """Yield the steps left in the epoch, up to where the others have stopped.

        A worker that has joined in it has fewer than the Trainer asks for.
        """
        trainer, self._steps, self._num_steps = self._trainer, loader.steps(), 0
        for step in self._steps:
            self._num_steps += 1
            yield step
            # To ask for more would pass the end of the epoch, before what the Trainer does there.
            is_last = self._engine.cursor.step == loader.steps_per_epoch()
            if is_last or trainer.control.should_training_stop:
                return

    def end_epoch(self) -> None:
        """End the epoch with all others, also if the Trainer has stopped in the middle of it."""
        self._engine.end_epoch()
        next(self._steps, None)

    def take_place(self, *, begins: bool = False) -> None:
        """Set the Trainer's rank to this worker's: the first one writes and shows progress.

        It also writes the checkpoint of the last step if the one that did may have died in it.
        """
        trainer = self._trainer
        is_first = take_place()
        state = trainer.state
        state.is_world_process_zero = trainer.is_world_process_zero()
        state.is_local_process_zero = trainer.is_local_process_zero()
        if is_first and not begins:
            self._open()
        if self.owed and self.owed == state.global_step and trainer.args.should_save:
            trainer._save_checkpoint(trainer.model_wrapped, None)

    def _open(self) -> None:
        """Open what only the first worker has: progress bars, and the runs of trackers."""
        trainer = self._trainer
        for one in trainer.callback_handler.callbacks:
            is_tracker = hasattr(one, "_initialized")
            if is_tracker:
                one._initialized = False  # It is set on every worker.
            if is_tracker or (isinstance(one, ProgressCallback) and one.training_bar is None):
                one.on_train_begin(
                    trainer.args,
                    trainer.state,
                    trainer.control,
                    model=trainer.model,
                    processing_class=trainer.processing_class,
                )


class _Steps:
    """The Trainer's loader: of whole steps. Everything else is the prepared loader's."""

    def __init__(self, run: _Run, loader: PreparedLoader) -> None:
        self._run, self._loader = run, loader

    def __len__(self) -> int:
        """Return the steps of an epoch; TypeError where that is not known."""
        steps = self._loader.steps_per_epoch()
        if not steps:
            raise TypeError("an iterable dataset: the steps of an epoch are known once it is over")
        return steps

    def __iter__(self) -> Iterator[WholeStep]:
        return self._run.steps(self._loader)

    def __getattr__(self, name: str) -> Any:
        """Pass everything else on to the prepared loader."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._loader, name)


class _InSteps(Trainer):
    """Mixin that is put before a Trainer's own class."""

    _elastic: _Run

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **named: Any) -> Any:
        """Train, from the run's state if a worker has it, whether or not this one can read a file.

        Raises:
            UsageError: called for the second time.
        """
        run = self._elastic
        if run.is_called:
            raise UsageError(
                "trainer.train() is called a second time: a run trains once, from its own state if "
                "it has one; set num_train_epochs or max_steps to all that is to be trained, or "
                "begin another run by TorchTrainer(...).fit()"
            )
        run.is_called = True
        try:
            return super().train(resume_from_checkpoint, *args, **named)
        except Exception as error:
            if not resume_from_checkpoint or run.has_begun:
                raise
            run.unread = error
        if self.neftune_noise_alpha is not None:
            self.neftune_hook_handle.remove()  # Or there were two.
        return super().train(None, *args, **named)

    def get_train_dataloader(self) -> Any:
        """Return the loader of steps, whose micro-batches come from the user's own loader."""
        run = self._elastic
        if run.loader is None and isinstance(self.train_dataset, ShardBatches):
            run.loader = _Steps(run, self.train_dataset.loader(run.global_batch, self._weight))
        if run.loader is None:
            prepare = self.accelerator.prepare
            self.accelerator.prepare = lambda loader, **_: loader
            try:
                loader = super().get_train_dataloader()
            finally:
                self.accelerator.prepare = prepare
            if not isinstance(loader, DataLoader):
                raise UsageError(
                    f"prepare_trainer: get_train_dataloader returned a {type(loader).__name__}; "
                    f"expected a torch.utils.data.DataLoader that is not prepared"
                )
            sizes: dict[str, Any] = {"global_batch_size": run.global_batch}
            if loader.batch_size is None:
                sizes = {"batches_per_step": run.global_batch // self.args.train_batch_size}
            prepared = prepare_data_loader(loader, weigh=self._weight, **sizes)
            run.loader = _Steps(run, prepared)
        return run.loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the batches of a shard's rows, or the Trainer's own loader."""
        chosen: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(chosen, str):
            chosen = self.eval_dataset[chosen]  # type: ignore[index]
        if isinstance(chosen, ShardBatches):
            return chosen.whole()
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return the batches of a shard's rows, or the Trainer's own loader."""
        if isinstance(test_dataset, ShardBatches):
            return test_dataset.whole()
        return super().get_test_dataloader(test_dataset)

    def _weight(self, batch: Any) -> Any:
        """Return the number of items that the loss of a micro-batch is a mean over."""
        items = self._get_num_items_in_batch([batch], torch.device("cpu"))
        return BY_SAMPLES if items is None else items

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        return self._elastic.global_batch

    def _init_training_state(self, *args: Any, **named: Any) -> tuple[int, int]:
        """Load the state of the Trainer's own checkpoint; skip nothing of what it has trained.

        The run does that: it may be further than this checkpoint, or not yet as far.
        """
        super()._init_training_state(*args, **named)
        return 0, 0

    def _run_epoch(self, **named: Any) -> None:  # type: ignore[override]
        """Run the steps left in an epoch; none if it was over when this worker joined."""
        run = self._elastic
        if not run.has_epoch(named["epoch"]):
            # Others may have decided to stop after a later one, whose end this worker is to pass.
            self.control.should_training_stop = run.is_done()
        elif not run.is_over():
            # Each micro-batch has a seed of its own, not that of the checkpoint.
            super()._run_epoch(**named | {"resume_from_checkpoint": None})
            run.end_epoch()

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], None]:
        """Return a step, whose micro-batches are read when they are computed."""
        step = next(epoch_iterator, None)
        return ([step] if step is not None else []), None

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Compute all micro-batches of a step, and return its loss."""
        if not isinstance(inputs, WholeStep):
            return super().training_step(model, inputs, num_items_in_batch)
        device, run = self.args.device, self._elastic
        begin = getattr(self.optimizer, "train", None)
        if callable(begin):
            begin()  # Moves weights; within the micro-batches the Trainer's own call finds it done.

        def compute(batch: Any) -> dict[str, Any]:
            items, run.logged = self._get_num_items_in_batch([batch], device), {}
            try:
                loss = super(_InSteps, self).training_step(model, batch, items)
                logged = {f"{LOGGED}{name}": value for name, value in run.logged.items()}
            finally:
                run.logged = None
            flos = super(_InSteps, self).floating_point_ops(batch)
            inputs.add(flos=flos, tokens=self._tokens(batch), **dict.fromkeys(logged, 1.0))
            return {"loss": loss} | logged

        averages, sums = inputs.run(compute), inputs.sums
        if require_engine("trainer.train").has_computed() and "flos" not in sums:
            raise UsageError(
                "self.log(...) or train.log(...) in compute_loss or training_step: the workers "
                "have logged different names in one step: log the same ones for each micro-batch"
            )
        logged = [name for name in sums if name.startswith(LOGGED) and name in averages]
        if logged:
            self.log({name.removeprefix(LOGGED): averages[name] for name in logged})
        return torch.tensor(averages.get("loss", 0.0), device=device)

    def log(self, logs: dict[str, float], *args: Any, **named: Any) -> None:
        """Log; what is logged for a micro-batch is averaged over the step, and logged once.

        Raises:
            UsageError: it is no number, or there are too many in a micro-batch.
        """
        logged = self._elastic.logged
        if logged is None:
            super().log(logs, *args, **named)
            return
        logged.update(logs)
        for name, value in logs.items():
            if not isinstance(value, (int, float)) and not (
                torch.is_tensor(value) and value.numel() == 1
            ):
                raise UsageError(
                    f"self.log({{{name!r}: ...}}) in compute_loss or training_step: a "
                    f"{type(value).__name__}; log numbers, which are averaged over the step"
                )
        if len(logged) > LOGGED_MAX:
            raise UsageError(
                f"self.log(...) in compute_loss or training_step: {len(logged)} names; log at most "
                f"{LOGGED_MAX} in a micro-batch"
            )

    def _tokens(self, batch: Any) -> int:
        """Return the number of tokens that a micro-batch adds to the count."""
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(batch)
        after, self.state.num_input_tokens_seen = self.state.num_input_tokens_seen, before
        return after - before

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if not isinstance(inputs, WholeStep):
            return super()._track_num_input_tokens(inputs)
        self.state.num_input_tokens_seen += int(inputs.sums.get("tokens", 0))

    def floating_point_ops(self, inputs: Any) -> int:
        """Return those of a whole step, summed over all ranks."""
        if not isinstance(inputs, WholeStep):
            return super().floating_point_ops(inputs)
        return int(inputs.sums.get("flos", 0))

    def _maybe_log_save_evaluate(self, *args: Any, **named: Any) -> None:
        """Log, evaluate and save; what others did with a step of theirs comes with their state."""
        if require_engine("trainer.train").runs_after_step():
            super()._maybe_log_save_evaluate(*args, **named)
        else:
            self._elastic.follow()

    def _evaluate(self, *args: Any, **named: Any) -> dict[str, float]:
        """Evaluate; at the start only if no worker of the run has done so."""
        if not named.get("skip_scheduler"):
            return super()._evaluate(*args, **named)
        if self._elastic.is_evaluated:
            return {}
        metrics = super()._evaluate(*args, **named)
        self._elastic.is_evaluated = True
        return metrics

    def _get_output_dir(self, trial: Any) -> str:
        """Return the folder of checkpoints, or the one where this worker writes its next one."""
        return self._elastic.draft or super()._get_output_dir(trial)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write the Trainer's own checkpoint on one worker; the others update their state alike."""
        run, state = self._elastic, self.state
        folder = Path(self._get_output_dir(trial), f"checkpoint-{state.global_step}")
        best = state.best_model_checkpoint
        if state.best_global_step == state.global_step:
            best = str(folder)
        if self.args.should_save:
            with working("writes a checkpoint"):
                self._write(folder, model, trial, best)
        else:
            self.store_flos()
        state.best_model_checkpoint = best
        run.owed = 0 if self.args.should_save else state.global_step

    def _write(self, folder: Path, model: nn.Module, trial: Any, best: str | None) -> None:
        """Write a checkpoint, whole or not at all: this worker may die meanwhile."""
        run, args = self._elastic, self.args
        folder.parent.mkdir(parents=True, exist_ok=True)
        for left in folder.parent.glob(f"{DRAFT}*"):  # By workers that have died.
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(
            dir=folder.parent, prefix=DRAFT, ignore_cleanup_errors=True
        ) as draft:
            run.draft = draft
            try:
                super()._save_checkpoint(model, trial)
            finally:
                run.draft = None
            written = Path(draft, folder.name)
            if written.is_dir():  # A subclass may write elsewhere.
                self.state.best_model_checkpoint = best
                self.state.save_to_json(str(written / TRAINER_STATE_NAME))
                if folder.exists():  # Of an earlier run; if this worker dies here, another writes.
                    shutil.move(folder, Path(draft, "replaced"))
                shutil.move(written, folder)
        if args.push_to_hub:
            self._push_from_checkpoint(str(folder))
        rotate_checkpoints(
            output_dir=str(folder.parent),
            save_total_limit=args.save_total_limit,
            best_model_checkpoint=best,
            use_mtime=True,
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._elastic.draft is None:  # Uploads go on after it has got its place.
            super()._push_from_checkpoint(checkpoint_folder)

    def _load_best_model(self) -> None:
        """Load it, on every worker; UsageError on one without it, which would keep the last."""
        best = self.state.best_model_checkpoint
        if best is not None and not Path(best).is_dir():
            raise UsageError(
                f"load_best_model_at_end=True: {best} is not on this worker's machine: set "
                f"output_dir to a folder on storage that all machines share"
            )
        super()._load_best_model()


class RayTrainReportCallback(TrainerCallback):
    """Reports what was logged, with the checkpoint, whenever the Trainer has saved one.

    The reported checkpoint contains the Trainer's in its folder `checkpoint`, as with Ray Train.
    """

    CHECKPOINT_NAME = "checkpoint"

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Report on all workers; the one that has written adds the files."""
        metrics: dict[str, Any] = {}
        for log in state.log_history:
            metrics.update(log)
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            path = Path(str(args.output_dir), f"checkpoint-{state.global_step}")
            if args.should_save and path.is_dir():
                shutil.copytree(path, Path(folder, self.CHECKPOINT_NAME))
                checkpoint = Checkpoint.from_directory(folder)
            report(metrics, checkpoint=checkpoint)


TrainReportCallback = RayTrainReportCallback


class TransformersTrainer(TorchTrainer):
    """A run of a Trainer on many workers, like Ray Train's class of this name."""

    def __init__(
        self,
        trainer_init_per_worker: Callable[..., Trainer],
        *,
        trainer_init_config: dict[str, Any] | None = None,
        **named: Any,
    ) -> None:
        """Describe the run; nothing is started.

        Args:
            trainer_init_per_worker: called on every worker with the config; returns the Trainer.
            trainer_init_config: its argument; must be picklable.
            named: arguments of `TorchTrainer`: scaling_config, run_config, ...
        """

        def train_loop(config: dict[str, Any]) -> None:
            prepare_trainer(trainer_init_per_worker(config)).train()

        super().__init__(train_loop, train_loop_config=trainer_init_config or {}, **named)


def _plain(value: Any) -> Any:
    return value.item() if torch.is_tensor(value) else value
