"""The `elastic-agent` command: flags and environment in, exit code out.

Rule: only this module of the agent reads the environment. A flag overrides its ELASTIC_* variable,
which overrides the default.

Exit codes: 0 done; 2 usage; 69 refused (also: this node id is taken on this host, or the address of
--metrics is in use); 70 a bug; 75 drained; 78 a setting is wrong (do not retry).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import anyio
import click

from elastic.agent.address import address_towards_any
from elastic.agent.address_book import AddressBook
from elastic.agent.device_health import open_devices
from elastic.agent.devices import (
    find_devices,
    node_resources,
    parse_labels,
    parse_resources,
    parse_workers,
    worker_env,
)
from elastic.agent.doctor import doctor
from elastic.agent.driver import AgentDriver, AgentSettings
from elastic.agent.figures import FiguresServer
from elastic.agent.health import HealthWatch, watch_health
from elastic.agent.node_lock import hold_node
from elastic.agent.notices.choosing import choose_sources
from elastic.agent.notices.source import Notice, NoticeSource, time_left_s
from elastic.agent.notices.watching import watch_all
from elastic.agent.processes import ZYGOTE_COMMAND, SpareCommand
from elastic.core.config import AgentConfig, check_name
from elastic.core.events.agent import ExitAgent, HealthChanged
from elastic.core.facts import Node, NodeId
from elastic.errors import (
    CoordinatorUnreachable,
    ElasticError,
    Refused,
    Unavailable,
    UsageError,
    is_for_now,
)
from elastic.runtime.access import find_access
from elastic.runtime.access_options import tls_options, token_option
from elastic.runtime.clock import Clock, SystemClock
from elastic.runtime.descriptors import raise_limit
from elastic.runtime.eventlog import quoted
from elastic.runtime.leaving import run_process
from elastic.runtime.listening import try_listen
from elastic.runtime.logging_thread import set_up_logging
from elastic.runtime.ready import wait_address
from elastic.runtime.rpc import parse_endpoint, parse_endpoints
from elastic.runtime.tether import check_tether, is_cut
from elastic.runtime.worker_ports import FLAG, PORTS_OF_A_WORKER, VARIABLE, PortRange
from elastic.version import __version__

log = logging.getLogger("elastic.agent")

OPEN_FILES = 65536
"""Open-file limit of the agent and each of its workers: rank 0 needs four per group member."""

EXIT_BUG = 70
EXIT_CONFIG = 78
EXIT_REFUSED = 69
EXIT_DRAINED = 75
RESOLVE_PAUSE_S = 2.0
COORD_FILE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The command line as parsed by click; names are those of the flags."""

    coord: str
    coord_file: str
    workers: str
    resources: str
    labels: str
    accelerator_type: str
    spares: int
    node_id: str
    host: str
    worker_ports: str
    token_file: str
    tls_dir: str
    tls_cert: str
    tls_key: str
    tls_ca: str
    drain_timeout: float
    notices: str
    log_dir: str
    run_dir: str
    event_log: str
    metrics: str
    log_level: str
    tether_fd: int
    removes_run_dir: bool


