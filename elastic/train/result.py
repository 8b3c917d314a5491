"""What a training run left behind: every report, the checkpoints, and how it ended."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

from elastic.core.world import CheckpointRecord
from elastic.errors import ElasticError, UsageError
from elastic.storage.run_directory import RunDirectory
from elastic.train.checkpoint import Checkpoint


@dataclass(frozen=True)
class Result:
    """The outcome of `TorchTrainer.fit`.

    Attributes:
        metrics: what rank 0 reported last, None if it never did; with or without a checkpoint
            (Ray keeps only metrics that come with one).
        checkpoint: the newest recorded one, None if there is none.
        path: the run directory.
        best_checkpoints: (checkpoint, metrics) of all that were kept, oldest first.
        history: every report of rank 0, oldest first: metrics, and generation, index, unix_ns.
        return_value: what rank 0's train function returned, as far as JSON can say it.
        error: why the run failed, None if it did not.
    """

    metrics: dict[str, Any] | None
    checkpoint: Checkpoint | None
    path: str
    best_checkpoints: list[tuple[Checkpoint, dict[str, Any]]] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    return_value: Any = None
    error: ElasticError | None = None

    def get_best_checkpoint(self, metric: str, mode: str = "max") -> Checkpoint | None:
        """Return the kept checkpoint with the best value of a metric, None if none has it.

        A value that is no number, or not a finite one, is passed over.

        Raises:
            UsageError: mode is neither "max" nor "min".
        """
        if mode not in ("max", "min"):
            raise UsageError(f"get_best_checkpoint(mode={mode!r}): expected 'max' or 'min'")
        scored = [(_number(metrics.get(metric)), c) for c, metrics in self.best_checkpoints]
        scored = [(value, c) for value, c in scored if math.isfinite(value)]
        if not scored:
            return None
        choose = max if mode == "max" else min
        return choose(scored, key=lambda pair: pair[0])[1]

    @property
    def metrics_dataframe(self) -> Any:
        """Return `history` as a pandas DataFrame, one row per report.

        Raises:
            UsageError: pandas is not installed.
        """
        try:
            import pandas  # type: ignore[import-untyped]
        except ImportError as error:
            raise UsageError(
                "Result.metrics_dataframe needs pandas: pip install pandas, or use Result.history"
            ) from error
        return pandas.DataFrame([{**row["metrics"], **_place(row)} for row in self.history])


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (bool, int, float)) else math.nan


def _place(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "metrics"}


def read_history(run_path: str) -> list[dict[str, Any]]:
    """Return every report of rank 0 from a run directory, oldest first.

    A line that was torn by a kill in the middle of writing is left out.

    Raises:
        StorageError: the file is there and cannot be read.
    """
    return RunDirectory(run_path).read_metrics()


def committed_in(run_path: str, job_id: str = "") -> tuple[CheckpointRecord, ...]:
    """Return the checkpoints that count in a run directory, oldest first.

    Args:
        run_path: the run directory, "" for none.
        job_id: whose checkpoints, "" for all.

    Raises:
        StorageError: the directory cannot be read.
    """
    return RunDirectory(run_path).records(job_id) if run_path else ()


def result_of(
    run_path: str,
    checkpoints: tuple[CheckpointRecord, ...],
    returned: str,
    error: ElasticError | None = None,
) -> Result:
    """Put a result together from the run directory and the coordinator's record.

    Args:
        run_path: the run directory.
        checkpoints: recorded and kept, oldest first.
        returned: JSON of rank 0's return value, "" for none.
        error: why the run failed.
    """
    history = read_history(run_path) if run_path else []
    kept = [(Checkpoint(c.path), json.loads(c.metrics)) for c in checkpoints if not c.automatic]
    return Result(
        metrics=history[-1]["metrics"] if history else None,
        checkpoint=kept[-1][0] if kept else None,
        path=run_path,
        best_checkpoints=kept,
        history=history,
        return_value=json.loads(returned) if returned else None,
        error=error,
    )
