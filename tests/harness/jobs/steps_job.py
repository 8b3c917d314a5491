"""The train script of chaos runs: a plain loop that shows after every step whether it was right.

Each rank appends a line of SHA-256 for each committed step to a file of its process in `--trace`:
of parameters, buffers, optimizers, scheduler, scaler and random state, with the logged values. Each
line must equal that of an undisturbed run: an error that fades before the end, as those of
BatchNorm statistics do, is detected in its step. The ledger is a parameter with one entry for each
sample, whose gradient counts how often the sample was trained with. Run by its path, as users'
scripts are.

A file in `--orders` kills or hangs the first rank that finds it: `kill-PLACE` or `hang-PLACE`. The
PLACE is forward, backward, step (gradients are exchanged), commit (weights change) or between.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from elastic import train
from elastic.core.policy.data_plan import DataPlan
from elastic.train.torch import (
    TorchTrainer,
    enable_reproducibility,
    prepare_data_loader,
    prepare_model,
    prepare_optimizer,
    prepare_scheduler,
)

CLASSES = 10
WORDS = 32
LENGTH = 12


class Samples(Dataset):
    """Random inputs with a label and an index, in the shapes of the model."""

    def __init__(self, size: int, model: str) -> None:
        generator = torch.Generator().manual_seed(1)
        if model == "gpt":
            self.x = torch.randint(0, WORDS, (size, LENGTH), generator=generator)
        elif model == "cnn":
            self.x = torch.randn(size, 1, 8, 8, generator=generator)
        else:
            self.x = torch.randn(size, 64, generator=generator)
        self.y = torch.randint(0, CLASSES, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.x[index], self.y[index], index


class TinyGPT(nn.Module):
    """One causal transformer block over words; returns logits, (batch, classes)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.block = nn.TransformerEncoderLayer(
            width, 2, 2 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits of words, (batch, LENGTH)."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.head(self.block(self.embed(x), src_mask=mask, is_causal=True)[:, -1])


class WithLedger(nn.Module):
    """A model with a parameter that counts samples."""

    def __init__(self, kind: str, width: int, size: int) -> None:
        super().__init__()
        if kind == "gpt":
            self.net: nn.Module = TinyGPT(width)
        elif kind == "cnn":
            self.net = nn.Sequential(
                nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2),
                nn.Flatten(), nn.Linear(8 * 64, CLASSES),
            )  # fmt: skip
        else:
            self.net = nn.Sequential(
                nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, CLASSES)
            )
        self.ledger = nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.net(x)