@click.group(
    "elastic-agent",
    invoke_without_command=True,
    context_settings={
        "auto_envvar_prefix": "ELASTIC",
        "show_default": True,
        "max_content_width": 100,
        "help_option_names": ["-h", "--help"],
    },
)
@click.option(
    "--coord",
    default="",
    show_default=False,
    metavar="HOST:PORT,...",
    help="Coordinators to try.  [required]",
)
@click.option(
    "--coord-file",
    default="",
    hidden=True,
    help="In place of --coord: the file that a coordinator writes once it is ready.",
)
@click.option(
    "--workers",
    default="auto",
    metavar="N|auto",
    help="Workers at once; auto: one per GPU, or one.",
)
@click.option(
    "--resources",
    default="auto",
    metavar="NAME=N,...",
    help="Overrides what was found: GPU=8,CPU=32.",
)
@click.option(
    "--labels",
    metavar="NAME=VALUE,...",
    default="",
    show_default=False,
    help="For the label selectors of jobs.",
)
@click.option(
    "--accelerator-type", default="auto", metavar="NAME", help="Such as H100; none for none."
)
@click.option("--spares", default=1, metavar="N", help="Processes kept warm beside the workers.")
@click.option(
    "--node-id",
    default="",
    show_default=False,
    metavar="NAME",
    help="Unique in the cluster.  [default: host name]",
)
@click.option(
    "--host",
    default="",
    show_default=False,
    metavar="ADDRESS",
    help="Where other nodes reach this one.  [default: by route]",
)
@click.option(
    FLAG,
    default="",
    show_default=False,
    metavar="LOW-HIGH",
    help=f"Ports that workers, and the agent for copies, listen on: {PORTS_OF_A_WORKER} for each "
    "worker, and 1. Not NCCL's.  [default: the system's]",
)
@token_option
@tls_options
@click.option(
    "--drain-timeout", default=30.0, metavar="SECONDS", help="Time to leave after SIGTERM."
)
@click.option(
    "--notices",
    default="auto",
    metavar="NAME,...",
    help="Sources of notices to leave this machine: aws, aws-rebalance, gcp, azure, slurm, "
    "file:PATH, kubernetes:PATH; auto: what is found; or none.",
)
@click.option(
    "--log-dir",
    default="",
    show_default=False,
    metavar="PATH",
    help="Output of workers.  [default: RUN_DIR/logs]",
)
@click.option(
    "--run-dir",
    default="",
    show_default=False,
    metavar="PATH",
    help="Private directory.  [default: TMPDIR/elastic-UID]",
)
@click.option(
    "--event-log",
    default="auto",
    metavar="PATH",
    help="JSON Lines file; auto: in LOG_DIR; or none.",
)
@click.option(
    "--metrics",
    default="",
    show_default=False,
    metavar="[HOST:]PORT",
    help="Serve /metrics for Prometheus; a port alone is one of this machine. Anyone who reaches "
    "it reads numbers, ranks and ids of jobs.",
)
@click.option(
    "--log-level", default="info", type=click.Choice(["debug", "info", "warning", "error"])
)
@click.option(
    "--tether-fd",
    default=-1,
    hidden=True,
    help="Reading end of a pipe whose closing ends the agent at once.",
)
@click.option(
    "--removes-run-dir",
    is_flag=True,
    hidden=True,
    help="Remove RUN_DIR if the process at the other end of the pipe is gone, which would have.",
)
# ELASTIC_VERSION is set on many machines, for another program.
@click.version_option(__version__, prog_name="elastic-agent", allow_from_autoenv=False)
@click.pass_context
def main(context: click.Context, /, **flags: object) -> None:
    """Run workers of this machine for a coordinator, until it is asked to leave.

    Every option can be set as ELASTIC_NAME in the environment as well, such as ELASTIC_COORD.
    SIGTERM, SIGINT or SIGHUP drains the node: its workers leave at a step boundary; a second one,
    but for SIGHUP, ends it at once.
    """
    given = Flags(**flags)  # type: ignore[arg-type]
    if context.invoked_subcommand is not None:
        return
    if not (given.coord or given.coord_file):
        raise click.UsageError("Missing option '--coord'.")
    lines = set_up_logging("elastic-agent", level=given.log_level)
    try:
        if given.coord_file:
            found = wait_address(Path(given.coord_file), given.tether_fd, COORD_FILE_S)
            given = dataclasses.replace(given, coord=found)
        code = run_agent(given, os.environ)
    except ElasticError as error:
        code = exit_code(error)
        if lines.drain():
            click.echo(f"elastic-agent: {error}", err=True)
    if given.removes_run_dir and is_cut(given.tether_fd):
        shutil.rmtree(choose_run_dir(given), ignore_errors=True)
    if not lines.drain():
        os._exit(code)
    sys.exit(code)


main.add_command(doctor)


def exit_code(error: ElasticError) -> int:
    """Return the exit code for an error that ended the agent."""
    if is_for_now(error) or isinstance(error, (Refused, Unavailable)):
        return EXIT_REFUSED
    if isinstance(error, UsageError):
        return EXIT_CONFIG
    return EXIT_BUG


def run_agent(flags: Flags, env: Mapping[str, str]) -> int:
    """Run one agent to its end; returns its exit code.

    Raises:
        ElasticError: a flag is invalid, or the node id is taken; nothing was started.
    """
    clock = SystemClock()
    raise_limit(OPEN_FILES)  # Before the first child.
    check_tether(flags.tether_fd)
    settings = read_settings(flags, env)
    node = settings.node
    with hold_node(choose_run_dir(flags), node.node_id, clock.unix_ns()) as incarnation:
        node = dataclasses.replace(node, incarnation=incarnation)
        check_log_dir(settings.log_dir)
        if node.host:
            check_host(node.host)
        path = choose_run_dir(flags) / f"agent-{node.node_id}.coordinators"
        book = AddressBook(path, settings.endpoints)
        settings = dataclasses.replace(settings, node=node, book=book)
        figures = open_metrics(flags.metrics)
        sources = choose_sources(flags.notices, env)
        ended = asyncio.run(live(settings, clock, flags.tether_fd, sources, figures))
    log.info("agent_ended code=%d reason=%s", ended.code, quoted(ended.reason))
    return ended.code


