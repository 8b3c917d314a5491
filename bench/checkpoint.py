"""What a checkpoint costs: ours beside `torch.save` and `torch.distributed.checkpoint.async_save`.

    python bench/checkpoint.py --gigabytes 0.1 --gigabytes 0.5 --gigabytes 2
    python bench/checkpoint.py --gigabytes 0.5 --pace 30
    python bench/checkpoint.py --device cuda
    python bench/checkpoint.py --device cuda --rows 64

A model with Adam's state of so many bytes is saved several times by each system, in a process of
its own, on one CPU thread as workers have it, while a loop of steps of `--step` seconds goes on.
Medians of: the stall (for how long the loop stands still at the boundary), what the next step loses
against steps of the same loop before it, what later steps lose until the checkpoint is durable, the
time until then, the time to read it again, and the most memory that the process had. `warm copy` is
one copy of the state into memory that is there already, made in the same loop: what a consistent
snapshot costs where the loop waits for it; ratios are to it, of the stall, and of stall and next
step together: `elastic` copies in that step and begins to write after it. Every process has that
copy, and `elastic` two slots of its own, in its peak. On a device, batches of many rows keep it
busy while the host is ahead of it; with few, it waits for the host at each kernel, and whatever
else the host does counts.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from elastic.core.config import Entry, JobSpec
from elastic.core.facts import EntryKind, JobId
from elastic.core.policy.cursor import Cursor
from elastic.core.policy.saving import SavingPlan
from elastic.runtime.clock import SystemClock
from elastic.storage.run_directory import RunDirectory
from elastic.worker.checkpoint.checkpoint_reader import read_checkpoint
from elastic.worker.checkpoint.checkpoint_writer import CheckpointWriter
from elastic.worker.checkpoint.committer import Committer
from elastic.worker.checkpoint.snapshotter import Snapshotter
from elastic.worker.process.local import NoCoordinator
from elastic.worker.state.train_state import TrainState

SYSTEMS = ("elastic", "elastic, at once", "torch.save", "async_save shm", "async_save")
WIDTH = 1024
COPIES = 3
"""Of each parameter: itself, and Adam's two moments."""
PLAIN_STEPS = 3
"""Between two checkpoints, so that nothing is being written: what others are compared with."""


