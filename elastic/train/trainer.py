"""Trainers: submit a train function to the cluster, follow the job, return the result.

Rule: the same call does the right thing wherever the script runs: in a driver it submits the
job and follows it, inside a worker (a script run by `elastic submit`) it trains in place, and
with `num_workers=0` it trains in this process.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import json
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from elastic.client.attempts import TRAINER_FILE, RunPlan, attempt, note_end
from elastic.client.output import LineCutter
from elastic.client.submission import DEFAULT_STORAGE, directory_of, plain_name, run_path_of
from elastic.core.config import VIRTUAL_LOCAL_RANK, JobSpec
from elastic.core.facts import Entry, EntryKind, JobId, JobPhase, Strategy, sorted_pairs
from elastic.errors import ElasticError, NameTaken, Refused, Unavailable, UsageError
from elastic.storage.files import Files
from elastic.storage.options import as_environment
from elastic.storage.run_record import RunOwner, RunPhase, read_run
from elastic.train.callbacks import CallbackRunner
from elastic.train.checkpoint import Checkpoint, metadata_text
from elastic.train.config import (
    BackendConfig,
    DataConfig,
    RunConfig,
    ScalingConfig,
    TorchConfig,
    TrainRunContext,
    UserCallback,
)
from elastic.train.config_checks import refuse
from elastic.train.failures import failed_on_cluster, failures_of
from elastic.train.local_run import as_raised, environment, failed_here, warn_unused
from elastic.train.metrics import as_reported
from elastic.train.overruled import check_size, check_trial, warn_overruled
from elastic.train.result import Result, committed_in, kept_of, result_of
from elastic.train.run_claim import (
    announced,
    begin_again,
    begin_here,
    end_noted,
    path_to_begin_from,
    print_stderr,
)
from elastic.train.session import beginning_from, is_driver
from elastic.train.stopping import StopRule
from elastic.train.stored_arguments import pack_arguments, read_arguments
from elastic.train.validation import ValidationConfig
from elastic.worker.engine import train_call
from elastic.worker.process.entry import takes_config

if TYPE_CHECKING:
    from typing_extensions import Self

    from elastic.client.jobs import Client
    from elastic.core.events.shared import Note
    from elastic.core.view import JobView
    from elastic.data.dataset import Dataset
    from elastic.train.cluster import ClusterConnection
    from elastic.train.feeding import FeederSecret
    from elastic.worker.engine.context import WorkerContext
    from elastic.worker.process.local import LocalRun

NAMES_TRIED = 20
"""Runs of one script that start within the same second automatically get different names."""

Config = TypeVar("Config")


class DataParallelTrainer:
    """A function on many workers, with ranks, reports, checkpoints and restarts.

    The function brings its own framework: `train.get_context()` returns its rank, and
    `train.collective` has barrier, broadcast and a store, over a small gloo group. Nothing is
    set up on GPUs.

    Example:
        >>> trainer = DataParallelTrainer(work, scaling_config=ScalingConfig(num_workers=4))
        >>> result = trainer.fit()  # doctest: +SKIP
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: dict[str, Any] | None = None,
        backend_config: BackendConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Dataset | Callable[[], Dataset]] | None = None,
        dataset_config: DataConfig | None = None,
        validation_config: ValidationConfig | None = None,
        metadata: Mapping[str, Any] | None = None,
        resume_from_checkpoint: Checkpoint | None = None,
    ) -> None:
        """Describe the run; nothing is started.

        Args:
            train_loop_per_worker: called on every worker, with `train_loop_config` if it takes
                an argument. It is called again when the group changes, and then finds its state
                with `train.get_checkpoint()`.
            train_loop_config: the argument; must be picklable.
            backend_config: a `TorchConfig`; None for the small group.
            scaling_config: number of workers and their resources.
            run_config: name, storage path and policies.
            datasets: by name, for `train.get_dataset_shard(name)`; or functions that return them.
                Their contents are recorded with the run, which is resumed only while they are the
                same.
            dataset_config: how they reach the workers.
            validation_config: what validates checkpoints that are reported with `validation=`.
            metadata: JSON-serializable, for `train.get_context().get_metadata()`, and part of the
                metadata of each reported checkpoint.
            resume_from_checkpoint: what `train.get_checkpoint` returns in a new run until it has
                one of its own; from any run, readable by all nodes.

        Raises:
            UsageError: the train function cannot be called with a config, or an argument is of
                another class.
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
        for name in self.scaling_config.undrawn:
            refuse(self.scaling_config, name, "a value; a Tuner draws what its param_space has")
        self.run_config = _checked("run_config", run_config, RunConfig)
        checkpoints = self.run_config.checkpoint_config
        for name in ("checkpoint_frequency", "checkpoint_at_end"):
            if getattr(checkpoints, name):
                refuse(checkpoints, name, "a train function that reports, or every_n_steps")
        if type(backend_config) is BackendConfig:
            backend_config = None
        plain: Any = TorchConfig(backend="gloo") if backend_config is None else backend_config
        self.torch_config: TorchConfig = _checked("backend_config", plain, TorchConfig)
        if validation_config is not None:
            _checked("validation_config", validation_config, ValidationConfig)
        self.validation_config = validation_config
        self.datasets = checked(datasets)
        self.dataset_config = _checked("dataset_config", dataset_config, DataConfig)
        self.dataset_config.check_names(self.datasets)
        if resume_from_checkpoint is not None and not isinstance(
            resume_from_checkpoint, Checkpoint
        ):
            raise UsageError(
                f"TorchTrainer: resume_from_checkpoint is a {type(resume_from_checkpoint).__name__}"
                f", expected a Checkpoint; use train.Checkpoint(path)"
            )
        self.resume_from_checkpoint = resume_from_checkpoint
        self.metadata = dict(metadata or {})
        metadata_text(self.metadata, "TorchTrainer: metadata is")
        self._reporting: CallbackRunner | None = None
        self._stopping = StopRule(self.run_config.stop)

    @classmethod
    def restore(
        cls,
        path: str | Path,
        train_loop_per_worker: Callable[..., Any] | None = None,
        *,
        train_loop_config: dict[str, Any] | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        torch_config: TorchConfig | None = None,
        datasets: Mapping[str, Dataset | Callable[[], Dataset]] | None = None,
        dataset_config: DataConfig | None = None,
        validation_config: ValidationConfig | None = None,
    ) -> Self:
        """Return the trainer of a run that did not succeed; its `fit` resumes the run.

        Use it without a train function only on directories that you trust: the trainer is stored
        as a pickle, RUN/trainer.pkl, and reading that executes code (reading checkpoints does
        not). With a train function the file is not read, and what is not passed is the default.

        Args:
            path: the run directory, storage_path/name.
            train_loop_per_worker: replaces the stored one.
            train_loop_config: replaces the stored one, as do all the others.
            scaling_config: the number of workers may differ.
            run_config: its name and storage_path are always those of `path`.
            torch_config: backend and its timeout.
            datasets: by name; of the same files.
            dataset_config: how they reach the workers.
            validation_config: what validates checkpoints.

        Raises:
            UsageError: there is no run, it has succeeded, or it has no readable stored trainer.
            StorageError: the directory cannot be read.
        """
        files = Files(directory_of(path))
        record = read_run(files)
        if record is None or record.phase is RunPhase.SUCCEEDED:
            state = "no run is there (it has no run.json)" if record is None else "it has succeeded"
            raise UsageError(
                f"TorchTrainer.restore({str(path)!r}): {state}; expected the directory "
                f"storage_path/name of a run that did not succeed"
            )
        stored: dict[str, Any] = {}
        if train_loop_per_worker is None:
            where = f"TorchTrainer.restore({files.path!r})"
            stored = read_arguments(
                files,
                TRAINER_FILE,
                where,
                missing="it was submitted by 'elastic submit', or could not be pickled",
                instead="pass the train function: TorchTrainer.restore(path, train_func, ...)",
            )
        passed = {
            "train_loop_per_worker": train_loop_per_worker,
            "train_loop_config": train_loop_config,
            "scaling_config": scaling_config,
            "run_config": run_config,
            "torch_config": torch_config,
            "datasets": datasets,
            "dataset_config": dataset_config,
            "validation_config": validation_config,
        }
        parts = {**stored, **{key: value for key, value in passed.items() if value is not None}}
        parent, _, name = files.path.rpartition("/")
        parts["run_config"] = replace(
            parts.get("run_config") or RunConfig(), name=name, storage_path=parent
        )
        return cls._made_of(parts)

    @classmethod
    def _made_of(cls, parts: dict[str, Any]) -> Self:
        return cls(
            **{k: v for k, v in parts.items() if k != "torch_config"},
            backend_config=parts.get("torch_config"),
        )

    @classmethod
    def can_restore(cls, path: str | Path) -> bool:
        """Return whether a directory holds a run that did not succeed and can be resumed.

        Raises:
            StorageError: the directory cannot be read.
        """
        files = Files(directory_of(path))
        record = read_run(files)
        if record is None or record.phase is RunPhase.SUCCEEDED:
            return False
        # A driver killed between writing the two files leaves a run without its trainer.
        return files.exists(TRAINER_FILE) or bool(committed_in(files.path))

    def fit(self, tuner: Any = None) -> Result:
        """Train, and return the result.

        `tuner` exists only to be rejected: a tuner takes the trainer, not the other way round.

        Ctrl-C stops the job: it is saved, and ends between two steps. A second Ctrl-C ends it at
        once, and so does an error in a callback. Where `elastic submit` runs the script, each
        worker trains in place, and the command line's options apply: a line on stderr lists those
        of the script that do not. In a function that is a job itself (a trial, an `elastic.remote`
        call) it trains in place, too: a trial is submitted again with the trainer's
        `scaling_config`, in a call a trainer that needs more workers is refused.

        A run whose name exists already is resumed, with a line on stderr: the train function
        starts from its newest reported checkpoint, after a success too, and finds nothing left to
        do; where none was reported, it trains again.

        Raises:
            TrainingFailed: the job ended without success; `.result` holds its partial result.
                `WorkerGroupError`: a worker's code failed; carries the first one's error and
                traceback. `ControllerError`: for another reason.
            UsageError: the configuration cannot work; nothing was started.
            NameTaken: a run of this name still runs, or its directory holds something else.
            StorageError: the run directory cannot be created.
            CoordinatorUnreachable: the cluster does not reply.
        """
        if tuner is not None:
            raise UsageError(
                f"{type(self).__name__}.fit({type(tuner).__name__}): fit takes nothing; to try "
                f"configs write: tune.Tuner(trainer, param_space={{...}}, tune_config=...).fit()"
            )
        self._stopping = StopRule(self.run_config.stop)
        inside = train_call.current()
        if inside is not None and not inside.is_local:
            return self._fit_in_place(inside)
        if self.scaling_config.max_workers == 0:
            return self._fit_in_this_process()
        return self._fit_on_cluster()

    def as_trainable(self) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
        """Return a function that runs this trainer with another config, for tuners.

        It takes a dict, whose "train_loop_config", or else the dict itself, is merged over the
        trainer's own, and returns rank 0's last reported metrics.
        """

        def trainable(config: Mapping[str, Any]) -> dict[str, Any]:
            over = config.get("train_loop_config", config)
            one = copy.copy(self)
            one.train_loop_config = {**(self.train_loop_config or {}), **over}
            return one.fit().metrics or {}

        return trainable

    # ------------------------------------------------------------ where it trains

    def _fit_in_place(self, context: WorkerContext) -> Result:
        """Train as a worker: this process already is one."""
        from elastic.worker.engine.outcome import result_json
        from elastic.worker.process.entry import call_with_config

        check_trial(self.scaling_config)
        check_size(context, self.scaling_config)
        warn_overruled(context, self.scaling_config, self.run_config, self.torch_config)
        engine = train_call.current_engine()
        if engine is not None:
            engine.configure(self._options())
        if context.validator is not None:
            context.validator.configure(self._options()["validation"])
        with beginning_from(self.resume_from_checkpoint), self._offering():
            value = call_with_config(self.train_loop_per_worker, self.train_loop_config)
        returned = result_json(value)
        kept = committed_in(context.run_path)
        return result_of(context.run_path, kept, returned, **self._ranking())

    def _fit_in_this_process(self) -> Result:
        """Train in this process, alone or under torchrun, with the same reports and checkpoints."""
        from elastic.worker.process.local import (
            from_rank_zero,
            local_group,
            run_local,
            torchrun_rank,
        )

        run = self._local_run()
        warn_unused(self.run_config.failure_config)
        variables = {**as_environment(), **(self.run_config.worker_env or {})}
        with environment(variables), local_group(run):
            begun = json.loads(from_rank_zero(lambda: json.dumps(self._begin_here())))
            run = replace(run, **begun)
            runner = self._reports(run.job_name, run.job_id, run.run_path)
            failed = None
            try:
                with end_noted(run), self._offering():
                    runner.begin()
                    outcome = self._stopping.run_here(self.train_loop_per_worker, run, run_local)
            except (Exception, SystemExit) as error:
                raised = {torchrun_rank() or 0: as_raised(error)}
                runner.failed(1, lambda: raised)
                # The traceback is in the text, as for a run on a cluster.
                failed = failed_here(run, error)
            finally:
                runner.finish()
        if failed is not None:
            runner.ended(failed.result)
            raise failed
        result = result_of(
            run.run_path,
            outcome.checkpoints,
            outcome.result,
            goodput=outcome.goodput,
            **self._ranking(),
        )
        runner.ended(result)
        return result

    def _fit_on_cluster(self) -> Result:
        """Submit the job, follow it, and return its result."""
        from elastic.client.job_follower import JobPrinter, follow
        from elastic.client.jobs import Client
        from elastic.client.stopping import stop_saved
        from elastic.train.cluster import check_fits, require_cluster

        spec = self._spec(next(self._names()))  # Reports its errors before a cluster is started.
        feeders = self.dataset_config.feeder_bounds[1] if self._has_feeder_job else 0
        cluster = require_cluster(spec.min_workers, spec.max_workers + feeders)
        with Client(cluster.address, cluster.access) as client:
            if cluster.is_embedded:
                check_fits(spec, [known.node for known in client.status().view.nodes])
            spec = self._submit(client, cluster)
            job_id, has_come = spec.job_id, False
            runner = self._reports(spec.name, job_id, spec.run_path)
            printer = JobPrinter()
            printer.print_line(f"run {spec.name}: results in {spec.run_path}")

            def interrupted() -> float | None:
                nonlocal has_come
                has_come = True
                return stop_saved(client, spec, "interrupted in its script")

            def on_note(note: Note) -> None:
                self._on_note(note)
                if note.name == "worker_gone" and runner.receives:
                    record = client.get(job_id).record
                    runner.failed(record.failures, lambda: failures_of(record))

            def check() -> None:
                cluster.check()
                runner.poll()
                if reason := self._stopping.take():
                    with contextlib.suppress(Refused):  # It has ended meanwhile.
                        client.stop(job_id, reason)

            try:
                runner.begin()
                view = follow(
                    client,
                    job_id,
                    printer,
                    on_report=self._on_report,
                    on_note=on_note,
                    on_interrupt=interrupted,
                    check=check,
                )
                runner.failed(view.record.failures, lambda: failures_of(view.record))
                runner.finish()
            except Unavailable:
                raise  # The job may still be running without this driver.
            except KeyboardInterrupt:
                stopped = _stop(client, spec, "interrupted in its script")
                goes_on = f"; {self._going_on(stopped)}" if stopped is not None else ""
                raise KeyboardInterrupt(f"run {spec.name} was asked to stop{goes_on}") from None
            except BaseException:
                _stop(client, spec, "its script failed")
                raise
            self._keep_output(client, spec)
        if has_come:
            note_end(spec.run_path, spec.job_id, view.record.phase, view.record.reason)
            raise KeyboardInterrupt(f"run {spec.name} has stopped; {self._going_on(view)}")
        return self._finish(spec, view, runner)

    def _going_on(self, view: JobView) -> str:
        from elastic.client.text_format import where_it_goes_on

        how = "run the script again"
        if self.run_config.name is None:
            how = f"TorchTrainer.restore({view.record.spec.run_path!r})"
        return where_it_goes_on(view, how)

    def _submit(self, client: Client, cluster: ClusterConnection) -> JobSpec:
        """Submit under the first free name, and claim its run directory."""
        from elastic.client.jobs import new_job_id

        trainer = self._pickled()
        for name in self._names():
            spec = replace(self._spec(name, cluster.env), job_id=new_job_id())
            try:
                return self._begin(client, cluster, spec, trainer)
            except NameTaken as error:
                taken = error
        raise taken

    def submit(self, spec: JobSpec, client: Client, cluster: ClusterConnection) -> JobSpec:
        """Submit the run without following it, with an id chosen before; for tuners.

        Args:
            spec: what `job_spec` returned, with its id.
            client: of the cluster.
            cluster: where the run is submitted.

        Raises:
            NameTaken: a job of its name runs, or its directory holds something else.
            UsageError: the configuration cannot work.
            StorageError: the run directory cannot be created.
        """
        return self._begin(client, cluster, spec, b"", announces=False)

    def job_spec(self, env: Mapping[str, str] = MappingProxyType({})) -> JobSpec:
        """Return the job that this trainer would submit; see `_spec`."""
        return self._spec(next(self._names()), env)

    def _begin(
        self,
        client: Client,
        cluster: ClusterConnection,
        spec: JobSpec,
        trainer: bytes,
        *,
        announces: bool = True,
    ) -> JobSpec:
        """Claim the run's directory and submit its job; return the job as submitted."""
        from elastic.train.feeding import FeederSecret

        owner = RunOwner.this_process() if cluster.is_embedded else None
        plan = self._plan(spec.name, spec.job_id, owner=owner, trainer=trainer)
        take = announced if announces else attempt
        with take(plan, job_of=client.record_of) as begun:
            spec = replace(spec, resume_from=begun.resume_from, resumes=begun.resumes)
            secret = FeederSecret(secrets.token_hex(32)) if self._has_feeder_job else None
            if self.datasets:
                spec = self._with_tables(spec, secret)
            client.submit(spec)
            if secret is not None:
                self._submit_feeders(client, cluster, spec, secret)
            return spec

    @property
    def _has_feeder_job(self) -> bool:
        return bool(self.datasets) and self.dataset_config.has_feeder_job

    def _submit_feeders(
        self, client: Client, cluster: ClusterConnection, spec: JobSpec, secret: FeederSecret
    ) -> None:
        """Submit the job that feeds this one, which trains without if the cluster takes no more.

        If that is for another reason, such as resources that no node has, this one is stopped.
        """
        from elastic.client.jobs import new_job_id
        from elastic.train.cluster import check_fits
        from elastic.train.feeding import feeders_of

        try:
            feeders = feeders_of(spec, new_job_id(), self.dataset_config, secret)
            if cluster.is_embedded:
                check_fits(feeders, [known.node for known in client.status().view.nodes])
            client.submit(feeders)
        except (Unavailable, Refused) as error:
            print_stderr(f"run {spec.name} trains without feeders: {error}")
        except BaseException:
            _stop(client, spec, "its feeders were not accepted")
            raise

    def _with_tables(self, spec: JobSpec, secret: FeederSecret | None = None) -> JobSpec:
        """Return the job with the contents of its datasets, which are listed now."""
        from elastic.data.context import with_context
        from elastic.train.datasets import OPTION, tables_for
        from elastic.worker.process.entry import pack

        given = tables_for(self.datasets, self.dataset_config, spec.run_path, secret)
        options = {**self._options(), OPTION: given}
        function = with_context(self.train_loop_per_worker)
        packed = pack(function, self.train_loop_config, options)
        return replace(spec, entry=replace(spec.entry, payload=packed.payload))

    def _offering(self) -> contextlib.AbstractContextManager[None]:
        """Make the datasets available to the train function in this process."""
        if not self.datasets:
            return contextlib.nullcontext()
        from elastic.train.datasets import offering

        return offering(self.datasets, self.dataset_config)

    def _plan(self, name: str, job_id: str, *, owner: RunOwner | None, trainer: bytes) -> RunPlan:
        return RunPlan(
            run_path=self._run_path(name),
            name=name,
            job_id=job_id,
            resume_from=path_to_begin_from(self.resume_from_checkpoint),
            owner=owner,
            trainer=trainer,
            may_resume=self.run_config.name is not None,
            may_repeat=self.run_config.name is not None,
        )

    def _pickled(self) -> bytes:
        return pack_arguments(
            {
                "train_loop_per_worker": self.train_loop_per_worker,
                "train_loop_config": self.train_loop_config,
                "scaling_config": self.scaling_config,
                "run_config": self.run_config,
                "torch_config": self.torch_config,
                "validation_config": self.validation_config,
                "metadata": self.metadata,
                "datasets": self.datasets,
                "dataset_config": self.dataset_config,
            }
        )

    def _finish(self, spec: JobSpec, view: JobView, runner: CallbackRunner) -> Result:
        record = view.record
        phase = record.phase
        if phase is JobPhase.STOPPED and self._stopping.is_met:
            phase = JobPhase.SUCCEEDED
        note_end(spec.run_path, spec.job_id, phase, record.reason)
        error = failed_on_cluster(record) if phase is not JobPhase.SUCCEEDED else None
        result = result_of(
            spec.run_path,
            kept_of(record),
            record.result,
            error,
            goodput=record.goodput,
            **self._ranking(),
        )
        runner.ended(result)
        if error is not None:
            error.result = result
            raise error
        return result

    def _keep_output(self, client: Client, spec: JobSpec) -> None:
        """Write the output of all workers into the run directory, if `log_to_file` is set."""
        names = self.run_config.log_names
        if not names:
            return
        lines = LineCutter(shows_prefix=spec.max_workers > 1, holds_tracebacks=False)
        try:
            with client.logs(spec.job_id, follow=False) as chunks:
                text = "".join(lines.take(chunk, 0) for chunk in chunks) + lines.flush("")
            Files(spec.run_path).write(names[0], text.encode())
        except ElasticError as error:
            print_stderr(f"log_to_file: {names[0]} cannot be written: {error}")

    def _reports(self, name: str, job_id: str, run_path: str) -> CallbackRunner:
        """Return the runner of this attempt's callbacks; under torchrun only rank 0 has any."""
        given = self.run_config.callbacks if is_driver() else ()
        callbacks = [c for c in given if isinstance(c, UserCallback)]
        context = TrainRunContext(
            name, job_id, run_path, self.run_config, self.scaling_config, self.train_loop_config
        )
        self._reporting = CallbackRunner(callbacks, context)
        return self._reporting

    def _on_report(self, metrics: dict[str, Any]) -> None:
        metrics = as_reported(metrics)
        if self._reporting is not None:
            self._reporting.poll()
        for callback in self.run_config.callbacks:
            after_report = getattr(callback, "after_report", None)
            if after_report is not None and not isinstance(callback, UserCallback):
                after_report(metrics)
        self._stopping.check(metrics)

    def _on_note(self, note: Note) -> None:
        for callback in self.run_config.callbacks:
            after_event = getattr(callback, "after_event", None)
            if after_event is not None:
                after_event(note.name, dict(note.fields))

    # ------------------------------------------------------------ the job

    def _names(self) -> Iterator[str]:
        """Yield the user's name, or generated candidates in order if there is none."""
        if self.run_config.name is not None:
            yield self.run_config.name
            return
        stem = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] else "run"
        name = f"{plain_name(stem)}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
        yield name
        for number in range(2, NAMES_TRIED + 1):
            yield f"{name}-{number}"

    def _run_path(self, name: str) -> str:
        return run_path_of(str(self.run_config.storage_path or DEFAULT_STORAGE), name)

    def _begin_here(self) -> dict[str, str]:
        """Claim the directory of a run in this process; return its fields of `LocalRun`.

        A run that torchrun has restarted continues in its directory.

        Raises:
            NameTaken: the directory exists, and is not to be resumed.
            StorageError: it cannot be created.
        """
        from elastic.worker.process.local import is_restart, new_job_id

        owner, trainer = RunOwner.this_process(), self._pickled()
        for name in self._names():
            plan = self._plan(name, new_job_id(), owner=owner, trainer=trainer)
            if self.run_config.name is not None and is_restart():
                return begin_again(plan)
            try:
                return begin_here(plan)
            except NameTaken as error:
                taken = error
        raise taken

    def _local_run(self) -> LocalRun:
        """Return the settings of a run in this process, before its name is chosen."""
        from elastic.worker.process.local import LocalRun

        checkpoints = self.run_config.checkpoint_config
        return LocalRun(
            job_name="",
            config=self.train_loop_config,
            options=self._options(),
            use_gpu=self.scaling_config.use_gpu,
            backend=self.torch_config.backend or "auto",
            timeout_s=self.torch_config.timeout_s,
            num_to_keep=checkpoints.num_to_keep or -1,
            **self._ranking(),
            on_report=self._on_report,
        )

    def _ranking(self) -> dict[str, Any]:
        """Return the metric that ranks checkpoints, "" for none, and which end of it is best."""
        checkpoints = self.run_config.checkpoint_config
        return {
            "score_attribute": checkpoints.checkpoint_score_attribute or "",
            "score_order": checkpoints.checkpoint_score_order,
        }

    def _options(self) -> dict[str, Any]:
        """Return the part of this trainer's configuration that the step engine needs."""
        checkpoints = self.run_config.checkpoint_config
        peers = checkpoints.peer_replication
        logging_config = self.run_config.logging_config
        return {
            "every_n_steps": checkpoints.every_n_steps,
            "every_s": checkpoints.every_s,
            "async_save": checkpoints.async_save,
            "copies_every": peers.every_n_steps if peers is not None else 0,
            "consistency": self.torch_config.consistency,
            "recovery": self.run_config.failure_config.recovery,
            "validation": self.validation_config.plan() if self.validation_config else None,
            "metadata": self.metadata,
            "log_level": logging_config.log_level if logging_config is not None else "",
        }

    def _spec(self, name: str, env: Mapping[str, str] = MappingProxyType({})) -> JobSpec:
        """Return the job; the client assigns its id.

        Args:
            name: of the run.
            env: of all workers of this script; the run's own variables take precedence.
        """
        from elastic.worker.process.entry import pack

        scaling, torch_config = self.scaling_config, self.torch_config
        checkpoints = self.run_config.checkpoint_config
        function = self.train_loop_per_worker
        virtual = {VIRTUAL_LOCAL_RANK: "1"} if torch_config.virtual_local_rank else {}
        packed = pack(function, self.train_loop_config, self._options())
        entry = Entry(
            kind=EntryKind.FUNCTION,
            target=getattr(function, "__qualname__", repr(function)),
            payload=packed.payload,
            working_dir=os.getcwd(),
            python_path=python_path(),
            env=sorted_pairs(
                {**as_environment(), **env, **virtual, **(self.run_config.worker_env or {})}
            ),
            imports=packed.imports,
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
            label_selector=sorted_pairs(scaling.labels),
            backend=torch_config.backend or "auto",
            collective_timeout_s=torch_config.timeout_s,
            max_failures=self.run_config.failure_config.max_failures,
            max_preemptions=self.run_config.failure_config.max_preemptions,
            hang_timeout_s=self.run_config.failure_config.hang_timeout_s,
            run_path=self._run_path(name),
            priority=self.run_config.priority,
            non_preemptible=not self.run_config.preemptible,
            num_to_keep=checkpoints.num_to_keep or -1,
            **self._ranking(),
        )


