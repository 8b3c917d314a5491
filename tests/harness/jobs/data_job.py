"""The train script of runs over a dataset of elastic.data: parquet files, functions, a shuffle.

It returns the SHA-256 of weights and optimizer state, as `steps_job` does, and writes down which
rows it computes with, and whether a feeder has computed them: before each micro-batch.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from elastic import data, train
from elastic.data.feeders import CONNECTIONS
from elastic.train.torch import TorchTrainer, prepare_model, prepare_optimizer
from tests.harness.jobs.steps_job import CLASSES, WithLedger, digest, is_over, trace

MICRO_BATCH = 4
"""Rows."""
FEEDERS_S = 20.0


def with_noise(batch: dict[str, Any]) -> dict[str, Any]:
    """Return features with noise that is drawn anew for each batch."""
    ids = batch["id"]
    x = np.sin(ids[:, None] * np.arange(1, 65)) + 0.1 * np.random.randn(len(ids), 64)
    by = np.full(len(ids), os.getpid())
    return {"id": ids, "x": x.astype(np.float32), "y": ids % CLASSES, "by": by}


def wait_for_feeders(batches: Any, number: int) -> None:
    """Wait a while for the feeders of a shard: small epochs might be over before they are there."""
    rows = batches.loader()._loader.dataset
    until = time.monotonic() + FEEDERS_S
    while rows._feeders.num_ready < number * CONNECTIONS and time.monotonic() < until:
        time.sleep(0.01)


def train_func(config: dict[str, Any]) -> dict[str, Any]:
    """Train, and say what the weights became."""
    torch.manual_seed(config["seed"])
    module = WithLedger("mlp", config["width"], config["samples"])
    model = prepare_model(module)
    optimizer = prepare_optimizer(torch.optim.AdamW(module.net.parameters(), lr=1e-3))
    ledger = None
    if config["ledger"]:
        path = Path(config["ledger"]) / f"{os.getpid()}.csv"
        ledger = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    batches = train.get_dataset_shard("train").iter_torch_batches(
        batch_size=MICRO_BATCH, global_batch_size=MICRO_BATCH * config["micro_batches"]
    )
    if config["ledger"] and config["feeders"] and not config["placed"]:
        wait_for_feeders(batches, config["feeders"])
    steps = 0
    for epoch in train.epochs(config["epochs"]):
        for batch in batches:
            if config["pace"]:
                time.sleep(config["pace"])  # Stands for a model that takes longer.
            if ledger is not None:
                step = train.get_context().get_step()
                fed = int(batch["by"][0] != os.getpid())
                lines = "".join(f"{epoch},{step},{one},{fed}\n" for one in batch["id"].tolist())
                os.write(ledger, lines.encode())
            loss = F.cross_entropy(model(batch["x"]), batch["y"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            train.log(loss=loss, over=float(is_over(config)))
            if config["trace"] and train.stepped():
                trace(config["trace"], module, [optimizer])
        steps += train.get_context().get_step()
        train.report({"epoch": epoch})
        if train.get_logged()["over"] > 0:
            break
    result = {
        "epochs": epoch + 1,
        "steps": steps,
        "weights": digest(model.state_dict()),
        "optimizer": digest(optimizer.state_dict()["state"]),
    }
    train.report(result)
    return result


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--table", help="folder of parquet files with a column id")
    parser.add_argument("--feeders", type=int, default=0)
    parser.add_argument("--placed", action="store_true", help="on any nodes, as their own job")
    parser.add_argument("--workers", type=int, default=0, help="of a job; 0 trains here")
    parser.add_argument("--storage", help="folder of the run of that job")
    parser.add_argument("--ledger", default="", help="folder for the ids that are trained with")
    parser.add_argument("--micro-batches", type=int, default=8, help="of a step")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds for each micro-batch")
    parser.add_argument("--trace", default="", help="folder for the hashes of every step")
    parser.add_argument("--finish", default="", help="end with the epoch in which this file comes")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = data.read_parquet(args.table).map_batches(with_noise).random_shuffle(seed=3)
    result = TorchTrainer(
        train_func,
        train_loop_config=vars(args),
        datasets={"train": rows},
        dataset_config=train.DataConfig(
            num_feeders=args.feeders, feeder_resources={} if args.placed else None
        ),
        scaling_config=train.ScalingConfig(num_workers=args.workers),
        run_config=train.RunConfig(storage_path=args.storage, name="fed" if args.storage else None),
    ).fit()
    if train.is_driver():
        print(json.dumps(result.return_value))


if __name__ == "__main__":
    main()