class Orders:
    """Kills or hangs this process at places for which there is a file."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory) if directory else None

    def at(self, place: str) -> None:
        """Obey an order for this place; only one of several ranks does."""
        if self._directory is None:
            return
        for name in (f"kill-{place}", f"hang-{place}"):
            try:
                (self._directory / name).unlink()
            except FileNotFoundError:
                continue
            if name.startswith("kill"):
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Event().wait()


class NoisyAdamW(torch.optim.AdamW):
    """Draws random numbers in each step, as optimizers with stochastic rounding do."""

    orders = Orders("")

    def step(self, closure: Any = None) -> Any:
        """Step, and add a little noise."""
        loss = super().step(closure)
        self.orders.at("commit")
        with torch.no_grad():
            for parameter in (one for group in self.param_groups for one in group["params"]):
                parameter.add_(torch.randn_like(parameter), alpha=1e-6)
        return loss


class Counted:
    """State of a user's loop: its number of steps."""

    number = 0

    def state_dict(self) -> dict[str, int]:
        """Return the number."""
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the number."""
        self.number = state["number"]


def train_func(config: dict) -> dict:
    """Train, and return the digest of the final state."""
    if config["gpu"]:
        enable_reproducibility(config["seed"])
    torch.manual_seed(config["seed"])
    size = config["samples"]
    module = WithLedger(config["model"], config["width"], size)
    model = prepare_model(module)
    optimizer = prepare_optimizer(NoisyAdamW(module.net.parameters(), lr=1e-3, weight_decay=0.01))
    counter = prepare_optimizer(torch.optim.SGD([module.ledger], lr=1.0))
    scheduler = prepare_scheduler(
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    )
    # Powers of two change no mantissa bit of a gradient; the scale increases with the steps.
    device = "cuda" if config["gpu"] else "cpu"
    scaler = torch.amp.GradScaler(device, 2.0**10, growth_interval=50, enabled=config["scaler"])
    orders = NoisyAdamW.orders = Orders(config["orders"])
    loader = prepare_data_loader(
        DataLoader(
            Samples(size, config["model"]),
            batch_size=config["micro_batch"],
            shuffle=True,
            num_workers=config["loader_workers"],
        ),
        global_batch_size=config["global_batch"],
    )
    counted, begun = Counted(), Counted()
    train.register(counted=counted, begun=begun)

    def compute(batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        x, y, ids = batch
        if config["pace"]:
            time.sleep(config["pace"])  # Simulates a slower model.
        orders.at("forward")
        loss = F.cross_entropy(model(x), y)
        orders.at("backward")
        (scaler.scale(loss) + module.ledger[ids].mean()).backward()
        train.log(loss=loss, over=float(is_over(config)), at=counted.number)

    def update() -> None:
        orders.at("step")
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(module.net.parameters(), 1.0)
        scaler.step(optimizer)
        # Without a check for None, as in many loops.
        largest = max(p.grad.abs().max() for p in module.net.parameters())  # type: ignore[union-attr]
        if largest > 1.0:
            raise ValueError(f"a gradient of {largest} was clipped to 1")
        counter.step()
        scheduler.step()
        scaler.update()
        optimizer.zero_grad()
        counter.zero_grad()
        note_time(config)
        if config["trace"] and train.stepped():
            # The mean over all micro-batches of the previous step, which have the same value.
            mean = {"mean": train.get_logged().get("at")} if not config["whole_steps"] else {}
            trace(config["trace"], module, [optimizer, counter], scheduler, scaler, **mean)
        orders.at("between")

    for epoch in train.epochs(config["epochs"]):
        if config["whole_steps"]:
            for step in train.steps(loader):
                begun.number += 1
                for batch in step:
                    compute(batch)
                update()
                counted.number += 1  # Unconditionally, as a library's loop does.
        else:
            for batch in loader:
                compute(batch)
                update()
                counted.number += train.stepped()
        train.report({"epoch": epoch})
        if train.get_logged()["over"] > 0:
            break
    if counted.number != (epoch + 1) * len(loader):
        raise ValueError(f"{counted.number} steps counted in {epoch + 1} epochs of {len(loader)}")
    if config["whole_steps"] and begun.number != counted.number:
        raise ValueError(f"{begun.number} steps begun, and {counted.number} counted")
    check_ledger(module.ledger.detach().cpu(), config | {"epochs": epoch + 1})
    result = {
        "epochs": epoch + 1,
        "steps": (epoch + 1) * len(loader),
        "weights": digest(model.state_dict()),
        "optimizer": digest(optimizer.state_dict()["state"]),
        "scheduler": scheduler.last_epoch,
    }
    train.report(result)
    return result


def note_time(config: dict) -> None:
    """Append the end time of a step to this worker's file of `times`, in seconds since 1970."""
    if config["times"] and train.stepped():
        with Path(f"{config['times']}.{os.getpid()}").open("a") as file:
            file.write(f"{time.time():.6f}\n")


