"""What a script wishes in vain where a command started its job: its options count there.

Rule: only what makes a difference is told, once in a process. Values of environment variables may
be secrets, and are not repeated.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from elastic.client.submission import run_path_of
from elastic.train.beginning import say
from elastic.train.config import RunConfig, ScalingConfig, TorchConfig

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
"""Fields whose value in the job a worker does not know -> the option of `elastic submit`."""

_is_reported = False


def say_overruled(
    context: WorkerContext, scaling: ScalingConfig, run: RunConfig, torch_config: TorchConfig
) -> None:
    """Tell the user on rank 0, once in this process, what of the configuration does not count."""
    global _is_reported
    if _is_reported or context.join is not None or context.world_rank != 0:
        return  # Who runs ahead of its group has no rank yet.
    _is_reported = True
    line = overruled(context, scaling, run, torch_config, os.environ)
    if line:
        say(line)


def overruled(
    context: WorkerContext,
    scaling: ScalingConfig,
    run: RunConfig,
    torch_config: TorchConfig,
    environ: Mapping[str, str],
) -> str:
    """Return what of a script's configuration does not count, as a line; "" for nothing.

    Args:
        context: this worker's.
        scaling: the trainer's, as are the next two.
        run: name, place and policies.
        torch_config: backend and its timeout.
        environ: the worker's environment, which says how large the job may be.
    """
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
    told = "elastic: of this script's configuration "
    if parts:
        told += f"the command line's counts instead: {', '.join(parts)}"
    if unused:
        told += f"{'; ' if parts else ''}not used: {', '.join(unused)}"
    return told


def _known(
    context: WorkerContext, scaling: ScalingConfig, run: RunConfig, environ: Mapping[str, str]
) -> list[str]:
    """Return what differs from the job where the worker knows the job's value."""
    low, high = int(environ.get("ELASTIC_MIN", context.max_workers)), context.max_workers
    bounds = f"{low}" if low == high else f"{low}:{high}"
    failures, allowed = run.failure_config.max_failures, environ.get("TORCHELASTIC_MAX_RESTARTS")
    said = []
    wanted = (scaling.min_workers, scaling.max_workers)
    # With 0 it would train in its own process, which it does.
    if scaling.num_workers not in (0, ScalingConfig().num_workers) and wanted != (low, high):
        said.append(f"num_workers={scaling.num_workers!r} (--num-workers {bounds})")
    if scaling.use_gpu and not context.devices:
        said.append("use_gpu=True (--use-gpu)")
    if run.name not in (None, context.job_name):
        said.append(f"name={run.name!r} (--name {context.job_name})")
    if run.storage_path is not None:
        path = run_path_of(str(run.storage_path), context.job_name)
        if path != context.run_path:
            parent = context.run_path.rpartition("/")[0]
            said.append(f"storage_path={str(run.storage_path)!r} (--storage-path {parent})")
    if failures and str(failures) != allowed:
        said.append(f"max_failures={failures} (--max-failures {allowed or 0})")
    return said


def _changed(config: Any) -> dict[str, Any]:
    """Return the fields of a configuration that are not as by default."""
    return {
        each.name: getattr(config, each.name)
        for each in fields(config)
        if each.default is not MISSING and getattr(config, each.name) != each.default
    }
