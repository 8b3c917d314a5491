"""The command `elastic-agent doctor`: looks, prints a table or JSON, exits 0 or 1.

Rule: one check that fails by an error of its own says so, and the others go on.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from elastic.agent.devices import find_devices
from elastic.agent.doctor import machine, network
from elastic.agent.doctor.check import Check, CheckLevel, fail, ok
from elastic.agent.doctor.torch_check import check_torch
from elastic.agent.notices.choosing import find_names
from elastic.errors import ElasticError
from elastic.runtime.access import find_access
from elastic.runtime.rpc import parse_endpoints

PIPED_WIDTH = 500
"""Columns where nobody looks: a line that is folded is lost to `grep`."""
COLOURS = {CheckLevel.OK: "green", CheckLevel.WARN: "yellow", CheckLevel.FAIL: "red"}


@click.command()
@click.option("--coord", default="", metavar="HOST:PORT,...", help="Coordinators to try.")
@click.option("--host", default="", metavar="ADDRESS", help="Where other nodes reach this one.")
@click.option("--token-file", default="", metavar="PATH", help="File that holds the token.")
@click.option(
    "--tls-dir", default="", metavar="PATH", help="Folder with ca.crt, tls.crt and tls.key."
)
@click.option("--tls-cert", default="", metavar="PATH", help="Instead of DIR/tls.crt.")
@click.option("--tls-key", default="", metavar="PATH", help="Instead of DIR/tls.key.")
@click.option("--tls-ca", default="", metavar="PATH", help="Instead of DIR/ca.crt.")
@click.option("--run-dir", default="", metavar="PATH", help="Private directory of the agent.")
@click.option("--log-dir", default="", metavar="PATH", help="Output of workers.")
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text")
@click.pass_context
def doctor(context: click.Context, /, output: str, **own: str) -> None:
    """Look whether this machine is fit to be a node; say what to do where it is not.

    Takes the agent's own flags and variables, before or behind its name. Exit 0 if nothing fails,
    1 otherwise; warnings do not count.
    """
    agents = context.parent.params if context.parent else {}
    flags = {name: value or str(agents.get(name) or "") for name, value in own.items()}
    default = Path(tempfile.gettempdir()) / f"elastic-{os.getuid()}"
    folders = [("run directory", Path(flags["run_dir"] or default).absolute())]
    if flags["log_dir"]:
        folders.append(("log directory", Path(flags["log_dir"]).absolute()))
    try:
        endpoints = parse_endpoints(flags["coord"]) if flags["coord"] else ()
    except ElasticError as error:
        raise click.UsageError(str(error)) from error
    checks = look(folders, flags["host"], endpoints)
    for endpoint in endpoints:
        single = {name: flags[f"tls_{name}"] for name in ("cert", "key", "ca")}
        step = partial(ask, endpoint, flags["token_file"], flags["tls_dir"], single)
        checks += guarded(f"coordinator {endpoint}", step)
    if output == "json":
        click.echo(json.dumps([as_dict(check) for check in checks], indent=2))
    else:
        width = None if sys.stdout.isatty() else PIPED_WIDTH
        print_checks(checks, Console(width=width))
    sys.exit(any(check.level is CheckLevel.FAIL for check in checks))


def look(folders: list[tuple[str, Path]], host: str, endpoints: tuple[str, ...]) -> list[Check]:
    """Check this machine."""
    devices = find_devices(os.environ.get("CUDA_VISIBLE_DEVICES"))
    gpus = f"{len(devices.entries)} {devices.accelerator_type}".strip()
    checks = [ok("devices", f"{gpus} ({devices.reason})" if devices.entries else devices.reason)]
    steps: list[tuple[str, Callable[[], Check | list[Check]]]] = [
        ("python", machine.check_python),
        ("torch", lambda: check_torch(len(devices.entries))),
        ("memory", machine.check_memory),
        ("shared memory", machine.check_shm),
        *((name, partial(machine.check_folder, name, path)) for name, path in folders),
        ("open files", machine.check_files),
        ("locked memory", machine.check_locked),
        ("processes", machine.check_tasks),
        ("host name", network.check_host_name),
        ("address", lambda: network.check_address(host, endpoints)),
        ("ports", network.check_ports),
        ("notices", check_notices),
    ]  # fmt: skip
    for name, step in steps:
        checks += guarded(name, step)
    return checks


def guarded(name: str, step: Callable[[], Check | list[Check]]) -> list[Check]:
    """Do one check; an error of its own is its outcome."""
    try:
        found = step()
    except Exception as error:
        return [fail(name, f"{type(error).__name__}: {error}", "tell us: this is a bug")]
    return found if isinstance(found, list) else [found]


def ask(endpoint: str, token_file: str, tls_dir: str, single: Mapping[str, str]) -> list[Check]:
    """Ask the coordinator, with what the agent would show; `single` are TLS files by kind."""
    try:
        access = find_access(token_file, folder=tls_dir, **single)
    except ElasticError as error:
        return [fail("credentials", str(error), "see the text")]
    return asyncio.run(network.check_coordinator(endpoint, access))


def check_notices() -> Check:
    """Say who would be asked whether this machine is to be taken."""
    names = find_names(os.environ)
    return ok("notices", ", ".join(names) if names else "none found; --notices names others")


def print_checks(checks: list[Check], console: Console) -> None:
    """Print a table for people, with what to do under what is wrong."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("check", "", "found"):
        table.add_column(column, overflow="fold")
    for check in checks:
        level = f"[{COLOURS[check.level]}]{check.level.value}[/]"
        table.add_row(check.name, level, escape(check.found))
        if check.fix:
            table.add_row("", "", f"[bold]to do:[/] {escape(check.fix)}")
    console.print(table)
    counts = {level: sum(check.level is level for check in checks) for level in CheckLevel}
    console.print(
        f"{counts[CheckLevel.FAIL]} fail, {counts[CheckLevel.WARN]} warn, "
        f"{counts[CheckLevel.OK]} ok"
    )


def as_dict(check: Check) -> dict[str, str]:
    """Return a check for programs."""
    return {
        "check": check.name, "level": check.level.value, "found": check.found, "fix": check.fix,
    }  # fmt: skip
