"""What all commands of `elastic` share: where the coordinator is, how errors end, how JSON looks.

Rule: answers go to stdout, everything about the asking goes to stderr; an error is one clear
text and an exit code that a scheduler can act on.
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
from elastic.core.view import JobView
from elastic.core.world import JobPhase
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
"""The job failed: its own fault."""
EXIT_USAGE = 2
"""The command line is wrong, or names what is not there."""
EXIT_UNREACHABLE = 69
EXIT_BUG = 70
EXIT_STOPPED = 75
"""The job was stopped: it can be submitted again and goes on from its checkpoint."""
EXIT_CONFIG = 78
"""A setting is wrong: trying again changes nothing."""
EXIT_TIMEOUT = 124
EXIT_INTERRUPTED = 130
RESTART_S = 10.0
"""How long commands wait for a coordinator that does not answer, unless --timeout says it."""

PIPED_WIDTH = 500
"""Columns of a table that nobody looks at: wide enough for programs that cut by lines."""

Command = TypeVar("Command", bound=Callable[..., Any])


def output_option(command: Command) -> Command:
    """Let a command say its answer for people or for programs: `-o json`, or `--json`."""

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
    """The cluster that a command speaks to.

    Attributes:
        coord: addresses of the coordinator.
        token_file: path of the join token, "" for none.
        tls: path of each TLS flag that was given, as `find_access` takes them.
        flags: what was said on the command line to name them, to be said again.
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
            UsageError: an address, the token file or a TLS file is no good.
        """
        client = Client(self.coord, find_access(self.token_file, **self.tls))
        client.wait_for_answers(RESTART_S if self.patience_s is None else self.patience_s)
        return client

    def command(self, *words: str) -> str:
        """Return an `elastic` command for this cluster, as one types it."""
        return shlex.join(("elastic", *self.flags, *words))


def with_timeout(command: click.Command) -> click.Command:
    """Have a command wait through a coordinator's restart for as long as its --timeout says.

    Those that wait for something have the option already: it bounds both.
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
        # A default is for what the command waits for; an outage is waited out as everywhere.
        if context.get_parameter_source("timeout_s") is ParameterSource.COMMANDLINE:
            context.obj = replace(context.obj, patience_s=value)
        return value

    option.callback = take
    return command


def exit_code(error: ElasticError) -> int:
    """Return the exit code that says what to do about an error."""
    if isinstance(error, Unavailable):
        return EXIT_UNREACHABLE
    settings = (UsageError, StorageError, NotAuthorized, VersionMismatch, NameTaken)
    if isinstance(error, settings):
        return EXIT_CONFIG
    return EXIT_USAGE if isinstance(error, Refused) else EXIT_BUG


def ending_code(view: JobView) -> int:
    """Return the exit code that says how a job ended."""
    codes = {JobPhase.SUCCEEDED: EXIT_OK, JobPhase.FAILED: EXIT_FAILED}
    return codes.get(view.record.phase, EXIT_STOPPED)


def fail(text: str, code: int) -> NoReturn:
    """End with one text on stderr."""
    click.echo(f"elastic: {plain(text)}", err=True)
    sys.exit(code)


def reporting_errors(command: Command) -> Command:
    """Let a command end with a clear text and the right code, whatever goes wrong."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except ElasticError as error:
            fail(str(error), exit_code(error))
        except TimeoutError as error:
            fail(str(error), EXIT_TIMEOUT)
        except KeyboardInterrupt:
            sys.exit(EXIT_INTERRUPTED)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise  # Such as EPIPE: who read this has enough, and click ends it without a word.
            fail(f"output cannot be written: {error.strerror}", EXIT_FAILED)

    return run  # type: ignore[return-value]


def stdout_console() -> Console:
    """Return where tables go: coloured on a terminal, plain and wide in a pipe."""
    return PlainConsole(
        width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False, soft_wrap=True
    )


def print_json(value: Any) -> None:
    """Print an answer for programs."""
    click.echo(json.dumps(value, indent=2))
