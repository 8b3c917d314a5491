"""Shared parts of all `elastic` commands: the target cluster, errors and exit codes, output.

Rule: answers go to stdout, messages about the request go to stderr; an error is one text and an
exit code that a scheduler can act on.
"""

from __future__ import annotations

import errno
import functools
import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeVar

import click
from click.core import ParameterSource
from rich.console import Console

from elastic.client.jobs import Client
from elastic.client.plain import PlainConsole, plain
from elastic.client.show import failure_text
from elastic.core.facts import JobPhase
from elastic.core.view import JobView
from elastic.errors import (
    ElasticError,
    NameTaken,
    NotAuthorized,
    Refused,
    StorageError,
    Unavailable,
    UsageError,
    VersionMismatch,
)
from elastic.runtime.access import find_access

EXIT_OK = 0
EXIT_FAILED = 1
"""The job failed by its own fault."""
EXIT_USAGE = 2
"""The command line is not understood, or names a job, node or rank that is not there."""
EXIT_UNREACHABLE = 69
EXIT_BUG = 70
EXIT_STOPPED = 75
"""The job was stopped: it can be submitted again and continues from its checkpoint."""
EXIT_CONFIG = 78
"""What was given cannot work: a retry is of no use."""
EXIT_TIMEOUT = 124
EXIT_INTERRUPTED = 130
RESTART_S = 10.0
"""How long commands wait for a coordinator that does not answer, without --timeout."""

PIPED_WIDTH = 500
"""Columns of a table in a pipe: wide enough for programs that process lines."""

Command = TypeVar("Command", bound=Callable[..., Any])


def output_option(command: Command) -> Command:
    """Add the choice between a table and JSON to a command: `-o json`, or `--json`."""

    @click.option(
        "-o", "--output", type=click.Choice(["table", "json"]), default="table",
        show_default=True, help="For people or for programs.",
    )  # fmt: skip
    @click.option("--json", "is_json", is_flag=True, help="The same as --output json.")
    @functools.wraps(command)
    def run(*args: Any, output: str, is_json: bool, **options: Any) -> Any:
        return command(*args, output="json" if is_json else output, **options)

    return run  # type: ignore[return-value]


@dataclass(frozen=True)
class ClusterTarget:
    """The cluster that a command connects to.

    Attributes:
        coord: addresses of the coordinator.
        token_file: path of the join token, "" for none.
        tls: path of each TLS flag that was given, by its name in `find_access`.
        flags: the flags on the command line that name them, to be repeated in hints.
        patience_s: how long a command waits for a coordinator that does not answer; see
            `with_timeout`.
    """

    coord: str
    token_file: str
    flags: tuple[str, ...] = ()
    tls: dict[str, str] = field(default_factory=dict)
    patience_s: float | None = None

    def connect(self) -> Client:
        """Return a client.

        Raises:
            UsageError: an address, the token file or a TLS file is not usable.
        """
        client = Client(self.coord, find_access(self.token_file, **self.tls))
        client.wait_for_answers(RESTART_S if self.patience_s is None else self.patience_s)
        return client

    def command(self, *words: str) -> str:
        """Return an `elastic` command line for this cluster."""
        return shlex.join(("elastic", *self.flags, *words))


def with_timeout(command: click.Command) -> click.Command:
    """Make a command tolerate a coordinator's restart for as long as its --timeout.

    Commands that wait for something have the option already: it bounds both.
    """
    option = next((one for one in command.params if one.name == "timeout_s"), None)
    if option is None:
        option = click.Option(
            ["--timeout", "timeout_s"],
            type=click.FloatRange(min=0, min_open=True),
            metavar="SECONDS",
            expose_value=False,
            help=f"Longest wait for a coordinator that does not answer ({RESTART_S:g} s).",
        )
        command.params.append(option)

    def take(context: click.Context, parameter: click.Parameter, value: float | None) -> Any:
        # A default applies to the command's own wait only, not to outages.
        if context.get_parameter_source("timeout_s") is ParameterSource.COMMANDLINE:
            context.obj = replace(context.obj, patience_s=value)
        return value

    option.callback = take
    return command


def exit_code(error: ElasticError) -> int:
    if isinstance(error, Unavailable):
        return EXIT_UNREACHABLE
    settings = (UsageError, StorageError, NotAuthorized, VersionMismatch, NameTaken)
    if isinstance(error, settings):
        return EXIT_CONFIG
    return EXIT_USAGE if isinstance(error, Refused) else EXIT_BUG


def exit_as(view: JobView) -> None:
    """Exit with the code of a job's end; a failure's traceback is the last thing shown."""
    codes = {JobPhase.SUCCEEDED: EXIT_OK, JobPhase.FAILED: EXIT_FAILED}
    code = codes.get(view.record.phase, EXIT_STOPPED)
    if code == EXIT_FAILED and (failure := failure_text(view)):
        click.echo(failure, err=True)
    if code:
        raise click.exceptions.Exit(code)


def fail(text: str, code: int) -> NoReturn:
    click.echo(f"elastic: {plain(text)}", err=True)
    sys.exit(code)


class CommandGroup(click.Group):
    """Commands that end with a text and the right exit code for each kind of error."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that the command line names."""
        try:
            return super().invoke(ctx)
        except ElasticError as error:
            fail(str(error), exit_code(error))
        except TimeoutError as error:
            fail(str(error), EXIT_TIMEOUT)
        except KeyboardInterrupt:
            sys.exit(EXIT_INTERRUPTED)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise  # Such as EPIPE: the reader is gone, and click exits silently.
            fail(f"output cannot be written: {error.strerror}", EXIT_FAILED)


def stdout_console() -> Console:
    """Return the console for tables: coloured on a terminal, plain and wide in a pipe."""
    return PlainConsole(
        width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False, soft_wrap=True
    )


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))
