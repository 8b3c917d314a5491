"""One life of a coordinator: bind, open the store, lead, recover, serve, and end in order.

Rule: whatever ends it, the order is the same: refuse new calls, let agents go, give leadership
back, close the store. A coordinator that is killed instead loses nothing but time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import anyio
from anyio.abc import TaskGroup

from elastic.coord.audit import Audit
from elastic.coord.driver import Driver
from elastic.coord.follows import Follows
from elastic.coord.journal import Journal
from elastic.coord.leadership import Holder, Leadership
from elastic.coord.server import Server
from elastic.coord.server_desk import Desk
from elastic.coord.server_guard import Guard, Locks
from elastic.coord.server_limits import raise_file_limit
from elastic.coord.server_tls import ServerTls
from elastic.coord.tokens import TokenList
from elastic.core.config import CoordinatorConfig
from elastic.core.machine.coordinator import CoordinatorMachine
from elastic.errors import ConfigError, ElasticError
from elastic.runtime.access import TlsFiles
from elastic.runtime.clock import Clock, SystemClock
from elastic.runtime.eventlog import EventLog
from elastic.runtime.rpc import format_endpoint, is_loopback, parse_endpoint
from elastic.store.interface import Store
from elastic.store.open import open_store

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
PREFIX = "coord"


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What a coordinator is started with.

    Attributes:
        listen: host and port, port 0 for a free one.
        store: URL of the store that keeps what must survive it.
        token: opens everything; "" for none.
        tokens: file of tokens with roles, None for none.
        tls: certificates; with an authority among them every caller must show one of it.
        insecure: listen beyond loopback without a lock.
        audit_log: file for the audit trail, None for the log only.
        event_log: file for the event log, None for none.
        ready_file: written when it serves, with the line that is printed too.
        tether_fd: the reading end of a pipe whose closing ends this process too, -1 for none.
        prefix: of all keys in the store.
        config: of the machine.
    """

    listen: tuple[str, int]
    store: str
    token: str = field(default="", repr=False)
    tokens: Path | None = None
    tls: TlsFiles | None = None
    insecure: bool = False
    audit_log: Path | None = None
    event_log: Path | None = None
    ready_file: Path | None = None
    tether_fd: int = -1
    prefix: str = PREFIX
    config: CoordinatorConfig = field(default_factory=CoordinatorConfig)

    def __post_init__(self) -> None:
        """Refuse to let strangers run code."""
        host, has_token = self.listen[0], bool(self.token or self.tokens)
        asks_certificate = self.tls is not None and self.tls.ca is not None
        if asks_certificate and has_token:
            raise ConfigError(
                "--tls-ca together with a token: with --tls-ca the certificate alone says who a "
                "caller is; leave out --token-file and --tokens, or pass --tls-cert and --tls-key "
                "without --tls-ca so that callers show tokens over TLS"
            )
        if not (is_loopback(host) or has_token or asks_certificate or self.insecure):
            raise ConfigError(
                f"--listen {host} reaches beyond this machine, and whoever reaches a coordinator "
                f"runs code on all its nodes; pass --tls-dir (see 'elastic-coord certs init'), "
                f"--tokens or --token-file FILE (a long random word, mode 600, the same file for "
                f"agents and users), or --insecure if everybody on that network may do so"
            )


def parse_listen(text: str) -> tuple[str, int]:
    """Split "host:port"; unlike an address to call, the port may be 0.

    Raises:
        ConfigError: it is no address.
    """
    host, colon, port = text.strip().rpartition(":")
    if colon and port == "0":
        return parse_endpoint(f"{host}:1")[0], 0
    return parse_endpoint(text)


def is_shared(store: str) -> bool:
    """Return whether several coordinators may use the store of this URL at once."""
    return store.startswith("etcd:")


async def serve(options: ServeOptions, announce: Callable[[str], None]) -> None:
    """Be a coordinator until SIGTERM or SIGINT.

    Args:
        options: all that is to be known.
        announce: called once with the line "elastic-coord ready address=...".

    Raises:
        Fenced: another coordinator took over.
        CorruptRecord: the store holds a record that cannot be read.
        InvariantViolation: a bug; carries the story.
        Unavailable: the address or the store cannot be used.
    """
    clock = SystemClock()
    audit, server = open_door(options, clock)
    store = await open_store(options.store)
    event_log = None
    if options.event_log is not None:
        process = f"coordinator:{server.address}"
        event_log = EventLog(options.event_log, process=process, clock=clock)
    try:
        await _Life(options, server, store, event_log).run(announce)
    finally:
        with anyio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
            await store.close()
        if event_log is not None:
            event_log.close()
        audit.close()


