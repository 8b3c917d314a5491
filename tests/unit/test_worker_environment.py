"""What a training process finds in its environment."""

from __future__ import annotations

import pytest

from elastic.core.config import JobSpec
from elastic.core.facts import Assignment, Entry, EntryKind, JobId, WorkerId
from elastic.core.messages import Assign
from elastic.worker.process import environment

ASSIGNMENT = Assignment(
    JobId("j1"),
    WorkerId("n1/4"),
    generation=3,
    rank=5,
    world_size=8,
    local_rank=1,
    local_world_size=2,
    node_rank=2,
    num_nodes=4,
    leader_address="[fd00::1]:4711",
)


def assign(devices: tuple[str, ...] = (), **env: str) -> Assign:
    entry = Entry(EntryKind.SCRIPT, "train.py", env=tuple(env.items()))
    spec = JobSpec(
        job_id=JobId("j1"), name="digits", entry=entry, min_workers=2, max_workers=8, max_failures=3
    )
    return Assign(WorkerId("n1/4"), spec, host="127.0.0.1", devices=devices)


def test_a_worker_with_devices_is_not_told_to_use_the_cpu() -> None:
    assert "ACCELERATE_USE_CPU" not in environment.for_job(assign(devices=("3",)), {})


@pytest.mark.parametrize(
    ("local_world_size", "entry_env", "started_with", "threads"),
    [
        (1, {}, {}, None),
        (2, {}, {}, 1),
        (2, {"OMP_NUM_THREADS": "6"}, {"OMP_NUM_THREADS": "4"}, 6),
        (1, {}, {"OMP_NUM_THREADS": "4,2"}, 4),
        (2, {"OMP_NUM_THREADS": "many"}, {}, None),
        (2, {"OMP_NUM_THREADS": "0"}, {}, None),
    ],
)
def test_threads_are_as_torchrun_has_them(
    local_world_size: int,
    entry_env: dict[str, str],
    started_with: dict[str, str],
    threads: int | None,
) -> None:
    place = Assignment(
        JobId("j1"), WorkerId("n1/4"), 1, 0, 8, 0, local_world_size, 0, 8, "127.0.0.1:1"
    )
    assert environment.num_threads(place, entry_env, started_with) == threads


def test_a_worker_finds_what_torchrun_sets() -> None:
    found = environment.for_job(assign(), {}) | environment.for_generation(assign(), ASSIGNMENT, {})
    torchruns = {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "ELASTIC_LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "4",
        "ROLE_RANK": "5",
        "ROLE_WORLD_SIZE": "8",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "fd00::1",
        "MASTER_PORT": "4711",
        "TORCHELASTIC_RUN_ID": "digits",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    assert {name: found[name] for name in torchruns} == torchruns
    assert found["ELASTIC_GENERATION"] == "3"
    assert (found["ELASTIC_MIN"], found["ELASTIC_MAX"]) == ("2", "8")
