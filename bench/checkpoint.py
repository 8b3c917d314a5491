"""What a checkpoint costs: ours beside `torch.save` and `torch.distributed.checkpoint.async_save`.

    python bench/checkpoint.py --gigabytes 0.1 --gigabytes 0.5 --gigabytes 2
    python bench/checkpoint.py --gigabytes 0.5 --pace 30

A model with Adam's state of so many bytes is saved several times by each system, in a process of
its own, on one CPU thread as workers have it, while a loop of small steps goes on. Medians of:
the stall (for how long the loop stands still), the time until the checkpoint is durable, the time
to read it again, and the most memory that the process had. `warm copy` is one copy of the state
into memory that is there already, made in the same loop: what a consistent snapshot costs at least.
Every process has that copy, and `elastic` two slots of its own, in its peak.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from elastic.core.policy.cursor import Cursor
from elastic.core.policy.saving import SavingPlan
from elastic.core.world import JobId
from elastic.runtime.clock import SystemClock
from elastic.storage.run_directory import RunDirectory
from elastic.worker.checkpoint.checkpoint_reader import read_checkpoint
from elastic.worker.checkpoint.checkpoint_writer import CheckpointWriter
from elastic.worker.checkpoint.snapshotter import Snapshotter
from elastic.worker.process.local import NoCoordinator
from elastic.worker.state.train_state import TrainState

SYSTEMS = ("elastic", "torch.save", "async_save", "async_save shm")
WIDTH = 1024
COPIES = 3
"""Of each parameter: itself, and Adam's two moments."""
PAUSE_STEPS = 20


class Trained:
    """A model and its optimizer, of so many bytes, that has done a step."""

    def __init__(self, num_bytes: float) -> None:
        torch.set_num_threads(1)
        layers = max(1, round(num_bytes / COPIES / (4 * WIDTH * (WIDTH + 1))))
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.probe = nn.Linear(256, 256)

    def state(self) -> dict[str, Any]:
        """Return what is saved."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors."""
        moments = [v for one in self.optimizer.state.values() for v in one.values()]
        return [*self.model.parameters(), *moments]

    def train(self) -> None:
        """Do a few small steps, as a loop goes on beside the writing."""
        for _ in range(PAUSE_STEPS):
            self.probe(torch.randn(64, 256)).square().mean().backward()


def copying(trained: Trained) -> Callable[[], float]:
    """Return a function that copies all tensors into memory that is there; returns its seconds."""
    with torch.no_grad():
        copies = [torch.empty_like(tensor).copy_(tensor) for tensor in trained.tensors()]

    def copy() -> float:
        began = time.perf_counter()
        with torch.no_grad():
            torch._foreach_copy_(copies, trained.tensors())
        return time.perf_counter() - began

    return copy


Saving = Callable[[], tuple[float, float]]
"""Saves once; returns the seconds of the stall, and until the checkpoint is durable."""


def ours(trained: Trained, folder: Path) -> tuple[Saving, Callable[[], None]]:
    """Save with this project."""
    objects = TrainState()
    objects.models.append(trained.model)
    objects.optimizers.append(trained.optimizer)
    run = RunDirectory(str(folder))
    writer = CheckpointWriter(run, JobId("bench"), line=NoCoordinator(), clock=SystemClock())
    snapshotter = Snapshotter((), writer)
    snapshotter.plan = SavingPlan(every_n_steps=1)
    steps = 0

    def state() -> dict[str, Any]:
        return {"objects": objects.take(), "cursor": [0, steps], "steps": steps}

    snapshotter.warm_up(state)

    def save() -> tuple[float, float]:
        nonlocal steps
        steps += 1
        began = time.perf_counter()
        done = snapshotter.take(state, Cursor(0, steps), steps)
        stall = time.perf_counter() - began
        while not done.is_set():
            trained.train()
        return stall, time.perf_counter() - began

    def load() -> None:
        name, marker = max(run.markers(), key=lambda pair: pair[1].index)
        objects.put(read_checkpoint(run, name, marker)["objects"])

    return save, load


def with_torch_save(trained: Trained, folder: Path) -> tuple[Saving, Callable[[], None]]:
    """Save as most scripts do, but so that it survives a power cut."""
    path = folder / "state.pt"

    def save() -> tuple[float, float]:
        began = time.perf_counter()
        with open(path, "wb") as file:
            torch.save(trained.state(), file)
            file.flush()
            os.fsync(file.fileno())
        took = time.perf_counter() - began
        return took, took

    def load() -> None:
        state = torch.load(path, weights_only=True)
        trained.model.load_state_dict(state["model"])
        trained.optimizer.load_state_dict(state["optimizer"])

    return save, load


