"""What the first worker writes for all: Lightning's checkpoints, and the rows of its loggers.

Rule: what the first worker writes between two steps, every other one keeps until the next step is
computed: the first one has taken part in it, so it has written. If it is lost before that, the next
first worker writes what it has kept, before it computes anything of that step: until then weights
are those of the checkpoint. All decide alike what is written, and under which name: what they
decide from is part of the run's state, and nobody asks the file system.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter

from elastic.train.session import working

OF_CALLBACK = (
    "dirpath",
    "current_score",
    "_last_global_step_saved",
    "_last_checkpoint_saved",
    "_defer_save_until_validation",
)
"""Attributes of a ModelCheckpoint that it decides from, and that its own state lacks or ignores."""


class Files:
    """The files of one call of `trainer.fit`."""

    def __init__(self, trainer: Any) -> None:
        """Begin with what is there; the Trainer's callbacks must be set up."""
        self._trainer = trainer
        # Writes of the others; of a logger's, with its row.
        self._kept: list[tuple[Mapping[str, Any], Callable[[], Any]]] = []
        self._checkpoints = [one for one in trainer.callbacks if isinstance(one, ModelCheckpoint)]
        self._paths = {path for one in self._checkpoints for path in _files_of(one)}
        for one in self._checkpoints:
            vars(one)["file_exists"] = lambda path, trainer: str(path) in self._paths
        for logger in trainer.loggers:
            vars(logger)["log_metrics"] = partial(self._log, logger, logger.log_metrics)

    def close(self) -> None:
        """Give the callbacks and loggers their own methods back."""
        for one in self._checkpoints:
            vars(one).pop("file_exists", None)
        for logger in self._trainer.loggers:
            vars(logger).pop("log_metrics", None)

    # ------------------------------------------------------------------- writing

    def write(self, path: Any, save: Callable[[], Any]) -> None:
        """Write a checkpoint, if this worker is the first one."""
        self._paths.add(str(path))
        self._do(save)

    def remove(self, path: Any, delete: Callable[[], Any]) -> None:
        """Remove a checkpoint, if this worker is the first one."""
        self._paths.discard(str(path))
        self._do(delete)

    def _do(self, write: Callable[[], Any]) -> None:
        if not self._trainer.is_global_zero:
            self._kept.append(({}, write))
            return
        with working("writes a checkpoint"):
            write()

    def _log(
        self,
        logger: Any,
        log: Callable[..., None],
        metrics: Mapping[str, Any],
        step: int | None = None,
        **named: Any,
    ) -> None:
        """Take a row of a logger; only the first worker's does anything with it."""
        log(metrics, step, **named)
        if isinstance(logger, CSVLogger):
            logger.save()  # Rows of callbacks stay in memory, which the others know nothing of.
        if not self._trainer.is_global_zero:
            row = {**metrics, "step": step}
            self._kept.append((row, partial(log, dict(metrics), step, **named)))

    def written(self) -> None:
        """Forget what was kept: a step is computed since, in which the first worker took part."""
        self._kept = []

    def take_over(self) -> None:
        """Go on where the lost first worker has stopped; it may have written some of it."""
        kept, self._kept = self._kept, []
        self._continue_rows([row for row, _ in kept if row])
        for _, write in kept:
            self._do(write)
        for logger in self._trainer.loggers:
            logger.save()

    def _continue_rows(self, again: Sequence[Mapping[str, Any]]) -> None:
        """Let CSV files keep the rows before those written again, or before the next step."""
        steps = [row["step"] for row in again if "epoch" in row and row["step"] is not None]
        before = min([*steps, self._trainer.fit_loop.epoch_loop._batches_that_stepped])
        for logger in self._trainer.loggers:
            if isinstance(logger, CSVLogger):
                logger._experiment = _Rows(logger.log_dir, before, again)

    # ------------------------------------------------------------------- the run's state

    def state_dict(self) -> dict[str, Any]:
        """Return the folders of the run, what is in them, and what callbacks know of it."""
        return {
            "paths": sorted(self._paths),
            "versions": [one.version if _is_numbered(one) else None for one in self._loggers()],
            "checkpoints": [
                {name: vars(one)[name] for name in OF_CALLBACK} for one in self._checkpoints
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Write into the folders of the run; counters must be loaded, callbacks must not."""
        self._paths = set(state["paths"])
        for one, values in zip(self._checkpoints, state["checkpoints"], strict=True):
            vars(one).update(values)
        moved = False
        for logger, version in zip(self._loggers(), state["versions"], strict=True):
            if version is not None and logger.version != version:
                logger._version, logger._experiment, moved = version, None, True
        if moved and self._trainer.is_global_zero:
            self._continue_rows([])

    def _loggers(self) -> list[Any]:
        return list(self._trainer.loggers)


def _is_numbered(logger: Any) -> bool:
    """Return whether each process would choose the next free version by itself."""
    return isinstance(logger, (CSVLogger, TensorBoardLogger))


def _files_of(callback: Any) -> list[str]:
    """Return the paths in its folder as the callback would name them."""
    files, root = callback._fs, callback._fs._strip_protocol(callback.dirpath)
    found = files.find(root) if files.exists(root) else []
    return [os.path.join(callback.dirpath, os.path.relpath(path, root)) for path in found]


class _Rows(ExperimentWriter):
    """A CSVLogger's writer that goes on with a file, where the library's own deletes it.

    Lightning adds the epoch to rows that it counts by steps; others, of callbacks, may count what
    they like, such as samples, and are kept.
    """

    def __init__(self, log_dir: str, before: int, again: Sequence[Mapping[str, Any]] = ()) -> None:
        """Open the file; rows from step `before` on are written again, of callbacks, too."""
        self._before = before
        self._again = [{name: _text(value) for name, value in row.items()} for row in again]
        super().__init__(log_dir)

    def _check_log_dir_exists(self) -> None:
        path = self.metrics_file_path
        if not self._fs.isfile(path):
            return
        text = self._fs.read_text(path)
        reader = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]))  # Without a torn row.
        rows = [one for one in reader if self._is_kept(one)]
        self.metrics_keys = list(reader.fieldnames or ())
        with self._fs.transaction, self._fs.open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=self.metrics_keys)
            writer.writeheader()
            writer.writerows(rows)

    def _is_kept(self, row: Mapping[str, str]) -> bool:
        if row.get("epoch"):
            return int(row["step"]) < self._before
        return {name: text for name, text in row.items() if text} not in self._again


def _text(value: Any) -> str:
    """Return a number as it stands in a file."""
    return str(value.item() if hasattr(value, "item") else value)
