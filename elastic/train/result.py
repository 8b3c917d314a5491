"""The result of a training run: every report, the checkpoints, and how it ended."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec

from elastic.core.facts import CheckpointRecord, CheckpointStatus
from elastic.core.policy import retention
from elastic.core.records import JobRecord
from elastic.core.telemetry import Goodput
from elastic.errors import ElasticError, TrainingFailed, UsageError
from elastic.storage.files import Files
from elastic.storage.filesystems import url_in, without_query
from elastic.storage.metrics import has_metrics
from elastic.storage.run_directory import RunDirectory
from elastic.storage.run_record import RunPhase, read_run
from elastic.train.checkpoint import Checkpoint
from elastic.train.metrics import as_reported, from_json


@dataclass(frozen=True)
class Result:
    """The outcome of `TorchTrainer.fit`.

    Attributes:
        metrics: what rank 0 reported last, None if it never did; with or without a checkpoint
            (Ray keeps only metrics that come with one), and with what a validation of that
            checkpoint returned.
        checkpoint: the newest reported one; of a run that reported none, the newest that was taken
            automatically; None if there is neither.
        path: the run directory.
        best_checkpoints: (checkpoint, metrics) of all reported ones that were kept, including
            those of earlier attempts of the run; oldest first, or from `fit` of a run with a
            `checkpoint_score_attribute` the worst first, so that the last is the best.
        history: every report of rank 0, oldest first: metrics, and generation, index, unix_ns; in
            a loop over `train.epochs()` also `at`, the place in the run; of reports repeated at
            the same place only the last, and rank 1's where rank 0 was lost before its own.
        return_value: what rank 0's train function returned, as far as it is JSON-serializable.
        error: why the run failed, None if it did not.
        goodput: where the time of the workers went; None where that is not known, as for a run
            that was read from its directory.
        config: for a trial of `tune.Tuner` its arguments, None for other runs.
    """

    metrics: dict[str, Any] | None
    checkpoint: Checkpoint | None
    path: str
    best_checkpoints: list[tuple[Checkpoint, dict[str, Any]]] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    return_value: Any = None
    error: ElasticError | None = None
    config: Any = None
    goodput: Goodput | None = None

    @classmethod
    def from_path(cls, path: str | Path, storage_filesystem: Any = None) -> Result:
        """Return the result in a run directory, of a run that has ended or still runs.

        The train function's return value is not stored, and only one line of a failure is.

        Args:
            path: the run directory, storage_path/name: a local path or an fsspec URL.
            storage_filesystem: of fsspec or pyarrow, in which `path` is.

        Raises:
            UsageError: it is no run directory.
            StorageError: it cannot be read.
        """
        if storage_filesystem is not None:
            path = url_in(storage_filesystem, str(path))
        run_path = without_query(str(path)).rstrip("/")
        if "://" not in run_path:
            run_path = str(Path(path).expanduser().absolute())
        files = Files(run_path)
        record = read_run(files)
        if record is None and not has_metrics(files):
            raise UsageError(
                f"Result.from_path({str(path)!r}): no run directory (it has neither run.json nor "
                f"metrics); expected storage_path/name of a run"
            )
        error = None
        if record is not None and record.phase in (RunPhase.FAILED, RunPhase.STOPPED):
            error = TrainingFailed(f"run {record.name} {record.phase.value}: {record.reason}")
        return result_of(run_path, committed_in(run_path), "", error)

    def get_best_checkpoint(self, metric: str, mode: str = "max") -> Checkpoint | None:
        """Return the kept checkpoint with the best value of a metric.

        Values that are no finite numbers are skipped.

        Returns:
            None if there is no checkpoint, or none with such a value.

        Raises:
            UsageError: mode is neither "max" nor "min", or the metric was reported with none.
        """
        if mode not in ("max", "min"):
            raise UsageError(f"get_best_checkpoint(mode={mode!r}): expected 'max' or 'min'")
        known = {name for _, metrics in self.best_checkpoints for name in metrics}
        if self.best_checkpoints and metric not in known:
            raise UsageError(
                f"get_best_checkpoint({metric!r}): no checkpoint has this metric; expected one of "
                f"{', '.join(sorted(known)) or 'none: they were reported without metrics'}"
            )
        scored = [(_number(metrics.get(metric)), c) for c, metrics in self.best_checkpoints]
        scored = [(value, c) for value, c in scored if math.isfinite(value)]
        if not scored:
            return None
        choose = max if mode == "max" else min
        return choose(scored, key=lambda pair: pair[0])[1]

    @property
    def filesystem(self) -> fsspec.AbstractFileSystem:
        """Return the fsspec file system that the run directory is in."""
        return Files(self.path).fs

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

    A line truncated by a kill during the write is skipped. Where rank 0 was lost between a step
    and its report, that of rank 1 stands for it.

    Raises:
        StorageError: the file exists and cannot be read.
    """
    run = RunDirectory(run_path)
    rows = run.read_metrics()
    newest = {row["at"]: number for number, row in enumerate(rows) if "at" in row}
    rows = [row for n, row in enumerate(rows) if "at" not in row or newest[row["at"]] == n]
    if rows and all("at" in row for row in rows):  # In a loop of ours, whose places are in order.
        for row in run.read_metrics(1):
            if "at" in row and row["at"] not in newest:
                later = (n for n, other in enumerate(rows) if other["at"] > row["at"])
                rows.insert(next(later, len(rows)), row)
                newest[row["at"]] = -1
    return [{**row, "metrics": as_reported(row["metrics"])} for row in rows]


