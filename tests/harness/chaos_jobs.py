"""The jobs that chaos runs train, and what must be true of each in the end."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elastic.core.config import JobSpec
from elastic.core.facts import Entry, EntryKind, JobId, JobPhase
from elastic.core.view import JobView
from elastic.errors import ElasticError
from elastic.storage.marker import MARKER
from tests.harness.traces import reference_of

JOBS = Path(__file__).with_name("jobs")
EPOCHS_MIN = 5
ENDLESS = 1_000_000
KILLS_EVERYBODY = ("kill_all_workers", "kill_all_agents")
KILLS_ONE = (
    "kill_worker", "stop_worker", "kill_agent", "stop_agent", "kill_node", "drain",
)  # fmt: skip


class ChaosFailed(ElasticError):
    """A run did not end as it must."""


@dataclass(frozen=True)
class Verdict:
    """A job that ended right.

    Attributes:
        text: what was found, for people.
        metrics: the last report.
    """

    text: str
    metrics: dict[str, Any]


@dataclass(frozen=True)
class ChaosJob:
    """A job that trains until it may finish.

    Attributes:
        kind: "steps", "wide" or "epochs".
        spec: what is submitted.
        finish: the file that lets it end.
        saves: it takes checkpoints by itself.
        options: of the script, without the ones that only pace it.
    """

    kind: str
    spec: JobSpec
    finish: Path
    options: tuple[str, ...]
    saves: bool = False

    @property
    def trace(self) -> Path:
        """Return where the workers write what each step has made of the state."""
        return self.finish.with_name("trace")

    @property
    def counts_epochs_once(self) -> bool:
        """Return whether no epoch is done again, so that reports tell its pace."""
        return self.kind != "epochs"

    def survives(self, fault: str, group_size: int) -> bool:
        """Return whether this fault leaves somebody, or something, that has the run's state."""
        if self.kind == "epochs" or self.saves:
            return True
        if fault in KILLS_EVERYBODY:
            return False
        return fault not in KILLS_ONE or group_size > 1

    def check(self, view: JobView) -> Verdict:
        """Say what the job came to.

        Raises:
            ChaosFailed: it failed, or its result is wrong.
        """
        record = view.record
        if record.phase is not JobPhase.SUCCEEDED:
            trace = record.failure.traceback if record.failure else ""
            raise ChaosFailed(f"the job is {record.phase.value}: {view.reason} {trace}")
        metrics = json.loads(record.metrics)
        for checkpoint in record.checkpoints:
            if not (Path(checkpoint.path) / MARKER).is_file():
                raise ChaosFailed(f"{checkpoint.path} is recorded, and not there")
        if self.kind == "epochs":
            return self._check_counted(metrics)
        return self._check_steps(metrics)

    def _check_counted(self, metrics: dict[str, Any]) -> Verdict:
        epochs = int(metrics["epoch"]) + 1
        if epochs < EPOCHS_MIN or metrics["count"] != epochs:
            raise ChaosFailed(
                f"expected at least {EPOCHS_MIN} epochs, all counted once; got {metrics}"
            )
        return Verdict(f"all {epochs} epochs counted once", metrics)

    def _check_steps(self, metrics: dict[str, Any]) -> Verdict:
        reference = reference_of(self.spec.entry.target, self.options)
        steps = reference.compare(self.trace)
        if steps != metrics["steps"]:
            raise ChaosFailed(f"{metrics['steps']} steps are reported, and {steps} were traced")
        return Verdict(
            f"{steps} steps in {metrics['epochs']} epochs, all state equal to an undisturbed run's "
            f"after every step on every rank, every sample once an epoch",
            metrics,
        )


def chaos_job(
    kind: str, name: str, *, workers: int, directory: Path, save_every: int = 0, width: int = 64
) -> ChaosJob:
    """Return a job of this kind for 1 to `workers` workers, with its files in a directory.

    Args:
        kind: "steps", "wide" or "epochs".
        name: of the job.
        workers: at most.
        directory: for its files.
        save_every: steps between automatic checkpoints, 0 for none.
        width: of the layers of the job "wide".
    """
    finish = directory / "finish"
    if kind == "steps":
        options: tuple[str, ...] = ("--width", "64", "--samples", "1000")
        args = (*options, "--epochs", str(ENDLESS), "--pace", "0.03")
        args = (*args, "--trace", str(directory / "trace"))
        if save_every:
            args = (*args, "--save-every", str(save_every))
    elif kind == "wide":
        options = ("--width", str(width))
        args = (*options, "--epochs", str(ENDLESS), "--trace", str(directory / "trace"))
    else:
        options = ()
        args = ("--epochs", str(EPOCHS_MIN), "--steps", "5", "--numbers", "100000")
    script = JOBS / f"{kind}_job.py"
    spec = JobSpec(
        job_id=JobId(""),
        name=name,
        entry=Entry(EntryKind.SCRIPT, str(script), args=(*args, "--finish", str(finish))),
        min_workers=1,
        max_workers=workers,
        run_path=str(directory / "run"),
        num_to_keep=2,
    )
    return ChaosJob(kind, spec, finish, options, saves=bool(save_every))


def with_script(job: ChaosJob, script: Path) -> ChaosJob:
    """Return the same job with another script that takes its arguments."""
    return replace(job, spec=replace(job.spec, entry=replace(job.spec.entry, target=str(script))))


def with_arguments(job: ChaosJob, *options: str) -> ChaosJob:
    """Return the same job with further options of its script, which count in both runs."""
    entry = replace(job.spec.entry, args=(*job.spec.entry.args, *options))
    return replace(job, spec=replace(job.spec, entry=entry), options=(*job.options, *options))
