"""TorchTrainer: hand a train function to the cluster, watch it, bring the result home.

Rule: the same call does the right thing wherever the script runs: in a driver it submits the
job and follows it, inside a worker (a script run by `elastic submit`) it trains in place, and
with `num_workers=0` it trains in this process.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from elastic.client.submission import NAME_CHARS_MAX, run_directory, run_path_of
from elastic.core.config import JobSpec
from elastic.core.world import Entry, EntryKind, JobId, JobPhase, Strategy, sorted_pairs
from elastic.errors import ElasticError, NameTaken, TrainingFailed, Unavailable, UsageError
from elastic.train.config import RunConfig, ScalingConfig, TorchConfig
from elastic.train.result import Result, committed_in, kept_of, result_of
from elastic.worker import context as worker_context
from elastic.worker.entry import takes_config

if TYPE_CHECKING:
    from elastic.client.jobs import Client
    from elastic.core.events.shared import Note
    from elastic.core.view import JobView
    from elastic.worker.context import WorkerContext
    from elastic.worker.local import LocalRun

DEFAULT_STORAGE = "~/elastic_results"
NAMES_TRIED = 20
"""Runs of one script that begin within one second get different names by themselves."""

Config = TypeVar("Config")


class TorchTrainer:
    """A training run of a PyTorch function on many workers, shaped like Ray Train's.

    Example:
        >>> trainer = TorchTrainer(train_func, scaling_config=ScalingConfig(num_workers=(2, 8)))
        >>> result = trainer.fit()  # doctest: +SKIP
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: dict[str, Any] | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        torch_config: TorchConfig | None = None,
    ) -> None:
        """Describe the run; nothing is started.

        Args:
            train_loop_per_worker: called on every worker, with `train_loop_config` if it takes
                an argument. It is called again when the group changes, and then finds its state
                with `train.get_checkpoint()`.
            train_loop_config: the argument; must be picklable.
            scaling_config: how many workers, with what.
            run_config: name, place and policies.
            torch_config: backend and its timeout.

        Raises:
            UsageError: the train function cannot be called with a config, or a configuration is
                of another class.
        """
        if not callable(train_loop_per_worker):
            raise UsageError(
                f"TorchTrainer: train_loop_per_worker is a {type(train_loop_per_worker).__name__}, "
                f"expected a function"
            )
        takes_config(train_loop_per_worker)
        self.train_loop_per_worker = train_loop_per_worker
        self.train_loop_config = train_loop_config
        self.scaling_config = _checked("scaling_config", scaling_config, ScalingConfig)
        self.run_config = _checked("run_config", run_config, RunConfig)
        self.torch_config = _checked("torch_config", torch_config, TorchConfig)

    def fit(self) -> Result:
        """Train, and return the result.

        Ctrl-C, and an error in a callback, stop the job and its workers. Where `elastic submit`
        runs the script, each worker trains here, and the command line's options count.

        Raises:
            TrainingFailed: the job ended without success; carries the first failing worker's
                traceback, and as `.result` what the run left behind.
            UsageError: the run cannot work like this; nothing was started.
            NameTaken: a job or a run directory of this name exists.
            StorageError: the run directory cannot be made.
            CoordinatorUnreachable: the cluster does not answer.
        """
        inside = worker_context.current()
        if inside is not None and not inside.is_local:
            return self._fit_in_place(inside)
        if self.scaling_config.max_workers == 0:
            return self._fit_in_this_process()
        return self._fit_on_cluster()

    # ------------------------------------------------------------ the three ways

    def _fit_in_place(self, context: WorkerContext) -> Result:
        """Train as the worker that this process already is."""
        from elastic.worker.entry import call_with_config
        from elastic.worker.outcome import result_json

        if context.engine is not None:
            context.engine.configure(self._options())
        returned = result_json(call_with_config(self.train_loop_per_worker, self.train_loop_config))
        kept = committed_in(context.run_path)
        return result_of(context.run_path, kept, returned)

    def _fit_in_this_process(self) -> Result:
        """Train here, alone or under torchrun, with the same reports and checkpoints."""
        from elastic.worker.local import from_rank_zero, local_group, run_local

        run = self._local_run()
        with local_group(run):
            run_path = from_rank_zero(self._make_run_directory)
            run = replace(run, job_name=run_path.rpartition("/")[2], run_path=run_path)
            try:
                outcome = run_local(self.train_loop_per_worker, run)
            except (Exception, SystemExit) as error:
                # The traceback is in the text, as it is when the run was on a cluster.
                raise _local_failure(run, error) from None
        return result_of(run_path, outcome.checkpoints, outcome.result)

    def _fit_on_cluster(self) -> Result:
        """Submit, follow, and bring the result home."""
        from elastic.client.jobs import Client
        from elastic.client.watching import Printer, follow
        from elastic.train.cluster import require_cluster

        spec = self._spec(next(self._names()))  # What is wrong with it is known before a start.
        cluster = require_cluster(spec.min_workers, spec.max_workers)
        with Client(cluster.address, cluster.token) as client:
            spec, job_id = self._submit(client)
            try:
                view = follow(
                    client, job_id, Printer(), on_report=self._on_report, on_note=self._on_note
                )
            except Unavailable:
                raise  # The job may well go on without us.
            except KeyboardInterrupt:
                _stop(client, job_id, "interrupted in its script")
                raise KeyboardInterrupt(f"run {spec.name} was told to stop") from None
            except BaseException:
                _stop(client, job_id, "its script failed")
                raise
        return self._finish(spec, view)

    def _submit(self, client: Client) -> tuple[JobSpec, JobId]:
        """Submit under the first name that is free, together with its run directory."""
        for name in self._names():
            spec = self._spec(name)
            try:
                with run_directory(spec.run_path):
                    return spec, client.submit(spec)
            except NameTaken as error:
                taken = error
        raise taken

    def _finish(self, spec: JobSpec, view: JobView) -> Result:
        record = view.record
        if record.phase is JobPhase.SUCCEEDED:
            return result_of(spec.run_path, kept_of(record), record.result)
        error = TrainingFailed(
            f"run {spec.name} {record.phase.value}: {record.reason}",
            worker=record.failed_worker,
            traceback=record.failure.traceback if record.failure else "",
        )
        error.result = result_of(spec.run_path, kept_of(record), record.result, error)
        raise error

    def _on_report(self, metrics: dict[str, Any]) -> None:
        for callback in self.run_config.callbacks:
            after_report = getattr(callback, "after_report", None)
            if after_report is not None:
                after_report(metrics)

    def _on_note(self, note: Note) -> None:
        for callback in self.run_config.callbacks:
            after_event = getattr(callback, "after_event", None)
            if after_event is not None:
                after_event(note.name, dict(note.fields))

    # ------------------------------------------------------------ the job

    def _names(self) -> Iterator[str]:
        """Yield the name, or those to try one after the other if the user chose none."""
        if self.run_config.name is not None:
            yield self.run_config.name
            return
        stem = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] else "run"
        letters = (c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in stem)
        stem = "".join(letters).lstrip("._-")[:NAME_CHARS_MAX] or "run"
        name = f"{stem}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
        yield name
        for number in range(2, NAMES_TRIED + 1):
            yield f"{name}-{number}"

    def _run_path(self, name: str) -> str:
        return run_path_of(str(self.run_config.storage_path or DEFAULT_STORAGE), name)

    def _make_run_directory(self) -> str:
        """Make the directory of a run in this process, and return it.

        A run that torchrun has started again goes on in the directory that it has.

        Raises:
            NameTaken: it is there and not empty.
            StorageError: it cannot be made.
        """
        from elastic.worker.local import is_restart

        if self.run_config.name is not None and is_restart():
            return self._run_path(self.run_config.name)
        for name in self._names():
            try:
                with run_directory(self._run_path(name)):
                    return self._run_path(name)
            except NameTaken as error:
                taken = error
        raise taken

    def _local_run(self) -> LocalRun:
        """Return what is known of a run in this process before its name is."""
        from elastic.worker.local import LocalRun

        checkpoints = self.run_config.checkpoint_config
        return LocalRun(
            job_name="",
            config=self.train_loop_config,
            options=self._options(),
            use_gpu=self.scaling_config.use_gpu,
            backend=self.torch_config.backend or "auto",
            timeout_s=self.torch_config.timeout_s,
            num_to_keep=checkpoints.num_to_keep or -1,
            score_attribute=checkpoints.checkpoint_score_attribute or "",
            score_order=checkpoints.checkpoint_score_order,
            on_report=self._on_report,
        )

    def _options(self) -> dict[str, str]:
        """Return what the step engine must know of this trainer's configuration."""
        return {
            "consistency": self.torch_config.consistency,
            "recovery": self.run_config.failure_config.recovery,
        }

    def _spec(self, name: str) -> JobSpec:
        """Return the job; the client gives it an id."""
        from elastic.worker.entry import pack

        scaling, torch_config = self.scaling_config, self.torch_config
        checkpoints = self.run_config.checkpoint_config
        function = self.train_loop_per_worker
        entry = Entry(
            kind=EntryKind.FUNCTION,
            target=getattr(function, "__qualname__", repr(function)),
            payload=pack(function, self.train_loop_config, self._options()),
            working_dir=os.getcwd(),
            python_path=_python_path(),
            env=sorted_pairs(self.run_config.worker_env or {}),
        )
        return JobSpec(
            job_id=JobId(""),
            name=name,
            entry=entry,
            min_workers=scaling.min_workers,
            max_workers=scaling.max_workers,
            workers_per_replica=scaling.workers_per_replica,
            resources_per_worker=scaling.resources(),
            strategy=Strategy(scaling.placement_strategy),
            accelerator_type=scaling.accelerator_type or "",
            label_selector=sorted_pairs(scaling.label_selector or {}),
            backend=torch_config.backend or "auto",
            collective_timeout_s=torch_config.timeout_s,
            max_failures=self.run_config.failure_config.max_failures,
            hang_timeout_s=self.run_config.failure_config.hang_timeout_s,
            run_path=self._run_path(name),
            num_to_keep=checkpoints.num_to_keep or -1,
            score_attribute=checkpoints.checkpoint_score_attribute or "",
            score_order=checkpoints.checkpoint_score_order,
        )


def _checked(what: str, value: Config | None, kind: type[Config]) -> Config:
    """Return a configuration, the default one for None.

    Raises:
        UsageError: it is something else, such as a dict.
    """
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise UsageError(
            f"TorchTrainer: {what} is a {type(value).__name__}, expected a {kind.__name__}"
        )
    return value


def _stop(client: Client, job_id: JobId, reason: str) -> None:
    """Stop a job that nobody follows any more; whatever ended the following is told instead."""
    with contextlib.suppress(ElasticError):
        client.stop(job_id, reason)


def _local_failure(run: LocalRun, error: BaseException) -> TrainingFailed:
    """Return what a failed run in this process raises."""
    from elastic.worker.outcome import failure_of

    failure = failure_of(error)
    failed = TrainingFailed(
        f"run {run.job_name} failed: {failure.error_type}: {failure.message}",
        traceback=failure.traceback,
    )
    failed.result = result_of(run.run_path, committed_in(run.run_path), "", failed)
    return failed


def _python_path() -> tuple[str, ...]:
    """Return the directories that the script imports its own modules from."""
    first = sys.path[0] if sys.path else ""
    return (str(Path(first or os.getcwd()).absolute()),)
