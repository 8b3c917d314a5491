"""Steps of a small network with two optimizers, reduced by the process's group."""

from __future__ import annotations

import hashlib
import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from elastic.core.policy.cursor import Cursor
from elastic.core.policy.data_plan import DataPlan
from elastic.core.policy.seeds import micro_batch_seed
from elastic.worker.data.randomness import seed_everything
from elastic.worker.group.c10d import default_store
from elastic.worker.group.member_links import connect
from elastic.worker.group.peer_sockets import PeerAddress
from elastic.worker.reduce import tree_exchange
from elastic.worker.reduce.reducer import OptimizerUnit, Reducer, StepShare
from elastic.worker.reduce.transports import GroupTransport, transport_of

EPOCHS = DataPlan(num_samples=50, micro_batch_size=4, num_micro_batches=6)
"""Steps of 24, 24 and 2 samples: in the last step, four of six micro-batches are empty."""
BUCKET_BYTES = 1 << 12


def _over_torch(group: dist.ProcessGroup, _: torch.device) -> GroupTransport:
    return GroupTransport(group)


class Steps:
    """A training run and its present step."""

    def __init__(self, consistency: str, over: str) -> None:
        """Create the run, with equal weights on all members.

        Args:
            consistency: the mode of the reducer.
            over: transport of exchanges: "memory", "torch", or another value for sockets.
        """
        self.over = over
        seed_everything(0)
        self.data = torch.randn(EPOCHS.num_samples, 1, 6, 6)
        # One layer is large enough to be sent in slices; the others are sent whole.
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
            nn.Linear(128, 600), nn.Dropout(0.5), nn.Linear(600, 5), nn.Tanh(),
        )  # fmt: skip
        self.head = nn.Linear(5, 1)
        self.unused = nn.Linear(2, 2)
        self.optimizers = [
            torch.optim.Adam([*self.body.parameters(), *self.unused.parameters()], lr=0.01),
            torch.optim.SGD(self.head.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
        ]
        self.units = [
            OptimizerUnit("body", [*self.body.named_parameters(), *self.unused.named_parameters()]),
            OptimizerUnit("head", list(self.head.named_parameters())),
        ]
        self.reducer = Reducer(
            self.units, [self.body], consistency=consistency, bucket_bytes=BUCKET_BYTES
        )
        self.step = 0

    def attach(self) -> None:
        """Continue in this group."""
        group, rank = dist.group.WORLD, dist.get_rank()
        node = "" if self.over == "memory" else str(rank)
        connect(group, default_store(), PeerAddress(node=node))
        # As tensors of a device are sent by NCCL.
        tree_exchange.transport_of = _over_torch if self.over == "torch" else transport_of
        self.reducer.attach(group)
        left = [p.grad for unit in self.units for _, p in unit.parameters]
        assert all(one is None for one in left), "a void step has left gradients"

    def run(self, until: int, die_at: int) -> dict[str, Any]:
        """Run steps up to this number, or until the group breaks."""
        while self.step < until:
            if not self._one(dies=self.step == die_at):
                return {"broken": type(self.reducer.broken).__name__, "step": self.step}
            self.step += 1
        return {"hash": self.hash(), "step": self.step, "sent": self.reducer.bytes_sent}

    def _one(self, *, dies: bool) -> bool:
        rank, step = dist.get_rank(), self.step % EPOCHS.steps
        share = StepShare.of(EPOCHS, step, rank=rank, world_size=dist.get_world_size())
        self.reducer.begin_step(share, [float(rank), float(self.step)])
        for number in range(*share.held):
            self.reducer.begin_micro_batch(number)
            seed_everything(micro_batch_seed(0, Cursor(0, self.step), number))
            first, last = EPOCHS.positions(step, number)
            x = self.data[first : max(last, first + 1)]
            loss = self.head(self.body(x)).square().mean()
            if dies and number == share.held[1] - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
        for unit in self.units:
            if not self.reducer.settle(unit):
                return False
        rows = [row[:2] for row in self.reducer.rows]
        assert rows == [(float(r), float(self.step)) for r in range(share.world_size)], rows
        if not self.reducer.settle_buffers():
            return False
        self.reducer.keep_buffers()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return True

    def hash(self) -> str:
        """Return the SHA-256 of all weights, buffers and optimizer states."""
        tensors = [t for m in (self.body, self.head, self.unused) for t in m.state_dict().values()]
        for optimizer in self.optimizers:
            for _, state in sorted(optimizer.state_dict()["state"].items()):
                tensors += [value for _, value in sorted(state.items()) if value is not None]
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()
