"""Handwritten digits: a small CNN on real data that survives the loss of any of its machines.

    python examples/digits.py                       # on this machine, 2 to 3 workers
    elastic submit examples/digits.py --num-workers 2:3 -- --epochs 40
    OMP_NUM_THREADS=1 python examples/digits.py --num-workers 0

The last one trains in one process, and ends with the same weights, bit by bit; with one thread,
because workers that share a machine have one each.

scikit-learn carries the data: 1,797 images of 8x8 pixels. 360 of them, drawn once, are held out.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from command_line import parse_workers
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elastic import train
from elastic.train.torch import (
    TorchTrainer,
    prepare_data_loader,
    prepare_model,
    prepare_optimizer,
)

NUM_HELD_OUT = 360


class Net(nn.Module):
    """Two convolutions and two linear layers; images are (batch, 1, 8, 8) in [0, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.hidden = nn.Linear(64 * 2 * 2, 128)
        self.out = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits, (batch, 10)."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.out(F.relu(self.hidden(x.flatten(1))))


def load_data() -> tuple[TensorDataset, torch.Tensor, torch.Tensor]:
    """Return the training set, and the held-out images and labels."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(digits.target, dtype=torch.long)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out, seen = order[:NUM_HELD_OUT], order[NUM_HELD_OUT:]
    return TensorDataset(images[seen], labels[seen]), images[held_out], labels[held_out]


def train_func(config: dict) -> None:
    """Train in a plain loop; workers come and go beneath it, at any moment."""
    torch.manual_seed(0)
    dataset, held_out, truth = load_data()
    model = prepare_model(Net())
    optimizer = prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=config["lr"]))
    loader = prepare_data_loader(
        DataLoader(dataset, batch_size=config["batch_size"], shuffle=True),
        global_batch_size=config["global_batch_size"],
    )
    for epoch in train.epochs(config["epochs"]):
        model.train()
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            train.log(loss=loss)
        model.eval()
        with torch.no_grad():
            accuracy = (model(held_out).argmax(1) == truth).float().mean().item()
        train.report({"epoch": epoch, "accuracy": accuracy})

    with tempfile.TemporaryDirectory() as directory:
        if train.get_context().get_world_rank() == 0:
            torch.save(model.module.state_dict(), Path(directory) / "model.pt")
        train.report(
            {"epoch": config["epochs"] - 1, "accuracy": accuracy, "weights": sha256(model)},
            checkpoint=train.Checkpoint.from_directory(directory),
        )


def sha256(model: nn.Module) -> str:
    """Return the SHA-256 of all weights: equal only if every bit of them is."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    """Read the arguments, train, print the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--num-workers", type=parse_workers, default=(2, 3))
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--batch-size", type=int, default=8, help="of a micro-batch")
    parser.add_argument("--global-batch-size", type=int, default=48, help="of a step")
    parser.add_argument("--storage-path", default=None)
    args = parser.parse_args()
    trainer = TorchTrainer(
        train_func,
        train_loop_config=vars(args),
        scaling_config=train.ScalingConfig(num_workers=args.num_workers),
        run_config=train.RunConfig(
            storage_path=args.storage_path,
            checkpoint_config=train.CheckpointConfig(num_to_keep=2),
        ),
    )
    result = trainer.fit()
    if train.is_driver():
        print(f"held-out accuracy: {result.metrics['accuracy']:.2%}")
        print(f"weights: {result.metrics['weights']}")
        print(f"run directory: {result.path}")


if __name__ == "__main__":
    main()
