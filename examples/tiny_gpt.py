"""A character-level GPT on the text of Python's own standard library; needs no download.

    python examples/tiny_gpt.py --epochs 3
    elastic submit examples/tiny_gpt.py --num-workers 2:4 -- --epochs 20 --characters 2000000

The weights are the same, bit by bit, whatever happens to the workers meanwhile.
"""

from __future__ import annotations

import argparse
import sysconfig
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from elastic import train
from elastic.train.torch import (
    TorchTrainer,
    prepare_data_loader,
    prepare_model,
    prepare_optimizer,
    prepare_scheduler,
)

CONTEXT = 64
"""Characters that a prediction sees."""
WIDTH, HEADS, LAYERS = 128, 4, 3
VOCABULARY = 128
"""ASCII; anything else is read as '?'."""


def read_text(max_bytes: int) -> torch.Tensor:
    """Return the library's source as (num_characters,) int64, each < VOCABULARY."""
    library = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(library.glob("*.py")):
        text += path.read_bytes()
        if len(text) > max_bytes:
            break
    plain = bytes(b if b < VOCABULARY else ord("?") for b in text[:max_bytes])
    return torch.frombuffer(bytearray(plain), dtype=torch.uint8).long()


class Snippets(Dataset):
    """Pieces of CONTEXT + 1 characters: all but the last predict all but the first."""

    def __init__(self, text: torch.Tensor) -> None:
        self.text = text

    def __len__(self) -> int:
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        piece = self.text[index * CONTEXT : index * CONTEXT + CONTEXT + 1]
        return piece[:-1], piece[1:]


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer; x is (batch, CONTEXT, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.feed = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix over earlier positions, then over channels; the shape stays."""
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.feed(self.norm2(x))


class TinyGPT(nn.Module):
    """Characters in, logits of the next character out: (batch, CONTEXT) to (..., VOCABULARY)."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits, (batch, CONTEXT, VOCABULARY)."""
        x = self.token(ids) + self.position[: ids.shape[1]]
        return self.out(self.norm(self.blocks(x)))


def train_func(config: dict) -> None:
    """Train in a plain loop; workers come and go beneath it, at any moment."""
    torch.manual_seed(0)
    model = prepare_model(TinyGPT())
    optimizer = prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=config["lr"]))
    scheduler = prepare_scheduler(
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
    )
    loader = prepare_data_loader(
        DataLoader(
            Snippets(read_text(config["characters"])),
            batch_size=config["batch_size"],
            shuffle=True,
        )
    )
    for epoch in train.epochs(config["epochs"]):
        for ids, following in loader:
            loss = F.cross_entropy(model(ids).flatten(0, 1), following.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            train.log(loss=loss)
        with tempfile.TemporaryDirectory() as directory:
            if train.get_context().get_world_rank() == 0:
                torch.save(model.module.state_dict(), Path(directory) / "model.pt")
            train.report({"epoch": epoch}, checkpoint=train.Checkpoint.from_directory(directory))


def main() -> None:
    """Read the arguments, train, print the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--min-workers", type=int, default=1)
    parser.add_argument("--max-workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--characters", type=int, default=400_000, help="of text")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--batch-size", type=int, default=16, help="of a micro-batch")
    parser.add_argument("--storage-path", default=None)
    args = parser.parse_args()
    trainer = TorchTrainer(
        train_func,
        train_loop_config=vars(args),
        scaling_config=train.ScalingConfig(num_workers=(args.min_workers, args.max_workers)),
        run_config=train.RunConfig(
            storage_path=args.storage_path,
            checkpoint_config=train.CheckpointConfig(num_to_keep=2),
        ),
    )
    result = trainer.fit()
    if train.is_driver():
        print(f"loss in epoch {result.metrics['epoch']}: {result.metrics['loss']:.3f}")


if __name__ == "__main__":
    main()