class TorchTrainer(DataParallelTrainer):
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
        torch_config: TorchConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Dataset | Callable[[], Dataset]] | None = None,
        dataset_config: DataConfig | None = None,
        validation_config: ValidationConfig | None = None,
        metadata: Mapping[str, Any] | None = None,
        resume_from_checkpoint: Checkpoint | None = None,
    ) -> None:
        """Describe the run; nothing is started.

        Args:
            train_loop_per_worker: as in `DataParallelTrainer`, and all others but `torch_config`.
            train_loop_config: the argument; must be picklable.
            torch_config: backend and its timeout.
            scaling_config: number of workers and their resources.
            run_config: name, storage path and policies.
            datasets: by name, for `train.get_dataset_shard(name)`. Their contents are recorded
                with the run, which is resumed only while they are the same.
            dataset_config: how they reach the workers.
            validation_config: what validates checkpoints that are reported with `validation=`.
            metadata: JSON-serializable, for `train.get_context().get_metadata()`, and part of the
                metadata of each reported checkpoint.
            resume_from_checkpoint: what a new run starts from.

        Raises:
            UsageError: the train function cannot be called with a config, or an argument is of
                another class.
        """
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=_checked("torch_config", torch_config, TorchConfig),
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            dataset_config=dataset_config,
            validation_config=validation_config,
            metadata=metadata,
            resume_from_checkpoint=resume_from_checkpoint,
        )

    @classmethod
    def _made_of(cls, parts: dict[str, Any]) -> Self:
        return cls(**parts)


