"""The results of a study: one per trial, from the study's log.

Rule: a report counts if it is in the log. Reports that a trial made after the decision to stop it
do not count, nor do their checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from elastic.core.facts import Failure
from elastic.core.study import ITERATION, TOTAL_S, Trial, TrialState, number_of
from elastic.errors import ControllerError, ElasticError, UsageError, WorkerGroupError
from elastic.storage.files import Files
from elastic.storage.study_log import StudyLog
from elastic.train.failures import as_exception
from elastic.train.metrics import as_reported
from elastic.train.result import Result, committed_in, result_of
from elastic.tune.space import flat
from elastic.tune.trials import from_log, reported


class ResultGrid:
    """The results of all trials, in the order in which they were proposed."""

    def __init__(self, log: StudyLog) -> None:
        """Use a study's log; the trials' directories are read on demand."""
        self._files, self._study = log.files, log.study

    @property
    def experiment_path(self) -> str:
        """Return the study's directory."""
        return self._files.path

    @property
    def filesystem(self) -> Any:
        """Return the fsspec file system of the study's directory."""
        return self._files.fs

    def __len__(self) -> int:
        """Return the number of trials."""
        return len(self._study.trials)

    def __getitem__(self, index: int) -> Result:
        """Return the result of a trial by its number."""
        return self._result(self._study.trials[index])

    def __iter__(self) -> Iterator[Result]:
        """Yield all results."""
        return map(self._result, self._study.trials)

    @property
    def errors(self) -> list[ElasticError]:
        """Return the errors of failed trials."""
        return [e for trial in self._study.trials if (e := _error_of(trial)) is not None]

    @property
    def num_errors(self) -> int:
        """Return how many trials failed."""
        return sum(trial.state is TrialState.FAILED for trial in self._study.trials)

    @property
    def num_terminated(self) -> int:
        """Return how many trials have ended without failing, including stopped ones."""
        return sum(t.is_over and t.state is not TrialState.FAILED for t in self._study.trials)

    def get_best_result(
        self,
        metric: str | None = None,
        mode: str | None = None,
        scope: str = "last",
        filter_nan_and_inf: bool = True,
    ) -> Result:
        """Return the result of the best trial.

        Args:
            metric: by default that of `TuneConfig`.
            mode: "min" or "max", by default that of `TuneConfig`.
            scope: the value by which trials are compared. "last": the last report; "all": the
                best report; "avg": the mean of all; "last-5-avg", "last-10-avg": the mean of the
                last 5 or 10.
            filter_nan_and_inf: ignore values that are not finite.

        Returns:
            That of the only trial, if there is one, also if it has not reported the metric.

        Raises:
            UsageError: no metric is set, or no trial has reported it.
        """
        metric, mode = self._objective("get_best_result", metric, mode)
        best = self._best_trial("get_best_result", metric, mode, scope, filter_nan_and_inf)
        if best is None:
            known = {key for t in self._study.trials for r in t.reports for key in r.metrics}
            raise UsageError(
                f"get_best_result: no trial has reported a finite {metric!r}; they reported "
                f"{', '.join(sorted(known)) or 'nothing'}"
            )
        return self._result(best)

    def _best_trial(
        self, what: str, metric: str | None, mode: str | None, scope: str, is_finite: bool
    ) -> Trial | None:
        """Return the best trial, None if none has reported the metric; see `get_best_result`."""
        if len(self._study.trials) == 1:
            return self._study.trials[0]  # As in Ray, whatever it has reported.
        metric, mode = self._objective(what, metric, mode)
        sign = -1.0 if mode == "min" else 1.0
        best: tuple[float, int] | None = None
        for trial in self._study.trials:
            values = [number_of(report.value(metric)) for report in trial.reports]
            numbers = [value * sign for value in values if value is not None]
            if is_finite:
                numbers = [value for value in numbers if math.isfinite(value)]
            if not numbers:
                continue
            score = (_in_scope(numbers, scope), -trial.number)
            best = score if best is None or score > best else best
        return self._study.trials[-best[1]] if best is not None else None

    def get_dataframe(
        self, filter_metric: str | None = None, filter_mode: str | None = None
    ) -> Any:
        """Return a pandas DataFrame with a row for each trial.

        Args:
            filter_metric: use the report where this is best, instead of the last one.
            filter_mode: "min" or "max", with `filter_metric`.

        Raises:
            UsageError: pandas is not installed.
        """
        try:
            import pandas  # type: ignore[import-untyped]
        except ImportError as error:
            raise UsageError("ResultGrid.get_dataframe needs pandas: pip install pandas") from error
        rows = []
        for trial in self._study.trials:
            reports = trial.reports
            if filter_metric is not None:
                sign = -1.0 if (filter_mode or self._study.settings.get("mode")) == "min" else 1.0
                found = [(number_of(r.value(filter_metric)), r) for r in reports]
                finite = [(v * sign, -r.number, r) for v, r in found if v is not None and v == v]
                reports = [max(finite, key=lambda one: one[:2])[2]] if finite else reports
            metrics = as_reported(reports[-1].metrics) if reports else {}
            config = {f"config/{k}": v for k, v in flat(_config(trial)).items()}
            rows.append(
                {
                    **metrics,
                    ITERATION: reports[-1].number if reports else 0,
                    TOTAL_S: reports[-1].seconds if reports else math.nan,
                    "trial_id": trial.name,
                    "state": trial.state.value,
                    "logdir": self._run_path(trial),
                    **config,
                }
            )
        return pandas.DataFrame(rows)

    def as_optuna_study(self) -> Any:
        """Return an Optuna study of these trials, for `optuna.visualization` and its dashboard.

        Bounds are those of the values that were tried; other values than numbers are categories.

        Raises:
            UsageError: Optuna is not installed, or the study has no metric.
        """
        from elastic.tune.search.optuna import study_of

        metric, mode = self._objective("as_optuna_study", None, None)
        return study_of(self._study.trials, metric, mode, [_config(t) for t in self._study.trials])

    def _objective(self, what: str, metric: str | None, mode: str | None) -> tuple[str, str]:
        metric = metric or self._study.metric
        mode = mode or str(self._study.settings.get("mode") or "")
        if not metric or mode not in ("min", "max"):
            raise UsageError(
                f"{what}(metric={metric or None!r}, mode={mode or None!r}): expected the name of a "
                f"metric and 'min' or 'max', here or in TuneConfig"
            )
        return metric, mode

    def _run_path(self, trial: Trial) -> str:
        run = trial.attempt.run if trial.attempts else trial.name
        return str(Files(self._files.path).folder(run).path)

    def _result(self, trial: Trial) -> Result:
        path, error, config = self._run_path(trial), _error_of(trial), _config(trial)
        known = committed_in(path) if trial.attempts else ()
        # Reports are ordered by generation, and within it.
        last = trial.reports[-1].place if trial.reports else (0, -1)
        counting = tuple(
            record
            for record in known
            if record.automatic or (record.generation, record.index) <= last
        )
        result = result_of(path, counting, "", error)
        history: list[dict[str, Any]] = [
            {
                "metrics": reported(trial, report.number, report.metrics, report.seconds),
                "generation": report.place[0],
                "index": report.place[1],
            }
            for report in trial.reports
        ]
        metrics = history[-1]["metrics"] if history else {}
        return replace(result, metrics=metrics, history=history, config=config)


def _config(trial: Trial) -> Any:
    return from_log(trial.logged_config)


def _in_scope(values: list[float], scope: str) -> float:
    if scope == "last":
        return values[-1]
    if scope == "all":
        return max(values)
    lasts = {"avg": 0, "last-5-avg": 5, "last-10-avg": 10}
    if scope not in lasts:
        raise UsageError(
            f"get_best_result(scope={scope!r}): expected last, all, avg, last-5-avg or last-10-avg"
        )
    part = values[-lasts[scope] :]
    return sum(part) / len(part)


def _error_of(trial: Trial) -> ElasticError | None:
    if trial.state is not TrialState.FAILED:
        return None
    known = dict(trial.error or {})
    worker = known.pop("worker", "")
    reason = f"trial {trial.label} failed: {trial.reason}"
    if not known.get("error_type"):
        return ControllerError(reason)
    failure = Failure(
        **{
            key: str(known.get(key, ""))
            for key in ("error_type", "message", "traceback", "position")
        }
    )
    return WorkerGroupError(
        reason, {0: as_exception(failure)}, worker=worker, traceback=failure.traceback
    )
