"""Reports settings of a script that the command line which started its job overrides.

In the job of a function, which has no command line, sizes that it lacks are refused. Only the
function of a trial gets a job of the size that a trainer in it asks for; see
`TrialResizeRequested`.

Rule: only differences are reported, once per process. Values of environment variables may be
secrets, and are not printed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from elastic.client.submission import run_path_of
from elastic.core.facts import EntryKind
from elastic.errors import UsageError
from elastic.train.config import RunConfig, ScalingConfig, TorchConfig
from elastic.train.run_claim import print_stderr
from elastic.train.session import size_of_trial

if TYPE_CHECKING:
    from elastic.worker.engine.context import WorkerContext

NO_OPTION = ""
OPTIONS: Mapping[str, str] = {
    "resources_per_worker": "--resources",
    "placement_strategy": "--placement-strategy",
    "accelerator_type": "--accelerator-type",
    "label_selector": "--label",
    "workers_per_replica": NO_OPTION,
    "max_preemptions": "--max-preemptions",
    "hang_timeout_s": "--hang-timeout",
    "num_to_keep": "--num-to-keep",
    "checkpoint_score_attribute": NO_OPTION,
    "callbacks": NO_OPTION,
    "stop": NO_OPTION,
    "log_to_file": NO_OPTION,
    "logging_config": NO_OPTION,
    "priority": "--priority",
    "preemptible": "--non-preemptible",
    "backend": "--backend",
    "timeout_s": NO_OPTION,
    "virtual_local_rank": "--env ELASTIC_VIRTUAL_LOCAL_RANK=1",
}
"""Fields whose value in the job is unknown to a worker -> the option of `elastic submit`."""

_is_reported = False


class TrialResizeRequested(BaseException):
    """A trainer is fitted in a trial whose job has not the workers that it asks for.

    It ends the function, past the user's `except Exception`, and the study submits the trial again
    as a job of this size; also if the function catches it.
    """

    def __init__(self, scaling: ScalingConfig) -> None:
        super().__init__(f"the trial is submitted again with {scaling}")


def check_trial(scaling: ScalingConfig) -> None:
    """Raise TrialResizeRequested if a trainer in a trial's function asks for another size."""
    known = size_of_trial.known
    if known is None or scaling == known:
        return
    if not scaling.max_workers:  # It trains in this process, of which there is to be one.
        if known.max_workers == 1:
            return
        scaling = ScalingConfig()
    size_of_trial.asked = scaling
    raise TrialResizeRequested(scaling)


def check_size(context: WorkerContext, scaling: ScalingConfig) -> None:
    """Refuse a trainer in a function's job that has not the workers, GPUs or storage it needs.

    A command line may choose another size than its script; a function's job has a size that was not
    chosen for the trainer in it, which would silently train on one worker.

    Raises:
        UsageError: the function is to be replaced by the trainer itself.
    """
    if context.entry_kind is not EntryKind.FUNCTION:
        return
    lacks = []
    if not context.run_path:
        lacks.append("a run directory for its reports, and it has none")
    if scaling.min_workers > context.max_workers:
        lacks.append(f"num_workers={scaling.num_workers!r}, and it has {context.max_workers}")
    if scaling.use_gpu and not context.devices:
        lacks.append("use_gpu=True, and it has no GPU")
    if lacks:
        raise UsageError(
            f"TorchTrainer.fit in a function that is a job itself ({context.job_name}) trains on "
            f"that job's workers; the trainer asks for {'; '.join(lacks)}. In a trial, leave out "
            f"tune.with_resources, and the trial's job gets what its trainer asks for. Of an "
            f"elastic.remote function, call trainer.fit() in the script"
        )


def warn_overruled(
    context: WorkerContext, scaling: ScalingConfig, run: RunConfig, torch_config: TorchConfig
) -> None:
    """Print on rank 0, once in this process, which of the configuration has no effect."""
    global _is_reported
    if _is_reported or context.join is not None or context.world_rank != 0:
        return  # A worker that is ahead of its group has no rank yet.
    _is_reported = True
    line = overruled(context, scaling, run, torch_config, os.environ)
    if line:
        print_stderr(line)


def overruled(
    context: WorkerContext,
    scaling: ScalingConfig,
    run: RunConfig,
    torch_config: TorchConfig,
    environ: Mapping[str, str],
) -> str:
    """Return the settings of a script that have no effect, as a line; "" for none."""
    parts = [*_known(context, scaling, run, environ)]
    unused = []
    nested = (scaling, run.failure_config, run.checkpoint_config, run, torch_config)
    for name, value in (changed for config in nested for changed in _changed(config).items()):
        option = OPTIONS.get(name)
        if option == NO_OPTION:
            unused.append(name)
        elif option is not None:
            parts.append(f"{name}={value!r} ({option})")
    if run.worker_env:
        parts.append("worker_env (--env)")
    if not parts and not unused:
        return ""
    line = "elastic: of this script's configuration "
    if parts:
        line += f"the command line's counts instead: {', '.join(parts)}"
    if unused:
        line += f"{'; ' if parts else ''}not used: {', '.join(unused)}"
    return line


def _known(
    context: WorkerContext, scaling: ScalingConfig, run: RunConfig, environ: Mapping[str, str]
) -> list[str]:
    """Return the settings that differ from the job, of those whose job value the worker knows."""
    low, high = int(environ.get("ELASTIC_MIN", context.max_workers)), context.max_workers
    bounds = f"{low}" if low == high else f"{low}:{high}"
    failures, allowed = run.failure_config.max_failures, environ.get("TORCHELASTIC_MAX_RESTARTS")
    differing = []
    wanted = (scaling.min_workers, scaling.max_workers)
    # 0 requests training in its own process, as a worker does.
    if scaling.num_workers not in (0, ScalingConfig().num_workers) and wanted != (low, high):
        differing.append(f"num_workers={scaling.num_workers!r} (--num-workers {bounds})")
    if scaling.use_gpu and not context.devices:
        differing.append("use_gpu=True (--use-gpu)")
    if run.name not in (None, context.job_name):
        differing.append(f"name={run.name!r} (--name {context.job_name})")
    if run.storage_path is not None:
        path = run_path_of(str(run.storage_path), context.job_name)
        if path != context.run_path:
            parent = context.run_path.rpartition("/")[0]
            differing.append(f"storage_path={str(run.storage_path)!r} (--storage-path {parent})")
    if failures and str(failures) != allowed:
        differing.append(f"max_failures={failures} (--max-failures {allowed or 0})")
    return differing


def _changed(config: Any) -> dict[str, Any]:
    """Return the fields of a configuration that differ from their defaults."""
    return {
        each.name: getattr(config, each.name)
        for each in fields(config)
        if each.default is not MISSING and getattr(config, each.name) != each.default
    }
