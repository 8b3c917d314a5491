"""The command `elastic-coord`: run a coordinator, and manage its store and locks.

Rule: the only module in this package that reads the environment. Exit codes: 0 done, 2 wrong usage,
69 no answer or the address is in use, 70 a bug, 75 another process took over a store that is
not shared, or the event loop hung with a shared store, 78 a setting is wrong (do not retry).
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import anyio
import click

from elastic.coord.backup import BackupSummary, back_up, check, restore, salvage
from elastic.coord.cli_locks import certs, tokens
from elastic.coord.collector import stop_collector
from elastic.coord.serve import PREFIX, ServeOptions, parse_http, parse_listen, serve
from elastic.coord.server_probe import fetch_health
from elastic.coord.store_access import StoreFiles
from elastic.core.config import CoordinatorConfig
from elastic.errors import (
    ElasticError,
    Fenced,
    InvariantViolation,
    Unavailable,
    is_for_now,
)
from elastic.runtime.access import TLS_FLAGS, find_access, find_tls, read_token_file
from elastic.runtime.access_options import tls_options, token_option
from elastic.runtime.leaving import run_process
from elastic.runtime.logging_thread import set_up_logging
from elastic.runtime.rpc import (
    SILENCE_S,
    SILENCE_S_MAX,
    SILENCE_S_MIN,
    format_endpoint,
    parse_endpoint,
    parse_endpoints,
)
from elastic.version import __version__

log = logging.getLogger(__name__)

DEFAULT_ADDRESS = "127.0.0.1:7070"
Command = TypeVar("Command", bound=Callable[..., Any])
EXIT_UNREACHABLE = 69
EXIT_BUG = 70
EXIT_AGAIN = 75
EXIT_CONFIG = 78
LOG_LEVELS = ("debug", "info", "warning", "error")


def exit_code(error: ElasticError) -> int:
    """Return the exit code for an error, so that a supervisor knows whether to restart."""
    if isinstance(error, InvariantViolation):
        return EXIT_BUG
    if isinstance(error, Fenced):
        return EXIT_AGAIN
    if isinstance(error, Unavailable) or is_for_now(error):
        return EXIT_UNREACHABLE
    return EXIT_CONFIG


class CommandGroup(click.Group):
    """Commands that end with a text and the right exit code for each kind of error."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that the command line names."""
        try:
            return super().invoke(ctx)
        except ElasticError as error:
            click.echo(f"elastic-coord: {error}", err=True)
            sys.exit(exit_code(error))


def default_store() -> str:
    """Return the SQLite file under the user's state directory (XDG)."""
    state = os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser()
    return f"sqlite:{state}/elastic/coord.sqlite"


def store_options(command: Command) -> Command:
    """Add the flags that name the credentials for etcd."""
    for name, what in (
        ("user", "File with USER:PASSWORD, if etcd asks for a user."),
        ("key", "Of --store-cert."),
        ("cert", "Certificate to show to etcd, if it asks for one."),
        ("ca", "CA of the certificates of etcd's members; turns TLS on."),
    ):
        command = click.option(
            f"--store-{name}", envvar=f"ELASTIC_STORE_{name.upper()}", default="", metavar="FILE",
            help=f"{what} [env: ELASTIC_STORE_{name.upper()}]",
        )(command)  # fmt: skip
    return command


def store_files_of(settings: dict[str, Any]) -> StoreFiles | None:
    """Return the credential files for the store from the flags, None if there are none.

    Raises:
        ConfigError: a certificate without its key or without the authority, or a key alone.
    """
    given = {name: settings[f"store_{name}"] for name in ("ca", "cert", "key", "user")}
    paths = {name: Path(path).absolute() for name, path in given.items() if path}
    return StoreFiles(**paths) if paths else None


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="elastic-coord")
def main() -> None:
    """Coordinator of elastic training: decides which workers train together."""


