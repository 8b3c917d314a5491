"""The train script of runs over streams: `steps_job` with datasets that can only be iterated over.

It returns the SHA-256 of weights and optimizer state, and checks the same ledger: a parameter with
one entry for each sample, whose gradient counts how often the sample was trained with.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from elastic import train
from elastic.train.torch import (
    TorchTrainer,
    prepare_data_loader,
    prepare_model,
    prepare_optimizer,
)
from tests.harness.jobs.steps_job import Samples, WithLedger, digest, is_over, trace

KINDS = (
    "plain",
    "worker",
    "shard",
    "stateful",
    "hf",
    "hf-shuffled",
    "hf-odd",
    "hf-map",
    "torchdata",
)
V = 8
"""Micro-batches of a step: global batch 32, 4 in a micro-batch."""


def parts(size: int) -> list[list[int]]:
    """Deal ids over V shards of different lengths; the last two have the same."""
    ends = [size * (n + 1) ** 2 // V**2 for n in range(V)]
    return [list(range(begin, end)) for begin, end in zip([0, *ends], ends, strict=False)]


class Plain(IterableDataset):
    """Knows nothing of shards and has no state; noise is added from torch's own generator."""

    def __init__(self, size: int, ids: list[int] | None = None) -> None:
        self.samples = Samples(size, "mlp")
        self.size = size
        self.ids = list(range(size)) if ids is None else ids
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Rotate the samples by the epoch."""
        self.epoch = epoch

    def order(self) -> list[int]:
        """Return the ids of this epoch in order."""
        turn = self.epoch % max(1, len(self.ids))
        return self.ids[turn:] + self.ids[:turn]

    def sample(self, number: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Return a sample with noise."""
        x, y, number = self.samples[number]
        return x + 0.1 * torch.randn(x.shape), y, number

    def __iter__(self) -> Iterator[Any]:
        """Yield the samples in order."""
        for number in self.order():
            yield self.sample(number)


class ByWorker(Plain):
    """Deals itself out as torch's documentation says."""

    def __iter__(self) -> Iterator[Any]:
        """Yield the part of this worker."""
        info = get_worker_info()
        number, count = (info.id, info.num_workers) if info is not None else (0, 1)
        for one in self.order()[number::count]:
            yield self.sample(one)


class Sharded(Plain):
    """Is cut into shards of different lengths."""

    def shard(self, num_shards: int, index: int) -> Sharded:
        """Return a shard."""
        ids = [one for part in parts(self.size)[index::num_shards] for one in part]
        return type(self)(self.size, ids)


class Stateful(Sharded):
    """The same with a place that can be set."""

    def __init__(self, size: int, ids: list[int] | None = None) -> None:
        super().__init__(size, ids)
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        """Yield the samples from its place on."""
        order = self.order()
        while self.at < len(order):
            self.at += 1
            yield self.sample(order[self.at - 1])
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the place."""
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a place."""
        self.at = state["at"]


def hugging_face(kind: str, size: int) -> Any:
    """Return a dataset of Hugging Face's."""
    import datasets

    samples = Samples(size, "mlp")
    columns = {"x": samples.x.tolist(), "y": samples.y.tolist(), "id": list(range(size))}
    whole = datasets.Dataset.from_dict(columns)
    if kind == "hf-map":
        return whole.with_format("torch")
    stream = whole.to_iterable_dataset(num_shards=V - 1 if kind == "hf-odd" else 2 * V)
    if kind == "hf-shuffled":
        stream = stream.shuffle(seed=5, buffer_size=20)
    return stream.with_format("torch")


def loader_of(config: dict) -> Any:
    """Return the prepared loader of a kind."""
    kind, size = config["data"], config["samples"]
    options: dict[str, Any] = {
        "batch_size": config["micro_batch"], "num_workers": config["loader_workers"],
    }  # fmt: skip
    cls: Any = DataLoader
    if kind == "torchdata":
        from torchdata.stateful_dataloader import StatefulDataLoader

        cls = StatefulDataLoader
    if kind.startswith("hf"):
        dataset = hugging_face(kind, size)
        options["shuffle"] = True if kind == "hf-map" else None
    else:
        classes = {"plain": Plain, "worker": ByWorker, "shard": Sharded}
        dataset = classes.get(kind, Stateful)(size)
    return prepare_data_loader(
        cls(dataset, **options),
        global_batch_size=V * config["micro_batch"],
        streams="worker" if kind == "worker" else None,
    )


