"""The state of Lightning's Trainer that workers share: counters, callbacks, what was logged."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule

from elastic.train.lightning.files import Files


class TrainerState:
    """The state of a Trainer as a registered object of the run."""

    def __init__(self, trainer: Any, files: Files) -> None:
        self._trainer, self._files = trainer, files
        # Of metrics that were logged before this worker joined, and not by it yet.
        self._results: dict[str, Any] = {}
        # What this worker has received, until the loop requests its first step.
        self._received: Mapping[str, Any] | None = None
        self._has_begun = False

    def resume(self) -> int:
        """Continue where `ckpt_path` was written; return the steps of its epoch that are done."""
        fit = self._trainer.fit_loop
        loop, progress = fit.epoch_loop, fit.epoch_progress.current
        if progress.ready == progress.processed > progress.completed:
            # Of an epoch's end: Lightning would begin the next one only in its loop, when the
            # others may have received these counters.
            fit.epoch_progress.increment_completed()
            for each in (loop.batch_progress, loop.scheduler_progress):
                each.reset_on_run()
            loop.automatic_optimization.optim_progress.reset_on_run()
        if progress.ready <= progress.processed:
            return 0
        # Of a step within an epoch. Its batches may not include the one at whose end it was
        # written; its steps do.
        state = self.state_dict()
        state["batches"] = _whole(state["batches"], state["steps"])
        self._received = state
        return int(state["steps"]["current"]["completed"])

    def begin_loop(self) -> None:
        """Load again what was received before the loop, which has set its counters to zero."""
        if not self._has_begun and self._received is not None:
            self.load_state_dict(self._received)
        self._has_begun, self._received = True, None

    def add_results(self, results: Any) -> None:
        """Add to metrics of this epoch what was logged before this worker joined."""
        for key in [key for key in self._results if key in results]:
            _add(results[key], self._results.pop(key))

    def state_dict(self) -> dict[str, Any]:
        """Return the counters of Lightning and the state of its callbacks, as after whole steps."""
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
                "files": self._files.state_dict(),
                "data": trainer.datamodule.state_dict() if trainer.datamodule else {},
                "hooked": self._hooked(),
                "callbacks": {one.state_key: one.state_dict() for one in trainer.callbacks},
            }
        )

    def _hooked(self) -> dict[str, Any]:
        """Return what hooks keep in a checkpoint that is no state of their own, as averages are."""
        trainer, module = self._trainer, self._trainer.lightning_module
        hooks = [one for one in trainer.callbacks if _has_hook(one, Callback)]
        if not hooks and not _has_hook(module, LightningModule):
            return {}
        checkpoint = {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "state_dict": dict(module.state_dict()),
        }
        for one in hooks:
            one.on_save_checkpoint(trainer, module, checkpoint)
        module.on_save_checkpoint(checkpoint)
        return checkpoint

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of another worker, or of a checkpoint."""
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
                self._results[key] = values  # How to reduce them is not known yet.
        self._files.load_state_dict(state["files"])
        for one in trainer.callbacks:
            if state["callbacks"].get(one.state_key):
                one.load_state_dict(state["callbacks"][one.state_key])
        if trainer.datamodule and state["data"]:
            trainer.datamodule.load_state_dict(state["data"])
        if state["hooked"]:
            module = trainer.lightning_module
            for one in trainer.callbacks:
                one.on_load_checkpoint(trainer, module, state["hooked"])
            module.on_load_checkpoint(state["hooked"])


def _whole(progress: Mapping[str, Any], done: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return counters as they are between steps, when all that was started is completed.

    The completed number is that of `done`, by default their own.
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
    """Add to a metric of an epoch what was logged before this worker joined."""
    metric._computed = None
    if metric.meta.is_mean_reduction or metric.meta.is_sum_reduction:
        for name, value in before.items():
            setattr(metric, name, value + getattr(metric, name))
    else:
        metric.value = metric.meta.reduce_fx(before["value"], metric.value)


def _has_hook(thing: Any, base: type) -> bool:
    return type(thing).on_save_checkpoint is not base.on_save_checkpoint  # type: ignore[attr-defined]
