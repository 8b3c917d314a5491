"""One coordinator process: bind, open the store, lead, recover, serve, and shut down in order.

Rule: each term has its own state machine, which starts from the store's contents; after the term
the coordinator is a standby again. The order of shutdown is always the same: close the agents'
sessions, resign leadership, refuse new calls, close the store. A coordinator that is killed
instead loses only time.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from elastic.coord.audit import Audit
from elastic.coord.collector import collect_for_ever
from elastic.coord.driver import Driver
from elastic.coord.history import History
from elastic.coord.journal import Journal
from elastic.coord.leader_state import LeaderState, Term
from elastic.coord.leadership import LeaderKey, Leadership
from elastic.coord.log_fanout import LogFanout
from elastic.coord.roster import Roster
from elastic.coord.server import Server
from elastic.coord.server_context import ServiceContext
from elastic.coord.server_guard import AccessRules, Guard
from elastic.coord.server_limits import raise_file_limit
from elastic.coord.server_tls import ServerTls
from elastic.coord.standby_view import StandbyView
from elastic.coord.store_access import StoreAccess, StoreFiles
from elastic.coord.tokens import TokenList
from elastic.coord.watchdog import Watchdog
from elastic.core.config import CoordinatorConfig
from elastic.core.machine.coordinator import CoordinatorMachine
from elastic.errors import ConfigError, ElasticError, Fenced
from elastic.runtime.access import TlsFiles
from elastic.runtime.clock import Clock, SystemClock
from elastic.runtime.eventlog import EventLog
from elastic.runtime.rpc import SILENCE_S, format_endpoint, is_loopback, parse_endpoint
from elastic.runtime.tether import check_tether
from elastic.store.interface import SharedStore, Store
from elastic.store.open import open_store

if TYPE_CHECKING:  # It needs an extra.
    from elastic.coord.web.serve import PageServer


log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
POLL_S = 1.0
PREFIX = "coord"
WILDCARDS = ("0.0.0.0", "::")

Part = Callable[[], Awaitable[None]]
"""One of the concurrent tasks of a coordinator."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The settings of a coordinator.

    Attributes:
        listen: host and port, port 0 for a free one.
        advertise: host and port at which others reach it, "" for those of `listen`.
        store: URL of the store for its durable state.
        store_files: credentials for the store, None for none.
        token: a token with all rights, "" for none.
        tokens: file of tokens with roles, None for none.
        tls: certificates; if they include an authority, every caller must present one from it.
        insecure: listen beyond loopback without authentication.
        audit_log: file for the audit trail, None for the log only.
        event_log: file for the event log, None for none.
        ready_file: written when it serves, with the printed ready line.
        tether_fd: the reading end of a pipe; its closing ends this process. -1 for none.
        http: host and port of the web page, None for no page.
        studies: folder of the studies that the page shows, "" for none.
        silence_s: an agent whose host is silent for so long is lost.
        prefix: of all keys in the store.
        config: of the state machine.
    """

    listen: tuple[str, int]
    store: str
    store_files: StoreFiles | None = None
    advertise: str = ""
    token: str = field(default="", repr=False)
    tokens: Path | None = None
    tls: TlsFiles | None = None
    insecure: bool = False
    audit_log: Path | None = None
    event_log: Path | None = None
    ready_file: Path | None = None
    tether_fd: int = -1
    http: tuple[str, int] | None = None
    studies: str = ""
    silence_s: float = SILENCE_S
    prefix: str = PREFIX
    config: CoordinatorConfig = field(default_factory=CoordinatorConfig)

    def __post_init__(self) -> None:
        """Refuse settings that let unauthenticated callers run code."""
        if self.advertise and parse_endpoint(self.advertise)[0] in WILDCARDS:
            raise ConfigError(
                f"--advertise {self.advertise} is no address that others could connect to: name "
                f"the host, or leave it out"
            )
        host, has_token = self.listen[0], bool(self.token or self.tokens)
        asks_certificate = self.tls is not None and self.tls.ca is not None
        if asks_certificate and has_token:
            raise ConfigError(
                "--tls-ca together with a token: with --tls-ca the certificate alone identifies a "
                "caller; leave out --token-file and --tokens, or pass --tls-cert and --tls-key "
                "without --tls-ca so that callers show tokens over TLS"
            )
        for flag, named in (("--listen", host), ("--http", self.http[0] if self.http else host)):
            if is_loopback(named) or has_token or asks_certificate or self.insecure:
                continue
            raise ConfigError(
                f"{flag} {named} reaches beyond this machine, and anyone who reaches a coordinator "
                f"can run code on all its nodes; pass --tls-dir (see 'elastic-coord certs init'), "
                f"--tokens or --token-file FILE (a long random word, mode 600, the same file for "
                f"agents and users), or --insecure if everybody on that network may do so"
            )
        if self.ready_file is not None and not os.access(
            self.ready_file.absolute().parent, os.W_OK
        ):
            raise ConfigError(
                f"--ready-file {self.ready_file}: expected a file in a folder that exists and that "
                f"this user may write to"
            )
        check_tether(self.tether_fd)

    def check_logs(self) -> None:
        """Check at startup that the logs can be written: a later failure would go unnoticed.

        Raises:
            ConfigError: a log cannot be written; names the flag.
        """
        for flag, path in (("--audit-log", self.audit_log), ("--event-log", self.event_log)):
            try:
                if path is not None:
                    _check_appendable(path)
            except OSError as error:
                raise ConfigError(
                    f"{flag} {path} cannot be written ({error.strerror or error}): expected a file "
                    f"that this user may append to"
                ) from error


def _check_appendable(path: Path) -> None:
    """Raise the OSError that an append would raise; does not open a pipe."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file() or path.is_dir() or not path.exists():
        path.touch(0o600)
        path.open("ab").close()
    elif not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def parse_listen(text: str) -> tuple[str, int]:
    """Split "host:port"; unlike an address to call, the port may be 0.

    Raises:
        ConfigError: it is not a valid address.
    """
    host, colon, port = text.strip().rpartition(":")
    if colon and port == "0":
        return parse_endpoint(f"{host}:1")[0], 0
    return parse_endpoint(text)


