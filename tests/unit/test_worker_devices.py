"""`cuda:LOCAL_RANK` is the worker's own GPU, in every group that it is in."""

from __future__ import annotations

import pytest
import torch

from elastic.core.config import VIRTUAL_LOCAL_RANK, JobSpec
from elastic.core.events.agent import ProcessExited
from elastic.core.facts import Assignment, Entry, EntryKind, JobId, Resources, WorkerId
from elastic.core.messages import Assign, StartWorker
from elastic.worker.process.devices import VisibleDevices
from tests.unit.agent_under_test import KILLED, W1, W2, W3, Agent, announce, spec, with_spare


def assign(
    own: tuple[str, ...], node: tuple[str, ...] = (), *, gpus: float = 1, **env: str
) -> Assign:
    job = JobSpec(
        job_id=JobId("j1"),
        name="digits",
        entry=Entry(EntryKind.SCRIPT, "train.py", env=tuple(env.items())),
        min_workers=1,
        max_workers=8,
        resources_per_worker=Resources.of({"GPU": gpus}),
    )
    return Assign(WorkerId("n1/4"), job, host="127.0.0.1", devices=own, node_devices=node)


def group(local_rank: int, node: tuple[str, ...] = (), generation: int = 1) -> Assignment:
    return Assignment(
        JobId("j1"), WorkerId("n1/4"), generation, local_rank, 4, local_rank, 4, 0, 1,
        leader_address="h:1", node_devices=node,
    )  # fmt: skip


def own_by_local_rank(devices: VisibleDevices, env: dict[str, str], place: Assignment) -> str:
    """Return what a script takes: the device of this process at LOCAL_RANK."""
    at = int(devices.place(place)["LOCAL_RANK"])
    return env["CUDA_VISIBLE_DEVICES"].split(",")[at]


def test_all_workers_of_a_node_see_one_list_and_take_their_own_by_local_rank() -> None:
    node = ("4", "5", "6", "7")  # What SLURM gave to the agent.
    for local_rank, own in enumerate(node):
        devices, place = VisibleDevices(assign((own,), (own,))), group(local_rank, node)
        env = devices.enter(place)
        assert env == {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
        assert devices.place(place) == {"LOCAL_RANK": str(local_rank)}
        assert devices.names() == (f"cuda:{local_rank}",)


def test_the_own_device_is_where_the_rank_points_also_for_who_came_later() -> None:
    """A lost worker's GPU goes to the one that replaces it, which is the last by rank."""
    devices, place = VisibleDevices(assign(("1",), ("0", "1", "2"))), group(2, ("0", "1", "2"))
    assert own_by_local_rank(devices, devices.enter(place), place) == "1"
    assert devices.names() == ("cuda:2",)


def test_a_worker_with_two_devices_finds_its_first_at_its_rank() -> None:
    node = ("0", "1", "2", "3")
    devices, place = VisibleDevices(assign(("2", "3"), node, gpus=2)), group(1, node)
    env = devices.enter(place)
    seen = env["CUDA_VISIBLE_DEVICES"].split(",")
    assert sorted(seen) == list(node)
    assert [seen[int(name.removeprefix("cuda:"))] for name in devices.names()] == ["2", "3"]
    assert own_by_local_rank(devices, env, place) == "2"


@pytest.mark.parametrize("by", ["cuda", "nccl"])
def test_once_cuda_runs_a_worker_keeps_its_number_when_those_before_it_are_gone(
    by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices, node = VisibleDevices(assign(("2",), ("0", "1", "2"))), ("0", "1", "2")
    devices.enter(group(2, node))
    if by == "cuda":
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    else:
        devices.started()
    later = group(1, ("0", "2"), generation=2)
    assert own_by_local_rank(devices, devices.enter(later), later) == "2"
    assert devices.names() == ("cuda:2",)
    # One that has not touched CUDA, such as a process forked anew, has the true one.
    fresh = VisibleDevices(assign(("2",), ("0", "2")))
    assert own_by_local_rank(fresh, fresh.enter(later), later) == "2"
    assert fresh.place(later) == {"LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    ("job", "why"),
    [
        (assign(("1",), ("0", "1"), **{VIRTUAL_LOCAL_RANK: "1"}), "asked for"),
        (assign(("1",), ("1",), gpus=0.5), "shared"),
        (assign(("MIG-1",), ("MIG-0", "MIG-1")), "a part of a GPU"),
    ],
)
def test_a_masked_worker_sees_its_own_as_the_first(job: Assign, why: str) -> None:
    devices, place = VisibleDevices(job), group(1, job.node_devices)
    assert devices.enter(place) == {"CUDA_VISIBLE_DEVICES": job.devices[0]}, why
    assert devices.place(place) == {"LOCAL_RANK": "0"}
    assert devices.names() == ("cuda:0",)


def test_a_worker_without_devices_sees_none_and_a_list_of_the_jobs_own_stands() -> None:
    none = VisibleDevices(assign(()))
    assert (none.enter(group(1)), none.names()) == ({"CUDA_VISIBLE_DEVICES": ""}, ())
    assert none.place(group(1)) == {"LOCAL_RANK": "1"}
    theirs = VisibleDevices(assign(("0",), ("0",), CUDA_VISIBLE_DEVICES="6,7"))
    assert theirs.enter(group(1, ("0", "1"))) == {"CUDA_VISIBLE_DEVICES": "6,7"}
    assert theirs.place(group(1)) == {"LOCAL_RANK": "1"}


def test_an_agent_tells_each_worker_what_its_job_has_on_the_node() -> None:
    agent = with_spare(devices=("GPU-a", "GPU-b", "GPU-c"))
    for number, worker_id in enumerate((W1, W2, W3), 1):
        agent.hear(StartWorker(worker_id, spec(1)))
        (told,) = agent.told(number)
        assert told.devices == ("GPU-a", "GPU-b", "GPU-c")[number - 1 : number]
        assert told.node_devices == ("GPU-a", "GPU-b", "GPU-c")[:number]
        agent.warm(number + 1)
    assert devices_announced(agent, W3, 1) == ("GPU-a", "GPU-b", "GPU-c")
    agent.do(ProcessExited(2, KILLED))
    assert devices_announced(agent, W3, 2) == ("GPU-a", "GPU-c")


def devices_announced(agent: Agent, worker_id: WorkerId, generation: int) -> tuple[str, ...]:
    agent.hear(announce(worker_id, generation))
    (told,) = agent.told(3)
    return tuple(told.assignment.node_devices)
