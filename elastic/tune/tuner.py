"""`Tuner`: runs configs of a function or a trainer, each as a job, and returns the results."""

from __future__ import annotations

import copy
import datetime
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import cloudpickle

from elastic.client.jobs import Client
from elastic.client.submission import DEFAULT_STORAGE, directory_of, plain_name, run_path_of
from elastic.errors import ConfigError, NameTaken, UsageError
from elastic.storage.files import Files
from elastic.storage.filesystems import url_in
from elastic.storage.run_record import RunOwner
from elastic.storage.study_log import StudyLog
from elastic.train.cluster import check_fits, require_cluster
from elastic.train.config import RunConfig
from elastic.train.stored_arguments import pack_arguments, read_arguments
from elastic.train.trainer import DataParallelTrainer
from elastic.tune import space as spaces
from elastic.tune.callback import Callbacks
from elastic.tune.config import TuneConfig
from elastic.tune.controller import Controller, Plan
from elastic.tune.result_grid import ResultGrid
from elastic.tune.schedulers import FIFOScheduler, TrialScheduler
from elastic.tune.search import BasicVariantGenerator, ConcurrencyLimiter, Searcher
from elastic.tune.stopper import as_stopper
from elastic.tune.trial_function import TrialFunction, as_trainable
from elastic.tune.trials import (
    DATASETS,
    LOOP,
    SCALING,
    Recipe,
    most_workers,
    split_config,
    with_fields,
)
from elastic.worker.engine import train_call

TUNER_FILE = "tuner.pkl"
RESTART_S = 120.0
"""A study waits so long for its coordinator to come back."""
AHEAD = 1
"""Trials that wait in the queue of the cluster for a slot, where proposals do not need results."""
NAME_CHARS_MAX = 80
"""A trial's name is the study's name and a number; job names have at most 100 characters."""


