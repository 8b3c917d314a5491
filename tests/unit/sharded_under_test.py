"""A run whose model is sharded over members that live in one process, each with its own rows."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from elastic.core.facts import SNAPSHOT_SLOTS
from elastic.core.policy.cursor import Cursor
from elastic.core.policy.shares import chunk
from elastic.storage.run_directory import RunDirectory
from elastic.worker.checkpoint.snapshot import RankInfo
from elastic.worker.checkpoint.snapshotter import Snapshotter
from elastic.worker.group.member_links import connect
from elastic.worker.group.peer_sockets import PeerAddress
from elastic.worker.state.sharded_state import with_expected
from elastic.worker.state.train_state import TrainState
from tests.patience import DEADLINE_S
from tests.unit.groups_under_test import Group, at_once
from tests.unit.saving_under_test import Coordinator, writer_of


class Whole(nn.Module):
    """Uneven and odd shapes: fewer rows than ranks, one row, no rows; buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(3, 7)
        self.narrow = nn.Linear(7, 2)
        self.one = nn.Parameter(torch.randn(1, 5))
        self.none = nn.Parameter(torch.randn(0, 4))
        self.register_buffer("mean", torch.randn(4))
        self.register_buffer("seen", torch.tensor(3), persistent=False)


def mesh_of(rank: int, shape: Sequence[int]) -> DeviceMesh:
    """Return a mesh that nobody communicates over."""
    size = int(torch.tensor(shape).prod())
    ranks = torch.arange(size).reshape(tuple(shape))
    return DeviceMesh("cpu", ranks, _init_backend=False, _rank=rank)


def sharded(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a rank's rows of a tensor; copies along all but the last dimension of the mesh."""
    last = mesh.ndim - 1
    rows = chunk(tensor.shape[0], mesh.size(last), mesh.get_coordinate()[last])  # type: ignore[index]
    return DTensor.from_local(
        tensor[rows.first : rows.end].clone(),
        mesh,
        [Replicate()] * last + [Shard(0)],
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


class Member:
    """One rank's objects: its rows of a model and of the optimizer's state."""

    def __init__(self, rank: int, shape: Sequence[int], seed: int, *, stepped: bool) -> None:
        torch.manual_seed(seed)
        # Torch keeps what it knows of a mesh, and of two ranks' in one process takes either one's.
        self.place = rank, shape
        whole, mesh = Whole(), mesh_of(rank, shape)
        self.whole = whole
        self.optimizer_state = {name: torch.randn_like(p) for name, p in whole.named_parameters()}
        self.model = nn.Module()
        for name, buffer in whole.named_buffers():
            self.model.register_buffer(name, buffer.clone())
        for name, parameter in whole.named_parameters():
            rows = nn.Parameter(sharded(parameter.detach(), mesh))
            self.model.register_parameter(name.replace(".", "_"), rows)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        if stepped:
            for (name, moment), mine in zip(
                self.optimizer_state.items(), self.model.parameters(), strict=True
            ):
                del name
                self.optimizer.state[mine] = {
                    "step": torch.tensor(5.0),
                    "exp_avg": sharded(moment, mesh),
                    "exp_avg_sq": sharded(moment * 2, mesh),
                }
        self.objects = TrainState()
        self.objects.models.append(self.model)
        self.objects.optimizers.append(self.optimizer)

    def state(self, steps: int) -> dict[str, Any]:
        """Return what is saved."""
        return {"objects": self.objects.take(), "cursor": [0, steps], "steps": steps}

    def ours(self) -> dict[str, Any]:
        """Return what a saved state is placed by."""
        return {"objects": with_expected(self.objects.take(), self.objects.optimizers)}


class ShardedRun:
    """The members of one group.

    Attributes:
        members, savers: by rank.
    """

    def __init__(
        self, folder: Path | str, *, shape: Sequence[int], nodes: int = 1, seed: int = 0
    ) -> None:
        self.coordinator = Coordinator()
        self.directory = RunDirectory(str(folder))
        size = int(torch.tensor(shape).prod())
        self.members = [Member(rank, shape, seed, stepped=True) for rank in range(size)]
        self.nodes = [Memory() for _ in range(nodes)]
        self.savers = []
        for rank in range(size):
            node, local = divmod(rank, size // nodes)
            writer = writer_of(self.directory, self.coordinator)
            snapshotter = Snapshotter(self.nodes[node].paths, writer)
            snapshotter.enter(RankInfo(1, rank, size, local, size // nodes))
            self.savers.append(snapshotter)

    def save(self, steps: int = 1, *, beside: Callable[[Member], None] | None = None) -> None:
        """Have every member take the snapshot, and wait until it is durable, or given up.

        Args:
            steps: of the run.
            beside: what each member does while its rows are copied; None to copy them first.
        """
        done = []
        for member, snapshotter in zip(self.members, self.savers, strict=True):
            one = snapshotter.take(
                lambda m=member: m.state(steps),  # type: ignore[misc]
                Cursor(0, steps),
                steps,
                still=member.objects.still_between_steps() if beside is not None else None,
            )
            if beside is not None:
                beside(member)
            done.append(one)
        for snapshotter in self.savers:
            snapshotter.settle()
        for one in done:
            assert one.wait(DEADLINE_S)

    def committed(self) -> list[str]:
        """Return the names of checkpoints that count, oldest first."""
        return [name for name, _ in self.directory.committed()]


def together(size: int, do: Callable[[int, Any], Any]) -> list[Any]:
    """Call a function on each member of a group that is threads."""
    store = dist.HashStore()

    def be(rank: int) -> Any:
        group = Group(rank, size)
        connect(group, store, PeerAddress("127.0.0.1", DEADLINE_S))
        return do(rank, group)

    return at_once([partial(be, rank) for rank in range(size)])


class Memory:
    """What an agent holds for the workers of its node."""

    def __init__(self) -> None:
        fds = [os.memfd_create("snapshot") for _ in range(SNAPSHOT_SLOTS)]
        self.paths = tuple(f"/proc/{os.getpid()}/fd/{fd}" for fd in fds)
        for fd in fds:
            weakref.finalize(self, os.close, fd)


def assert_rows_of(member: Member, whole: nn.Module, moments: dict[str, torch.Tensor]) -> None:
    """Check that a member has its rows of this model and of this optimizer's state."""
    for (name, expected), mine in zip(
        whole.named_parameters(), member.model.parameters(), strict=True
    ):
        state = member.optimizer.state[mine]
        assert float(state["step"]) == 5.0
        for tensor, value in (
            (mine, expected),
            (state["exp_avg"], moments[name]),
            (state["exp_avg_sq"], moments[name] * 2),
        ):
            assert isinstance(tensor, DTensor)
            assert torch.equal(
                tensor.to_local(), sharded(value.detach(), mesh_of(*member.place)).to_local()
            )
    for (_, expected), (_, buffer) in zip(
        whole.named_buffers(), member.model.named_buffers(), strict=True
    ):
        assert torch.equal(buffer, expected)