def open_metrics(text: str) -> FiguresServer | None:
    """Bind the address of --metrics; a port alone binds to loopback, "" returns None.

    Raises:
        UsageError: it is no valid address.
        Unavailable: it cannot be bound.
    """
    if not text:
        return None
    host, _, port = (f"127.0.0.1:{text}" if text.isdecimal() else text).rpartition(":")
    # Unlike in an endpoint to connect to, the port may be 0.
    host, _ = parse_endpoint(f"{host}:{port if port != '0' else 1}")
    return FiguresServer(host, int(port))


def check_host(host: str) -> None:
    """Listen on this address as workers will, before one fails there in a job's name.

    Raises:
        UsageError: this machine does not have it, or it is a wildcard.
    """
    try:
        try_listen(host)
    except OSError as error:
        raise UsageError(
            f"--host {host}: workers could not be reached there ({error.strerror or error}); "
            f"expected an address or name of this machine that the other nodes reach: pass one, or "
            f"leave it out for that of the route to the coordinator"
        ) from error


def check_log_dir(log_dir: Path) -> None:
    """Create the log directory and try to write there, before any output of workers could be lost.

    Raises:
        UsageError: it is not writable.
    """
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=log_dir):
            pass
    except OSError as error:
        raise UsageError(
            f"--log-dir {log_dir} cannot be written ({error.strerror}); the output of workers goes "
            f"there: pass another one"
        ) from error


def choose_run_dir(flags: Flags) -> Path:
    """Return the absolute path of the directory for locks and, by default, logs."""
    default = Path(tempfile.gettempdir()) / f"elastic-{os.getuid()}"
    return Path(flags.run_dir or default).absolute()


def read_settings(flags: Flags, env: Mapping[str, str]) -> AgentSettings:
    """Return settings for the flags; the node's host may still be "", its incarnation is 0.

    Raises:
        ElasticError: a flag is invalid.
    """
    node_id = flags.node_id or socket.gethostname()
    check_name("node", node_id)
    endpoints = parse_endpoints(flags.coord)
    devices = find_devices(env.get("CUDA_VISIBLE_DEVICES"))
    log.info("devices_found gpus=%d reason=%s", len(devices.entries), quoted(devices.reason))
    log_dir = Path(flags.log_dir).absolute() if flags.log_dir else choose_run_dir(flags) / "logs"
    event_log: Path | None = Path(flags.event_log).absolute()
    if flags.event_log in ("auto", "none"):
        event_log = log_dir / f"{node_id}.events.jsonl" if flags.event_log == "auto" else None
    types = {"auto": devices.accelerator_type, "none": ""}
    resources = node_resources(devices, parse_resources(flags.resources))
    # Fewer GPUs may be offered than were found: the first ones.
    offered = devices.entries[: math.ceil(resources.amount("GPU"))]
    devices = dataclasses.replace(devices, entries=offered)
    num_slots = parse_workers(flags.workers, devices)
    ports = PortRange.of(flags.worker_ports)
    ports.check_room(num_slots)
    for_workers = worker_env(env, devices, num_slots)
    if ports:
        for_workers[VARIABLE] = str(ports)
    node = Node(
        node_id=NodeId(node_id),
        incarnation=0,
        host=flags.host,
        num_slots=num_slots,
        resources=resources,
        labels=parse_labels(flags.labels),
        accelerator_type=types.get(flags.accelerator_type, flags.accelerator_type),
        version=__version__,
    )
    return AgentSettings(
        endpoints=endpoints,
        access=find_access(
            flags.token_file,
            tls_dir=flags.tls_dir,
            tls_cert=flags.tls_cert,
            tls_key=flags.tls_key,
            tls_ca=flags.tls_ca,
        ),
        node=node,
        devices=devices.entries,
        config=AgentConfig(num_spares=flags.spares, drain_timeout_s=flags.drain_timeout),
        launch=SpareCommand(env=for_workers, zygote=ZYGOTE_COMMAND),
        log_dir=log_dir,
        run_dir=choose_run_dir(flags),
        event_log=event_log,
        worker_ports=ports,
    )


async def live(
    settings: AgentSettings,
    clock: Clock,
    tether_fd: int,
    sources: tuple[NoticeSource, ...] = (),
    figures: FiguresServer | None = None,
) -> ExitAgent:
    """Run the driver with the signals and notices that drain it; `figures` serves its metrics."""
    stopping = ShutdownTrigger(settings.config.drain_timeout_s)
    failure: ElasticError | None = None
    loop = asyncio.get_running_loop()
    if tether_fd >= 0:
        # Never written to: it becomes readable when the process at the other end is gone.
        loop.add_reader(tether_fd, stopping.on_cut, tether_fd)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.on_signal, number.name)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it.
        loop.add_signal_handler(signal.SIGHUP, stopping.on_hangup)
    async with anyio.create_task_group() as watching:
        watching.start_soon(watch_all, sources, stopping.on_notice)
        watch = HealthWatch(settings.folders, open_devices(settings.devices))
        watching.start_soon(watch_health, watch, stopping.on_health)
        if settings.book is not None:
            watching.start_soon(settings.book.write_news)
        if figures is not None:
            watching.start_soon(figures.run, stopping.figures)
        try:
            ended = await drive(settings, clock, stopping, notices=[each.name for each in sources])
        except ElasticError as error:
            failure = error  # Raised below, outside the task group, which would wrap it.
        watching.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return ended


