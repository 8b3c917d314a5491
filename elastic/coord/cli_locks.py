"""`elastic-coord certs` and `elastic-coord tokens`: manage a cluster's certificates and tokens.

Rule: both work on files alone, without a coordinator. A token is printed once, alone on stdout,
so that it can be piped into a file; all messages about it go to stderr.
"""

from __future__ import annotations

import datetime
import importlib
import re
from pathlib import Path
from types import ModuleType

import click
from rich.table import Table

from elastic.client.terminal import stdout_console
from elastic.coord.roles import Role
from elastic.coord.tokens import (
    Token,
    create_token,
    forget_tokens,
    no_token_file,
    read_tokens,
    revoke_token,
)
from elastic.core.config import NS_PER_S
from elastic.errors import ConfigError
from elastic.runtime.clock import SystemClock

EXPIRES_S_MAX = 100 * 365 * 86_400
UNIX_S_MAX = 253_402_300_799
"""The last second that `datetime` can represent."""
ROLES = [role.value for role in Role]
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}

_clock = SystemClock()
folder_argument = click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
host_option = click.option(
    "--host", "hosts", multiple=True, metavar="NAME",
    help="Host name or address of the coordinator; may be given several times.",
)  # fmt: skip
days_option = click.option(
    "--days", type=click.FloatRange(min=0, min_open=True), default=90.0, show_default=True,
    metavar="N", help="How long the certificate holds.",
)  # fmt: skip
tokens_option = click.option(
    "--tokens", "path", envvar="ELASTIC_TOKENS", required=True, metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The coordinator's file of tokens. [env: ELASTIC_TOKENS]",
)  # fmt: skip


# ------------------------------------------------------------------------------ certificates


@click.group()
def certs() -> None:
    """Make an authority and certificates for mutual TLS."""


@certs.command(name="init")
@folder_argument
@host_option
@days_option
def certs_init(folder: Path, hosts: tuple[str, ...], days: float) -> None:
    """Make an authority in FOLDER, and the coordinator's certificate in FOLDER/coordinator.

    Without --host the certificate is for this machine alone: localhost, 127.0.0.1 and ::1.
    """
    made = _signer().init_authority(folder, _with_local(hosts), _now(), days)
    click.echo(f"authority    {folder}/ca.key: its holder can impersonate anyone; keep it secret")
    click.echo(f"coordinator  elastic-coord serve --tls-dir {made}")
    click.echo(f"next         elastic-coord certs issue {folder} --name NODE --role node")


@certs.command(name="issue")
@folder_argument
@click.option("--name", required=True, metavar="NAME", help="The node's id, or the user's name.")
@click.option(
    "--role", type=click.Choice(ROLES), required=True,
    help="What it may do; all: serve as a coordinator, too.",
)  # fmt: skip
@days_option
@host_option
def certs_issue(folder: Path, name: str, role: str, days: float, hosts: tuple[str, ...]) -> None:
    """Sign a certificate with the authority in FOLDER, into FOLDER/NAME.

    Issued again under the same name, it replaces the older one: coordinators use the new files
    from the next connection on, agents and clients when they connect anew. A node attaches as
    NAME and as no other. A coordinator's is for this machine, too: localhost, 127.0.0.1 and ::1.
    """
    signer = _signer()
    kind = Role(role)
    serves_at = _with_local(hosts) if kind is Role.ADMIN and hosts else hosts
    wanted = signer.CertificateRequest(name=name, role=kind, hosts=serves_at, days=days)
    made = signer.issue(folder, wanted, _now())
    until = _now() + datetime.timedelta(days=days)
    uses = {"node": f"elastic-agent --node-id {name}", "admin": "elastic-coord serve"}
    click.echo(f"made   {made}: ca.crt, tls.crt, tls.key, until {until:%Y-%m-%d %H:%M} UTC")
    click.echo(f"use    {uses.get(role, 'elastic')} --tls-dir {made} (a copy of it, over there)")


def _signer() -> ModuleType:
    """Import the signing module late: it needs a package that nothing else here does."""
    try:
        return importlib.import_module("elastic.coord.certs")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error}: pip install 'elastic-torch[certs]' makes certificates"
        ) from error


def _with_local(hosts: tuple[str, ...]) -> tuple[str, ...]:
    """Add the local names, by which health checks on the same machine connect."""
    return tuple(dict.fromkeys((*hosts, "localhost", "127.0.0.1", "::1")))


