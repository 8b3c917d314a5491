"""Ours beside the peers: the train script of chaos runs, as it is, with a mark after each step.

Rule: what is trained is not touched; torch itself calls us after a real optimizer step. The marks
are lines "unix_ns rank life step pid world" as `bench/marks.py` reads them; a life is a generation.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from elastic import train
from tests.harness.jobs import steps_job


def main() -> None:
    """Take our own options, and leave the others to the script."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--marks", required=True)
    parser.add_argument("--samples", type=int, required=True)
    args, others = parser.parse_known_args()
    file = os.open(args.marks, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    newest = (0, 0)

    def mark(optimizer: torch.optim.Optimizer, _args: Any, _named: Any) -> None:
        nonlocal newest
        if not isinstance(optimizer, torch.optim.AdamW):
            return  # The script has two optimizers, which are committed together.
        place = train.get_context()
        steps = -(-args.samples // place.get_global_batch_size())
        number = place.get_epoch() * steps + place.get_step() + 1
        if newest == (place.get_generation(), number):
            return  # The script's optimizer is a subclass, whose step calls that of its base.
        newest = place.get_generation(), number
        line = (
            f"{time.time_ns()} {place.get_world_rank()} {place.get_generation()} {number} "
            f"{os.getpid()} {place.get_world_size()}\n"
        )
        os.write(file, line.encode())

    register_optimizer_step_post_hook(mark)
    sys.argv = [sys.argv[0], "--samples", str(args.samples), *others]
    steps_job.main()


if __name__ == "__main__":
    main()
