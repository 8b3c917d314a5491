"""Ray's older interface of studies: `tune.run`, and the `ExperimentAnalysis` that it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from elastic.client.submission import directory_of
from elastic.core.study import ITERATION, Trial
from elastic.errors import TuneError, UsageError
from elastic.storage.study_log import StudyLog
from elastic.train.checkpoint import Checkpoint
from elastic.train.config import CheckpointConfig, FailureConfig, RunConfig, SyncConfig
from elastic.tune.config import TuneConfig
from elastic.tune.result_grid import ResultGrid
from elastic.tune.schedulers import TrialScheduler
from elastic.tune.search import Searcher
from elastic.tune.trial_function import with_resources
from elastic.tune.tuner import Tuner

_SHOWN = "verbose=0 hides the table, which is shown by itself, and callbacks=[...] receive reports"
_REPORTED = "tune.report(metrics, checkpoint=...) in the trainable, as often as one is needed"
_RESTORED = "tune.Tuner.restore(path, trainable).fit()"
INSTEAD = {
    "progress_reporter": _SHOWN,
    "local_dir": "storage_path=...",
    "upload_dir": "storage_path=...",
    "resume": _RESTORED,
    "resume_config": _RESTORED,
    "restore": "the path in config, and train.Checkpoint(path) in the trainable",
    "keep_checkpoints_num": "checkpoint_config=CheckpointConfig(num_to_keep=...)",
    "checkpoint_score_attr": "checkpoint_config=CheckpointConfig(checkpoint_score_attribute=...)",
    "checkpoint_freq": "checkpoint_config=CheckpointConfig(checkpoint_frequency=...)",
    "checkpoint_at_end": "checkpoint_config=CheckpointConfig(checkpoint_at_end=True)",
    "checkpoint_keep_all_ranks": _REPORTED,
    "checkpoint_upload_from_workers": _REPORTED,
    "export_formats": "torch.export, or what you export with, in the trainable",
}
"""Arguments of Ray's `tune.run` that are refused, unless they are empty -> what to write."""


class ExperimentAnalysis(ResultGrid):
    """A `ResultGrid` with the names of Ray's older interface.

    Metric and mode that are not passed are those of the study. As in Ray, the best trial and its
    config are None if no trial has reported the metric, and an only trial is the best one.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        default_metric: str | None = None,
        default_mode: str | None = None,
    ) -> None:
        """Read the log of a study.

        Args:
            path: the study's directory, storage_path/name.
            default_metric: replaces the study's.
            default_mode: "min" or "max", replaces the study's.

        Raises:
            UsageError: no study is there.
        """
        log = StudyLog(directory_of(path))
        if not log.is_there:
            raise UsageError(
                f"ExperimentAnalysis({str(path)!r}): no study is there (it has no study.jsonl); "
                f"expected the directory storage_path/name of a study"
            )
        super().__init__(log)
        given = {"metric": default_metric, "mode": default_mode}
        self._study.settings.update({key: value for key, value in given.items() if value})

    @property
    def trials(self) -> list[Trial]:
        """Return all trials, in the order in which they were proposed."""
        return list(self._study.trials)

    @property
    def best_trial(self) -> Trial | None:
        """Return the trial whose last value of the study's metric is best, None for none."""
        return self.get_best_trial()

    @property
    def best_config(self) -> Any:
        """Return the best trial's config, None for none."""
        return self.get_best_config()

    @property
    def best_result(self) -> dict[str, Any]:
        """Return the best trial's last metrics; raises as `get_best_result`."""
        return self.get_best_result().metrics or {}

    @property
    def best_checkpoint(self) -> Checkpoint | None:
        """Return the best kept checkpoint of the best trial, None if it reported none.

        Raises:
            UsageError: as `get_best_result`.
        """
        metric, mode = self._objective("best_checkpoint", None, None)
        return self.get_best_result().get_best_checkpoint(metric, mode)

    @property
    def results_df(self) -> Any:
        """Return a pandas DataFrame of the last reports, with the trials' ids as its index."""
        return self.get_dataframe().set_index("trial_id")

    def get_best_trial(
        self,
        metric: str | None = None,
        mode: str | None = None,
        scope: str = "last",
        filter_nan_and_inf: bool = True,
    ) -> Trial | None:
        """Return the best trial, None for none; see `ResultGrid.get_best_result`."""
        return self._best_trial("get_best_trial", metric, mode, scope, filter_nan_and_inf)

    def get_best_config(
        self, metric: str | None = None, mode: str | None = None, scope: str = "last"
    ) -> Any:
        """Return the config of the best trial, None for none; see `ResultGrid.get_best_result`."""
        best = self.get_best_trial(metric, mode, scope)
        return self._result(best).config if best is not None else None

    def get_best_checkpoint(
        self, trial: Trial, metric: str | None = None, mode: str | None = None
    ) -> Checkpoint | None:
        """Return a trial's kept checkpoint with the best value of a metric, None for none."""
        metric, mode = self._objective("get_best_checkpoint", metric, mode)
        return self._result(trial).get_best_checkpoint(metric, mode)

    def get_last_checkpoint(
        self, trial: Trial | None = None, metric: str = ITERATION, mode: str = "max"
    ) -> Checkpoint | None:
        """Return the newest checkpoint of a trial, None for none.

        Args:
            trial: None for the best one by the metric: by default, that which reported most often.
            metric: see above.
            mode: "min" or "max", for the metric.
        """
        trial = trial or self.get_best_trial(metric, mode)
        return self._result(trial).checkpoint if trial is not None else None

    def dataframe(self, metric: str | None = None, mode: str | None = None) -> Any:
        """Return a pandas DataFrame with a row for each trial; see `get_dataframe`."""
        return self.get_dataframe(metric, mode)