class Trained:
    """A model and its optimizer, of so many bytes, that has done a step."""

    def __init__(self, num_bytes: float, device: str = "cpu", rows: int = 0) -> None:
        torch.set_num_threads(1)
        self.device = torch.device(device)
        layers = max(1, round(num_bytes / COPIES / (4 * WIDTH * (WIDTH + 1))))
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        self.model.to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.optimizer.step()
        self.optimizer.zero_grad()
        on_device = self.device.type == "cuda"
        self._width = 4096 if on_device else 256
        self._rows = rows or (4096 if on_device else 64)
        self._probe = nn.Linear(self._width, self._width, device=self.device)
        self.wait()

    def state(self) -> dict[str, Any]:
        """Return what is saved."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors."""
        moments = [v for one in self.optimizer.state.values() for v in one.values()]
        return [*self.model.parameters(), *moments]

    def train(self, batches: int = 20) -> float:
        """Go forward and backward, as a loop does beside the writing; return the seconds."""
        began = time.perf_counter()
        for _ in range(batches):
            x = torch.randn(self._rows, self._width, device=self.device)
            self._probe(x).square().mean().backward()
        self.wait()
        return time.perf_counter() - began

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def copying(trained: Trained) -> Callable[[], float]:
    """Return a function that copies all tensors into memory that is there; returns its seconds."""
    with torch.no_grad():
        pin = trained.device.type == "cuda"
        copies = [
            torch.empty_like(tensor, device="cpu", pin_memory=pin).copy_(tensor)
            for tensor in trained.tensors()
        ]

    def copy() -> float:
        began = time.perf_counter()
        with torch.no_grad():
            torch._foreach_copy_(copies, trained.tensors(), non_blocking=True)
            trained.wait()
        return time.perf_counter() - began

    return copy


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was begun.

    Attributes:
        is_durable: returns whether it is.
        settle: what an optimizer's next step waits for.
        end: called once it is durable.
    """

    is_durable: Callable[[], bool] = lambda: True
    settle: Callable[[], object] = lambda: None
    end: Callable[[], object] = lambda: None


Saving = Callable[[], Saved]
Loading = Callable[[], None]


class OwnRun:
    """A run of this project."""

    def __init__(self, trained: Trained, folder: Path, *, at_once: bool = False) -> None:
        self._at_once = at_once
        self.objects = TrainState()
        self.objects.models.append(trained.model)
        self.objects.optimizers.append(trained.optimizer)
        self.run, self.steps = RunDirectory(str(folder)), 0
        entry = Entry(EntryKind.FUNCTION, "bench")
        spec = JobSpec(
            job_id=JobId("bench"), name="bench", entry=entry, min_workers=1, max_workers=1
        )
        committer = Committer(self.run, spec, NoCoordinator())
        writer = CheckpointWriter(self.run, spec.job_id, committer=committer, clock=SystemClock())
        self.snapshotter = Snapshotter((), writer)
        self.snapshotter.plan = SavingPlan(every_n_steps=2)
        self.snapshotter.warm_up(self.state)

    def state(self) -> dict[str, Any]:
        """Return what is saved."""
        return {"objects": self.objects.take(), "cursor": [0, self.steps], "steps": self.steps}

    def save(self) -> Saved:
        """Begin a checkpoint."""
        self.steps += 1
        still = None if self._at_once else self.objects.still_between_steps()
        done = self.snapshotter.take(self.state, Cursor(0, self.steps), self.steps, still=still)
        return Saved(done.is_set, self.snapshotter.settle)

    def load(self) -> None:
        """Read the newest one."""
        name, marker = max(self.run.markers(), key=lambda pair: pair[1].index)
        self.objects.put(read_checkpoint(self.run, name, marker)["objects"])


def ours(trained: Trained, folder: Path, *, at_once: bool = False) -> tuple[Saving, Loading]:
    """Save with this project; at once: as it does where the copy cannot wait."""
    run = OwnRun(trained, folder, at_once=at_once)
    return run.save, run.load


def with_torch_save(trained: Trained, folder: Path) -> tuple[Saving, Loading]:
    """Save as most scripts do, but so that it survives a power cut."""
    path = folder / "state.pt"

    def save() -> Saved:
        with open(path, "wb") as file:
            torch.save(trained.state(), file)
            file.flush()
            os.fsync(file.fileno())
        return Saved()

    def load() -> None:
        state = torch.load(path, weights_only=True)
        trained.model.load_state_dict(state["model"])
        trained.optimizer.load_state_dict(state["optimizer"])

    return save, load


def with_async_save(
    trained: Trained, folder: Path, *, shares_memory: bool
) -> tuple[Saving, Loading]:
    """Save with torch's own asynchronous checkpoints."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    pins = shares_memory and trained.device.type == "cuda"
    options = StagingOptions(pins, shares_memory, pins, pins)
    stager = DefaultStager(options) if shares_memory else None
    paths: list[Path] = []

    def save() -> Saved:
        paths.append(folder / str(len(paths)))
        answer = dcp.async_save(trained.state(), checkpoint_id=str(paths[-1]), async_stager=stager)
        future = getattr(answer, "upload_completion", answer)
        staged = getattr(answer, "staging_completion", None)

        def end() -> None:
            future.result()
            if len(paths) > 1:
                shutil.rmtree(paths[-2])

        return Saved(future.done, (lambda: None) if staged is None else staged.result, end)

    def load() -> None:
        state = trained.state()
        dcp.load(state, checkpoint_id=str(paths[-1]))
        trained.optimizer.load_state_dict(state["optimizer"])

    return save, load


def measure(
    system: str,
    num_bytes: float,
    rounds: int,
    parent: str,
    step_s: float,
    device: str = "cpu",
    rows: int = 0,
) -> dict[str, float]:
    """Save and load several times; returns medians."""
    folder = Path(tempfile.mkdtemp(dir=parent))
    trained = Trained(num_bytes, device, rows)
    copy = copying(trained)
    makers: dict[str, Callable[[], tuple[Saving, Loading]]] = {
        "elastic": lambda: ours(trained, folder),
        "elastic, at once": lambda: ours(trained, folder, at_once=True),
        "torch.save": lambda: with_torch_save(trained, folder),
        "async_save": lambda: with_async_save(trained, folder, shares_memory=False),
        "async_save shm": lambda: with_async_save(trained, folder, shares_memory=True),
    }
    save, load = makers[system]()
    batches = max(1, round(20 * step_s / min(trained.train() for _ in range(20))))
    names = ("copy", "stall", "next", "later", "durable")
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        plain = statistics.median(trained.train(batches) for _ in range(PLAIN_STEPS))
        copied = copy()  # In the same loop: memory that was not used for a while is slower.
        trained.train(batches)
        began = time.perf_counter()
        saved = save()
        stall, lost, is_durable = time.perf_counter() - began, list[float](), False
        while not is_durable:
            began_step = time.perf_counter()
            trained.train(batches)
            saved.settle()
            lost.append(time.perf_counter() - began_step - plain)
            is_durable = saved.is_durable()
        durable = time.perf_counter() - began
        saved.end()
        if number:  # The first one finds its memory.
            values = (copied, stall, lost[0], sum(lost[1:]), durable)
            for name, value in zip(names, values, strict=True):
                found[name].append(value)
    loads = []
    for _ in range(rounds):
        began = time.perf_counter()
        load()
        trained.wait()
        loads.append(time.perf_counter() - began)
    shutil.rmtree(folder)
    return {
        "bytes": float(sum(tensor.nbytes for tensor in trained.tensors())),
        **{name: statistics.median(values) for name, values in found.items()},
        "snapshot": statistics.median(map(sum, zip(found["stall"], found["next"], strict=True))),
        "load": statistics.median(loads),
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0,
    }


