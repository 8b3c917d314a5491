"""The options of all our programs that name a token and certificates, for `find_access`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


def _path_option(name: str, what: str) -> Callable[[Command], Command]:
    variable = f"ELASTIC_{name.upper().replace('-', '_')}"
    return click.option(
        f"--{name}",
        envvar=variable,
        default="",
        show_default=False,
        metavar="PATH",
        help=f"{what}  [env: {variable}]",
    )


token_option = _path_option("token-file", "File that holds the join token, one long random word.")


def tls_options(command: Command) -> Command:
    """Add the options that name certificates."""
    for name, what in (
        (
            "tls-ca",
            "CA of the other side, instead of DIR/ca.crt; alone if you use a token.",
        ),
        ("tls-key", "Instead of DIR/tls.key."),
        ("tls-cert", "Instead of DIR/tls.crt."),
        ("tls-dir", "Folder with ca.crt, tls.crt and tls.key, from 'elastic-coord certs'."),
    ):
        command = _path_option(name, what)(command)
    return command
