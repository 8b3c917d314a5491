"""Lightning's Trainer under chaos: every step's state and what was logged so far, by each rank.

Lightning's own demo, a tiny transformer, learns the text of CPython's standard library.
"""

from __future__ import annotations

import argparse
import csv
import logging
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.demos import Transformer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, Dataset

from elastic import train
from elastic.train.lightning import (
    RayDDPStrategy,
    RayLightningEnvironment,
    prepare_trainer,
)
from tests.harness.jobs.steps_job import Orders, is_over, trace
from tests.harness.jobs.struck_job import run

SAMPLES, LENGTH = 34, 12
MICRO_BATCH, GLOBAL_BATCH = 2, 8


class Bytes(Dataset):
    """Pieces of Python, and what comes next."""

    def __init__(self, size: int) -> None:
        text = Path(argparse.__file__).read_bytes()[: size * LENGTH + 1]
        self.ids = torch.tensor(list(text)) % 128
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        begin = index * LENGTH
        return self.ids[begin : begin + LENGTH], self.ids[begin + 1 : begin + LENGTH + 1]


class Struck(BoringModel):
    """Lightning's boring model around its demo's transformer; ranks are struck in it."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = Transformer(
            vocab_size=128, ninp=16, nhead=2, nhid=16, nlayers=1,
            dropout=config.get("dropout", 0.1),
        )  # fmt: skip
        self.config, self.orders = config, Orders(config["orders"])

    def _loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.nll_loss(self.layer(x, y), y.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Compute the loss of a micro-batch."""
        time.sleep(self.config["pace"])
        self.orders.at("forward")
        loss = self._loss(batch)
        self.orders.at("backward")
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("over", float(is_over(self.config)), on_step=True, on_epoch=False)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Compute the loss of other text."""
        loss = self._loss(batch)
        self.log("val_loss", loss)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Here gradients are there, and nothing has changed."""
        self.orders.at("step")

    def configure_optimizers(self) -> dict[str, Any]:
        """Return an optimizer, and a schedule of its steps."""
        # Attention's key biases have gradients that are nothing but rounding: they shall not count.
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-4)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.99)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def saved(callback: Any) -> list[Any]:
    """Return what a callback has decided, with names of files, which are those of the run."""
    best = {Path(path).name: float(score) for path, score in callback.best_k_models.items()}
    return [Path(callback.best_model_path).name, Path(callback.last_model_path).name, best]


class Watch(Callback):
    """Traces every step, and stops when the job may end."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Here the step is counted."""
        pl_module.orders.at("commit")
        metrics = trainer.callback_metrics
        if pl_module.config["trace"] and train.stepped():
            (config,) = trainer.lr_scheduler_configs
            seen = {name: float(metrics[name]) for name in sorted(metrics) if name != "over"}
            trace(
                pl_module.config["trace"],
                pl_module,
                [trainer.optimizers[0]],
                config.scheduler,
                counted=[trainer.global_step, trainer.current_epoch, batch_idx],
                loss=float(outputs["loss"]),
                logged=seen,
                saved=[saved(one) for one in trainer.checkpoint_callbacks],
            )
        if float(metrics.get("over", 0)) > 0 or train.get_logged()["over"] > 0:
            trainer.should_stop = True
        pl_module.orders.at("between")


def build(config: dict, **options: Any) -> tuple[Trainer, Struck, list[DataLoader]]:
    """Return what Lightning needs."""
    stock = {
        "max_epochs": config["epochs"],
        "accelerator": "cpu",
        "devices": 1,
        "gradient_clip_val": 0.5,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "callbacks": [Watch(), EarlyStopping("val_loss", patience=10**9)],
    }
    loaders = [
        DataLoader(
            Bytes(config.get("samples", SAMPLES)),
            batch_size=MICRO_BATCH,
            shuffle=config.get("shuffle", True),
        ),
        DataLoader(Bytes(4), batch_size=2),
    ]
    return Trainer(**(stock | options)), Struck(config), loaders


def written(folder: str) -> dict[str, Any]:
    """Return Trainer options to log every step, and to save what is best and what is newest."""
    best = ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True)
    return {
        "logger": CSVLogger(folder),
        "log_every_n_steps": 1,
        "enable_checkpointing": True,
        "enable_progress_bar": True,
        "callbacks": [
            Watch(),
            EarlyStopping("val_loss", patience=10**9),
            EMAWeightAveraging(decay=0.9),
            best,
            ModelCheckpoint(),
        ],
    }


def check_written(trainer: Any) -> None:
    """Check that whatever the Trainer was to write is there, and each row once."""
    for one in trainer.checkpoint_callbacks:
        paths = [*one.best_k_models, one.best_model_path, one.last_model_path]
        missing = [path for path in paths if path and not Path(path).exists()]
        assert not missing, missing
    with open(Path(trainer.logger.log_dir, "metrics.csv"), newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows if row["loss_step"]] == list(
        range(trainer.global_step)
    )
    judged = [int(row["step"]) for row in rows if row["val_loss"]]
    assert judged == sorted(set(judged))


def train_func(config: dict) -> dict[str, Any]:
    """Train, and say what was logged."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer, module, loaders = build(
        config,
        strategy=RayDDPStrategy(global_batch_size=GLOBAL_BATCH, find_unused_parameters=True),
        plugins=[RayLightningEnvironment()],
        **(written(f"{config['trace']}/written") if config["trace"] else {}),
    )
    prepare_trainer(trainer).fit(module, *loaders)
    if config["trace"]:
        check_written(trainer)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    result = {"steps": trainer.global_step, "epochs": trainer.current_epoch, "logged": logged}
    train.report(result)
    return result


if __name__ == "__main__":
    run(train_func)
