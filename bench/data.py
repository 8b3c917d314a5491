"""Rows per second into the step: elastic.data beside Ray Data, Hugging Face and a DataLoader.

    python bench/data.py --rows 40000 --cost-ms 2

One table of parquet files, one costly function of batches, one consumer, one run: each variant
reads the whole table once, shuffled, with as many processes beside the consumer as `--processes`
says. Prints rows per second over the epoch, the time to the first batch, and how much memory the
consumer took on. All are read in turns, each in a process of its own.

"Feeders on nodes" are as many processes, reached by TCP as those of `feeder_resources` are; they
run before the epoch begins, as on nodes.

Ray Data is there if it is installed (bench/requirements-peers.txt): on a cluster of its own with a
processor for each process, which is started once before the epoch, as its documents say for
training: files in random order, and a buffer in which rows are shuffled.

The plain DataLoader has the table in memory and shuffles all rows; Hugging Face has it in its Arrow
cache, whose making is not counted; elastic.data reads the parquet files, shuffled in windows.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

PLACED = "elastic.data, feeders on nodes"
RAY = "Ray Data"
VARIANTS = ("DataLoader", "HF datasets + DataLoader", RAY, "elastic.data", PLACED)
SERVE = """
import sys
from elastic.data.feeder_network import FeederServer
print(FeederServer("127.0.0.1", "secret").address, flush=True)
sys.stdin.read()
"""
BATCH = 128
WIDTH = 256
RAY_BUFFER = 1000
"""Rows that Ray Data shuffles among; elastic.data shuffles windows of row groups."""
COST_MS = "BENCH_COST_MS"


def costly(batch: dict[str, Any]) -> dict[str, Any]:
    """Do arithmetic for so many milliseconds of this processor's own time."""
    x = np.asarray(batch["x"])
    x = (np.stack(x) if x.dtype == object else x).astype(np.float32)  # Ray's has arrays in it.
    until = time.process_time() + float(os.environ[COST_MS]) / 1000
    while time.process_time() < until:
        x = np.tanh(x + 0.5)
    return {"id": np.asarray(batch["id"]), "x": x}


