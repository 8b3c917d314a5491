"""What a step costs: plain DistributedDataParallel beside the step engine, in the same processes.

    python bench/step.py --world 2 --world 3

Every rank is a process of one thread on this machine, joined by gloo as workers are. The same
model, data and optimizer go through torch's DDP and through `train.epochs()` with both
consistencies, in turns, several rounds of each, so that whatever else the machine does hits all of
them. Prints, of the exchange alone, its time beside gloo's all_reduce; then medians of the rounds'
step times, their ratio to DDP's, and the bytes of gradients that a rank sends per step.

    python bench/step.py --only exchange --world 2 --world 3 --world 4
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from elastic import train
from elastic.core.policy.exchange_plan import BUCKET_BYTES
from elastic.train.torch import prepare_data_loader, prepare_model, prepare_optimizer
from elastic.worker.engine import train_call
from elastic.worker.group.c10d import default_group, default_store
from elastic.worker.group.group import GroupSpec, ProcessGroups
from elastic.worker.group.member_links import connect, links_of
from elastic.worker.group.peer_sockets import PeerAddress
from elastic.worker.group.shared_memory import OwnMemory
from elastic.worker.group.store_server import StoreServer
from elastic.worker.process.local import LocalRun, local_context
from elastic.worker.reduce.tree_exchange import MicroBatchPartition, make_exchange

VARIANTS = ("ddp", "bitwise", "samples")
SIZES = {"tiny": (64, 16), "10 M": (1580, 32), "100 M": (5000, 32)}
"""Name: (width of each of four layers, samples of a micro-batch)."""
EXCHANGED = (17_000, 1_000_000, 10_000_000, 100_000_000)
"""Elements of the gradients whose exchange is measured alone."""
WARM_UP = 5
HOST = "127.0.0.1"
KEY = "a secret of the generation"


def model_of(width: int) -> nn.Module:
    """Return four layers; of width 1580 they have 10 million parameters."""
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def data_of(width: int, size: int) -> TensorDataset:
    """Return noise."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(size, width, generator=generator))


