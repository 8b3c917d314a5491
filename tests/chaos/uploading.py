"""The driver scripts of the upload tests, run by `python uploading.py CASE STORAGE`.

The upload of one epoch's checkpoint takes until STORAGE/go is there; STORAGE/uploading-R says
that rank R is at it, and STORAGE/pid-R holds its process.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from elastic import train
from elastic.train import CheckpointUploadMode
from elastic.train.torch import (
    TorchTrainer,
    prepare_data_loader,
    prepare_model,
    prepare_optimizer,
)
from tests.patience import DEADLINE_S

NUM_EPOCHS = 4
SLOW_EPOCH = 1


def wait_for(path: Path) -> None:
    """Wait until there is such a file."""
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def report(epoch: int, storage: Path) -> None:
    """Report an epoch's checkpoint in the background."""
    context = train.get_context()
    rank = context.get_world_rank()
    # In each epoch: whoever reads it meanwhile finds it whole.
    draft = storage / f"pid-{rank}.draft"
    draft.write_text(str(os.getpid()))
    draft.replace(storage / f"pid-{rank}")

    def upload(checkpoint: train.Checkpoint, name: str) -> train.Checkpoint:
        if epoch == SLOW_EPOCH:
            (storage / f"uploading-{rank}").touch()
            wait_for(storage / "go")
        target = Path(context.get_storage()) / "checkpoints" / name
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(checkpoint.path) / "dict.pt", target / f"rank{rank}.pt")
        return train.Checkpoint(target)

    train.report(
        {"epoch": epoch},
        checkpoint=train.Checkpoint.from_dict({"epoch": epoch}),
        checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
        checkpoint_upload_fn=upload,
    )
    train.report({"epoch": epoch, "goes_on": True})


def plain_loop(config: dict) -> str:
    """Report each epoch that is left, and wait in one of them until told."""
    begun = train.get_checkpoint()
    first = 0
    if begun is not None:
        with begun.as_directory() as directory:
            loaded = torch.load(Path(directory) / "rank0.pt", weights_only=True)
            first = loaded["epoch"] + 1
    for epoch in range(first, NUM_EPOCHS):
        report(epoch, Path(config["storage"]))
    return f"began at {first}"


def in_place_loop(config: dict) -> str:
    """Train a small model in a loop that survives a change of the group."""
    model = prepare_model(torch.nn.Linear(2, 1))
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    data = TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
    loader = prepare_data_loader(DataLoader(data, batch_size=2))
    for epoch in train.epochs(NUM_EPOCHS):
        for x, y in loader:
            (model(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        report(epoch, Path(config["storage"]))
    return "went on in place"


def already_there(config: dict) -> str:
    """Write a checkpoint to where it belongs, and report it."""
    context = train.get_context()
    path = Path(context.get_storage()) / "checkpoints" / "mine"
    path.mkdir(parents=True, exist_ok=True)
    (path / f"shard{context.get_world_rank()}").write_text("x")
    train.report(
        {"epoch": 0},
        checkpoint=train.Checkpoint.from_directory(path),
        checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
    )
    begun = train.get_checkpoint()
    with begun.as_directory() as directory:
        return ", ".join(sorted(p.name for p in Path(directory).glob("shard*")))


def fit(function: object, storage: str, num_workers: int) -> None:
    """Run it and print what the tests look at."""
    result = TorchTrainer(
        function,
        train_loop_config={"storage": storage},
        scaling_config=train.ScalingConfig(num_workers=num_workers),
        run_config=train.RunConfig(name="run", storage_path=storage),
    ).fit()
    if train.is_driver():
        print("returned", result.return_value)
        print("kept", [metrics["epoch"] for _, metrics in result.best_checkpoints])
        newest = Path(result.checkpoint.path)
        print("files", sorted(p.name for p in newest.iterdir() if p.name[0] != "_"))


CASES = {
    "plain": (plain_loop, 2),
    "in_place": (in_place_loop, 2),
    "there": (already_there, 2),
    "there_here": (already_there, 0),
    "plain_here": (plain_loop, 0),
}

if __name__ == "__main__":
    fit(CASES[sys.argv[1]][0], sys.argv[2], CASES[sys.argv[1]][1])
