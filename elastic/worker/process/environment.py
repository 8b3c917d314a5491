"""The environment variables that a training process finds, as torchrun's users know them.

Rule: pure. What the process was started with comes in as an argument, what is to be set goes
out as a dict; what the user has set himself is never replaced, except a process's place in its
group, which changes with every generation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from elastic.core.config import JobSpec
from elastic.core.facts import Assignment, host_of
from elastic.core.messages import Assign

PLACE = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "NODE_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RESTART_COUNT",
        "ELASTIC_GENERATION",
    }
)
"""Environment variables that give a process its place in its group."""

THREADS = "OMP_NUM_THREADS"
THREADS_OF_SEVERAL = "1"
"""What torchrun sets when several workers share a node."""


def for_job(assign: Assign, started_with: Mapping[str, str]) -> dict[str, str]:
    """Return what to set when a spare becomes a worker; its entry's own variables win over ours."""
    spec = assign.spec
    ours = {
        "ELASTIC_JOB_ID": spec.job_id,
        "ELASTIC_JOB_NAME": spec.name,
        "ELASTIC_WORKER_ID": assign.worker_id,
        "ELASTIC_MIN": str(spec.min_workers),
        "ELASTIC_MAX": str(spec.max_workers),
        "TORCHELASTIC_RUN_ID": spec.name,
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_failures),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    defaults = (
        # What torch.use_deterministic_algorithms asks for; read before CUDA is first used.
        {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        if assign.devices
        # accelerate picks NCCL wherever torch was built with it, unless set otherwise; with devices
        # it goes by LOCAL_RANK, which is the number of the worker's own.
        else {"ACCELERATE_USE_CPU": "true", "ACCELERATE_TORCH_DEVICE": "cpu"}
    )
    return _unset(defaults, started_with) | ours | dict(spec.entry.env)


def _unset(defaults: Mapping[str, str], known: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in defaults.items() if name not in known}


def for_generation(
    assign: Assign, assignment: Assignment, started_with: Mapping[str, str]
) -> dict[str, str]:
    """Return what to set before the train function is called in a group."""
    port = assignment.leader_address.rpartition(":")[2]
    place = {
        "RANK": str(assignment.rank),
        "WORLD_SIZE": str(assignment.world_size),
        "LOCAL_RANK": str(assignment.local_rank),
        "LOCAL_WORLD_SIZE": str(assignment.local_world_size),
        "GROUP_RANK": str(assignment.node_rank),
        "NODE_RANK": str(assignment.node_rank),
        "GROUP_WORLD_SIZE": str(assignment.num_nodes),
        "ROLE_NAME": dict(assign.spec.entry.env).get("ROLE_NAME", "default"),
        "ROLE_RANK": str(assignment.rank),
        "ROLE_WORLD_SIZE": str(assignment.world_size),
        "MASTER_ADDR": host_of(assignment.leader_address),
        "MASTER_PORT": port,
        # torch prefixes the keys of a store that it is handed with this number.
        "TORCHELASTIC_RESTART_COUNT": str(assignment.generation - 1),
        "ELASTIC_GENERATION": str(assignment.generation),
        "ELASTIC_LOCAL_RANK": str(assignment.local_rank),
    }
    theirs = dict(assign.spec.entry.env)
    return place | _unset(_tracker(assign.spec, assignment.rank), {**started_with, **theirs})


def _tracker(spec: JobSpec, rank: int) -> dict[str, str]:
    """Return one Weights & Biases run per job and rank, whatever is restarted meanwhile.

    MLflow has no such variable: MLFLOW_RUN_ID must name a run that its server knows already.
    """
    identity = f"{spec.job_id}\n{spec.run_path}"
    run_id = hashlib.sha256(identity.encode()).hexdigest()[:24]
    return {
        "WANDB_RUN_ID": run_id if rank == 0 else f"{run_id}-{rank}",
        "WANDB_RESUME": "allow",
    }


def num_threads(
    assignment: Assignment, entry_env: Mapping[str, str], started_with: Mapping[str, str]
) -> int | None:
    """Return how many threads torch is to compute with, None to leave it as it is.

    The spare loaded torch before it had a job, so the variable alone comes too late.
    """
    default = THREADS_OF_SEVERAL if assignment.local_world_size > 1 else ""
    value = entry_env.get(THREADS) or started_with.get(THREADS) or default
    # OpenMP allows "4,2" for nested regions; the first number is ours.
    first = value.split(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None
