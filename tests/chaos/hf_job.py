"""Hugging Face's Trainer under chaos: every step's state and the log history so far, by each rank.

A tiny Llama learns the text of CPython's standard library, padded by the stock collator, and is
evaluated and saved after each epoch. A file in `--orders` kills the rank that finds it first, at a
place of `steps_job.py`'s, or in the middle of a checkpoint ("save").
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import Dataset
from transformers import (
    DataCollatorForLanguageModeling,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)

from elastic import train
from elastic.train.huggingface.transformers import prepare_trainer
from tests.harness.jobs.steps_job import Orders, is_over, trace
from tests.harness.jobs.struck_job import run

SAMPLES, EVALUATED = 36, 9
MICRO_BATCH, GLOBAL_BATCH = 2, 8
TIMES = ("runtime", "per_second")


def tokenizer() -> PreTrainedTokenizerFast:
    """Return one that reads bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(["<pad>", *letters])}
    plain = Tokenizer(models.BPE(vocabulary, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>")


class Lines(Dataset):
    """Lines of Python, each as long as it is."""

    def __init__(self, size: int) -> None:
        read = tokenizer()
        text = Path(argparse.__file__).read_text().splitlines()
        self.ids = [read(line[:40])["input_ids"] for line in text if len(line) > 5][:size]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.ids[index]}


def history(trainer: Trainer) -> list[dict[str, Any]]:
    """Return what was logged, but for how long it took."""
    return untimed(trainer.state.log_history)


def untimed(logs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return these without how long it took."""
    return [
        {name: value for name, value in log.items() if not any(one in name for one in TIMES)}
        for log in logs
    ]


def right(found: Any) -> dict[str, float]:
    """Return how many letters are predicted, of how many lines."""
    hits = found.predictions.argmax(-1)[:, :-1] == found.label_ids[:, 1:]
    return {"right": float(hits.sum()), "lines": float(len(hits))}


def best_of(state: TrainerState) -> str:
    """Return the name of the best checkpoint so far, "" if there is none."""
    return Path(state.best_model_checkpoint or "").name


def check_saved(trainer: Trainer) -> None:
    """Raise unless there is a whole checkpoint of every evaluation, and the best one is loaded."""
    state, output = trainer.state, Path(str(trainer.args.output_dir))
    losses = {log["step"]: log["eval_loss"] for log in state.log_history if "eval_loss" in log}
    del losses[0]  # Before training.
    states = [json.loads(path.read_text()) for path in output.glob("checkpoint-*/*_state.json")]
    for one in states:
        logs, all_logs = untimed(one["log_history"]), history(trainer)
        if logs != all_logs[: len(logs)] or logs[-1]["step"] != one["global_step"]:
            raise ValueError(f"the checkpoint of step {one['global_step']} has logged {logs}")
    saved = sorted(one["global_step"] for one in states)
    best = f"checkpoint-{min(losses, key=losses.__getitem__)}"
    if saved != sorted(losses) or best != best_of(state):
        raise ValueError(f"saved: {saved}, best: {best_of(state)}; evaluated: {losses}")
    weights = load_file(output / best / "model.safetensors")
    mine = trainer.model.state_dict()  # type: ignore[union-attr]
    if any(not torch.equal(mine[name], tensor) for name, tensor in weights.items()):
        raise ValueError(f"the weights are not those of {best}")


class Watch(TrainerCallback):
    """Obeys orders, traces every step, and stops when the job may end."""

    trainer: Trainer

    def __init__(self, config: dict) -> None:
        self.config, self.orders = config, Orders(config["orders"])
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        """Return how many steps it has seen."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue to count from there."""
        self.steps = state["steps"]

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Here gradients are there, and nothing has changed."""
        self.orders.at("step")

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Here weights have changed, and nothing is counted."""
        self.orders.at("commit")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Here the step is counted."""
        trainer = self.trainer
        self.steps += 1
        if self.config["trace"] and train.stepped():
            trace(
                self.config["trace"],
                trainer.model,
                [trainer.optimizer.optimizer],
                trainer.lr_scheduler,
                counted=[state.global_step, state.epoch, state.num_input_tokens_seen, self.steps],
                best=[state.best_metric, state.best_global_step, best_of(state)],
                logged=hashlib.sha256(json.dumps(history(trainer)).encode()).hexdigest(),
            )
        if train.get_logged()["over"] > 0:
            control.should_training_stop = True
        self.orders.at("between")

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        """Here the epoch's last step is counted, and nothing is evaluated."""
        self.orders.at("epoch")


class Struck(LlamaForCausalLM):
    """A model in which ranks are struck."""

    watch: Watch | None

    @functools.wraps(LlamaForCausalLM.forward)  # The Trainer looks for names of labels there.
    def forward(self, *args: Any, **named: Any) -> Any:
        """Compute the loss."""
        watch = self.watch if self.training else None
        if watch is not None:
            time.sleep(watch.config["pace"])  # Stands for a model that takes longer.
            train.log(over=float(is_over(watch.config)))
            watch.orders.at("forward")
        outputs = super().forward(*args, **named)
        if watch is not None:
            watch.orders.at("backward")
        return outputs

    def save_pretrained(self, *args: Any, **named: Any) -> None:
        """Write the weights, which is the first part of a checkpoint."""
        super().save_pretrained(*args, **named)
        if self.watch is not None:
            self.watch.orders.at("save")


def build(config: dict, cls: type[Trainer] = Trainer, **options: Any) -> Trainer:
    """Return a stock Trainer."""
    torch.manual_seed(0)
    read = tokenizer()
    model = Struck(
        LlamaConfig(
            vocab_size=len(read), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, max_position_embeddings=64,
            attention_dropout=config.get("dropout", 0.1),
            pad_token_id=read.pad_token_id,
        )
    )  # fmt: skip
    arguments = {
        "output_dir": config["output"],
        "per_device_train_batch_size": MICRO_BATCH,
        "per_device_eval_batch_size": MICRO_BATCH,
        "num_train_epochs": config["epochs"],
        "warmup_steps": 10,
        "learning_rate": 1e-3,
        "logging_steps": 3,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "include_num_input_tokens_seen": "non_padding",
        "report_to": [],
        "seed": 0,
    }
    model.watch = Watch(config)
    trainer = cls(
        model=model,
        args=TrainingArguments(**(arguments | options)),
        train_dataset=Lines(SAMPLES),
        eval_dataset=Lines(EVALUATED),
        compute_metrics=right,
        data_collator=DataCollatorForLanguageModeling(read, mlm=False),
        processing_class=read,
        callbacks=[model.watch],
    )
    model.watch.trainer = trainer
    return trainer


def train_func(config: dict) -> dict[str, Any]:
    """Train, and say what was logged."""
    options = {"save_strategy": "epoch", "load_best_model_at_end": True, "eval_on_start": True}
    trainer = prepare_trainer(build(config, **options), global_batch_size=GLOBAL_BATCH)
    # Workers that come later find checkpoints of those that train.
    trainer.train(resume_from_checkpoint=any(Path(config["output"]).glob("checkpoint-*")))
    check_saved(trainer)
    result = {"steps": trainer.state.global_step, "logged": history(trainer)}
    train.report(result)
    return result


if __name__ == "__main__":
    run(train_func)