def parse_http(text: str) -> tuple[str, int] | None:
    """Parse the address of the page: a port alone means loopback; None for "".

    Raises:
        ConfigError: it is not a valid address.
    """
    text = text.strip()
    if not text:
        return None
    return parse_listen(f"127.0.0.1:{text}" if text.isdecimal() else text)


async def serve(options: ServeOptions, announce: Callable[[str], None]) -> None:
    """Run a coordinator until SIGTERM or SIGINT.

    Args:
        options: its settings.
        announce: called once with the line "elastic-coord ready address=...".

    Raises:
        Fenced: another coordinator took over a store that is not shared.
        CorruptRecord: the store holds a record that cannot be read.
        InvariantViolation: a bug; includes the recent events.
        Unavailable: the address or the store cannot be used.
        ConfigError: a log cannot be written.
    """
    options.check_logs()
    clock = SystemClock()
    audit, server, page = open_endpoint(options, clock)
    access = StoreAccess(options.store_files) if options.store_files is not None else None
    store = await open_store(options.store, access=access.now if access is not None else None)
    event_log = None
    if options.event_log is not None:
        process = f"coordinator:{server.address}"
        event_log = EventLog(options.event_log, process=process, clock=clock)
    try:
        follow = [access.keep] if access is not None else []
        await _Components(options, server, store, event_log, page).run(announce, follow)
    finally:
        with anyio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
            await store.close()
        if event_log is not None:
            event_log.close()
        audit.close()


def open_endpoint(options: ServeOptions, clock: Clock) -> tuple[Audit, Server, PageServer | None]:
    """Bind the addresses with the configured authentication.

    Raises:
        UsageError: a token or TLS file is not usable.
        Unavailable: the address cannot be bound.
    """
    host = options.listen[0]
    tls = ServerTls(options.tls) if options.tls is not None else None
    locks = AccessRules(
        token=options.token,
        tokens=TokenList(options.tokens, clock) if options.tokens is not None else None,
        asks_certificate=tls is not None and tls.asks_certificate,
    )
    if tls is None and not is_loopback(host):
        log.warning(
            "listens_in_the_clear host=%s advice=%r", host,
            "tokens and jobs can be read on the network: --tls-dir (elastic-coord certs init)",
        )  # fmt: skip
    connections = raise_file_limit()
    process = f"coordinator:{format_endpoint(*options.listen)}"
    audit = Audit(options.audit_log, process=process, clock=clock)
    try:
        # Named later: the name includes the port, which is known once it is bound.
        leader_state = LeaderState("", clock)
        guard = Guard(locks, audit, clock, leader_state)
        server = Server(
            options.listen, guard, tls=tls, connections=connections, silence_s=options.silence_s
        )
        return audit, server, open_page(options, guard, locks, audit, clock)
    except BaseException:
        audit.close()
        raise


def open_page(
    options: ServeOptions, guard: Guard, locks: AccessRules, audit: Audit, clock: Clock
) -> PageServer | None:
    """Bind the address of the page; None if it is not configured.

    Raises:
        ConfigError: a package that the page needs is not installed.
        Unavailable: the address cannot be bound.
    """
    if options.http is None:
        return None
    try:
        from elastic.coord.web.serve import PageServer
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--http needs {error.name}, which is not installed: pip install "
            f"'elastic-torch[page]', or leave --http out"
        ) from error
    return PageServer(
        options.http, locks=locks, audit=audit, clock=clock, tls=options.tls,
        studies=options.studies, answered=guard.answered,
    )  # fmt: skip


