"""TorchTrainer: hand a train function to the cluster, watch it, bring the result home.

Rule: the same call does the right thing wherever the script runs: in a driver it submits the
job and follows it, inside a worker (a script run by `elastic submit`) it trains in place, and
with `num_workers=0` it trains in this process.
"""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic.core.config import JobSpec
from elastic.core.world import Entry, EntryKind, JobId, JobPhase, Strategy, sorted_pairs
from elastic.errors import NameTaken, StorageError, TrainingFailed, UsageError
from elastic.train.config import RunConfig, ScalingConfig, TorchConfig
from elastic.train.result import Result, result_of
from elastic.worker import context as worker_context

if TYPE_CHECKING:
    from elastic.core.events.shared import Note
    from elastic.core.view import JobView

DEFAULT_STORAGE = "~/elastic_results"


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
            UsageError: the train function cannot be called.
        """
        if not callable(train_loop_per_worker):
            raise UsageError(
                f"TorchTrainer: train_loop_per_worker is a {type(train_loop_per_worker).__name__}, "
                f"expected a function"
            )
        self.train_loop_per_worker = train_loop_per_worker
        self.train_loop_config = train_loop_config
        self.scaling_config = scaling_config or ScalingConfig()
        self.run_config = run_config or RunConfig()
        self.torch_config = torch_config or TorchConfig()

    def fit(self) -> Result:
        """Train, and return the result.

        The first Ctrl-C stops the job and its workers.

        Raises:
            TrainingFailed: the job ended without success; carries the first failing worker's
                traceback, and as `.result` what the run left behind.
            NameTaken: a job or a run directory of this name exists.
            CoordinatorUnreachable: the cluster does not answer.
        """
        inside = worker_context.current()
        if inside is not None and not inside.is_local:
            return self._fit_in_place(inside.run_path)
        if self.scaling_config.max_workers == 0:
            return self._fit_in_this_process()
        return self._fit_on_cluster()

    # ------------------------------------------------------------ the three ways

    def _fit_in_place(self, run_path: str) -> Result:
        """Train as the worker that this process already is."""
        from elastic.worker.entry import call_with_config

        call_with_config(self.train_loop_per_worker, self.train_loop_config)
        return result_of(run_path, (), "")

    def _fit_in_this_process(self) -> Result:
        """Train here, alone or under torchrun, with the same reports and checkpoints."""
        from elastic.worker.local import run_local

        name = self._name()
        run_path = self._run_path(name)
        outcome = run_local(
            self.train_loop_per_worker,
            self.train_loop_config,
            job_name=name,
            run_path=run_path,
            use_gpu=self.scaling_config.use_gpu,
            backend=self.torch_config.backend or "auto",
            timeout_s=self.torch_config.timeout_s,
        )
        return result_of(run_path, outcome.checkpoints, outcome.result)

    def _fit_on_cluster(self) -> Result:
        """Submit, follow, and bring the result home."""
        from elastic.client.jobs import Client
        from elastic.client.watching import Printer, follow
        from elastic.train.cluster import require_cluster

        spec = self._spec()
        cluster = require_cluster(spec.max_workers)
        client = Client(cluster.address, cluster.token)
        try:
            job_id = client.submit(spec)
            try:
                view = follow(
                    client, job_id, Printer(), on_report=self._on_report, on_note=self._on_note
                )
            except KeyboardInterrupt:
                client.stop(job_id)
                raise
        finally:
            client.close()
        return self._finish(spec, view)

    def _finish(self, spec: JobSpec, view: JobView) -> Result:
        record = view.record
        if record.phase is JobPhase.SUCCEEDED:
            return result_of(spec.run_path, record.checkpoints, record.result)
        error = TrainingFailed(
            f"run {spec.name} {record.phase.value}: {record.reason}",
            worker=record.failed_worker,
            traceback=record.failure.traceback if record.failure else "",
        )
        error.result = result_of(spec.run_path, record.checkpoints, record.result, error)
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

    def _name(self) -> str:
        if self.run_config.name is not None:
            return self.run_config.name
        stem = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] else "run"
        stem = "".join(c if c.isalnum() or c in "._-" else "_" for c in stem).lstrip("._-") or "run"
        return f"{stem[:60]}-{datetime.datetime.now():%Y%m%d-%H%M%S}"

    def _run_path(self, name: str) -> str:
        """Return the run directory, and refuse one that holds another run.

        Raises:
            NameTaken: it is there and not empty.
            StorageError: it cannot be made.
        """
        from fsspec.core import url_to_fs

        parent = self.run_config.storage_path or DEFAULT_STORAGE
        if "://" not in parent:
            parent = str(Path(parent).expanduser().absolute())
        run_path = f"{parent.rstrip('/')}/{name}"
        fs, root = url_to_fs(run_path)
        try:
            if fs.exists(root) and fs.ls(root):
                raise NameTaken(
                    f"run directory {run_path} exists already and is not empty: choose another "
                    f"RunConfig(name=...), or delete the directory"
                )
            fs.makedirs(root, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"run directory {run_path} cannot be made ({error}): choose a storage_path that "
                f"can be written"
            ) from error
        return run_path

    def _spec(self) -> JobSpec:
        """Return the job; the cluster gives it an id."""
        from elastic.worker.entry import pack

        name = self._name()
        scaling, torch_config = self.scaling_config, self.torch_config
        checkpoints = self.run_config.checkpoint_config
        function = self.train_loop_per_worker
        entry = Entry(
            kind=EntryKind.FUNCTION,
            target=getattr(function, "__qualname__", repr(function)),
            payload=pack(function, self.train_loop_config, {}),
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
            run_path=self._run_path(name),
            num_to_keep=checkpoints.num_to_keep or -1,
            score_attribute=checkpoints.checkpoint_score_attribute or "",
            score_order=checkpoints.checkpoint_score_order,
        )


def _python_path() -> tuple[str, ...]:
    """Return the directories that the script imports its own modules from."""
    first = sys.path[0] if sys.path else ""
    return (str(Path(first or os.getcwd()).absolute()),)