async def drive(
    settings: AgentSettings, clock: Clock, stopping: ShutdownTrigger, *, notices: list[str]
) -> ExitAgent:
    """Wait until this host's address is known, then run the driver to its end."""
    learned = settings.book.learned if settings.book else ()
    host = settings.node.host or await find_host((*settings.endpoints, *learned), stopping)
    if not host:
        return ExitAgent(EXIT_DRAINED, "asked to leave before the first connection")
    node = dataclasses.replace(settings.node, host=host)
    settings = dataclasses.replace(settings, node=node)
    driver = AgentDriver(settings, clock=clock, draws=random.Random())
    log.info(
        "agent_started node=%s incarnation=%d host=%s workers=%d coord=%s logs=%s notices=%s",
        node.node_id, node.incarnation, host, node.num_slots, ",".join(settings.endpoints),
        settings.log_dir, ",".join(notices) or "none",
    )  # fmt: skip
    stopping.attach(driver)
    return await driver.run()


class ShutdownTrigger:
    """Drains the agent: on a notice within the notice's time, on a signal within the drain timeout.

    A second signal ends it at once. A notice does not count as a signal: a cloud sends its signal
    after the notice, and that signal must not cut short the drain that the notice has started.
    """

    def __init__(self, drain_timeout_s: float) -> None:
        """Start without signal or notice."""
        self.came = asyncio.Event()
        self._timeout_s = drain_timeout_s
        self._drain_request: tuple[str, float] | None = None
        self._driver: AgentDriver | None = None
        self._problems: tuple[str, ...] = ()

    def figures(self) -> str:
        """Return the driver's metrics for Prometheus; "" before there is a driver."""
        return self._driver.figures.text() if self._driver is not None else ""

    def attach(self, driver: AgentDriver) -> None:
        """Drain this driver from now on, and at once if a signal or notice came already."""
        self._driver = driver
        if self._drain_request is not None:
            driver.drain(*self._drain_request)
        if self._problems:
            driver.post(HealthChanged(self._problems))

    def on_cut(self, tether_fd: int) -> None:
        """End at once, because the process that this agent was started for is gone."""
        asyncio.get_running_loop().remove_reader(tether_fd)
        self.came.set()
        self.on_signal("the tether was cut")

    def on_notice(self, notice: Notice) -> None:
        """Drain within the notice's time; runs on the event loop."""
        left_s = time_left_s(notice, now_unix_s=time.time(), default_s=self._timeout_s)
        self._leave(notice.reason, left_s)

    def on_health(self, problems: tuple[str, ...]) -> None:
        """Pass problems of this machine on to the driver; runs on the event loop."""
        self._problems = problems
        if self._driver is not None:
            self._driver.post(HealthChanged(problems))

    def on_signal(self, name: str) -> None:
        """Drain within the drain timeout, at once on a second signal; runs on the event loop."""
        timeout_s = 0.0 if self.came.is_set() else self._timeout_s
        self.came.set()
        self._leave(name, timeout_s)

    def on_hangup(self) -> None:
        """Drain, as the terminal is closed: shell and kernel may both say so, so one counts."""
        if not self.came.is_set():
            self.on_signal("SIGHUP")

    def _leave(self, reason: str, timeout_s: float) -> None:
        if self._driver is not None:
            self._driver.drain(reason, timeout_s)
        elif self._drain_request is None or timeout_s < self._drain_request[1]:
            self._drain_request = (reason, timeout_s)


async def find_host(endpoints: tuple[str, ...], stopping: ShutdownTrigger) -> str:
    """Return this host's address towards the coordinator, waiting for a route; "" if stopped."""
    logged = ""
    while not stopping.came.is_set():
        try:
            return await asyncio.to_thread(address_towards_any, endpoints)
        except CoordinatorUnreachable as error:
            if str(error) != logged:
                logged = str(error)
                log.warning("waiting_for_coordinator reason=%s", quoted(logged))
        with anyio.move_on_after(RESOLVE_PAUSE_S):
            await stopping.came.wait()
    return ""


if __name__ == "__main__":
    run_process(main)
