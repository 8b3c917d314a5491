"""What a trial costs beside its own work: many short trials on a cluster of this machine.

    python -m bench.tune --trials 100 --seconds 1

Beside Ray Tune, where it is installed. Each trial sleeps. Overhead is the time that a slot was not
asleep, for each trial: from the end of one trial's function to the beginning of the next one's in
the same slot. Its parts are read from the study's log. The first trial of each slot is left out: it
waits for the cluster to come up.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

import elastic
from elastic import tune

RAY_JOB = Path(__file__).with_name("peers") / "ray_tune_job.py"
RAY_TRIALS = 20
"""Each takes it seconds."""


def trial(config: dict[str, Any]) -> None:
    """Sleep, and report when that began and ended."""
    began = time.time()
    time.sleep(config["seconds"])
    tune.report({"began": began, "slept": time.time()})


@click.command()
@click.option("--trials", default=100, show_default=True)
@click.option("--seconds", default=1.0, show_default=True, help="Of each trial.")
@click.option("--slots", default=2, show_default=True, help="Trials at once.")
def main(trials: int, seconds: float, slots: int) -> None:
    """Measure the overhead of a trial."""
    with tempfile.TemporaryDirectory() as storage, elastic.init("local", num_cpus=slots):
        grid = tune.Tuner(
            trial,
            param_space={"seconds": seconds},
            tune_config=tune.TuneConfig(num_samples=trials),
            run_config=tune.RunConfig(name="bench", storage_path=storage, verbose=0),
        ).fit()
        if grid.num_errors:
            raise click.ClickException(str(grid.errors[0]))
        show(read(Path(grid.experiment_path)), seconds, slots)
    if find_spec("ray") is None:
        print("Ray Tune is not installed (pip install -r bench/requirements-peers.txt).")
        return
    with tempfile.TemporaryDirectory() as storage:
        show_ray(min(trials, RAY_TRIALS), seconds, slots, storage)


def show_ray(trials: int, seconds: float, slots: int, storage: str) -> None:
    """Run the same trials under Ray Tune, and print the same two figures of them."""
    words = [str(trials), str(seconds), str(slots), storage]
    done = subprocess.run(
        [sys.executable, str(RAY_JOB), *words], stdout=subprocess.PIPE, text=True, check=True
    )
    times = json.loads(done.stdout.splitlines()[-1])
    ends = sorted(slept for _, slept in times)
    begins = sorted(began for began, _ in times)[slots:]
    median = statistics.median(b - e for e, b in zip(ends, begins, strict=False))
    print(f"Ray Tune: function to function {1e3 * median:.0f} ms, median of {len(begins)}")
    print_mean(times, seconds, slots)


def read(path: Path) -> dict[int, dict[str, float]]:
    """Return by trial when what happened, in seconds of the time of day."""
    times: dict[int, dict[str, float]] = {}
    for line in (path / "study.jsonl").read_text().splitlines():
        event = json.loads(line)
        if "trial" in event:
            mine = times.setdefault(event["trial"], {})
            mine.setdefault(event["e"], event["t"])
            if event["e"] == "began":
                mine["formed"] = event["unix_ns"] / 1e9
            elif event["e"] == "reported":
                mine.update({key: event["metrics"][key] for key in ("began", "slept")})
    return times


def show(times: dict[int, dict[str, float]], seconds: float, slots: int) -> None:
    """Print one table."""
    after: dict[str, list[float]] = {}
    # Each trial but the first ones follows the one whose slot it took over: the ends in order.
    ends = sorted(times.values(), key=lambda one: one["slept"])
    begins = sorted(times.values(), key=lambda one: one["began"])[slots:]
    for before, one in zip(ends, begins, strict=False):
        for what, from_s, to_s in (
            ("function's end to the next one's group", before["slept"], one["formed"]),
            ("group to the function", one["formed"], one["began"]),
            ("whole: function to function", before["slept"], one["began"]),
            ("meanwhile: function's end to the driver's line", before["slept"], before["ended"]),
            ("meanwhile: proposal to submission", one["proposed"], one["started"]),
        ):
            after.setdefault(what, []).append(to_s - from_s)
    table = Table("ms for each trial", "median", "p90", box=None)
    for what, values in after.items():
        tenths = statistics.quantiles(values, n=10) if len(values) > 1 else values * 9
        table.add_row(what, f"{1e3 * statistics.median(values):.0f}", f"{1e3 * tenths[8]:.0f}")
    console = Console()
    console.print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    console.print(table)
    print_mean([(one["began"], one["slept"]) for one in times.values()], seconds, slots)


def print_mean(times: Sequence[tuple[float, float]], seconds: float, slots: int) -> None:
    """Print the overhead from the first function's beginning: before that the cluster came up."""
    began, slept = zip(*times, strict=True)
    wall_s = max(slept) - min(began)
    mean = wall_s * slots / len(times) - seconds
    print(f"{len(times)} trials of {seconds:g} s in {wall_s:.1f} s: {mean:.3f} s of a slot each")


if __name__ == "__main__":
    main()
