"""`elastic-agent doctor`: checks whether this machine can be a node, and suggests fixes.

Rule: a check only reads, or writes a temporary file and removes it. The only remote peers are the
named coordinator and nodes (`--peer`), and nothing is registered there: a stream or connection is
opened, and closed without a message. A check that raises is reported as failed, and the others
still run. The agent itself never imports torch: a child process does, with a timeout.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from elastic.agent.address import address_towards_any
from elastic.agent.devices import Devices, find_devices, parse_workers
from elastic.agent.health import MIB
from elastic.agent.notices.choosing import find_names
from elastic.core.facts import host_of
from elastic.core.messages import PROTOCOL
from elastic.errors import ConfigError, CoordinatorUnreachable, ElasticError
from elastic.runtime.access import TLS_FLAGS, Access, find_access
from elastic.runtime.listening import family_of, try_listen
from elastic.runtime.rpc import is_loopback, parse_endpoints
from elastic.runtime.stream import open_stream
from elastic.runtime.worker_ports import FLAG, PortRange, ports_needed
from elastic.version import __version__
from elastic.wire.codec_stream import ATTACH_METHOD

PIPED_WIDTH = 500
"""Columns when the output is no terminal: folded lines would break `grep`."""
GIB = 1024 * MIB
SHM_BYTES_MIN = 1 * GIB
DISK_BYTES_WARN, DISK_BYTES_FAIL = 2 * GIB, 256 * MIB
SKEW_WARN_S, SKEW_FAIL_S = 1.0, 60.0
CONNECT_S = 5.0
CONNECTIONS_MAX = 256
PORTS_SHOWN = 3
TORCH_S = 120.0
SCRIPT = """
import json, os
found = {}
import torch
found["torch"] = torch.__version__
found["cuda"] = torch.version.cuda
found["devices"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
try:
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None
except Exception as error:
    found["nccl"] = None
# Already here: what fails below is no fault of torch's installation.
print(json.dumps(found), flush=True)
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
from elastic.worker.process.gloo_trial import try_gloo
found["gloo"] = "; ".join(try_gloo())
print(json.dumps(found), flush=True)
os._exit(0)
"""


class CheckLevel(Enum):
    """Result of a check."""

    OK = "ok"
    WARN = "warn"
    """Training works, but with a limitation."""
    FAIL = "fail"
    """Training does not work on this machine."""


COLOURS = {CheckLevel.OK: "green", CheckLevel.WARN: "yellow", CheckLevel.FAIL: "red"}


@dataclass(frozen=True)
class Check:
    """Result of one check.

    Attributes:
        name: what was checked, in two or three words.
        found: the finding, with its values.
        fix: one line about how to fix it, "" if there is nothing to fix.
    """

    name: str
    level: CheckLevel
    found: str
    fix: str = ""


def ok(name: str, found: str) -> Check:
    return Check(name, CheckLevel.OK, found)


def warn(name: str, found: str, fix: str) -> Check:
    """Return a check whose finding limits training."""
    return Check(name, CheckLevel.WARN, found, fix)


def fail(name: str, found: str, fix: str) -> Check:
    """Return a check whose finding prevents training."""
    return Check(name, CheckLevel.FAIL, found, fix)


# ------------------------------------------------------------------------- the machine


def check_torch(num_gpus: int) -> list[Check]:
    """Check torch and gloo, and whether torch sees the GPUs that the driver lists."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TORCH_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [fail("torch", f"not imported in {TORCH_S:.0f} s", "check the disk it is on")]
    lines = done.stdout.strip().splitlines()
    text = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    if not lines:
        return [
            fail("torch", text[:300], f"pip install torch, in this environment: {sys.executable}")
        ]
    return judge_torch({"gloo": text, **json.loads(lines[-1])}, num_gpus)


def judge_torch(versions: dict[str, Any], num_gpus: int) -> list[Check]:
    """Return the checks for the child's report.

    Args:
        versions: torch, cuda, nccl, devices and gloo ("" if it works, otherwise what differs).
        num_gpus: how many GPUs the driver lists.
    """
    found = f"torch {versions['torch']}"
    if versions["cuda"]:
        found += f", CUDA {versions['cuda']}, NCCL {versions['nccl'] or 'absent'}"
    if num_gpus and not versions["devices"]:
        text = f"{found}; it sees none of {num_gpus} GPUs"
        checks = [fail("torch", text, "install a build for this driver's CUDA (nvidia-smi)")]
    elif versions["devices"] < num_gpus:
        text = f"{found}; it sees {versions['devices']} of {num_gpus} GPUs"
        checks = [warn("torch", text, "check CUDA_VISIBLE_DEVICES and nvidia-smi")]
    else:
        checks = [ok("torch", f"{found}, {versions['devices']} GPUs")]
    if versions["gloo"]:
        fix = "let processes talk over loopback (lo); if they do, install another release of torch"
        checks.append(fail("gloo", versions["gloo"][:300], fix))
    else:
        checks.append(ok("gloo", "two members added numbers over loopback, and were cut apart"))
    return checks


def check_shm() -> list[Check]:
    """Check shared memory, through which DataLoader workers pass batches."""
    path = Path("/dev/shm")
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        return [fail("shared memory", f"{path}: {error.strerror}", f"mount a tmpfs at {path}")]
    found = f"{path}: {gib(usage.free)} of {gib(usage.total)} free"
    if usage.free < SHM_BYTES_MIN:
        fix = "give the container more (docker --shm-size 8g; in Kubernetes an emptyDir in memory)"
        return [warn("shared memory", found, fix)]
    return [ok("shared memory", found)]


def check_folder(name: str, folder: Path) -> list[Check]:
    """Check that a directory is writable, and the free space of its disk."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
            file.flush()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        fix = f"make it writable for uid {os.getuid()}, or choose another"
        return [fail(name, f"{folder}: {error.strerror or error}", fix)]
    found = f"{folder}: {gib(free)} free"
    if free < DISK_BYTES_FAIL:
        return [fail(name, found, "make room, or choose a directory on another disk")]
    if free < DISK_BYTES_WARN:
        return [warn(name, found, "make room: the output of workers goes there")]
    return [ok(name, found)]


def gib(amount: int) -> str:
    return f"{amount / GIB:.1f} GiB"


# ------------------------------------------------------------------- the network


def check_address(host: str, endpoints: tuple[str, ...]) -> list[Check]:
    """Check the address that other nodes use to reach this one."""
    try:
        address = host or (address_towards_any(endpoints) if endpoints else "")
    except CoordinatorUnreachable as error:
        return [fail("address", str(error), "check the network and the name in --coord")]
    if not address:
        return [ok("address", "chosen by the route to the coordinator; none was named")]
    try:
        port = try_listen(address)
    except OSError as error:
        fix = "name an address of this machine with --host, or leave it out"
        return [fail("address", f"{address}: {error.strerror or error}", fix)]
    is_local = is_loopback(address)
    is_far = any(not is_loopback(host_of(endpoint)) for endpoint in endpoints)
    if is_local and is_far:
        fix = "name an address that other nodes reach with --host"
        return [fail("address", f"{address}, and the coordinator is elsewhere", fix)]
    more = " (this machine only)" if is_local else ""
    return [ok("address", f"{address}{more}, port {port} was free")]


def check_ports(flags: Mapping[str, str], devices: Devices) -> list[Check]:
    """Check that --worker-ports has enough ports that can be listened on."""
    host = flags["host"]
    try:
        num_workers = parse_workers(flags["workers"], devices)
        ports = PortRange.of(flags["worker_ports"])
        ports.check_room(num_workers)
    except ConfigError as error:
        return [fail(FLAG, str(error), "see the text")]
    if not ports:
        return [ok(FLAG, "any port of net.ipv4.ip_local_port_range; none was named")]
    taken = []
    for port in sorted(ports):
        try:
            socket.create_server((host, port), family=family_of(host)).close()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                # Of the address, which has a check of its own, or of all ports alike.
                fix = "see the text; --host names the address"
                return [fail(FLAG, f"{ports}: port {port}: {error.strerror or error}", fix)]
            taken.append(port)
    total, needed = len(list(ports)), ports_needed(num_workers)
    found = f"{ports}: {total - len(taken)} of {total} free, {needed} needed"
    if total - len(taken) >= needed:
        return [ok(FLAG, found)]
    shown = ", ".join(map(str, taken[:PORTS_SHOWN]))
    fix = f"widen it, or see what uses {shown} (ss -ltnp): an agent that runs here may"
    return [(warn if len(taken) < total else fail)(FLAG, found, fix)]


def check_peer(peer: str, text: str) -> list[Check]:
    """Check that a node's worker ports can be reached from here, whether or not one is in use.

    Args:
        peer: name or address of the other node.
        text: of --worker-ports, the same on both.
    """
    name = f"peer {peer}"
    try:
        ports = PortRange.of(text)
    except ConfigError:
        return []  # It is reported for this node.
    if not ports:
        return [warn(name, "not checked: any port may be used", f"name the ports with {FLAG}")]
    wrong = asyncio.run(find_unreachable(peer, sorted(ports)))
    total = len(list(ports))
    if not wrong:
        return [ok(name, f"its {total} ports {ports} answer")]
    shown = "; ".join(f"{port}: {wrong[port]}" for port in [*wrong][:PORTS_SHOWN])
    found = f"{len(wrong)} of its {total} ports {ports} do not answer ({shown})"
    return [fail(name, found, f"let TCP {ports} through between the nodes, both ways")]


async def find_unreachable(host: str, ports: Sequence[int]) -> dict[int, str]:
    """Return the reason for each of a host's ports to which packets do not get through.

    A refused connection is an answer too: nothing listens there now.
    """

    async def reason(port: int) -> str:
        try:
            async with limit:
                connecting = asyncio.open_connection(host, port)
                _, writer = await asyncio.wait_for(connecting, CONNECT_S)
            writer.close()
        except ConnectionRefusedError:
            return ""
        except asyncio.TimeoutError:
            return f"no answer in {CONNECT_S:.0f} s"
        except OSError as error:
            return error.strerror or str(error)
        return ""

    limit = asyncio.Semaphore(CONNECTIONS_MAX)
    reasons = await asyncio.gather(*map(reason, ports))
    return {port: why for port, why in zip(ports, reasons, strict=True) if why}


def check_coordinator(endpoint: str, flags: Mapping[str, str]) -> list[Check]:
    """Check that the coordinator accepts this agent, and that the clocks agree."""
    try:
        access = find_access(flags["token_file"], **{name: flags[name] for name in TLS_FLAGS})
    except ElasticError as error:
        return [fail("credentials", str(error), "see the text")]
    name = f"coordinator {endpoint}"
    try:
        took_s, ahead_s = asyncio.run(ask_for_time(endpoint, access))
    except CoordinatorUnreachable as error:
        fix = "start it (elastic-coord serve), or check address, route and firewall"
        return [fail(name, str(error), fix)]
    except ElasticError as error:
        fix = "see the text; 'elastic-coord serve' logs each refusal too"
        return [fail(name, str(error), fix)]
    checks = [ok(name, f"lets this agent in, protocol {PROTOCOL}, {took_s * 1e3:.0f} ms")]
    return checks if ahead_s is None else [*checks, judge_clock(ahead_s, took_s)]


async def ask_for_time(endpoint: str, access: Access) -> tuple[float, float | None]:
    """Return the seconds to be accepted, and those that our clock is ahead (None if unknown).

    Raises:
        ElasticError: the coordinator cannot be reached, or refuses this agent.
    """
    began = time.monotonic()
    stream = await open_stream(endpoint, ATTACH_METHOD, access=access, timeout_s=CONNECT_S)
    try:
        took_s = time.monotonic() - began
        theirs_ns = await stream.server_time_ns()
        return took_s, None if theirs_ns is None else (time.time_ns() - theirs_ns) / 1e9
    finally:
        await stream.close()


def judge_clock(ahead_s: float, took_s: float) -> Check:
    """Return the check for the offset of our clock from the coordinator's.

    Args:
        ahead_s: our time minus theirs; below 0 if we are behind.
        took_s: duration of the request, which bounds the error of the measurement.
    """
    off_s = max(0.0, abs(ahead_s) - took_s)
    side = "ahead of" if ahead_s > 0 else "behind"
    found = f"{off_s:.1f} s {side} the coordinator's" if off_s >= SKEW_WARN_S else "agree"
    fix = "run chrony or ntpd on both machines"
    if off_s >= SKEW_FAIL_S:
        return fail("clocks", found, f"{fix}: certificates and tokens have dates")
    if off_s >= SKEW_WARN_S:
        return warn("clocks", found, f"{fix}: logs of the two cannot be compared")
    return ok("clocks", found)


# ------------------------------------------------------------------------- the command


@click.command()
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text")
@click.option(
    "--peer",
    "peers",
    multiple=True,
    metavar="HOST",
    help=f"Another node: try to reach its {FLAG}, which are taken to be the same as here.",
)
@click.pass_context
def doctor(context: click.Context, /, output: str, peers: tuple[str, ...]) -> None:
    """Check whether this machine is fit to be a node; show what to do where it is not.

    With the agent's own flags, before its name (elastic-agent --coord HOST:PORT doctor), and its
    variables. Exit 0 if nothing fails, 1 otherwise; warnings do not count.
    """
    flags = {name: str(value or "") for name, value in (context.find_root().params or {}).items()}
    default = Path(tempfile.gettempdir()) / f"elastic-{os.getuid()}"
    folders = {"run directory": flags["run_dir"] or default, "log directory": flags["log_dir"]}
    try:
        endpoints = parse_endpoints(flags["coord"]) if flags["coord"] else ()
    except ElasticError as error:
        raise click.UsageError(str(error)) from error
    devices = find_devices(os.environ.get("CUDA_VISIBLE_DEVICES"))
    gpus = f"{len(devices.entries)} {devices.accelerator_type}".strip()
    notices = ", ".join(find_names(os.environ)) or "none found; --notices names others"
    checks = [
        ok("version", f"elastic-torch {__version__}, Python {sys.version.partition(' ')[0]}"),
        ok("devices", f"{gpus} ({devices.reason})" if devices.entries else devices.reason),
        ok("notices", notices),
    ]
    steps: list[tuple[str, Callable[[], list[Check]]]] = [
        ("torch", partial(check_torch, len(devices.entries))),
        ("shared memory", check_shm),
        *(
            (name, partial(check_folder, name, Path(path).absolute()))
            for name, path in folders.items()
            if path
        ),
        ("address", partial(check_address, flags["host"], endpoints)),
        (FLAG, partial(check_ports, flags, devices)),
        *((f"peer {peer}", partial(check_peer, peer, flags["worker_ports"])) for peer in peers),
        *(
            (f"coordinator {endpoint}", partial(check_coordinator, endpoint, flags))
            for endpoint in endpoints
        ),
    ]
    for name, step in steps:
        try:
            checks += step()
        except Exception as error:
            checks.append(fail(name, f"{type(error).__name__}: {error}", "report this bug"))
    if output == "json":
        click.echo(json.dumps([as_dict(check) for check in checks], indent=2))
    else:
        print_checks(checks, Console(width=None if sys.stdout.isatty() else PIPED_WIDTH))
    sys.exit(any(check.level is CheckLevel.FAIL for check in checks))


def print_checks(checks: list[Check], console: Console) -> None:
    """Print a table, with each fix under its finding."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("check", "", "found"):
        table.add_column(column, overflow="fold")
    for check in checks:
        level = f"[{COLOURS[check.level]}]{check.level.value}[/]"
        table.add_row(check.name, level, escape(check.found))
        if check.fix:
            table.add_row("", "", f"[bold]to do:[/] {escape(check.fix)}")
    console.print(table)
    counts = Counter(check.level for check in checks)
    console.print(", ".join(f"{counts[level]} {level.value}" for level in CheckLevel))


def as_dict(check: Check) -> dict[str, str]:
    """Return a check as a JSON object."""
    return {"check": check.name, "level": check.level.value, "found": check.found, "fix": check.fix}