def write_table(folder: Path, rows: int) -> None:
    """Write 8 files, with row groups of 1,000 rows."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    generator = np.random.default_rng(0)
    for number, ids in enumerate(np.array_split(np.arange(rows), 8)):
        flat = generator.random(len(ids) * WIDTH, dtype=np.float32)
        wide = pa.FixedSizeListArray.from_arrays(flat, WIDTH)
        table = pa.table({"id": ids, "x": wide})
        parquet.write_table(table, folder / f"{number}.parquet", row_group_size=1000)


@contextmanager
def placed(run: Path, processes: int) -> Iterator[None]:
    """Run feeders that are reached over the network, for a block; `run` has their addresses."""
    from elastic.data.feeder_network import addresses_file

    command = [sys.executable, "-c", SERVE]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    feeders = [subprocess.Popen(command, **pipes) for _ in range(processes)]  # type: ignore[call-overload]
    try:
        path = run / addresses_file("bench")
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps([one.stdout.readline().strip() for one in feeders]))
        yield
    finally:
        for one in feeders:
            one.kill()
            one.wait()


def batches_of(variant: str, folder: str, processes: int) -> Iterator[Any]:
    """Yield one epoch of batches, shuffled, as dicts of tensors."""
    import torch
    from torch.utils.data import DataLoader

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        found = costly({name: np.stack([row[name] for row in rows]) for name in ("id", "x")})
        return {name: torch.from_numpy(values) for name, values in found.items()}

    if variant in ("elastic.data", PLACED):
        from elastic import data
        from elastic.data.dataset import Dataset
        from elastic.data.feeder_network import FeedersOnNodes
        from elastic.data.feeders import beside
        from elastic.data.iterator import DataIterator
        from elastic.data.nodes import in_memory, table_of

        ds = data.read_parquet(folder).map_batches(costly, batch_size=None)
        table = table_of(ds.random_shuffle(seed=1).node, in_memory)
        feeders: Any = beside(processes)
        if variant == PLACED and processes:
            run = str(Path(folder).parent)
            feeders = lambda: FeedersOnNodes(run, "bench", "secret", highest=processes)  # noqa: E731
        iterator = DataIterator(lambda: table, lambda: (0, 1), Dataset, feeders=feeders)
        yield from iterator.iter_torch_batches(batch_size=BATCH)
        iterator.close()
        return
    if variant == RAY:
        import ray

        if not ray.is_initialized():
            ray.init(num_cpus=1 + processes, include_dashboard=False, logging_level="ERROR")
            ray.data.DataContext.get_current().enable_progress_bars = False
        ds = ray.data.read_parquet(folder, shuffle="files").map_batches(costly, batch_size=BATCH)
        yield from ds.iter_torch_batches(batch_size=BATCH, local_shuffle_buffer_size=RAY_BUFFER)
        return
    if variant == "DataLoader":
        import pyarrow.parquet as parquet

        whole = parquet.read_table(folder)
        ids = whole["id"].to_numpy()
        x = whole["x"].combine_chunks().flatten().to_numpy().reshape(-1, WIDTH)
        rows: Any = [{"id": ids[one], "x": x[one]} for one in range(len(ids))]
    else:
        import datasets

        cache = Path(folder).parent / "cache"
        files = [str(one) for one in sorted(Path(folder).glob("*.parquet"))]
        rows = datasets.load_dataset(
            "parquet", data_files=files, split="train", cache_dir=str(cache)
        ).with_format("numpy")
    yield from DataLoader(
        rows, batch_size=BATCH, shuffle=True, num_workers=processes, collate_fn=collate
    )


def measure(variant: str, folder: str, processes: int) -> dict[str, float]:
    """Read an epoch in this process."""
    # Imports, and the cache of Hugging Face, are made once, and are no part of what is compared.
    next(iter(batches_of(variant, folder, 0)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ids: list[int] = []
    first = 0.0
    with placed(Path(folder).parent, processes) if variant == PLACED else nullcontext():
        began = time.perf_counter()
        for batch in batches_of(variant, folder, processes):
            first = first or time.perf_counter() - began
            ids += batch["id"].tolist()
        seconds = time.perf_counter() - began
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {
        "rows": len(ids),
        "distinct": len(set(ids)),
        "rows_per_s": len(ids) / seconds,
        "first_s": first,
        "memory_mb": grown / 1024,
    }


def main() -> None:
    """Read the arguments, measure each variant in turns, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--cost-ms", type=float, default=2.0, help="of the function, a batch")
    parser.add_argument("--processes", type=int, default=1, help="beside the consumer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", nargs=2, metavar=("VARIANT", "FOLDER"))
    args = parser.parse_args()
    os.environ[COST_MS] = str(args.cost_ms)
    if args.measure:
        print(json.dumps(measure(*args.measure, args.processes)))
        return
    variants = [one for one in VARIANTS if one != RAY or importlib.util.find_spec("ray")]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
    with tempfile.TemporaryDirectory(prefix="bench-data-") as place:
        folder = Path(place) / "table"
        folder.mkdir()
        write_table(folder, args.rows)
        size = sum(one.stat().st_size for one in folder.iterdir()) / 1024**2
        for _ in range(args.rounds):
            for name in variants:
                command = [
                    *(sys.executable, __file__, "--measure", name, str(folder)),
                    *("--cost-ms", str(args.cost_ms), "--processes", str(args.processes)),
                ]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                found[name].append(json.loads(done.stdout.splitlines()[-1]))
    table = Table(
        title=f"{args.rows:,} rows, {size:.0f} MB; {args.cost_ms} ms a batch of {BATCH}; "
        f"{args.processes} processes beside; medians of {args.rounds}"
    )
    for heading in ("", "rows/s", "first batch", "memory", "each row once"):
        table.add_column(heading, justify="right")
    for name, rounds in found.items():
        middle = {
            key: statistics.median(one[key] for one in rounds)
            for key in ("rows_per_s", "first_s", "memory_mb")
        }
        once = all(one["rows"] == one["distinct"] == args.rows for one in rounds)
        table.add_row(
            name,
            f"{middle['rows_per_s']:,.0f}",
            f"{middle['first_s']:.2f} s",
            f"{middle['memory_mb']:,.0f} MB",
            "yes" if once else "no",
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
