"""The HTTP server of the page, on an address of its own, in the coordinator's event loop.

Rule: the address is bound before anything else is tried, like that of gRPC. Replaced certificates
are used from the next connection on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Iterator, Mapping
from typing import Any

import anyio
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from elastic.coord.audit import Audit
from elastic.coord.server_context import ServiceContext
from elastic.coord.server_guard import AccessRules
from elastic.coord.server_limits import AdmissionLimiter, ServerLimits
from elastic.coord.web.access import Gate
from elastic.coord.web.app import Site
from elastic.coord.web.studies import Studies
from elastic.runtime.access import TlsFiles, file_signature
from elastic.runtime.clock import Clock
from elastic.runtime.exposition import Histogram
from elastic.runtime.listening import bind
from elastic.runtime.rpc import format_endpoint, is_loopback

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 1000
IDLE_S = 20
STALL_S = 60.0
CERTIFICATES_POLL_S = 5.0


class _Protocol(H11Protocol):
    """Passes the client's certificate to the application, and ends idle connections."""

    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS_MAX:
            transport.abort()
            return
        # Otherwise a silent connection would hold its descriptor for ever.
        self.loop.call_later(IDLE_S, self._end_silent)
        secured = transport.get_extra_info("ssl_object")
        shown = secured.getpeercert(binary_form=True) if secured is not None else None
        self.app_state = {**self.app_state, "certificate": shown or b""}

    def _end_silent(self) -> None:
        if self.cycle is None:
            self.transport.abort()

    def pause_writing(self) -> None:
        """End a connection whose client reads nothing for long, to free its resources."""
        super().pause_writing()
        self._stalled = self.loop.call_later(STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._stalled is not None:
            self._stalled.cancel()


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to the coordinator."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class PageServer:
    """Serves the page of one coordinator."""

    def __init__(
        self,
        listen: tuple[str, int],
        *,
        locks: AccessRules,
        audit: Audit,
        clock: Clock,
        tls: TlsFiles | None,
        studies: str,
        answered: Mapping[str, Histogram],
    ) -> None:
        """Bind the address.

        Args:
            listen: host and port; port 0 picks a free one.
            locks: the credentials required of callers.
            audit: records refusals.
            clock: for ages.
            tls: the coordinator's certificate; None to serve without TLS.
            studies: folder of studies, "" for none.
            answered: durations of gRPC requests, by method.

        Raises:
            Unavailable: the address cannot be bound.
        """
        host, port = listen
        self._socket = bind(host, port, "the page", "free it, or choose another --http")
        self._host, self._locks, self._audit, self._clock = host, locks, audit, clock
        self._tls, self._studies, self._answered = tls, studies, answered
        scheme = "https" if tls is not None else "http"
        self.url = f"{scheme}://{format_endpoint(host, self._socket.getsockname()[1])}"
        if tls is None and not is_loopback(host):
            log.warning(
                "page_in_the_clear url=%s advice=%r", self.url,
                "tokens can be read on the network: --tls-cert and --tls-key",
            )  # fmt: skip

    async def run(self, context: ServiceContext) -> None:
        site = Site(context, Studies(self._studies, self._clock), self._answered)
        gate = Gate(
            site.app(),
            locks=self._locks,
            limiter=AdmissionLimiter(ServerLimits(), self._clock),
            audit=self._audit,
            clock=self._clock,
            is_local=is_loopback(self._host),
        )
        config = uvicorn.Config(
            gate, http=_Protocol, ws="none", lifespan="off", log_config=None, access_log=False,
            proxy_headers=False, server_header=False, limit_concurrency=CONNECTIONS_MAX,
            timeout_keep_alive=IDLE_S, log_level="error", **self._certificates(),
        )  # fmt: skip
        config.load()
        server = _Server(config)
        try:
            async with anyio.create_task_group() as tasks:
                if config.ssl is not None:
                    tasks.start_soon(self._keep_certificates, config.ssl)
                await server.serve(sockets=[self._socket])
        finally:
            server.force_exit = True
            with anyio.CancelScope(shield=True):
                if server.started:
                    await server.shutdown(sockets=[self._socket])
            self._socket.close()

    def _certificates(self) -> dict[str, Any]:
        if self._tls is None:
            return {}
        settings: dict[str, Any] = {"ssl_certfile": self._tls.cert, "ssl_keyfile": self._tls.key}
        if self._tls.ca is not None:
            settings |= {"ssl_ca_certs": str(self._tls.ca), "ssl_cert_reqs": ssl.CERT_REQUIRED}
        return settings

    async def _keep_certificates(self, context: ssl.SSLContext) -> None:
        """Load replaced certificates; an unusable one is logged and changes nothing."""
        tls = self._tls
        if tls is None or tls.cert is None or tls.key is None:
            return
        seen = file_signature(tls.cert), file_signature(tls.key)
        while True:
            await anyio.sleep(CERTIFICATES_POLL_S)
            now = file_signature(tls.cert), file_signature(tls.key)
            if now != seen:
                seen = now
                try:
                    context.load_cert_chain(tls.cert, tls.key)
                except (OSError, ssl.SSLError) as error:
                    log.error("page_certificate_unusable error=%r", str(error))
