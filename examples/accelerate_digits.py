"""An Accelerate loop: handwritten digits, on machines any of which may be lost.

    python examples/accelerate_digits.py                 # on this machine, 2 to 3 workers
    elastic submit examples/accelerate_digits.py --num-workers 2:3
    OMP_NUM_THREADS=1 python examples/accelerate_digits.py --num-workers 0

The last one trains in one process, and ends with the same accuracy. scikit-learn has the images.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from command_line import parse
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elastic import train
from elastic.train.accelerate import prepare_accelerator
from elastic.train.torch import TorchTrainer

NUM_HELD_OUT = 360


def train_func(config: dict[str, Any]) -> dict[str, Any]:
    """Train as any script does: the Accelerator and the epochs are ours."""
    torch.manual_seed(0)
    data = load_digits()
    images, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    accelerator = prepare_accelerator(Accelerator(), global_batch_size=48)
    model: Any = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-3)
    seen = TensorDataset(images[NUM_HELD_OUT:], labels[NUM_HELD_OUT:])
    held_out = TensorDataset(images[:NUM_HELD_OUT], labels[:NUM_HELD_OUT])
    loader: Any = DataLoader(seen, batch_size=16, shuffle=True)
    others: Any = DataLoader(held_out, batch_size=120)
    model, optimizer, loader, others = accelerator.prepare(model, optimizer, loader, others)
    schedule: Any = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, T_max=config["epochs"] * len(loader)
    )
    schedule = accelerator.prepare(schedule)
    accuracy = 0.0
    for epoch in train.epochs(config["epochs"]):
        model.train()
        for x, y in loader:
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            right = [accelerator.gather_for_metrics(model(x).argmax(1) == y) for x, y in others]
        accuracy = float(torch.cat(right).float().mean())
        train.report({"epoch": epoch, "accuracy": accuracy})
    return {"accuracy": accuracy}


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