class _Components:
    """The parts of a running coordinator and the order of their start and end."""

    def __init__(
        self,
        options: ServeOptions,
        server: Server,
        store: Store,
        event_log: EventLog | None,
        page: PageServer | None,
    ) -> None:
        self._options = options
        self._page = page
        self._server = server
        self._store = store
        self._event_log = event_log
        self._clock = SystemClock()
        address = options.advertise or advertised(server.address)
        # In containers all coordinators may have the same address and the same pid.
        self._name = f"{address}/{os.getpid()}"
        self._leader_state = server.leader_state
        self._leader_state.name = self._name
        self._follower = StandbyView(store, options.prefix, self._leader_state, self._clock)
        holder = LeaderKey(self._name, address, os.getpid(), secrets.token_hex(8))
        self._leadership = Leadership(store, options.prefix, holder, self._clock)
        self._roster: Roster | None = None
        if isinstance(store, SharedStore):
            self._roster = Roster(store, options.prefix, holder, self._leader_state.know)

    async def run(self, announce: Callable[[str], None], more: Sequence[Part] = ()) -> None:
        """Run until a signal, or until a part fails; with `more` parts."""
        context = ServiceContext(
            self._leader_state, self._follower, self._options.store, self._clock
        )
        parts: list[Part] = [
            self._end_on_signal,
            self._server.keep_health,
            self._server.watch_locks,
            self._follower.refresh,
            collect_for_ever,
            lambda: self._lead_for_ever(announce),
            *more,
        ]
        if self._roster is not None:
            parts += [self._roster.keep, Watchdog().keep]
        page = self._page
        if page is not None:
            parts.append(lambda: page.run(context))
        if self._options.tether_fd >= 0:
            parts.append(self._end_with_tether)
        try:
            await self._server.start(context)
            await run_until_one_ends(parts)
        finally:
            with anyio.CancelScope(shield=True):
                # First, so that the next leader need not wait until our callers are gone.
                await self._leadership.resign()
                await self._server.stop("the coordinator is ending; another one will answer")

    async def _lead_for_ever(self, announce: Callable[[str], None]) -> None:
        """Lead whenever no other process does, one term after the other; never returns."""
        while True:
            await self._leadership.acquire(self._leader_state.saw)
            try:
                await self._lead(announce)
            except Fenced as error:
                if self._roster is None:
                    raise  # Nobody else may write to a store that is not shared.
                log.warning("leads_no_more reason=%r", str(error))

    async def _lead(self, announce: Callable[[str], None]) -> None:
        """Run one term, from loading the journal to its end."""
        options = self._options
        self._leader_state.claim(self._leadership.term)
        machine = CoordinatorMachine(options.config, self._name)
        journal = Journal(self._store, options.prefix, self._leadership)
        driver = Driver(machine, journal, self._clock, event_log=self._event_log)
        history = History() if self._page is not None else None
        parts: list[Part] = [self._leadership.keep, driver.run]
        if history is not None:
            driver.watchers.listen(history.take)
            parts.append(lambda: check_for_ever(history, driver, self._clock))

        async def answer() -> None:
            await driver.wait_recovered()
            follows = LogFanout(driver.sessions)
            tenure = Term(driver, follows, self._clock.monotonic_ns(), history)
            self._leader_state.enter(tenure, self._leadership.is_valid)
            await self._server.report_health()
            self._report_ready(announce)
            await anyio.sleep_forever()

        is_over = True
        try:
            await run_until_one_ends([*parts, answer])
        except anyio.get_cancelled_exc_class():
            is_over = False  # This process ends in order: queued messages are still sent.
            raise
        finally:
            self._leader_state.leave()
            if driver.has_recovered():
                self._follower.remember(driver.view())
            driver.end(f"the term of coordinator {self._name} is over", at_once=is_over)

    def _report_ready(self, announce: Callable[[str], None]) -> None:
        page = f"page={self._page.url} " if self._page is not None else ""
        line = (
            f"elastic-coord ready address={self._server.address} {page}"
            f"store={self._options.store} pid={os.getpid()}"
        )
        if self._options.ready_file is not None:
            try:
                write_whole(self._options.ready_file, line + "\n")
            except OSError as error:
                # A briefly full disk must not end the leader.
                log.error("ready_file_unwritable error=%r", str(error))
        try:
            announce(line)
        except (OSError, ValueError) as error:  # ValueError: it was closed.
            # The reader of the first line may be gone, or stdout may be a file on a full disk.
            log.error("ready_line_unwritable error=%r", str(error))

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


async def run_until_one_ends(parts: Sequence[Part]) -> None:
    """Run all parts; the first that returns or fails ends the others, and its error is raised."""
    failures: list[ElasticError] = []
    async with anyio.create_task_group() as tasks:

        async def run(part: Part) -> None:
            try:
                await part()
            except ElasticError as error:
                failures.append(error)
            finally:
                tasks.cancel_scope.cancel()

        for part in parts:
            tasks.start_soon(run, part)
    if failures:
        raise failures[0]


async def check_for_ever(history: History, driver: Driver, clock: Clock) -> None:
    """Have the history sample all jobs, once a second; never returns."""
    await driver.wait_recovered()
    while True:
        history.sample(driver.samples(), clock.unix_ns())
        await anyio.sleep(POLL_S)


def advertised(address: str) -> str:
    """Return the address for other machines: a wildcard becomes this host's name."""
    host, port = parse_endpoint(address)
    return format_endpoint(socket.gethostname(), port) if host in WILDCARDS else address


def write_whole(path: Path, text: str) -> None:
    """Write a small file atomically."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.draft")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)