def pace(trained: Trained, seconds: float, save: Saving | None) -> float:
    """Return the small steps per second of a loop that saves once, at its beginning, or never."""
    count, began = 0, time.perf_counter()
    saved = save() if save is not None else Saved()
    while time.perf_counter() - began < seconds:
        trained.train()
        saved.settle()
        count += 1
    return count / (time.perf_counter() - began)


def throughput(num_bytes: float, rounds: int, seconds: float, parent: str) -> float:
    """Return the pace of a loop that saves every so many seconds, in parts of one that does not."""
    folder = Path(tempfile.mkdtemp(dir=parent))
    trained = Trained(num_bytes)
    own = OwnRun(trained, folder)
    pace(trained, 3.0, own.save)
    ratios = []
    for _ in range(rounds):
        plain = pace(trained, seconds, None)
        ratios.append(pace(trained, seconds, own.save) / plain)
    own.snapshotter.finish()
    shutil.rmtree(folder)
    return statistics.median(ratios)


def in_own_process(system: str, gigabytes: float, args: argparse.Namespace) -> dict[str, float]:
    """Measure one system where nothing of the others is left."""
    call = [sys.executable, __file__, "--system", system, "--gigabytes", str(gigabytes)]
    call += ["--rounds", str(args.rounds), "--folder", args.folder, "--step", str(args.step)]
    call += ["--device", args.device, "--rows", str(args.rows)]
    done = subprocess.run(call, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        raise RuntimeError(f"{system}: {done.stderr[-3000:].strip()}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure all systems, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gigabytes", type=float, action="append", help="default 0.1, 0.5, 2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step", type=float, default=0.2, help="seconds of a step")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where checkpoints go")
    parser.add_argument(
        "--pace", type=float, help="seconds between two checkpoints: what they cost a loop instead"
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rows", type=int, default=0, help="of a batch; default 64, on cuda 4096")
    parser.add_argument("--system", choices=SYSTEMS, help="this one only, as JSON")
    args = parser.parse_args()
    sizes = args.gigabytes or [0.1, 0.5, 2.0]
    if args.system:
        size = sizes[0] * 1e9
        found = measure(
            args.system, size, args.rounds, args.folder, args.step, args.device, args.rows
        )
        print(json.dumps(found))
        return
    console = Console(width=120)
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
        f"state on {args.device}, medians of {args.rounds}, steps of {args.step:g} s, milliseconds"
    )
    for gigabytes in sizes:
        table = Table(
            *("state", "system", "copy", "stall", "ratio", "next step", "both", "later steps"),
            *("durable", "load", "peak MB"),
        )
        for system in SYSTEMS:
            try:
                found = in_own_process(system, gigabytes, args)
            except RuntimeError as error:  # Some releases of torch cannot stage a model of theirs.
                if system.startswith("elastic"):
                    raise
                console.print(f"{system} failed: {str(error).splitlines()[-1]}")
                continue
            table.add_row(
                f"{found['bytes'] / 1e6:.0f} MB",
                system,
                *(f"{found[name] * 1e3:.1f}" for name in ("copy", "stall")),
                f"{found['stall'] / found['copy']:.2f}",
                f"{found['next'] * 1e3:.1f}",
                f"{found['snapshot'] / found['copy']:.2f}",
                *(f"{found[name] * 1e3:.0f}" for name in ("later", "durable", "load")),
                f"{found['peak'] / 1e6:.0f}",
            )
        console.print(table)


if __name__ == "__main__":
    main()
