"""Lightning's Trainer: handwritten digits, on machines any of which may be lost.

    python examples/lightning_digits.py                  # on this machine, 2 to 3 workers
    elastic submit examples/lightning_digits.py --num-workers 2:3
    OMP_NUM_THREADS=1 python examples/lightning_digits.py --num-workers 0

The last one trains in one process, and ends with the same accuracy. scikit-learn has the images.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from command_line import parse
from lightning.pytorch import LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elastic import train
from elastic.train.lightning import RayDDPStrategy, RayLightningEnvironment, prepare_trainer
from elastic.train.torch import TorchTrainer

NUM_HELD_OUT = 360


class Digits(LightningModule):
    """Two linear layers; images are (batch, 64) in [0, 1]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the loss; what is logged is the mean over the whole step."""
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log how many are right."""
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def train_func(config: dict[str, Any]) -> dict[str, Any]:
    """Train as any script does: strategy and plugin are ours."""
    data = load_digits()
    images, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    seen = TensorDataset(images[NUM_HELD_OUT:], labels[NUM_HELD_OUT:])
    held_out = TensorDataset(images[:NUM_HELD_OUT], labels[:NUM_HELD_OUT])
    trainer = Trainer(
        max_epochs=config["epochs"],
        strategy=RayDDPStrategy(global_batch_size=48),
        plugins=[RayLightningEnvironment()],
        logger=False,
        enable_checkpointing=False,
    )
    prepare_trainer(trainer).fit(
        Digits(),
        DataLoader(seen, batch_size=16, shuffle=True),
        DataLoader(held_out, batch_size=120),
    )
    accuracy = float(trainer.callback_metrics["accuracy"])
    result = {"steps": trainer.global_step, "accuracy": accuracy}
    train.report(result)
    return result


def main() -> None:
    """Train, and say how well."""
    args = parse(__doc__, epochs=10)
    result = TorchTrainer(
        train_func,
        train_loop_config={"epochs": args.epochs},
        scaling_config=train.ScalingConfig(num_workers=args.num_workers),
    ).fit()
    if train.is_driver():
        print(result.return_value)


if __name__ == "__main__":
    main()
