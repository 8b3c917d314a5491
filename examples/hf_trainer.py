"""Hugging Face's Trainer: a tiny Llama learns Python, and survives the loss of any of its machines.

    python examples/hf_trainer.py                        # on this machine, 2 to 3 workers
    elastic submit examples/hf_trainer.py --num-workers 2:3
    OMP_NUM_THREADS=1 python examples/hf_trainer.py --num-workers 0

The last one trains in one process, and logs the same losses. Text: CPython's own standard library.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from command_line import parse
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from elastic import train
from elastic.train.huggingface.transformers import prepare_trainer
from elastic.train.torch import TorchTrainer

LENGTH = 64


class Bytes(Dataset):
    """Pieces of one module's source, byte by byte."""

    def __init__(self, path: str) -> None:
        text = torch.tensor(list(Path(path).read_bytes()))
        self.pieces = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def train_func(config: dict[str, Any]) -> dict[str, Any]:
    """Train as any script does: one line is ours."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
        )
    )
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=8,
            max_steps=config["steps"],
            learning_rate=3e-3,
            logging_steps=10,
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=Bytes(argparse.__file__),
        eval_dataset=Bytes(tempfile.__file__),
    )
    prepare_trainer(trainer, global_batch_size=24)
    trainer.train()
    result = {"steps": trainer.state.global_step, "eval_loss": trainer.evaluate()["eval_loss"]}
    train.report(result)
    return result


def main() -> None:
    """Train, and say how well."""
    args = parse(__doc__, steps=60)
    result = TorchTrainer(
        train_func,
        train_loop_config={"steps": args.steps},
        scaling_config=train.ScalingConfig(num_workers=args.num_workers),
    ).fit()
    if train.is_driver():
        print(result.return_value)


if __name__ == "__main__":
    main()
