"""A character-level GPT on the text of Python's own standard library; needs no download.

    python examples/tiny_gpt.py --steps 300
    elastic submit examples/tiny_gpt.py --num-workers 2:4 -- --steps 2000

A checkpoint every `--checkpoint-every` steps; when the group changes, training goes on from the
newest one.
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
from elastic.train.torch import TorchTrainer, get_device, prepare_data_loader, prepare_model

CONTEXT = 64
"""Characters that a prediction sees."""
WIDTH, HEADS, LAYERS = 128, 4, 3
VOCABULARY = 128
"""ASCII; anything else is read as '?'."""


def read_text(max_bytes: int = 2_000_000) -> torch.Tensor:
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
    """Train; goes on from the newest checkpoint when the group has changed."""
    torch.manual_seed(0)
    model = prepare_model(TinyGPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    loader = prepare_data_loader(
        DataLoader(Snippets(read_text()), batch_size=config["batch_size"], shuffle=True)
    )
    step = 0
    checkpoint = train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            state = torch.load(
                Path(directory) / "state.pt", weights_only=True, map_location=get_device()
            )
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]

    loader.set_epoch(step)
    while step < config["steps"]:
        for ids, following in loader:
            loss = F.cross_entropy(model(ids).flatten(0, 1), following.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % config["checkpoint_every"] == 0 or step == config["steps"]:
                save(step, loss, model, optimizer)
            if step == config["steps"]:
                break


def save(step: int, loss: torch.Tensor, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Report with a checkpoint; rank 0's copy stands for all."""
    with tempfile.TemporaryDirectory() as directory:
        if train.get_context().get_world_rank() == 0:
            state = {
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step,
            }
            torch.save(state, Path(directory) / "state.pt")
        train.report(
            {"step": step, "loss": loss.item()},
            checkpoint=train.Checkpoint.from_directory(directory),
        )


def main() -> None:
    """Read the arguments, train, print the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--min-workers", type=int, default=1)
    parser.add_argument("--max-workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--checkpoint-every", type=int, default=25)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--batch-size", type=int, default=16, help="for each worker")
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
        print(f"loss after {result.metrics['step']} steps: {result.metrics['loss']:.3f}")


if __name__ == "__main__":
    main()