def with_async_save(
    trained: Trained, folder: Path, *, shares_memory: bool
) -> tuple[Saving, Callable[[], None]]:
    """Save with torch's own asynchronous checkpoints."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    options = StagingOptions(False, shares_memory, False, False)
    stager = DefaultStager(options) if shares_memory else None
    paths: list[Path] = []

    def save() -> tuple[float, float]:
        paths.append(folder / str(len(paths)))
        began = time.perf_counter()
        answer = dcp.async_save(trained.state(), checkpoint_id=str(paths[-1]), async_stager=stager)
        stall = time.perf_counter() - began
        future = getattr(answer, "upload_completion", answer)
        while not future.done():
            trained.train()
        future.result()
        took = time.perf_counter() - began
        if len(paths) > 1:
            shutil.rmtree(paths[-2])
        return stall, took

    def load() -> None:
        state = trained.state()
        dcp.load(state, checkpoint_id=str(paths[-1]))
        trained.optimizer.load_state_dict(state["optimizer"])

    return save, load


def measure(system: str, num_bytes: float, rounds: int, parent: str) -> dict[str, float]:
    """Save and load several times; returns medians."""
    folder = Path(tempfile.mkdtemp(dir=parent))
    trained = Trained(num_bytes)
    copy = copying(trained)
    makers: dict[str, Callable[[], tuple[Saving, Callable[[], None]]]] = {
        "elastic": lambda: ours(trained, folder),
        "torch.save": lambda: with_torch_save(trained, folder),
        "async_save": lambda: with_async_save(trained, folder, shares_memory=False),
        "async_save shm": lambda: with_async_save(trained, folder, shares_memory=True),
    }
    save, load = makers[system]()
    trained.train()
    save()  # The first one finds its memory.
    saves, copies = [], []
    for _ in range(rounds):
        trained.train()
        copies.append(copy())  # In the same loop: memory that was not used for a while is slower.
        trained.train()
        saves.append(save())
    loads = []
    for _ in range(rounds):
        began = time.perf_counter()
        load()
        loads.append(time.perf_counter() - began)
    shutil.rmtree(folder)
    return {
        "bytes": float(sum(tensor.nbytes for tensor in trained.tensors())),
        "copy": statistics.median(copies),
        "stall": statistics.median(stall for stall, _ in saves),
        "durable": statistics.median(took for _, took in saves),
        "load": statistics.median(loads),
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0,
    }


def pace(trained: Trained, seconds: float, save: Callable[[], object] | None) -> float:
    """Return the small steps per second of a loop that saves once, at its beginning, or never."""
    count, began = 0, time.perf_counter()
    if save is not None:
        save()
    while time.perf_counter() - began < seconds:
        trained.train()
        count += 1
    return count / (time.perf_counter() - began)


def throughput(num_bytes: float, rounds: int, seconds: float, parent: str) -> float:
    """Return the pace of a loop that saves every so many seconds, in parts of one that does not."""
    folder = Path(tempfile.mkdtemp(dir=parent))
    trained = Trained(num_bytes)
    objects = TrainState()
    objects.models.append(trained.model)
    objects.optimizers.append(trained.optimizer)
    run = RunDirectory(str(folder))
    snapshotter = Snapshotter(
        (), CheckpointWriter(run, JobId("pace"), line=NoCoordinator(), clock=SystemClock())
    )
    snapshotter.plan = SavingPlan(every_n_steps=1)
    taken = 0

    def state() -> dict[str, Any]:
        return {"objects": objects.take(), "cursor": [0, taken], "steps": taken}

    def save() -> None:
        nonlocal taken
        taken += 1
        snapshotter.take(state, Cursor(0, taken), taken)

    snapshotter.warm_up(state)
    pace(trained, 3.0, save)
    ratios = []
    for _ in range(rounds):
        plain = pace(trained, seconds, None)
        ratios.append(pace(trained, seconds, save) / plain)
    snapshotter.finish()
    shutil.rmtree(folder)
    return statistics.median(ratios)


def in_own_process(system: str, gigabytes: float, rounds: int, parent: str) -> dict[str, float]:
    """Measure one system where nothing of the others is left."""
    call = [sys.executable, __file__, "--system", system, "--gigabytes", str(gigabytes)]
    call += ["--rounds", str(rounds), "--folder", parent]
    done = subprocess.run(call, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        raise SystemExit(f"{system}: {done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure all systems, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gigabytes", type=float, action="append", help="default 0.1, 0.5, 2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where checkpoints go")
    parser.add_argument(
        "--pace", type=float, help="seconds between two checkpoints: what they cost a loop instead"
    )
    parser.add_argument("--system", choices=SYSTEMS, help="this one only, as JSON")
    args = parser.parse_args()
    sizes = args.gigabytes or [0.1, 0.5, 2.0]
    if args.system:
        print(json.dumps(measure(args.system, sizes[0] * 1e9, args.rounds, args.folder)))
        return
    console = Console()
    if args.pace:
        for gigabytes in sizes:
            kept = throughput(gigabytes * 1e9, args.rounds, args.pace, args.folder)
            console.print(
                f"{gigabytes:g} GB saved every {args.pace:g} s: {100 * kept:.2f} % of the steps "
                f"per second of a loop that does not save, median of {args.rounds}"
            )
        return
    console.print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, "
        f"medians of {args.rounds}, milliseconds"
    )
    table = Table("state", "system", "stall", "warm copy", "ratio", "durable", "load", "peak MB")
    for gigabytes in sizes:
        for system in SYSTEMS:
            found = in_own_process(system, gigabytes, args.rounds, args.folder)
            table.add_row(
                f"{found['bytes'] / 1e6:.0f} MB",
                system,
                *(f"{found[name] * 1e3:.1f}" for name in ("stall", "copy")),
                f"{found['stall'] / found['copy']:.2f}",
                *(f"{found[name] * 1e3:.0f}" for name in ("durable", "load")),
                f"{found['peak'] / 1e6:.0f}",
            )
        table.add_section()
    console.print(table)


if __name__ == "__main__":
    main()
