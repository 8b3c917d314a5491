"""The driver scripts of the validation tests, run by `python validating.py CASE STORAGE`.

Each validation writes a line to STORAGE/begun, and is over once STORAGE/open is there.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elastic import train
from elastic.train.torch import (
    TorchTrainer,
    prepare_data_loader,
    prepare_model,
    prepare_optimizer,
)
from tests.patience import DEADLINE_S

NUM_EPOCHS = 3
NAME = "judged"


def judge(checkpoint: train.Checkpoint, *, storage: str, weight: float) -> dict[str, float]:
    """Say who we are, and wait to be let go on."""
    if dist_names := [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name in os.environ]:
        raise AssertionError(f"a validation is in no group, and finds {dist_names}")
    data = checkpoint.to_dict()
    with open(f"{storage}/begun", "a") as file:
        file.write(f"{os.getpid()} {data['epoch']}\n")
    wait_for(Path(storage) / "open")
    return {"score": data["epoch"] * weight}


def wait_for(path: Path) -> None:
    """Wait until there is such a file."""
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def train_func(config: dict[str, Any]) -> str:
    """Train a little, report each epoch; return the hash of the weights."""
    torch.manual_seed(1)
    x = torch.randn(64, 4)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    model = prepare_model(nn.Linear(4, 1))
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    loader = prepare_data_loader(DataLoader(data, batch_size=8, shuffle=True), global_batch_size=16)
    for epoch in train.epochs(NUM_EPOCHS):
        for inputs, targets in loader:
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        report(epoch, config)
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(weights).hexdigest()


def report(epoch: int, config: dict[str, Any]) -> None:
    """Report a checkpoint, to be validated unless it is said otherwise."""
    checkpoint = None
    if train.get_context().get_world_rank() == 0:
        checkpoint = train.Checkpoint.from_dict({"epoch": epoch})
    validation: Any = False
    if checkpoint is not None and config["validates"]:
        validation = train.ValidationTaskConfig(fn_kwargs={"weight": 10.0})
    train.report({"epoch": epoch}, checkpoint=checkpoint, validation=validation)


def fit(storage: str, *, num_workers: int = 2, validates: bool = True) -> train.Result:
    """Train, or go on, and say what came of it."""
    name = NAME if validates else "undisturbed"
    given = train.ValidationTaskConfig(fn_kwargs={"storage": storage, "weight": 0.0})
    result = TorchTrainer(
        train_func,
        train_loop_config={"validates": validates},
        scaling_config=train.ScalingConfig(num_workers=num_workers),
        run_config=train.RunConfig(
            name=name,
            storage_path=storage,
            checkpoint_config=train.CheckpointConfig(
                num_to_keep=2, checkpoint_score_attribute="score", checkpoint_score_order="min"
            ),
        ),
        validation_config=train.ValidationConfig(fn=judge, task_config=given),
    ).fit()
    print(name, "weights", result.return_value)
    print(name, "kept", [sorted(metrics.items()) for _, metrics in result.best_checkpoints])
    return result


def fit_beside_undisturbed(storage: str) -> None:
    """Train with validations, and once more alone without."""
    disturbed = fit(storage)
    assert disturbed.metrics == {"epoch": 2, "score": 20.0}, disturbed.metrics
    alone = fit(storage, num_workers=0, validates=False)
    print("the same bits" if alone.return_value == disturbed.return_value else "other bits")


def go_on(storage: str) -> None:
    """Go on with the run."""
    fit(storage)


if __name__ == "__main__":
    Path(sys.argv[2]).mkdir(exist_ok=True)
    globals()[sys.argv[1]](sys.argv[2])
