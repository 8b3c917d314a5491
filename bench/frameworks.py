"""What a step costs in other libraries' trainers: under elastic, beside their own DDP by torchrun.

    python bench/frameworks.py --workers 2 --rounds 2

The same model, data and optimizer; each worker has one micro-batch of a step and one thread. The
variants take turns, so that whatever else the machine does hits all of them. Prints medians of the
rounds' median step times in milliseconds, and their ratio to DDP's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, Dataset

WARM_UP, LENGTH, VOCABULARY, BATCH = 10, 32, 128, 8


class Bytes(Dataset):
    """Pieces of this file, over and over."""

    def __init__(self, size: int) -> None:
        text = (Path(argparse.__file__).read_bytes() * 100)[: size * LENGTH]
        self.pieces = (torch.tensor(list(text)) % VOCABULARY).view(-1, LENGTH)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def llama(width: int) -> Any:
    """Return a small Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
    )
    return LlamaForCausalLM(config)


class Clock:
    """Notes when steps end."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def tick(self) -> None:
        """Note that one has."""
        self._times.append(time.perf_counter())

    def median_ms(self) -> float:
        """Return how long one takes."""
        times = self._times[WARM_UP:]
        pairs = itertools.pairwise(times)
        return 1e3 * statistics.median(after - before for before, after in pairs)


def run_transformers(config: dict[str, Any]) -> float:
    """Train with Hugging Face's Trainer; return milliseconds for each step."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    clock = Clock()

    class Watch(TrainerCallback):
        def on_step_end(self, *args: Any, **named: Any) -> None:
            clock.tick()

    size = config["steps"] * BATCH * config["workers"]
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=BATCH,
        max_steps=config["steps"],
        logging_steps=50,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=llama(config["width"]),
        args=arguments,
        train_dataset=Bytes(size),
        callbacks=[Watch()],
    )
    if config["elastic"]:
        from elastic.train.huggingface.transformers import prepare_trainer

        prepare_trainer(trainer)
    trainer.train()
    return clock.median_ms()


def run_lightning(config: dict[str, Any]) -> float:
    """Train with Lightning's Trainer; return milliseconds for each step."""
    from lightning.pytorch import Callback, LightningModule, Trainer

    clock = Clock()

    class Watch(Callback):
        def on_train_batch_end(self, *args: Any, **named: Any) -> None:
            clock.tick()

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = llama(config["width"])

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.net(**batch).loss
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    options: dict[str, Any] = {"strategy": "ddp", "devices": config["workers"]}
    if config["elastic"]:
        from elastic.train.lightning import RayDDPStrategy, RayLightningEnvironment

        plugins = [RayLightningEnvironment()]
        options = {"strategy": RayDDPStrategy(), "plugins": plugins, "devices": 1}
    trainer = Trainer(
        accelerator="cpu",
        max_steps=config["steps"],
        callbacks=[Watch()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    size = config["steps"] * BATCH * config["workers"]
    trainer.fit(Module(), DataLoader(Bytes(size), batch_size=BATCH))
    return clock.median_ms()


LIBRARIES: dict[str, Callable[[dict[str, Any]], float]] = {
    "transformers": run_transformers,
    "lightning": run_lightning,
}


def measure(config: dict[str, Any]) -> None:
    """Train on one of the workers; the first one writes how long a step took."""
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", "0"))
    took = LIBRARIES[config["library"]](config)
    if rank == 0:
        Path(config["out"]).write_text(json.dumps(took))


def by_elastic(config: dict[str, Any]) -> None:
    """Train on a cluster of this machine."""
    from elastic import train
    from elastic.train.torch import TorchTrainer

    workers = train.ScalingConfig(num_workers=config["workers"])
    TorchTrainer(measure, train_loop_config=config, scaling_config=workers).fit()


def by_torchrun(config: dict[str, Any]) -> None:
    """Train on processes that torchrun starts."""
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(config["workers"])),
            *(__file__, "--child", json.dumps(config)),
        ],
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
    )


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100, help=f"of which {WARM_UP} do not count")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        measure(json.loads(args.child))
        return
    took: dict[tuple[str, bool], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "took")
        for _ in range(args.rounds):
            for library in LIBRARIES:
                for is_elastic in (False, True):
                    config = {
                        "library": library, "elastic": is_elastic, "out": str(out),
                        "steps": args.steps, "workers": args.workers, "width": args.width,
                    }  # fmt: skip
                    (by_elastic if is_elastic else by_torchrun)(config)
                    took.setdefault((library, is_elastic), []).append(json.loads(out.read_text()))
    table = Table("library", "its DDP, ms", "elastic, ms", "ratio")
    for library in LIBRARIES:
        ddp, ours = (statistics.median(took[library, one]) for one in (False, True))
        table.add_row(library, f"{ddp:.1f}", f"{ours:.1f}", f"{ours / ddp:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
