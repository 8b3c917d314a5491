"""The driver scripts of the resume tests, run by `python resuming.py CASE STORAGE`.

Each goes on where the run stands; while STORAGE/go is not there, it stops after three epochs.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from elastic import train
from elastic.train.torch import TorchTrainer
from tests.patience import DEADLINE_S

NUM_EPOCHS = 5
HELD_AT = 3


def count_on(config: dict) -> list[int]:
    """Report a checkpoint for each epoch that is left; return the first and the number of ranks."""
    rank = train.get_context().get_world_rank()
    Path(config["storage"], f"pid-{rank}").write_text(str(os.getpid()))
    begun = train.get_checkpoint()
    first = begun.to_dict()["epoch"] + 1 if begun is not None else 0
    for epoch in range(first, NUM_EPOCHS):
        if epoch == HELD_AT:
            wait_for(Path(config["storage"]) / "go")
        checkpoint = train.Checkpoint.from_dict({"epoch": epoch, "more": list(range(1000))})
        train.report({"epoch": epoch, "loss": 1.0 / (epoch + 1)}, checkpoint=checkpoint)
    known = [one.metrics["epoch"] for one in train.get_all_reported_checkpoints()]
    assert known == list(range(NUM_EPOCHS)), known
    return [first, train.get_context().get_world_size()]


def wait_for(path: Path) -> None:
    """Wait until there is such a file."""
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def trainer(storage: str, **run: object) -> TorchTrainer:
    """Return the trainer that all cases use."""
    return TorchTrainer(
        count_on,
        train_loop_config={"storage": storage},
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(name="long", storage_path=storage, **run),
    )


def say(result: train.Result) -> None:
    """Print what the tests look at."""
    print("returned", result.return_value)
    print("history", [row["metrics"]["epoch"] for row in result.history])
    print("kept", [metrics["epoch"] for _, metrics in result.best_checkpoints])


def fit(storage: str) -> None:
    """Train, or go on."""
    say(trainer(storage).fit())


def restore(storage: str) -> None:
    """Go on with what is stored."""
    assert TorchTrainer.can_restore(f"{storage}/long")
    say(TorchTrainer.restore(f"{storage}/long").fit())


def branch(storage: str) -> None:
    """Begin another run with the first checkpoint of the one that is there."""
    (checkpoint, metrics), *_ = train.Result.from_path(f"{storage}/long").best_checkpoints
    config = train.RunConfig(name="branch", storage_path=storage)
    result = TorchTrainer(begin_and_end, run_config=config, resume_from_checkpoint=checkpoint).fit()
    print("branched after", result.return_value, "of", metrics["epoch"])


def begin_and_end() -> list[int]:
    """Return what there is to begin with, and how much of it is ours."""
    begun = train.get_checkpoint()
    return [begun.to_dict()["epoch"], len(train.get_all_reported_checkpoints())]


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
