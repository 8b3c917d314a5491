"""Two ranks with a sharded model; rank 1 is late at a place, and each observes its main thread.

Run as `python -m tests.workers.watched_shards RANK PORT CASE...`; rank 0, whose port is 0, prints
the port for rank 1. For each case it prints one JSON line: the observations of a control thread
while rank 1 was late. Rank 1 stays late until rank 0's observations have not changed for long
enough, so that no test depends on a sleep that may be too short.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from elastic.worker.group.collective_watch import CollectiveWatch, blocked_in_of
from tests.patience import DEADLINE_S

WIDTH = 16
POLL_S = 0.1
NUM_POLLS = 5
"""So many equal observations in a row are final; at the deadline, the last one is."""


class Late(torch.autograd.Function):
    """Calls a function in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.call()
        return (*gradients, None)


class Between(nn.Module):
    """A module between two sharded layers that calls a function in forward and in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.in_forward: Callable[[], None] = lambda: None
        self.in_backward: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x unchanged."""
        self.in_forward()
        return Late.apply(x, self.in_backward)  # type: ignore[no-any-return]


class Rank:
    """One of the two ranks; each case is a method that calls `late` where rank 1 is late."""

    def __init__(self, rank: int, port: int) -> None:
        self.rank = rank
        self.store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, wait_for_workers=False)
        if rank == 0:
            print(self.store.port, flush=True)
        self.told = self.ask()
        dist.init_process_group("gloo", store=self.store, rank=rank, world_size=2)
        torch.manual_seed(0)
        self.between = Between()
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), self.between, nn.Linear(WIDTH, WIDTH))
        for layer in (self.model[0], self.model[2]):
            fully_shard(layer)
        fully_shard(self.model)
        self.late: Callable[[], None] = lambda: None

    def ask(self) -> dist.TCPStore:
        """Return a client of the store for one thread."""
        return dist.TCPStore("127.0.0.1", self.store.port, 2, False)

    def backward(self) -> None:
        """Rank 1 is late in backward."""
        self.between.in_backward = self.late
        self.step()

    def forward(self) -> None:
        """Rank 1 is late in forward."""
        self.between.in_forward = self.late
        self.step()

    def step(self) -> None:
        """Run forward and backward."""
        self.model(torch.ones(4, WIDTH)).sum().backward()

    def optimizer(self) -> None:
        """Rank 1 is late before the norm of all gradients is computed."""
        self.step()
        self.late()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        assert float(norm) >= 0.0

    def operator(self) -> None:
        """Rank 1 is late while rank 0 calls torch's operator directly, as compiled models do."""
        self.late()
        one = torch.ops._c10d_functional.all_reduce(torch.ones(1), "sum", "0")
        torch.ops._c10d_functional.wait_tensor(one)

    def barrier(self) -> None:
        """Rank 1 is late for a barrier of the script."""
        self.late()
        dist.barrier()

    def layers(self) -> None:
        """Both ranks run the layers repeatedly."""
        over = torch.zeros(1)
        while not over.item():
            self.step()
            over.fill_(self.told.check(["seen/layers"]))
            dist.all_reduce(over, dist.ReduceOp.MAX)

    def play(self, case: str) -> dict[str, Any]:
        """Run one case while another thread observes; return the observations."""
        self.between.in_forward = self.between.in_backward = lambda: None
        dist.barrier()
        seen: dict[str, Any] = {}
        over = threading.Event()
        watching = threading.Thread(target=self.watch, args=(case, seen, over))
        self.late = lambda: self.wait_seen(case, watching)
        if self.rank == 0:
            watching.start()
        getattr(self, case)()
        over.set()
        if watching.ident is not None:
            watching.join()
        return seen

    def wait_seen(self, case: str, watching: threading.Thread) -> None:
        """Block rank 1 until both have enough observations."""
        if self.rank == 1:
            watching.start()
            watching.join()
            end = time.monotonic() + DEADLINE_S
            while not self.told.check([f"seen/{case}"]):
                assert time.monotonic() < end, f"rank 0 has not come to an end with {case}"
                time.sleep(POLL_S)

    def watch(self, case: str, seen: dict[str, Any], over: threading.Event) -> None:
        """Observe as a control thread does, until NUM_POLLS observations in a row are equal."""
        watch, polls = CollectiveWatch(), 0
        last, end = (0, False), time.monotonic() + DEADLINE_S
        while polls < NUM_POLLS and not over.is_set() and time.monotonic() < end:
            moves, waiting_ns = watch.sample(1, time.monotonic_ns(), is_sharded=True)
            moved, waits = moves != last[0], waiting_ns > 0
            same = seen.get("moved") == moved and seen.get("waits") == waits
            polls = polls + 1 if same else 0
            last = (moves, waits)
            stance = blocked_in_of(threading.main_thread()).value
            seen.update(moved=moved, waits=waits, stance=stance, waiting_ns=waiting_ns)
            over.wait(POLL_S)
        if self.rank == 0:
            self.ask().set(f"seen/{case}", "")


def main() -> None:
    """Run the cases; end without destroying the group, since the other rank may have ended."""
    warnings.simplefilter("ignore")
    rank, port, *cases = sys.argv[1:]
    player = Rank(int(rank), int(port))
    for case in cases:
        print(json.dumps(player.play(case)), flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
