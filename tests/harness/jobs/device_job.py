"""A plain loop on a simulated device (see `played_device`), which never reads a gradient.

With a folder of `--orders` it trains on the device, and obeys orders at the device's places too;
without, on the CPU. A file `open-gate` in the folder makes steps commit too early. Run by its path.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from elastic import train
from elastic.train.torch import prepare_data_loader, prepare_model, prepare_optimizer
from tests.harness.jobs import struck_job
from tests.harness.jobs.steps_job import CLASSES, NoisyAdamW, Orders, Samples, trace
from tests.harness.played_device import install

SAMPLES = 256


def train_func(config: dict[str, Any]) -> None:
    """Train until the finish file exists."""
    orders = NoisyAdamW.orders = Orders(config["orders"])
    if config["orders"]:
        install(orders.at, opens_gate=Path(config["orders"], "open-gate").exists())
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(),
        # So large that it is reduced in slices, with totals sent back; the buffers are sent whole.
        nn.Linear(8 * 64, 256), nn.ReLU(), nn.Linear(256, CLASSES),
    )  # fmt: skip
    model = prepare_model(module)
    optimizer = prepare_optimizer(NoisyAdamW(module.parameters(), lr=1e-3))
    data = DataLoader(Samples(SAMPLES, "cnn"), batch_size=4, shuffle=True)
    loader = prepare_data_loader(data, global_batch_size=32)
    for _ in train.epochs(config["epochs"]):
        for x, y, _ in loader:
            orders.at("forward")
            loss = F.cross_entropy(model(x), y)
            orders.at("backward")
            loss.backward()
            orders.at("step")
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            train.log(over=float(bool(config["finish"]) and Path(config["finish"]).exists()))
            if config["trace"] and train.stepped():
                trace(config["trace"], module, [optimizer])
            orders.at("between")
        if train.get_logged()["over"] > 0:
            break


if __name__ == "__main__":
    struck_job.run(train_func)