class Tuner:
    """A study: trials of one function or trainer with different configs.

    Example:
        >>> tuner = Tuner(objective, param_space={"lr": tune.loguniform(1e-4, 1e-1)},
        ...               tune_config=TuneConfig(metric="loss", mode="min", num_samples=20))
        >>> best = tuner.fit().get_best_result()  # doctest: +SKIP
    """

    def __init__(
        self,
        trainable: Any = None,
        *,
        param_space: Mapping[str, Any] | Callable[[Any], Any] | None = None,
        tune_config: TuneConfig | None = None,
        run_config: RunConfig | None = None,
    ) -> None:
        """Configure the study; `fit` starts it.

        Args:
            trainable: a function of a config that calls `tune.report`, or a `TorchTrainer`.
            param_space: the search space. For a trainer it updates the train_loop_config: keys
                are inside of "train_loop_config", or at the top level. "scaling_config" and
                "datasets" stand for the trainer's, and may have parts that are drawn.
            tune_config: objective, search and limits.
            run_config: name and storage path of the study, and policies of its trials. What it
                leaves unset is taken from the trainer's, if the trainable is a trainer.

        Raises:
            UsageError: the trainable is not supported, or the space has elements that cannot be
                drawn.
        """
        self._path = ""
        # See `restore`: (resume_unfinished, resume_errored, restart_errored).
        self._again = (True, False, False)
        self._trainable = _trainable(trainable)
        self._space = with_fields(param_space if param_space is not None else {})
        self._tune_config = tune_config or TuneConfig()
        if not isinstance(self._tune_config, TuneConfig):
            raise UsageError(
                f"Tuner: tune_config is a {type(tune_config).__name__}, expected a TuneConfig"
            )
        if run_config is not None and not isinstance(run_config, RunConfig):
            raise UsageError(
                f"Tuner: run_config is a {type(run_config).__name__}, expected a RunConfig"
            )
        self._run_config = _merged(run_config, self._trainable)
        self._check_checkpoints()
        self._check_space()

    @classmethod
    def restore(
        cls,
        path: str | Path,
        trainable: Any,
        *,
        resume_unfinished: bool = True,
        resume_errored: bool = False,
        restart_errored: bool = False,
        param_space: Mapping[str, Any] | None = None,
        storage_filesystem: Any = None,
    ) -> Tuner:
        """Return the tuner of an existing study; its `fit` continues the study.

        Use it only on directories that you trust: the study's configuration is a pickle there.

        Args:
            path: the study's directory, storage_path/name.
            trainable: the function or trainer, as before.
            resume_unfinished: trials that have not ended continue; False: they are stopped.
            resume_errored: failed trials continue from their newest checkpoints.
            restart_errored: failed trials start from the beginning.
            param_space: needed if it has parts that could not be pickled.
            storage_filesystem: file system of fsspec or pyarrow that has `path`.

        Raises:
            UsageError: there is no study at `path`, or its configuration cannot be read here.
            StorageError: the directory cannot be read.
        """
        where = directory_of(url_in(storage_filesystem, str(path)) if storage_filesystem else path)
        log = StudyLog(where)
        if not log.is_there:
            raise UsageError(
                f"Tuner.restore({str(path)!r}): no study is there (it has no study.jsonl); "
                f"expected the directory storage_path/name of a study"
            )
        stored = read_arguments(
            log.files,
            TUNER_FILE,
            f"Tuner.restore({log.files.path!r})",
            missing="it was removed, or not copied with the study",
            instead="restore the study with the file, version and packages that it was begun with",
        )
        space = param_space if param_space is not None else stored["param_space"]
        parent, _, name = where.rpartition("/")
        run_config = replace(stored["run_config"], name=name, storage_path=parent)
        tuner = cls(
            trainable, param_space=space, tune_config=stored["tune_config"], run_config=run_config
        )
        tuner._run_config = run_config  # As it was, whatever this trainer's is.
        tuner._path = where
        tuner._again = (resume_unfinished, resume_errored, restart_errored)
        return tuner

    @classmethod
    def can_restore(cls, path: str | Path, storage_filesystem: Any = None) -> bool:
        """Return whether a directory has a study.

        Raises:
            StorageError: the directory cannot be read.
        """
        where = directory_of(url_in(storage_filesystem, str(path)) if storage_filesystem else path)
        return StudyLog(where).is_there and Files(where).exists(TUNER_FILE)

    def get_results(self) -> ResultGrid:
        """Return the results of the study so far.

        Raises:
            UsageError: the study was not started.
        """
        if not self._path:
            raise UsageError("Tuner.get_results: call fit() first, or Tuner.restore(path, ...)")
        return ResultGrid(StudyLog(self._path))

    def fit(self) -> ResultGrid:
        """Run the study to its end, and return the results.

        Ctrl-C stops the trials; `Tuner.restore` continues them. A failed trial does not end the
        study: see `ResultGrid.errors`.

        Raises:
            NameTaken: a study of this name exists; `Tuner.restore` continues it.
            UsageError: the trials cannot run as configured, or do not report the metric.
            StorageError: the study's directory cannot be written.
            CoordinatorUnreachable: the cluster does not reply.
        """
        if train_call.current() is not None:
            raise UsageError(
                "Tuner.fit: this process is a worker of a job, and trials are jobs of their own: "
                "run the script itself, with ELASTIC_COORD for a cluster that is there"
            )
        log = StudyLog(self._path or self._new_path())
        if log.is_there and not self._path:
            raise NameTaken(
                f"a study is there already in {log.files.path}: resume it by tune.Tuner.restore"
                f"({log.files.path!r}, trainable).fit(), choose another name, or remove it"
            )
        recipe = Recipe(self._trainable, self._run_config, log.files.path)
        # Errors that every trial would have are raised before anything is written.
        spec = recipe.trainer("trial", self._some_config()).job_spec()
        is_trainer = isinstance(self._trainable, DataParallelTrainer)
        most = most_workers(self._space) if is_trainer else 0
        cluster = require_cluster(spec.min_workers, max(spec.max_workers, most))
        with Client(cluster.address, cluster.access) as client:
            nodes = client.status().view.nodes  # Raises at once if no coordinator answers.
            if cluster.is_embedded:
                check_fits(spec, [known.node for known in nodes])
            else:
                client.wait_for_answers(RESTART_S)
            if self._path:
                self._go_on(log)
            else:
                self._begin(log)
            self._path = log.files.path
            recipe.store()
            plan = self._plan(log, recipe)
            plan.callbacks.call("setup", **log.study.settings, experiment_path=self._path)
            log.add({"e": "opened", "owner": asdict(RunOwner.this_process())})
            Controller(log, plan, client, cluster).run()
        return ResultGrid(log)

    # ---------------------------------------------------------------------- starting or resuming

    def _new_path(self) -> str:
        """Return the directory of a new study: of names of our own, of the first that is free."""
        name = self._run_config.name or self._own_name()
        if len(name) > NAME_CHARS_MAX:
            raise ConfigError(
                f"RunConfig(name={name!r}): of a study expected at most {NAME_CHARS_MAX} characters"
            )
        storage = str(self._run_config.storage_path or DEFAULT_STORAGE)
        path, number = run_path_of(storage, name), 1
        while not self._run_config.name and StudyLog(path).is_there:
            number += 1
            path = run_path_of(storage, f"{name}-{number}")
        return path

    def _begin(self, log: StudyLog) -> None:
        """Start a study: write its configuration and the first line of its log."""
        config = self._tune_config
        self._store(log.files)
        seed = secrets.randbits(32) if config.seed is None else config.seed
        scheduler = config.scheduler or FIFOScheduler()
        settings = {
            "name": log.files.path.rpartition("/")[2],
            "trainable": self._trainable_name(),
            "metric": config.metric or scheduler.metric,
            "mode": config.mode or scheduler.mode,
            "num_samples": config.num_samples,
            "seed": seed,
            "total": self._total(seed),
            "format": 1,
        }
        log.add({"e": "study", "settings": settings})

    def _go_on(self, log: StudyLog) -> None:
        """Resume a study: log what happens to trials that have not ended, or have failed."""
        known = log.study.owner
        if known is not None and RunOwner(**known).is_other_and_alive():
            raise NameTaken(
                f"study {log.study.settings['name']} is run by process {known['pid']} on this "
                f"machine: end that first"
            )
        unfinished, errored, anew = self._again
        for trial in log.study.trials:
            if trial.is_over and trial.error is not None and (errored or anew):
                log.add({"e": "left", "trial": trial.number, "anew": anew})
            elif not trial.is_over and not unfinished:
                reason = "not resumed: resume_unfinished=False"
                log.add({"e": "ended", "trial": trial.number, "phase": "stopped", "reason": reason})

    def _store(self, files: Files) -> None:
        """Pickle the study's configuration for `restore`."""
        data = pack_arguments(
            {
                "param_space": self._space,
                "tune_config": self._tune_config,
                "run_config": self._run_config,
            }
        )
        if not data:
            raise UsageError(
                "Tuner: param_space or tune_config cannot be pickled, and a study that cannot be "
                "gone on with is not begun: create what cannot be pickled (files, locks, "
                "connections) inside the trainable"
            )
        files.write(TUNER_FILE, data)

    def _own_name(self) -> str:
        stem = plain_name(self._trainable_name())
        return f"{stem}_{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}"

    def _trainable_name(self) -> str:
        kind = type(self._trainable).__name__
        return self._trainable.name if isinstance(self._trainable, TrialFunction) else kind

    # ---------------------------------------------------------------------------- components

    def _plan(self, log: StudyLog, recipe: Recipe) -> Plan:
        config, seed = self._tune_config, int(log.study.settings["seed"])
        # Copied, since it is bound to one study's metric and seed.
        scheduler: TrialScheduler = copy.copy(config.scheduler) or FIFOScheduler()
        scheduler.bind(config.metric or "", config.mode or "", seed)
        failures = self._run_config.failure_config
        search = self._search(seed)
        # A trial that waits in the queue would come before one that continues from a checkpoint.
        may_wait = not (search.learns or scheduler.needs_checkpoints)
        return Plan(
            recipe=recipe,
            search=search,
            scheduler=scheduler,
            stopper=as_stopper(self._run_config.stop),
            callbacks=Callbacks(self._run_config.callbacks),
            max_concurrent=config.max_concurrent_trials or 0,
            ahead=AHEAD if may_wait else 0,
            num_samples=config.num_samples,
            time_budget_s=config.time_budget_s,  # type: ignore[arg-type]
            label=config.trial_name_creator,
            fail_fast=bool(failures.fail_fast),
            is_quiet=self._run_config.verbose == 0,
        )

    def _search(self, seed: int) -> Searcher:
        config = self._tune_config
        # Copied, since it keeps the state of one study.
        search: Searcher = cloudpickle.loads(cloudpickle.dumps(config.search_alg))
        if search is None:
            search = BasicVariantGenerator()
        if isinstance(search, BasicVariantGenerator):
            search.num_samples = config.num_samples
            if search.max_concurrent:
                search = ConcurrencyLimiter(search, search.max_concurrent)
        search.set_space(self._space, config.metric or "", config.mode or "max", seed)  # type: ignore[arg-type]
        return search

    def _total(self, seed: int) -> int | None:
        samples = self._tune_config.num_samples
        return self._search(seed).total or (samples if samples > 0 else None)

    def _check_checkpoints(self) -> None:
        """Raise ConfigError for checkpoints of a class, if there is none."""
        config, given = self._run_config.checkpoint_config, self._trainable
        if isinstance(given, TrialFunction) and isinstance(given.function, type):
            return
        if config.checkpoint_frequency or config.checkpoint_at_end:
            raise ConfigError(
                "CheckpointConfig(checkpoint_frequency, checkpoint_at_end) are for subclasses of "
                "tune.Trainable: let the function call tune.report(metrics, checkpoint=...) as "
                "often as one is needed"
            )

    def _check_space(self) -> None:
        """Validate the search space.

        Raises:
            ConfigError: an element cannot be drawn; names its key.
        """
        space = self._space
        if callable(space):
            if self._tune_config.search_alg is None:
                raise ConfigError(
                    "Tuner: param_space is a function, which OptunaSearch calls with its trial: "
                    "expected TuneConfig(search_alg=OptunaSearch()), or a dict"
                )
            return
        if not isinstance(space, Mapping):
            raise ConfigError(f"Tuner: param_space is a {type(space).__name__}, expected a dict")
        spaces.check(space)
        if isinstance(self._trainable, DataParallelTrainer):
            split_config({k: v for k, v in space.items() if k not in (SCALING, DATASETS)})
            if LOOP in space and not isinstance(space[LOOP], Mapping):
                raise ConfigError(f"param_space[{LOOP!r}]: expected a dict")

    def _some_config(self) -> dict[str, Any]:
        """Return a sample config, to find the resources of a trial."""
        from random import Random

        if callable(self._space):
            return {}
        chosen = next(spaces.combinations(self._space))
        return dict(spaces.draw(self._space, Random(0), chosen))


def _trainable(trainable: Any) -> TrialFunction | DataParallelTrainer:
    if isinstance(trainable, DataParallelTrainer):
        if trainable.scaling_config.max_workers == 0:
            raise UsageError(
                "Tuner: the trainer has num_workers=0, which trains in this process: trials are "
                "jobs of their own; expected ScalingConfig(num_workers=1), or more"
            )
        return trainable
    if trainable is None:
        raise UsageError("Tuner: expected a trainable: a function of a config, or a TorchTrainer")
    return as_trainable(trainable)


def _merged(run_config: RunConfig | None, trainable: Any) -> RunConfig:
    """Return the study's run config, with unset fields taken from the trainer's."""
    theirs = trainable.run_config if isinstance(trainable, DataParallelTrainer) else RunConfig()
    if run_config is None:
        return theirs
    changed = {name: getattr(run_config, name) for name in run_config.given}
    return replace(replace(theirs, name=None, storage_path=None), **changed)
