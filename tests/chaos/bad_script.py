"""A train script that goes wrong in the way that its argument says; run by `elastic submit`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from elastic import train
from elastic.train.torch import TorchTrainer


def train_func(config: dict) -> None:
    """Report a few steps, then do what was asked for."""
    for step in range(10):
        if step == 7:
            WAYS[config["way"]]()
        train.report({"step": step})


def fail() -> None:
    """Raise as user code does."""
    raise ValueError("bad batch at step 7")


def leave_with_3() -> None:
    """End with a code of its own."""
    sys.exit(3)


def leave_at_once() -> None:
    """End the process without a word to Python."""
    os._exit(3)


def leave_well() -> None:
    """End early, and well."""
    sys.exit(0)


def checkpoint() -> None:
    """Save more than there may be room for."""
    Path("big").mkdir(exist_ok=True)
    (Path("big") / f"file{os.getpid()}").write_bytes(bytes(1 << 20))
    train.report({}, checkpoint=train.Checkpoint.from_directory("big"))


def make_noise() -> None:
    """Print what no terminal likes."""
    print("x" * 300_000)
    print("\n" * 2000)
    os.write(1, bytes(range(256)) * 20 + b"\xff\xfe\x00 no newline at the end")


WAYS = {
    "fail": fail,
    "leave_with_3": leave_with_3,
    "leave_at_once": leave_at_once,
    "leave_well": leave_well,
    "checkpoint": checkpoint,
    "make_noise": make_noise,
}

if __name__ == "__main__":
    TorchTrainer(train_func, train_loop_config={"way": sys.argv[1]}).fit()