def train_func(config: dict) -> dict:
    """Train, and say what the weights became."""
    torch.manual_seed(config["seed"])
    size = config["samples"]
    module = WithLedger("mlp", config["width"], size)
    model = prepare_model(module)
    optimizer = prepare_optimizer(torch.optim.AdamW(module.net.parameters(), lr=1e-3))
    counter = prepare_optimizer(torch.optim.SGD([module.ledger], lr=1.0))
    loader = loader_of(config)
    for epoch in train.epochs(config["epochs"]):
        for batch in loader:
            x, y, ids = batch.values() if isinstance(batch, dict) else batch
            if config["pace"]:
                time.sleep(config["pace"])  # Stands for a model that takes longer.
            loss = F.cross_entropy(model(x), y)
            (loss + module.ledger[ids].mean()).backward()
            torch.nn.utils.clip_grad_norm_(module.net.parameters(), 1.0)
            optimizer.step()
            counter.step()
            optimizer.zero_grad()
            counter.zero_grad()
            train.log(loss=loss, over=float(is_over(config)))
            if config["trace"] and train.stepped():
                trace(config["trace"], module, [optimizer, counter])
        train.report({"epoch": epoch})
        if train.get_logged()["over"] > 0:
            break
    check_ledger(module.ledger.detach(), config, epoch + 1)
    result = {
        "epochs": epoch + 1,
        # Counted in the run's state: a worker that came late has not seen all of them.
        "steps": int(optimizer.state[next(module.net.parameters())]["step"]),
        "weights": digest(model.state_dict()),
        "optimizer": digest(optimizer.state_dict()["state"]),
    }
    train.report(result)
    return result


def check_ledger(ledger: torch.Tensor, config: dict, epochs: int) -> None:
    """Raise unless every sample counted exactly once in each epoch.

    A sample counts as one part of the samples of its step. Which one that is, is known for our own
    datasets; of Hugging Face's, whose order is their own, each counts the same but in a last step.
    """
    counted, size, full = -ledger.double(), config["samples"], V * config["micro_batch"]
    if config["data"].startswith("hf"):
        least, most = epochs / full, epochs / (size % full or full)
        wrong = (counted < 0.99 * least) | (counted > 1.01 * most)
        # Each full step counts as one in all, and so does the last one.
        wrong |= (counted.sum() - epochs * math.ceil(size / full)).abs() > 0.01
    else:
        wrong = (counted - written_out(config, epochs)).abs() > 0.01 / full
    if wrong.any():
        first = int(wrong.nonzero()[0])
        raise ValueError(
            f"{int(wrong.sum())} of {size} samples were not trained with exactly once in each "
            f"epoch; sample {first}: {counted[first]}"
        )


def written_out(config: dict, epochs: int) -> torch.Tensor:
    """Return how much each sample must have counted, read the plain way."""
    size, micro = config["samples"], config["micro_batch"]
    kind, counted = config["data"], torch.zeros(config["samples"], dtype=torch.float64)
    for epoch in range(epochs):
        shards = parts(size) if kind in ("shard", "stateful", "torchdata") else [list(range(size))]
        orders = []
        for ids in shards:
            turn = epoch % max(1, len(ids))
            orders.append(ids[turn:] + ids[:turn])
        streams = orders if len(orders) == V else [orders[0][v::V] for v in range(V)]
        for start in range(0, max(map(len, streams)), micro):
            step = [one for ids in streams for one in ids[start : start + micro]]
            counted[step] += 1 / len(step)
    return counted


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", choices=KINDS, default="plain")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--loader-workers", type=int, default=0)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds for each micro-batch")
    parser.add_argument("--recovery", default="auto")
    parser.add_argument("--save-every", type=int, help="steps between automatic checkpoints")
    parser.add_argument("--trace", default="", help="folder for the hashes of every step")
    parser.add_argument("--finish", default="", help="end with the epoch in which this file comes")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    result = TorchTrainer(
        train_func,
        train_loop_config=vars(args),
        scaling_config=train.ScalingConfig(num_workers=0),
        run_config=train.RunConfig(
            failure_config=train.FailureConfig(recovery=args.recovery),
            checkpoint_config=train.CheckpointConfig(every_n_steps=args.save_every, every_s=None),
        ),
    ).fit()
    if train.is_driver():
        print(json.dumps(result.return_value))


if __name__ == "__main__":
    main()