def committed_in(run_path: str) -> tuple[CheckpointRecord, ...]:
    """Return the committed checkpoints in a run directory, of all attempts, oldest first.

    Args:
        run_path: the run directory, "" for none.

    Raises:
        StorageError: the directory cannot be read.
    """
    return RunDirectory(run_path).records() if run_path else ()


def kept_of(job: JobRecord) -> tuple[CheckpointRecord, ...]:
    """Return the kept checkpoints of a job's run, including those of its earlier attempts.

    Raises:
        StorageError: the run directory cannot be read.
    """
    spec = job.spec
    run = RunDirectory(spec.run_path)
    jobs = run.jobs()
    earlier = set(jobs[: jobs.index(spec.job_id)]) if spec.job_id in jobs else set()
    before = [
        run.record(n, m) for n, m in (run.reported() if earlier else ()) if m.job_id in earlier
    ]
    reported = [record for record in job.checkpoints if not record.automatic]
    kept = retention.keep(
        [*before, *reported],
        num_to_keep=spec.num_to_keep,
        score_attribute=spec.score_attribute,
        score_order=spec.score_order,
    )
    return (*(record for record in job.checkpoints if record.automatic), *kept)


def _came_with(report: dict[str, Any], record: CheckpointRecord) -> bool:
    """Return whether a validated checkpoint came with this report."""
    same = (report["generation"], report["index"]) == (record.generation, record.index)
    known = json.loads(record.metrics).keys()
    return (
        same and record.status is CheckpointStatus.VALIDATED and report["metrics"].keys() <= known
    )


def result_of(
    run_path: str,
    checkpoints: tuple[CheckpointRecord, ...],
    returned: str,
    error: ElasticError | None = None,
    goodput: Goodput | None = None,
    *,
    score_attribute: str = "",
    score_order: str = "max",
) -> Result:
    """Build a result from the run directory and the outcome of the run.

    Args:
        run_path: the run directory.
        checkpoints: recorded and kept, oldest first; automatic ones are ordered separately.
        returned: JSON of rank 0's return value, "" for none.
        error: why the run failed.
        goodput: where the time of its workers went, if that is known.
        score_attribute: metric by which `best_checkpoints` are ordered, "" for by age.
        score_order: "max" or "min" is best.
    """
    history = read_history(run_path) if run_path else []
    metrics = history[-1]["metrics"] if history else None
    reported = [record for record in checkpoints if not record.automatic]
    if metrics is not None and reported and _came_with(history[-1], reported[-1]):
        metrics = {**metrics, **from_json(reported[-1].metrics)}
    found = reported or checkpoints
    checkpoint = Checkpoint(found[-1].path) if found else None
    if score_attribute:
        reported.sort(key=lambda one: retention.score(one, score_attribute, score_order))
    return Result(
        metrics=metrics,
        checkpoint=checkpoint,
        path=run_path,
        best_checkpoints=[(Checkpoint(c.path), from_json(c.metrics)) for c in reported],
        history=history,
        return_value=json.loads(returned) if returned else None,
        error=error,
        goodput=goodput,
    )