@main.command(name="serve")
@click.option(
    "--listen", envvar="ELASTIC_LISTEN", default=DEFAULT_ADDRESS, show_default=True,
    metavar="HOST:PORT", help="Address to listen on; port 0 picks a free one.",
)  # fmt: skip
@click.option(
    "--advertise", envvar="ELASTIC_ADVERTISE", default=None, metavar="HOST:PORT",
    help="Address at which agents and users reach this coordinator, if not that of --listen: "
    "standbys report it to them.",
)  # fmt: skip
@click.option(
    "--store", envvar="ELASTIC_STORE", default=None, metavar="URL",
    help="sqlite:PATH, etcd://host:port,... or memory: [default: a file in the state directory]",
)  # fmt: skip
@store_options
@token_option
@click.option(
    "--tokens", envvar="ELASTIC_TOKENS", default="", metavar="FILE",
    help="File of tokens with roles, from 'elastic-coord tokens'; read again when it changes. "
    "[env: ELASTIC_TOKENS]",
)  # fmt: skip
@tls_options
@click.option(
    "--insecure", is_flag=True,
    help="Listen beyond this machine without certificates or tokens: anyone who connects can run "
    "code on all nodes.",
)  # fmt: skip
@click.option(
    "--audit-log", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Append who changed what, and who was refused, to this file, as JSON lines.",
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
    "--http", envvar="ELASTIC_HTTP", default="", metavar="[HOST:]PORT",
    help="Serve a page with jobs, metrics and output, and /metrics for Prometheus, at this "
    "address; a port alone is one of this machine. Behind the same tokens or certificates. Needs "
    "'elastic-torch[page]'. [default: no page]",
)  # fmt: skip
@click.option(
    "--studies", envvar="ELASTIC_STUDIES", default="", metavar="DIR",
    help="Show the studies of elastic.tune below this storage_path on the page, too.",
)  # fmt: skip
@click.option(
    "--probe-timeout", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
    default=CoordinatorConfig.probe_timeout_s, show_default=True,
    help="While workers wait for a peer, a node whose agent does not answer this long is lost. "
    "More than a round trip and the longest pause of an agent on a loaded machine.",
)  # fmt: skip
@click.option(
    "--max-jobs", type=click.IntRange(min=1), default=CoordinatorConfig.jobs_max, metavar="N",
    show_default=True, help="Jobs that have not ended, at once.",
)  # fmt: skip
@click.option(
    "--silence", type=click.FloatRange(SILENCE_S_MIN, SILENCE_S_MAX), metavar="SECONDS",
    default=SILENCE_S, show_default=True,
    help="A host that sends nothing for so long is lost: an agent's, and for agents the leader's. "
    "With thousands of agents 6 saves most of the pings; a group that trains notices by itself.",
)  # fmt: skip
@click.option(
    "--preemption-deadline", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
    default=CoordinatorConfig.preemption_deadline_s, show_default=True,
    help="A job that gives way has so long for a checkpoint, and again to reach a boundary.",
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

    Prints "elastic-coord ready address=HOST:PORT store=... pid=..." when it leads and answers
    requests. Others on the same etcd are standbys: they show what the store holds, name
    the leader, and take over.
    """
    lines = set_up_logging("elastic-coord", level=log_level)
    advertise = settings["advertise"]
    try:
        options = ServeOptions(
            listen=parse_listen(settings["listen"]),
            advertise=format_endpoint(*parse_endpoint(advertise)) if advertise else "",
            store=settings["store"] or default_store(),
            store_files=store_files_of(settings),
            token=read_token_file(settings["token_file"]) if settings["token_file"] else "",
            tokens=Path(settings["tokens"]).absolute() if settings["tokens"] else None,
            tls=find_tls(**{name: settings[name] for name in TLS_FLAGS}),
            insecure=settings["insecure"],
            http=parse_http(settings["http"]),
            studies=settings["studies"],
            audit_log=settings["audit_log"],
            event_log=settings["event_log"],
            ready_file=settings["ready_file"],
            tether_fd=settings["tether_fd"],
            silence_s=settings["silence"],
            config=CoordinatorConfig(
                probe_timeout_s=settings["probe_timeout"],
                jobs_max=settings["max_jobs"],
                preemption_deadline_s=settings["preemption_deadline"],
            ),
        )
        stop_collector()
        anyio.run(serve, options, functools.partial(print, flush=True))
    except ElasticError as error:
        if not lines.drain():
            os._exit(exit_code(error))
        raise
    if not lines.drain():
        os._exit(0)


@main.command()
@click.option(
    "--coord",
    envvar="ELASTIC_COORD",
    default=DEFAULT_ADDRESS,
    show_default=True,
    metavar="HOST:PORT",
    help="Address of the coordinator, or several with commas. [env: ELASTIC_COORD]",
)
@tls_options
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0.1),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for an answer.",
)
def health(coord: str, timeout_s: float, **tls: str) -> None:
    """Show whether a coordinator leads (SERVING) or could take over (STANDBY).

    Of several all are asked; exit 0 only if each is one or the other.
    """
    codes: list[int] = []
    access = find_access(**tls)
    for endpoint in parse_endpoints(coord):
        try:
            answer = fetch_health(endpoint, access, timeout_s=timeout_s)
        except ElasticError as error:
            click.echo(f"elastic-coord: {error}", err=True)
            codes.append(exit_code(error))
        else:
            click.echo(f"{endpoint} {answer}")
            codes.append(0 if answer in ("SERVING", "STANDBY") else EXIT_UNREACHABLE)
    sys.exit(next((code for code in codes if code), 0))


store_option = click.option(
    "--store", envvar="ELASTIC_STORE", default=None, metavar="URL",
    help="sqlite:PATH [default: a file in the state directory]",
)  # fmt: skip


@main.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@store_option
def backup(file: Path, store: str | None) -> None:
    """Copy the embedded store into FILE, also while its coordinator runs.

    The copy is checked, record by record. A FILE that exists is left as it is.
    """
    copied = anyio.run(back_up, store or default_store(), PREFIX, file)
    click.echo(f"{file} holds {_copied(copied)}")


@main.command(name="restore")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@store_option
def restore_command(file: Path, store: str | None) -> None:
    """Make an embedded store from FILE, which `backup` wrote; then start a coordinator on it.

    A store that exists is left as it is. Jobs whose groups changed after the copy was taken begin
    anew from their newest checkpoint; the others continue as they run.
    """
    target = store or default_store()
    copied = anyio.run(restore, file, target, PREFIX)
    click.echo(f"{target} holds {_copied(copied)}")


@main.group(name="store")
def store_group() -> None:
    """Check an embedded store, and salvage one that was damaged."""


@store_group.command(name="check")
@store_option
def check_store(store: str | None) -> None:
    """Read all of it, also while its coordinator runs; exit 0 if nothing is damaged or lacking."""
    copied, acknowledged = anyio.run(check, store or default_store(), PREFIX)
    click.echo(f"sound: {_copied(copied)}; acknowledged up to revision {acknowledged or 'unknown'}")


@store_group.command(name="salvage")
@store_option
def salvage_store(store: str | None) -> None:
    """Let a store be opened that lacks something that was acknowledged, with what is left.

    Its files are copied first, as they are. What is lost, is lost: a backup has maybe more.
    """
    copied, found = anyio.run(salvage, store or default_store(), PREFIX)
    lost = max(0, found.acknowledged - found.found)
    click.echo(
        f"what is left: {_copied(copied)}; {lost} revisions that were acknowledged are lost; the "
        f"files as they were: {', '.join(map(str, found.copies))}"
    )


def _copied(copied: BackupSummary) -> str:
    return f"{copied.jobs} jobs, revision {copied.revision}, term {copied.term}"


main.add_command(certs)
main.add_command(tokens)


if __name__ == "__main__":
    run_process(main)