def trace(
    directory: str,
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    scaler: torch.amp.GradScaler | None = None,
    **more: Any,
) -> None:
    """Append the digests of the state after the step that was just committed."""
    context = train.get_context()
    line = {
        "epoch": context.get_epoch(),
        "step": context.get_step(),
        "parameters": digest(dict(module.named_parameters())),
        "buffers": digest(dict(module.named_buffers())),
        "optimizers": digest([one.state_dict() for one in optimizers]),
        "scheduler": scheduler and json.dumps(scheduler.state_dict(), default=str, sort_keys=True),
        "scaler": scaler and scaler.state_dict(),
        "random": digest([torch.get_rng_state(), *numpy_state(), random.getstate()[1]]),
        **more,
    }
    Path(directory).mkdir(parents=True, exist_ok=True)
    path = Path(directory, f"{os.getpid()}.jsonl")
    # A single write, so that a kill leaves only whole lines.
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, json.dumps(line).encode() + b"\n")
    os.close(file)


def numpy_state() -> tuple[bytes, int]:
    """Return the state of NumPy's generator."""
    state: Any = np.random.get_state()
    return state[1].tobytes(), state[2]


def is_over(config: dict) -> bool:
    """Return whether the finish file exists; `train.log` gives all ranks the same value."""
    return bool(config["finish"]) and Path(config["finish"]).exists()


def digest(state: object) -> str:
    """Return the SHA-256 of all tensors and plain values in nested containers, in order."""
    sha = hashlib.sha256()

    def add(value: object) -> None:
        if isinstance(value, torch.Tensor):
            sha.update(
                value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            )
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                sha.update(str(key).encode())
                add(value[key])
        elif isinstance(value, list):
            for one in value:
                add(one)
        else:
            sha.update(repr(value).encode())

    add(state)
    return sha.hexdigest()


def check_ledger(ledger: torch.Tensor, config: dict) -> None:
    """Raise unless every sample was trained with exactly once in each epoch."""
    number = config["global_batch"] // config["micro_batch"]
    plan = DataPlan(config["samples"], config["micro_batch"], number)
    expected = torch.zeros(config["samples"], dtype=torch.float64)
    for epoch in range(config["epochs"]):
        for step in range(plan.steps):
            for micro_batch in range(number):
                for sample in plan.samples(epoch, step, micro_batch):
                    expected[sample] -= 1 / plan.step_size(step)
    wrong = (ledger.double() - expected).abs() > 0.01 / config["global_batch"]
    if wrong.any():
        first = int(wrong.nonzero()[0])
        raise ValueError(
            f"{int(wrong.sum())} of {len(expected)} samples were not trained with exactly once in "
            f"each epoch; sample {first}: {ledger[first]}, expected {expected[first]}"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the arguments and train.

    Args:
        arguments: instead of those of the command line.
    """
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=("mlp", "cnn", "gpt"), default="mlp")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--loader-workers", type=int, default=0)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds for each micro-batch")
    parser.add_argument("--whole-steps", action="store_true", help="loop over train.steps()")
    parser.add_argument("--scaler", action="store_true", help="scale the loss with a GradScaler")
    parser.add_argument("--gpu", action="store_true", help="with deterministic kernels")
    parser.add_argument("--trace", default="", help="folder for the hashes of every step")
    parser.add_argument("--orders", default="", help="folder of strikes, see above")
    parser.add_argument("--finish", default="", help="end with the epoch in which this file comes")
    parser.add_argument("--times", default="", help="file for the moments at which steps ended")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, help="steps between automatic checkpoints")
    parser.add_argument("--copy-every", type=int, help="steps between copies on another node")
    parser.add_argument("--name", help="of the run, if it is one of this process")
    parser.add_argument("--storage", help="where its directory goes")
    args = parser.parse_args(arguments)
    peers = train.PeerReplication(every_n_steps=args.copy_every) if args.copy_every else None
    result = TorchTrainer(
        train_func,
        train_loop_config=vars(args),
        scaling_config=train.ScalingConfig(num_workers=0, use_gpu=args.gpu),
        run_config=train.RunConfig(
            name=args.name,
            storage_path=args.storage,
            checkpoint_config=train.CheckpointConfig(
                every_n_steps=args.save_every, every_s=None, peer_replication=peers
            ),
        ),
    ).fit()
    if train.is_driver():
        print(json.dumps(result.return_value))


if __name__ == "__main__":
    main()
