"""The command `elastic profile`: where a rank spends its time, as a file for speedscope."""

from __future__ import annotations

import time

import click

from elastic.client.terminal import ClusterTarget, output_option, print_json
from elastic.storage.files import Files

PAUSE_S = 0.2
LATE_S = 15.0
"""How long storage may take after the end of sampling."""


@click.command()
@click.argument("job")
@click.option("--rank", default=0, show_default=True, type=click.IntRange(min=0), metavar="R")
@click.option(
    "--seconds", default=10.0, show_default=True, metavar="N",
    type=click.FloatRange(min=0, min_open=True, max=600), help="How long to sample.",
)  # fmt: skip
@output_option
@click.pass_obj
def profile(target: ClusterTarget, job: str, rank: int, seconds: float, output: str) -> None:
    """Sample the stacks of a rank of JOB (id or name) while it trains.

    The file is in the run's directory; open it at https://www.speedscope.app or with any tool that
    knows its format.
    """
    with target.connect() as client:
        run_path = client.get(job).record.spec.run_path
        name = client.profile(job, rank=rank, seconds=seconds)
    files, deadline = Files(run_path), time.monotonic() + seconds + LATE_S
    while not files.exists(name):
        if time.monotonic() >= deadline:
            raise TimeoutError(
                f"{files.path}/{name} is not there within {seconds + LATE_S:g} s: has the worker "
                f"ended, or can this machine not read the run's directory?"
            )
        time.sleep(PAUSE_S)
    if output == "json":
        print_json({"profile": f"{files.path}/{name}"})
    else:
        click.echo(f"{files.path}/{name}")
