"""Ray Tune's class API: a trial whose steps are the calls of a method.

    class Search(tune.Trainable):
        def setup(self, config): ...
        def step(self): return {"loss": ...}
        def save_checkpoint(self, folder): ...
        def load_checkpoint(self, folder): ...

Rule: `steps` makes it a function that reports, as any other trial; nothing else knows of classes.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from elastic.errors import UsageError
from elastic.train.checkpoint import Checkpoint
from elastic.train.dict_checkpoint import read_dict, write_dict
from elastic.tune.session import get_checkpoint, get_context, report

DONE, SHOULD_CHECKPOINT = "done", "should_checkpoint"
"""Keys of a step's result: the trial ends after it, or saves a checkpoint."""
STATE = "trainable.json"
"""File beside what a class saves: of which trial, how far it is, and whether a dict was saved."""


class Trainable:
    """Base class: `step` is called until a stop criterion is met, or its result has done=True.

    Attributes:
        config: of the trial.
        iteration: number of finished steps.
    """

    config: dict[str, Any]
    iteration: int = 0

    @property
    def training_iteration(self) -> int:
        """Return the number of finished steps."""
        return self.iteration

    @property
    def trial_id(self) -> str:
        """Return the trial's name: study and number."""
        return get_context().get_trial_id()

    @property
    def trial_name(self) -> str:
        """Return the trial's name: study and number."""
        return get_context().get_trial_name()

    @property
    def logdir(self) -> str:
        """Return the path of a folder for the trial's own files."""
        return get_context().get_trial_dir()

    def setup(self, config: dict[str, Any]) -> None:
        """Run once, before the first step or `load_checkpoint`."""

    def step(self) -> Mapping[str, Any]:
        """Run a part of the training; return metrics, which are reported."""
        raise NotImplementedError

    def save_checkpoint(self, checkpoint_dir: str) -> Any:
        """Write a checkpoint to a folder, or return it as a dict; see `Checkpoint.from_dict`."""
        raise NotImplementedError

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Read a checkpoint: the folder's path, or the dict."""
        raise NotImplementedError

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Return whether it takes another config; not called: a changed trial is a new process."""
        return False

    def cleanup(self) -> None:
        """Run at the end, if the trial ends by itself."""

    @classmethod
    def default_resource_request(cls, config: Mapping[str, Any]) -> Any:
        """Return the resources of a trial, as for `with_resources`; None for one CPU."""
        return None


def steps(kind: type[Trainable], every: int) -> Callable[..., None]:
    """Return a function that runs a trial of a class.

    Args:
        kind: the class.
        every: steps between two checkpoints; 0 for those that its results ask for.
    """

    def run(config: dict[str, Any], **parameters: Any) -> None:
        one = kind()
        one.config = config
        one.setup(config, **parameters)
        checkpoint = get_checkpoint()
        # Its last step may be recorded already, if the trial was killed before its end.
        is_done = checkpoint is not None and _load(one, checkpoint)
        while not is_done:
            metrics = one.step()
            if not isinstance(metrics, Mapping):
                raise UsageError(
                    f"{kind.__name__}.step returned a {type(metrics).__name__}: expected a dict of "
                    f"metrics"
                )
            one.iteration += 1
            is_done = bool(metrics.get(DONE))
            is_due = every and (is_done or one.iteration % every == 0)
            if is_due or metrics.get(SHOULD_CHECKPOINT):
                with tempfile.TemporaryDirectory() as folder:
                    report(metrics, checkpoint=_saved(one, folder, is_done))
            else:
                report(metrics)
        one.cleanup()

    run.__name__ = kind.__name__
    return run


def checkpoints_every(kind: type[Trainable], frequency: int | None, at_end: bool | None) -> int:
    """Return the steps between two checkpoints: each one by default, if the class saves any.

    Args:
        kind: the class.
        frequency: of the user; None for the default, 0 for none.
        at_end: the newest is always kept, so that it is there whenever the trial is stopped.
    """
    if kind.save_checkpoint is Trainable.save_checkpoint:
        return 0
    return 1 if at_end or frequency is None else frequency


def _saved(one: Trainable, folder: str, is_done: bool) -> Checkpoint:
    """Return a checkpoint in a folder; UsageError if reading the class's dict back needs code."""
    saved = one.save_checkpoint(folder)
    is_dict = isinstance(saved, dict)
    if is_dict:
        try:
            write_dict(saved, Path(folder))
        except UsageError as error:
            raise UsageError(
                f"{type(one).__name__}.save_checkpoint returned a dict that cannot be stored "
                f"(write such values into checkpoint_dir, and return no dict): {error}"
            ) from error
    state = {"iteration": one.iteration, "done": is_done, "trial": _trial(), "dict": is_dict}
    Path(folder, STATE).write_text(json.dumps(state), encoding="utf-8")
    return Checkpoint.from_directory(folder)


def _load(one: Trainable, checkpoint: Checkpoint) -> bool:
    """Load a checkpoint; return whether this trial was done then, as no clone of it is."""
    with checkpoint.as_directory() as folder:
        state = json.loads(Path(folder, STATE).read_text(encoding="utf-8"))
        one.iteration = int(state["iteration"])
        one.load_checkpoint(read_dict(Path(folder)) if state["dict"] else folder)
        return bool(state["done"]) and state["trial"] == _trial()


def _trial() -> str:
    return get_context().get_trial_id()
