"""The options of `elastic run`: all of torchrun's, what any job has, and what we add.

Rule: the names, the variables (PET_*) and the defaults are those of torchrun; a test holds them
against torch's own parser. Underscores may be written for dashes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import click

from elastic.client.job_options import job_options
from elastic.client.output_router import PREFIX
from elastic.client.submission import DEFAULT_STORAGE
from elastic.client.torchrun import AS_MANY, IGNORED
from elastic.client.values import parse_ranks

IGNORED_CHOICES = {
    "start-method": ("spawn", "fork", "forkserver"),
    "numa-binding": ("node", "socket", "exclusive", "core-complex"),
}
IGNORED_NUMBERS: dict[str, Any] = {
    "node-rank": int, "master-port": int, "monitor-interval": float,
}  # fmt: skip

Command = Callable[..., Any]


def parse_nodes(_: click.Context, __: click.Parameter, text: str) -> tuple[int, int]:
    """Read --nnodes, "2" or "1:4", as (min, max)."""
    low, colon, high = text.partition(":")
    try:
        least, most = int(low), int(high if colon else low)
    except ValueError:
        raise click.BadParameter(f"{text!r}: expected a number, or MIN:MAX such as 1:4") from None
    if not 1 <= least <= most:
        raise click.BadParameter(f"{text!r}: expected 1 <= MIN <= MAX")
    return least, most


def parse_per_node(_: click.Context, __: click.Parameter, text: str) -> str:
    """Read --nproc-per-node: a number or a word for one."""
    if text not in AS_MANY and not (text.isdecimal() and int(text)):
        known = ", ".join(AS_MANY)
        raise click.BadParameter(f"{text!r}: expected a number of at least 1, or one of {known}")
    return text


# Variables are for what torchrun has.
_our = partial(click.option, allow_from_autoenv=False)

OURS = (
    _our("--coord", default="", metavar="HOST:PORT,...", help="Run on this cluster."),
    _our("--min", "min_workers", type=click.IntRange(min=1), help="Fewest workers, in all."),
    _our("--max", "max_workers", type=click.IntRange(min=1), help="Most workers, in all."),
    _our("--name", default="", help="Name of the run; one that did not succeed is resumed."),
    _our(
        "--storage", "--storage-path", "storage", default=DEFAULT_STORAGE, show_default=True,
        metavar="PATH|URL", help="Parent of the run directory; all nodes must reach it.",
    ),
    _our("--detach", is_flag=True, help="Print the job's id and leave it to the cluster."),
)  # fmt: skip

THEIRS = (
    click.option("--nnodes", default="1:1", callback=parse_nodes, metavar="N|MIN:MAX",
        show_default=True, help="Nodes."),
    click.option("--nproc-per-node", default="1", callback=parse_per_node, show_default=True,
        metavar="N|auto|cpu|gpu", help="Workers of each node; the group is a multiple of it."),
    click.option("--standalone", is_flag=True, help="On this machine alone."),
    click.option("--max-restarts", default=0, show_default=True, type=click.IntRange(min=0),
        help="How often the script may fail; lost workers and nodes do not count."),
    click.option("--shutdown-timeout", "--grace", "shutdown_timeout", default=30.0,
        type=click.FloatRange(min=0), show_default=True, metavar="SECONDS",
        help="When the job is stopped, a script's own handler of SIGTERM has so long."),
    click.option("-m", "--module", "is_module", is_flag=True, envvar="PET_MODULE",
        help="SCRIPT is the name of a module."),
    click.option("--no-python", is_flag=True, help="SCRIPT is a program of its own."),
    click.option("--virtual-local-rank", is_flag=True,
        help="Each worker sees its own GPU only, and LOCAL_RANK is 0."),
    click.option("--run-path", is_flag=True, help="SCRIPT runs in the worker's own interpreter, "
        "as it does in any case; wins over --no-python."),
    click.option("--rdzv-id", default="", help="TORCHELASTIC_RUN_ID, and part of the name."),
    click.option("--role", default="default", show_default=True, help="ROLE_NAME, and in --tee."),
    click.option("--log-dir", default="", metavar="PATH",
        help="Parent of what the next two write."),
    click.option("-r", "--redirects", default="0", show_default=True,
        help="Whose output is written and not shown: 3 for all, 0:3,1:3 by local rank."),
    click.option("-t", "--tee", default="0", show_default=True,
        help="Whose output is written and shown, with a prefix."),
    click.option("--local-ranks-filter", default="", callback=parse_ranks, metavar="RANK,...",
        help="Show only these."),
    click.option("--log-line-prefix-template", "log_line_prefix", default=PREFIX,
        envvar="TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", show_default=True,
        help="Of lines that --tee shows; ${rank} and ${hostname}, the node, are known, too."),
    click.option("--threads", envvar="OMP_NUM_THREADS", default="", hidden=True),
)  # fmt: skip


def run_options(command: Command) -> Command:
    for flag in reversed(tuple(IGNORED)):
        command = _ignored(flag)(command)
    command = job_options(command)
    for option in reversed((*THEIRS, *OURS)):
        command = option(command)
    return command


def _ignored(flag: str) -> Callable[[Command], Command]:
    settings: dict[str, Any] = {"help": f"No effect: {IGNORED[flag]}."}
    if flag in IGNORED_CHOICES:
        settings["type"] = click.Choice(IGNORED_CHOICES[flag])
    elif flag in IGNORED_NUMBERS:
        settings["type"] = IGNORED_NUMBERS[flag]
    return click.option(f"--{flag}", **settings)
