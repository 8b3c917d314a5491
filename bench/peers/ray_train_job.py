"""The script of `torchrun_job.py` under Ray Train: the same loop, called by Ray's workers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from bench.peers import torchrun_job


def train_func(config: dict[str, Any]) -> None:
    """Count this group, and train; called in each worker, again after each failure."""
    args = torchrun_job.parser().parse_args(config["args"])
    life = torch.zeros(1, dtype=torch.int64)
    if dist.get_rank() == 0:
        counted = Path(args.marks).with_suffix(".lives")
        life[0] = int(counted.read_text()) + 1 if counted.exists() else 0
        counted.write_text(str(int(life)))
    dist.broadcast(life, 0)
    torch.set_num_threads(1)
    torchrun_job.train(args, int(life))


def main() -> None:
    """Start Ray on this machine, and train until somebody ends it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--scratch", required=True)
    parser.add_argument("--storage", required=True)
    args, others = parser.parse_known_args()
    ray.init(num_cpus=args.world + 1, include_dashboard=False, _temp_dir=args.scratch)
    TorchTrainer(
        train_func,
        train_loop_config={"args": others},
        scaling_config=ScalingConfig(num_workers=args.world),
        run_config=RunConfig(
            name="bench", storage_path=args.storage, failure_config=FailureConfig(max_failures=-1)
        ),
    ).fit()


if __name__ == "__main__":
    main()
