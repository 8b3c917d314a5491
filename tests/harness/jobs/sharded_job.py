"""The train script of chaos runs of a sharded model: each worker has its rows of it, nobody all.

It returns the SHA-256 of the gathered weights and optimizer state, which must equal that of an
undisturbed run of the same world size. It writes the weights to a file; they must be close to
those of any other run. It checks the ledger of `steps_job`. Run by its path, as users' scripts are.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from elastic import train
from elastic.train.torch import (
    TorchTrainer,
    prepare_data_loader,
    prepare_model,
    prepare_optimizer,
    prepare_scheduler,
)
from tests.harness.jobs.steps_job import CLASSES, Samples, TinyGPT, check_ledger, digest, is_over


class Orders:
    """Files that order a rank to hang: the first rank that finds one deletes it and hangs.

    They are named PLACE-EPOCH; places are "loop", "forward" and "backward".
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder) if folder else None
        self.epoch = 0

    def obey(self, place: str) -> None:
        """Hang, if there is an order for this place."""
        if self.folder is None:
            return
        try:
            (self.folder / f"{place}-{self.epoch}").unlink()
        except FileNotFoundError:
            return
        hang_for_ever()


def hang_for_ever() -> None:
    """Wait for an event that is never set."""
    threading.Event().wait()


class Counted(nn.Module):
    """A model with a parameter that counts samples, and with the buffers of BatchNorm."""

    def __init__(self, width: int, size: int, orders: Orders) -> None:
        super().__init__()
        self.orders = orders
        self.net = TinyGPT(width)
        self.norm = nn.BatchNorm1d(CLASSES)
        self.ledger = nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits, and the mean ledger entry of these samples."""
        logits = self.net(x)
        self.orders.obey("forward")
        if logits.requires_grad:
            logits.register_hook(lambda _: self.orders.obey("backward"))
        if len(x) > 1:  # A batch of one sample, as a stand-in may be, has no variance.
            logits = logits + self.norm(logits)
        return logits, self.ledger[ids].mean()


def train_func(config: dict) -> dict:
    """Train, and return the digest of the final state."""
    torch.manual_seed(config["seed"])
    size = config["samples"]
    orders = Orders(config["orders"])
    module = Counted(config["width"], size, orders)
    replica = None
    if config["strategy"] == "own":
        fully_shard(module.net.block)
        fully_shard(module)
        model = prepare_model(module)
    else:
        options: dict[str, Any] = {"modules": [nn.TransformerEncoderLayer]}
        if config["strategy"] == "hsdp":
            options["mesh"] = two_replicas()
            replica = options["mesh"].get_group("shard")
        model = prepare_model(
            module,
            parallel_strategy="ddp" if config["strategy"] == "ddp" else "fsdp",
            parallel_strategy_kwargs=options if config["strategy"] != "ddp" else None,
        )
    weights = [p for name, p in module.named_parameters() if name != "ledger"]
    # A large eps: gradients that are only rounding errors must not become steps.
    optimizer = prepare_optimizer(torch.optim.AdamW(weights, lr=1e-3, eps=1e-4))
    counter = prepare_optimizer(torch.optim.SGD([module.ledger], lr=1.0))
    scheduler = prepare_scheduler(
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    )
    loader = prepare_data_loader(
        DataLoader(Samples(size, "gpt"), batch_size=config["micro_batch"], shuffle=True),
        global_batch_size=config["global_batch"],
    )
    for epoch in train.epochs(config["epochs"]):
        orders.epoch = epoch
        for x, y, ids in loader:
            orders.obey("loop")
            if replica is not None:
                synchronize(replica)
            if config["pace"]:
                time.sleep(config["pace"])  # Simulates a slower model.
            logits, counted = model(x, ids)
            loss = F.cross_entropy(logits, y)
            (loss + counted).backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            counter.step()
            scheduler.step()
            optimizer.zero_grad()
            counter.zero_grad()
            train.log(loss=loss, over=float(is_over(config)))
        train.report({"epoch": epoch})
        if train.get_logged()["over"] > 0:
            break
    state = gathered(module.state_dict())
    check_ledger(state["ledger"], config | {"epochs": epoch + 1})
    if config["weights"] and dist.get_rank() == 0:
        torch.save(state, f"{config['weights']}.part")
        os.replace(f"{config['weights']}.part", config["weights"])
    result = {
        "epochs": epoch + 1,
        "world_size": dist.get_world_size(),
        "weights": digest(state),
        "optimizer": digest(gathered(optimizer.state_dict()["state"])),
        "scheduler": scheduler.last_epoch,
    }
    train.report(result)
    return result


def two_replicas() -> DeviceMesh:
    """Return a mesh of two replicas of the model, each sharded over half of the ranks."""
    shape = (2, dist.get_world_size() // 2)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard"))


def synchronize(group: dist.ProcessGroup) -> None:
    """Wait for the other members of a group, in a way that cannot be observed from outside."""
    work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    if work is not None:
        work.wait()


def gathered(state: Any) -> Any:
    """Return nested containers with full tensors instead of shards; a collective of all ranks."""
    if isinstance(state, DTensor):
        return state.full_tensor().detach()
    if isinstance(state, dict):
        return {key: gathered(value) for key, value in state.items()}
    return state


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the arguments and train.

    Args:
        arguments: instead of those of the command line.
    """
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--global-batch", type=int, default=24)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds for each micro-batch")
    parser.add_argument("--finish", default="", help="end with the epoch in which this file comes")
    parser.add_argument("--orders", default="", help="folder of orders to hang")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategy", choices=("fsdp", "own", "ddp", "hsdp"), default="fsdp")
    parser.add_argument("--save-every", type=int, help="steps between automatic checkpoints")
    parser.add_argument("--copy-every", type=int, help="steps between copies on other nodes")
    parser.add_argument("--weights", default="", help="file that the weights go to")
    parser.add_argument("--name", help="of the run, if it is one of this process")
    parser.add_argument("--storage", help="where its directory goes")
    args = parser.parse_args(arguments)
    result = TorchTrainer(
        train_func,
        train_loop_config=vars(args),
        scaling_config=train.ScalingConfig(num_workers=0),
        run_config=train.RunConfig(
            name=args.name,
            storage_path=args.storage,
            checkpoint_config=train.CheckpointConfig(
                every_n_steps=args.save_every,
                every_s=None,
                peer_replication=train.PeerReplication(args.copy_every)
                if args.copy_every
                else None,
            ),
        ),
    ).fit()
    if train.is_driver():
        print(json.dumps(result.return_value))


if __name__ == "__main__":
    main()
