"""The command `elastic-coord`: run a coordinator, or ask one how it is.

Rule: the only place in this room that reads the environment. Exit codes: 0 done, 2 used wrongly,
69 nobody answers or the address is taken, 70 a bug, 75 another coordinator took over (start
again to be its standby), 78 a setting is wrong (do not retry).
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import anyio
import click
from rich.console import Console

from elastic import __version__
from elastic.client.show import print_cluster, status_as_dict
from elastic.coord.serve import ServeOptions, parse_listen, serve
from elastic.coord.server_probe import fetch_health, first_answer
from elastic.core.config import CoordinatorConfig
from elastic.errors import (
    ElasticError,
    Fenced,
    InvariantViolation,
    Unavailable,
)
from elastic.runtime.clock import SystemClock
from elastic.runtime.eventlog import set_up_logging
from elastic.runtime.rpc import parse_endpoints, read_token_file

log = logging.getLogger(__name__)

DEFAULT_ADDRESS = "127.0.0.1:7070"
EXIT_UNREACHABLE = 69
EXIT_BUG = 70
EXIT_AGAIN = 75
EXIT_CONFIG = 78
LOG_LEVELS = ("debug", "info", "warning", "error")


def exit_code(error: ElasticError) -> int:
    """Return the code that tells a supervisor what to do about an error."""
    if isinstance(error, InvariantViolation):
        return EXIT_BUG
    if isinstance(error, Fenced):
        return EXIT_AGAIN
    return EXIT_UNREACHABLE if isinstance(error, Unavailable) else EXIT_CONFIG


def fail(error: ElasticError) -> NoReturn:
    """End with one clear line on stderr."""
    click.echo(f"elastic-coord: {error}", err=True)
    sys.exit(exit_code(error))


def default_store() -> str:
    """Return the SQLite file under the user's state directory (XDG)."""
    state = os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser()
    return f"sqlite:{state}/elastic/coord.sqlite"


def token_of(path: str | None) -> str:
    """Return the token in a file, "" if no file is named."""
    return read_token_file(path) if path else ""


token_option = click.option(
    "--token-file",
    envvar="ELASTIC_TOKEN_FILE",
    metavar="FILE",
    help="File with the join token, one long random word. [env: ELASTIC_TOKEN_FILE]",
)
coord_option = click.option(
    "--coord",
    envvar="ELASTIC_COORD",
    default=DEFAULT_ADDRESS,
    show_default=True,
    metavar="HOST:PORT",
    help="Address of the coordinator, or several with commas. [env: ELASTIC_COORD]",
)
timeout_option = click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=0.1), default=5.0, show_default=True,
    metavar="SECONDS", help="How long to wait for an answer.",
)  # fmt: skip


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="elastic-coord")
def main() -> None:
    """Coordinator of elastic training: decides who trains with whom."""


@main.command(name="serve")
@click.option(
    "--listen", envvar="ELASTIC_LISTEN", default=DEFAULT_ADDRESS, show_default=True,
    metavar="HOST:PORT", help="Address to listen on; port 0 picks a free one.",
)  # fmt: skip
@click.option(
    "--store", envvar="ELASTIC_STORE", default=None, metavar="URL",
    help="sqlite:PATH, etcd://host:port,... or memory: [default: a file in the state directory]",
)  # fmt: skip
@token_option
@click.option(
    "--insecure", is_flag=True,
    help="Listen beyond this machine without a token: whoever connects runs code on all nodes.",
)  # fmt: skip
@click.option(
    "--event-log", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Append what happens to this file, as JSON lines.",
)  # fmt: skip
@click.option(
    "--ready-file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Write the 'ready' line to this file too, once requests are answered.",
)  # fmt: skip
@click.option(
    "--probe-timeout", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
    default=CoordinatorConfig.probe_timeout_s, show_default=True,
    help="While workers wait for a peer, a node whose agent does not answer this long is lost. "
    "More than a round trip and the longest pause of an agent on a loaded machine.",
)  # fmt: skip
@click.option(
    "--tether-fd", type=int, default=-1, metavar="FD",
    help="End when this inherited pipe closes: for programs that start a coordinator for "
    "themselves.",
)  # fmt: skip
@click.option(
    "--log-level", envvar="ELASTIC_LOG_LEVEL", type=click.Choice(LOG_LEVELS), default="info",
    show_default=True,
)  # fmt: skip
def serve_command(log_level: str, **settings: Any) -> None:
    """Run a coordinator until SIGTERM.

    Prints "elastic-coord ready address=HOST:PORT store=... pid=..." once it answers requests. A
    second coordinator on the same etcd waits as a standby.
    """
    set_up_logging("elastic-coord", level=log_level)
    try:
        options = ServeOptions(
            listen=parse_listen(settings["listen"]),
            store=settings["store"] or default_store(),
            token=token_of(settings["token_file"]),
            insecure=settings["insecure"],
            event_log=settings["event_log"],
            ready_file=settings["ready_file"],
            tether_fd=settings["tether_fd"],
            config=CoordinatorConfig(probe_timeout_s=settings["probe_timeout"]),
        )
        anyio.run(serve, options, functools.partial(print, flush=True))
    except ElasticError as error:
        fail(error)


@main.command()
@coord_option
@token_option
@timeout_option
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table")
def status(coord: str, token_file: str | None, timeout_s: float, output: str) -> None:
    """Show nodes, jobs, generations, and what each job waits for."""
    try:
        endpoints, token = parse_endpoints(coord), token_of(token_file)
        answer = first_answer(endpoints, token, timeout_s=timeout_s, clock=SystemClock())
    except ElasticError as error:
        fail(error)
    if output == "json":
        click.echo(json.dumps(status_as_dict(answer), indent=2))
    else:
        print_cluster(answer, Console())


@main.command()
@coord_option
@timeout_option
def health(coord: str, timeout_s: float) -> None:
    """Say whether a coordinator answers requests; exit 0 only if it does."""
    try:
        for endpoint in parse_endpoints(coord):
            answer = fetch_health(endpoint, timeout_s=timeout_s)
            click.echo(f"{endpoint} {answer}")
            if answer != "SERVING":
                sys.exit(EXIT_UNREACHABLE)
    except ElasticError as error:
        fail(error)


if __name__ == "__main__":
    main()