def open_door(options: ServeOptions, clock: Clock) -> tuple[Audit, Server]:
    """Bind the address behind the locks that were asked for.

    Raises:
        UsageError: a token or TLS file is no good.
        Unavailable: the address cannot be bound.
    """
    host = options.listen[0]
    tls = ServerTls(options.tls) if options.tls is not None else None
    locks = Locks(
        token=options.token,
        tokens=TokenList(options.tokens, clock) if options.tokens is not None else None,
        asks_certificate=tls is not None and tls.asks_certificate,
    )
    if tls is None and not is_loopback(host):
        log.warning(
            "listens_in_the_clear host=%s advice=%r", host,
            "whoever reads the network reads tokens and jobs: --tls-dir (elastic-coord certs init)",
        )  # fmt: skip
    connections = raise_file_limit()
    process = f"coordinator:{format_endpoint(*options.listen)}"
    audit = Audit(options.audit_log, process=process, clock=clock)
    try:
        guard = Guard(locks, audit, clock)
        return audit, Server(options.listen, guard, tls=tls, connections=connections)
    except BaseException:
        audit.close()
        raise


class _Life:
    """The parts of a running coordinator and the order in which they begin and end."""

    def __init__(
        self, options: ServeOptions, server: Server, store: Store, event_log: EventLog | None
    ) -> None:
        self._options = options
        self._server = server
        self._clock = SystemClock()
        self._in_office_ns = self._clock.monotonic_ns()
        name = f"{server.address}/{os.getpid()}"
        holder = Holder(name, server.address, os.getpid(), secrets.token_hex(8))
        shared = is_shared(options.store)
        self._leadership = Leadership(store, options.prefix, holder, self._clock, shared=shared)
        journal = Journal(store, options.prefix, self._leadership, compacts=not shared)
        machine = CoordinatorMachine(options.config, name)
        self._driver = Driver(machine, journal, self._clock, event_log=event_log)
        self._name = name
        self._failure: BaseException | None = None

    async def run(self, announce: Callable[[str], None]) -> None:
        """Live until a signal, or until a part fails."""
        follows = Follows(self._driver.sessions)
        desk = Desk(self._driver, follows, self._name, self._options.store, self._uptime_ns)
        try:
            async with anyio.create_task_group() as tasks:
                self._start(tasks, self._end_on_signal)
                if self._options.tether_fd >= 0:
                    self._start(tasks, self._end_with_tether)
                await self._server.start(self._driver, desk, follows)
                self._start(tasks, self._server.watch_tokens)
                self._start(tasks, lambda: self._lead(tasks, announce))
        finally:
            with anyio.CancelScope(shield=True):
                await self._server.stop("the coordinator is ending; another one will answer")
                await self._leadership.resign()
        if self._failure is not None:
            raise self._failure

    def _start(self, tasks: TaskGroup, part: Callable[[], Awaitable[None]]) -> None:
        """Run a part; the first that fails or returns ends all others."""

        async def run() -> None:
            try:
                await part()
            except ElasticError as error:
                self._failure = self._failure or error
            tasks.cancel_scope.cancel()

        tasks.start_soon(run)

    async def _lead(self, tasks: TaskGroup, announce: Callable[[str], None]) -> None:
        await self._leadership.acquire(self._server.wait_with)
        self._in_office_ns = self._clock.monotonic_ns()
        self._start(tasks, self._leadership.keep)
        self._start(tasks, self._driver.run)
        await self._driver.wait_recovered()
        await self._server.open()
        line = (
            f"elastic-coord ready address={self._server.address} "
            f"store={self._options.store} pid={os.getpid()}"
        )
        if self._options.ready_file is not None:
            write_whole(self._options.ready_file, line + "\n")
        announce(line)
        await anyio.sleep_forever()

    async def _end_on_signal(self) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for number in signals:
                log.info("ending signal=%s", signal.Signals(number).name)
                return

    async def _end_with_tether(self) -> None:
        """Return when the process at the other end of the pipe is gone."""
        loop, fd, cut = asyncio.get_running_loop(), self._options.tether_fd, anyio.Event()
        loop.add_reader(fd, cut.set)
        try:
            await cut.wait()
        finally:
            loop.remove_reader(fd)
        log.info("ending reason=%r", "the process that started this one is gone")

    def _uptime_ns(self) -> int:
        return self._clock.monotonic_ns() - self._in_office_ns


def write_whole(path: Path, text: str) -> None:
    """Write a small file so that a reader sees all of it or none."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.draft")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)