def checked(datasets: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return datasets by name, once their names and classes are checked.

    Raises:
        UsageError: one of them is no dataset, or its name is no valid file name.
    """
    found = dict(datasets or {})
    if found:
        from elastic.data.dataset import Dataset
    for name, dataset in found.items():
        if not isinstance(name, str) or not name.replace("-", "_").isidentifier():
            raise UsageError(
                f"TorchTrainer: datasets has the name {name!r}: expected letters, digits, _ and -"
            )
        if callable(dataset):
            dataset = found[name] = dataset()
        if not isinstance(dataset, Dataset):
            raise UsageError(
                f"TorchTrainer: datasets[{name!r}] is a {type(dataset).__name__}: expected what "
                f"elastic.data.read_parquet(...), from_huggingface(...), from_torch(...) and "
                f"others return"
            )
    return found


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


def _stop(client: Client, spec: JobSpec, reason: str) -> JobView | None:
    """Stop a job that is no longer followed, and return its state; None in place of errors.

    Those are dropped in favour of the original one.
    """
    with contextlib.suppress(ElasticError):
        client.stop(spec.job_id, reason, now=True)
        note_end(spec.run_path, spec.job_id, JobPhase.STOPPED, reason)
        return client.get(spec.job_id)
    return None


def python_path() -> tuple[str, ...]:
    """Return the directories that the script imports its own modules from."""
    first = sys.path[0] if sys.path else ""
    return (str(Path(first or os.getcwd()).absolute()),)
