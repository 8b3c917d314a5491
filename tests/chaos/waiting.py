"""The train script of the hang tests: shows what it does, and hangs or dawdles when told to.

A file named hang-R or slow-R in the directory that it is given tells rank R to do so, once.
"""

from __future__ import annotations

import argparse
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from elastic.train.torch import TorchTrainer
from elastic.worker.context import current

SLOW_S = 4.0


def train_func(config: dict) -> int:
    """Reduce small tensors until the finish file is there; return how many."""
    context = current()
    activity, orders = context.activity, Path(config["orders"])
    steps = 0
    while True:
        activity.at(0, steps)
        obey(orders, context.world_rank, activity)
        may_end = torch.tensor([float((orders / "finish").exists())])
        with activity.waiting():
            dist.all_reduce(may_end, op=dist.ReduceOp.MIN)
        context.note_step()
        steps += 1
        if may_end.item():
            return steps
        time.sleep(0.005)


def obey(orders: Path, rank: int, activity: object) -> None:
    """Hang or be slow, if there is such an order for this rank."""
    for what in ("hang", "slow"):
        order = orders / f"{what}-{rank}"
        if not order.exists():
            continue
        order.unlink()
        if what == "hang":
            hang_for_ever()
        until = time.monotonic() + SLOW_S
        while time.monotonic() < until:
            time.sleep(0.1)
            activity.beats += 1


def hang_for_ever() -> None:
    """Wait for what never comes."""
    threading.Event().wait()


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--orders", required=True, help="directory of the orders")
    args = parser.parse_args()
    TorchTrainer(train_func, train_loop_config=vars(args)).fit()


if __name__ == "__main__":
    main()