def loop_of(
    variant: str, width: int, batch: int, steps: int, device: str
) -> Iterator[tuple[float, int]]:
    """Train; yield (time, bytes sent so far) at the end of each step."""
    world = dist.get_world_size()
    data = data_of(width, steps * batch * world)
    torch.manual_seed(0)
    model: nn.Module = model_of(width).to(device)
    if variant == "ddp":
        model = DistributedDataParallel(model)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for (x,) in DataLoader(data, batch_size=batch, sampler=DistributedSampler(data)):
            step(model, optimizer, x.to(device))
            yield time.perf_counter(), 0
        return
    model = prepare_model(model)
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
    loader = prepare_data_loader(DataLoader(data, batch_size=batch, shuffle=True))
    engine = train_call.current_engine()
    for _ in train.epochs(1):
        for (x,) in loader:
            step(model, optimizer, x.to(device))
            yield time.perf_counter(), engine.bytes_sent()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """Do what every loop does."""
    loss = F.mse_loss(model(x), x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if x.is_cuda:
        torch.cuda.synchronize()


def one_round(variant: str, width: int, batch: int, steps: int, device: str) -> tuple[float, int]:
    """Return the median step time in seconds, and the bytes that this rank sent per step."""
    run = LocalRun(job_name="bench", options={"consistency": variant})
    with local_context(run):
        marks = list(loop_of(variant, width, batch, steps + WARM_UP, device))
    times = [mark for mark, _ in marks[WARM_UP - 1 :]]
    spans = [after - before for before, after in itertools.pairwise(times)]
    return statistics.median(spans), (marks[-1][1] - marks[WARM_UP - 1][1]) // steps


def rank_main(
    rank: int,
    world: int,
    leader: str,
    rounds: int,
    device: str,
    sizes: Sequence[str],
    results: mp.SimpleQueue,  # type: ignore[type-arg]
) -> None:
    """Be one rank."""
    torch.set_num_threads(1)
    groups = ProcessGroups()
    groups.form(
        GroupSpec(1, rank, world, leader, "gloo", HOST, timeout_s=600.0, job_id="bench", key=KEY)
    )
    found: dict[tuple[str, str], list[tuple[float, int]]] = {}
    for size in sizes:
        width, batch = SIZES[size]
        steps = {"tiny": 200, "10 M": 12}.get(size, 4)
        for _ in range(rounds):
            for variant in VARIANTS:
                measured = one_round(variant, width, batch, steps, device)
                found.setdefault((size, variant), []).append(measured)
    if rank == 0:
        results.put(found)
    dist.barrier()
    groups.close()


def exchange_rank_main(
    rank: int,
    world: int,
    leader: str,
    apart: bool,
    sizes: Sequence[int],
    results: mp.SimpleQueue,  # type: ignore[type-arg]
) -> None:
    """Be one rank that exchanges gradients of each size, and does nothing else."""
    torch.set_num_threads(1)
    groups = ProcessGroups()
    groups.form(
        GroupSpec(1, rank, world, leader, "gloo", HOST, timeout_s=600.0, job_id="bench", key=KEY)
    )
    group = default_group()
    connect(group, default_store(), PeerAddress(HOST, 600.0, str(rank) if apart else ""))
    for numel in sizes:
        gradient = torch.randn(numel)
        exchange = exchange_of(group, gradient)
        times: dict[str, list[tuple[float, float]]] = {"ours": [], "gloo": []}
        for _ in range(30 if numel < 5e6 else 9 if numel < 5e7 else 5):
            for name, call in (("ours", exchange), ("gloo", lambda g=gradient: dist.all_reduce(g))):
                dist.barrier()
                began, spent = time.perf_counter(), time.process_time()
                call()
                took = time.perf_counter() - began, time.process_time() - spent
                times[name].append(took)
            gradient.normal_()
        if rank == 0:
            results.put((numel, {name: _medians(some[1:]) for name, some in times.items()}))
    dist.barrier()
    groups.close()


def _medians(times: list[tuple[float, float]]) -> tuple[float, float]:
    walls, cpus = zip(*times, strict=True)
    return statistics.median(walls), statistics.median(cpus)


def exchange_of(group: Any, gradient: torch.Tensor) -> Callable[[], None]:
    """Return what exchanges the buckets that a gradient is cut into."""
    deal = MicroBatchPartition(group.rank(), group.size(), group.size())
    memory = OwnMemory() if links_of(group).memory else None
    running = []
    for part in gradient.split(BUCKET_BYTES // gradient.itemsize):
        made = make_exchange(deal, part, group, memory=memory)
        flat = part.clone() if memory is None else memory.empty(part.numel(), part.dtype)
        flat.copy_(part)
        running.append((made, {deal.mine[0]: flat}))

    def exchange() -> None:
        for made, sums in running:
            made.start(sums, divisor=float(group.size()))
        for made, _ in running:
            made.finish(float(group.size()))

    return exchange


def exchange_only(
    world: int, apart: bool, sizes: Sequence[int]
) -> Iterator[tuple[int, dict[str, tuple[float, float]]]]:
    """Yield what rank 0 measured: elements, and by whose exchange seconds of time and processor."""
    results = mp.get_context("spawn").SimpleQueue()
    server = StoreServer(HOST)
    server.admit(1, KEY)
    context = mp.spawn(
        exchange_rank_main,
        (world, server.address, apart, sizes, results),
        nprocs=world,
        join=False,
    )
    for _ in sizes:
        yield results.get()
    context.join()
    server.close()


def print_exchange_only(console: Console, worlds: Sequence[int], sizes: Sequence[int]) -> None:
    """Measure and print the exchange alone, as it comes: the largest take long."""
    for world, apart in itertools.product(worlds, (False, True)):
        for numel, one in exchange_only(world, apart, sizes):
            (ours, our_cpu), (gloo, gloo_cpu) = one["ours"], one["gloo"]
            where = "through sockets" if apart else "on one node"
            console.print(
                f"exchange alone, {world} workers {where}, {numel:>11,} elements: "
                f"{ours * 1e3:.2f} ms, all_reduce {gloo * 1e3:.2f} ms, ratio {ours / gloo:.2f}; "
                f"of the processor {our_cpu / gloo_cpu:.2f}; load {os.getloadavg()[0]:.1f}"
            )


def measure(
    world: int, rounds: int, device: str, sizes: Sequence[str]
) -> dict[tuple[str, str], list[tuple[float, int]]]:
    """Return what rank 0 measured, by size and variant."""
    results = mp.get_context("spawn").SimpleQueue()
    server = StoreServer(HOST)
    server.admit(1, KEY)
    context = mp.spawn(
        rank_main, (world, server.address, rounds, device, sizes, results), nprocs=world, join=False
    )
    found = results.get()
    context.join()
    server.close()
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--world", type=int, action="append", help="again for several")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", action="append", choices=[*SIZES], help="again for several")
    parser.add_argument("--elements", type=int, action="append", help="of gradients exchanged")
    parser.add_argument("--device", default="cpu", help="cuda: all ranks share the first GPU")
    parser.add_argument("--only", choices=("exchange", "steps"), help="half of it")
    args = parser.parse_args()
    console = Console(highlight=False, width=170)
    console.print(
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, gloo on "
        f"loopback, one thread for each rank; medians of {args.rounds} rounds"
    )
    if args.device == "cpu" and args.only != "steps":
        print_exchange_only(console, args.world or [2, 3, 4], args.elements or EXCHANGED)
    if args.only == "exchange":
        return
    for world in args.world or [2, 3]:
        load = os.getloadavg()[0]
        table = Table(title=f"steps on {args.device}; load of the machine {load:.1f}")
        for name in ("workers", "model", "variant", "step", "to DDP", "sent per step"):
            table.add_column(name, justify="left" if name in ("model", "variant") else "right")
        sizes = args.model or [*SIZES]
        found = measure(world, args.rounds, args.device, sizes)
        for size in sizes:
            base = statistics.median(seconds for seconds, _ in found[size, "ddp"])
            for variant in VARIANTS:
                seconds = statistics.median(s for s, _ in found[size, variant])
                sent = found[size, variant][-1][1]
                table.add_row(
                    str(world), size, variant, f"{seconds * 1e3:.2f} ms",
                    f"{seconds / base:.3f}", f"{sent / 1e6:.2f} MB" if sent else "-",
                )  # fmt: skip
        console.print(table)


if __name__ == "__main__":
    main()
