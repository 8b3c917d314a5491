"""The driver scripts of the wrong-input tests, run by `python drivers.py CASE STORAGE`.

Each is what a newcomer writes: a train function, a trainer, `fit()`; nothing is started before.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import elastic
from elastic import train
from elastic.client.jobs import Client
from elastic.errors import UsageError
from elastic.train.cluster import require_cluster
from elastic.train.torch import TorchTrainer
from tests.patience import DEADLINE_S

NUM_EPOCHS = 3


def count_epochs(config: dict) -> dict:
    """Report some epochs, a checkpoint with each."""
    print(f"rank {train.get_context().get_world_rank()} begins")
    for epoch in range(config["epochs"]):
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "epoch").write_text(str(epoch))
            metrics = {"epoch": epoch, "score": -abs(epoch - 1)}
            train.report(metrics, checkpoint=train.Checkpoint.from_directory(directory))
    return {"epochs": config["epochs"], "size": train.get_context().get_world_size()}


def fail_at_step_7(config: dict) -> None:
    """Raise in the middle."""
    for step in range(10):
        if step == 7:
            raise ValueError(f"bad batch at step {step}")
        train.report({"step": step})


def wait_for_ever(config: dict) -> None:
    """Say who we are, then train on until something happens."""
    Path(config["pid"]).write_text(str(os.getpid()))
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        time.sleep(0.1)


def trainer(function: object, num_workers: object, storage: str, **run: object) -> TorchTrainer:
    """Return a trainer of any of the functions above."""
    return TorchTrainer(
        function,
        train_loop_config={"epochs": NUM_EPOCHS, "pid": f"{storage}/pid"},
        scaling_config=train.ScalingConfig(num_workers=num_workers),
        run_config=train.RunConfig(storage_path=storage, **run),
    )


def check_result(result: train.Result, storage: str, *, kept: int) -> None:
    """Whatever ran it, the result of `count_epochs` says the same."""
    assert result.metrics == {"epoch": NUM_EPOCHS - 1, "score": -1}, result.metrics
    assert [row["metrics"]["epoch"] for row in result.history] == list(range(NUM_EPOCHS))
    assert str(Path(result.path).parent) == storage, result.path
    assert len(result.best_checkpoints) == kept, result.best_checkpoints
    assert len(list((Path(result.path) / "checkpoints").iterdir())) == kept
    best = result.get_best_checkpoint("score")
    with best.as_directory() as directory:
        assert (Path(directory) / "epoch").read_text() == "1"
    with result.checkpoint.as_directory() as directory:
        assert (Path(directory) / "epoch").read_text() == str(NUM_EPOCHS - 1)
    assert result.return_value["epochs"] == NUM_EPOCHS
    assert result.error is None


def run_twice_and_fail(storage: str) -> None:
    """Two good runs in one script, then one that fails and is not caught."""
    keep = train.CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="score")
    result = trainer(count_epochs, (1, 2), storage, checkpoint_config=keep).fit()
    check_result(result, storage, kept=2)
    try:
        elastic.init()
    except UsageError as error:
        print(f"second init: {error}")
    result = trainer(count_epochs, 2, storage).fit()
    check_result(result, storage, kept=3)
    assert result.return_value["size"] == 2
    if train.is_driver():
        print("both runs are right")
    trainer(fail_at_step_7, 1, storage).fit()


def train_on(storage: str) -> None:
    """Train until killed."""
    trainer(wait_for_ever, 1, storage).fit()


def ask_for_h100(storage: str) -> None:
    """Ask for an accelerator that is not here, and will not be."""
    trainer_ = trainer(wait_for_ever, 1, storage)
    trainer_.scaling_config = train.ScalingConfig(accelerator_type="H100")
    trainer_.fit()


def wait_for_a_slot(storage: str) -> None:
    """Wait for the only slot, which another job has, until interrupted."""
    # Run in the background by a shell, a script inherits that SIGINT is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    elastic.init(num_workers=1)
    trainer_ = trainer(wait_for_ever, 1, storage)
    cluster = require_cluster(1, 1)
    with Client(cluster.address, cluster.access) as client:
        client.submit(trainer_._spec("first"))
    trainer_.fit()


def run_here(storage: str) -> None:
    """Train in this process, or in torchrun's."""
    check_result(trainer(count_epochs, 0, storage).fit(), storage, kept=3)
    keep = train.CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="score")
    check_result(trainer(count_epochs, 0, storage, checkpoint_config=keep).fit(), storage, kept=2)
    if train.is_driver():
        print("both runs are right")


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