# ------------------------------------------------------------------------------------ tokens


@click.group()
def tokens() -> None:
    """Make, list and revoke join tokens with roles.

    They are in a file that 'elastic-coord serve --tokens FILE' reads again when it changes.
    """


@tokens.command(name="create")
@tokens_option
@click.option("--role", type=click.Choice(ROLES), required=True, help="What it opens.")
@click.option(
    "--expires", default="never", show_default=True, metavar="7d",
    help="How long it holds: 30m, 12h, 7d, 4w.",
)  # fmt: skip
@click.option(
    "--name", default="", metavar="NAME",
    help="Its holder. With role node: the only node id that it admits.",
)  # fmt: skip
def tokens_create(path: Path, role: str, expires: str, name: str) -> None:
    """Print a new token, once; FILE keeps its hash only."""
    now_ns = _clock.unix_ns()
    expires_ns = now_ns + _duration_ns(expires) if expires != "never" else 0
    token = Token(
        token_id="", name=name, role=Role(role), digest="", created_ns=now_ns, expires_ns=expires_ns
    )
    shown = create_token(path, token)
    click.echo(shown)
    held = _moment(expires_ns) if expires_ns else "it is revoked"
    click.echo(
        f"token {shown.split('_')[1]} for role {role}, until {held}; it is not shown again: write "
        f"it into a file of mode 600 and pass that as --token-file",
        err=True,
    )


@tokens.command(name="list")
@tokens_option
def tokens_list(path: Path) -> None:
    """List tokens: id, role, name, and how long they hold."""
    try:
        known = read_tokens(path)
    except FileNotFoundError as error:
        raise no_token_file(path) from error
    if not known:
        click.echo(f"no token in {path}", err=True)
        return
    now_ns = _clock.unix_ns()
    table = Table("id", "role", "name", "made", "until", box=None, pad_edge=False)
    for token in known:
        until = _moment(token.expires_ns)
        if token.revoked_ns:
            until = f"revoked {_moment(token.revoked_ns)}"
        elif token.why_over(now_ns):
            until = f"expired {_moment(token.expires_ns)}"
        elif not token.expires_ns:
            until = "ever"
        row = (token.token_id, token.role.value, token.name or "-", _moment(token.created_ns))
        table.add_row(*row, until)
    stdout_console().print(table)


@tokens.command(name="revoke")
@tokens_option
@click.argument("token", metavar="ID|NAME", default="")
@click.option("--forget", is_flag=True, help="Remove revoked and expired tokens from the file.")
def tokens_revoke(path: Path, token: str, forget: bool) -> None:
    """Take back the token of this id, or all of this name.

    A running coordinator refuses it, and ends what it holds open, within a second.
    """
    if not token and not forget:
        raise click.UsageError("name the token, by id or name, or pass --forget")
    now_ns = _clock.unix_ns()
    for revoked in revoke_token(path, token, now_ns) if token else ():
        name = f" ({revoked.name})" if revoked.name else ""
        click.echo(f"revoked {revoked.token_id}{name}, role {revoked.role.value}")
    if forget:
        click.echo(f"removed {forget_tokens(path, now_ns)} from {path}")


def _duration_ns(text: str) -> int:
    match = re.fullmatch(r"([1-9][0-9]{0,8})([smhdw])", text.strip())
    if match is None:
        raise click.BadParameter(
            f"{text!r}: expected a number and a unit, such as 30m, 12h, 7d or 4w, or 'never'",
            param_hint="--expires",
        )
    seconds = int(match[1]) * UNITS_S[match[2]]
    if seconds > EXPIRES_S_MAX:
        raise click.BadParameter(
            f"{text!r} is more than a hundred years; use 'never'", param_hint="--expires"
        )
    return seconds * NS_PER_S


def _now() -> datetime.datetime:
    return datetime.datetime.fromtimestamp(_clock.unix_ns() / NS_PER_S, datetime.timezone.utc)


def _moment(unix_ns: int) -> str:
    moment = datetime.datetime.fromtimestamp(
        min(unix_ns // NS_PER_S, UNIX_S_MAX), datetime.timezone.utc
    )
    return f"{moment:%Y-%m-%d %H:%M} UTC"