def run(
    run_or_experiment: Any,
    *,
    name: str | None = None,
    metric: str | None = None,
    mode: str | None = None,
    stop: Any = None,
    time_budget_s: Any = None,
    config: Mapping[str, Any] | None = None,
    resources_per_trial: Any = None,
    num_samples: int = 1,
    storage_path: str | Path | None = None,
    storage_filesystem: Any = None,
    search_alg: Searcher | None = None,
    scheduler: TrialScheduler | None = None,
    checkpoint_config: CheckpointConfig | None = None,
    verbose: int | None = None,
    log_to_file: Any = None,
    trial_name_creator: Callable[[Trial], str] | None = None,
    trial_dirname_creator: Callable[[Trial], str] | None = None,
    sync_config: SyncConfig | None = None,
    max_failures: int | None = None,
    fail_fast: bool | str | None = None,
    reuse_actors: bool | None = None,
    raise_on_failed_trial: bool = True,
    callbacks: Any = None,
    max_concurrent_trials: int | None = None,
    chdir_to_trial_dir: bool | None = None,
    **others: Any,
) -> ExperimentAnalysis:
    """Run a study in one call, as Ray's older `tune.run` does; see `Tuner` and `TuneConfig`.

    Arguments are those of `TuneConfig`, `RunConfig` and `FailureConfig`, except for these:
    `run_or_experiment` is the function or trainer, `config` the space, `resources_per_trial` as in
    `tune.with_resources`; with `raise_on_failed_trial` failed trials are an error at the end. What
    is not passed is as in the trainer's `RunConfig`; `max_failures` and `fail_fast` are one part.

    Raises:
        TuneError: trials have failed; its `result` is what would have been returned.
        UsageError: an argument is not supported, or see `Tuner.fit`.
    """
    _check_others(others)
    if resources_per_trial is not None:
        run_or_experiment = with_resources(run_or_experiment, resources_per_trial)
    failures = _passed(max_failures=max_failures, fail_fast=fail_fast)
    tuner = Tuner(
        run_or_experiment,
        param_space=config,
        tune_config=TuneConfig(
            metric=metric,
            mode=mode,
            num_samples=num_samples,
            search_alg=search_alg,
            scheduler=scheduler,
            max_concurrent_trials=max_concurrent_trials,
            time_budget_s=time_budget_s,
            trial_name_creator=trial_name_creator,
            reuse_actors=reuse_actors,
            chdir_to_trial_dir=chdir_to_trial_dir,
            trial_dirname_creator=trial_dirname_creator,
        ),
        run_config=RunConfig(
            **_passed(
                name=name,
                storage_path=storage_path,
                storage_filesystem=storage_filesystem,
                failure_config=FailureConfig(**failures) if failures else None,
                checkpoint_config=checkpoint_config,
                sync_config=sync_config,
                stop=stop,
                callbacks=callbacks,
                log_to_file=log_to_file,
                verbose=verbose,
            )
        ),
    )
    analysis = ExperimentAnalysis(tuner.fit().experiment_path)
    if raise_on_failed_trial and analysis.num_errors:
        raise failed_trials(analysis)
    return analysis


def failed_trials(analysis: ExperimentAnalysis) -> TuneError:
    """Return the error of a study with failed trials; its cause is that of the first of them."""
    first = analysis.errors[0]
    error = TuneError(
        f"tune.run: {analysis.num_errors} of {len(analysis)} trials failed, in "
        f"{analysis.experiment_path}; raise_on_failed_trial=False returns the others' results. The "
        f"first one: {first}"
    )
    error.result, error.__cause__ = analysis, first
    return error


def _passed(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _check_others(others: Mapping[str, Any]) -> None:
    for name, value in others.items():
        if name not in INSTEAD:
            raise UsageError(f"tune.run: unknown argument: {name}")
        if value:
            raise UsageError(
                f"tune.run({name}={value!r}): Ray has it, and there is none here: {INSTEAD[name]}"
            )
