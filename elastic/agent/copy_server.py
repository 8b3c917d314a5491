"""Server for snapshot copies: other nodes push them here, workers fetch them and own snapshots.

Rule: one thread per connection, in limited number (`secret_server`); the agent's event loop never
waits for one.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable

from elastic.agent.copy_store import CopyStore
from elastic.agent.local_snapshots import LocalSnapshots
from elastic.errors import Refused
from elastic.runtime.copy_wire import (
    FETCH,
    LIST,
    PUSH,
    TEXT,
    CopyAnswer,
    CopyConnection,
    CopyRequest,
    yield_to_training,
)
from elastic.runtime.secret_connection import end
from elastic.runtime.secret_server import SecretServer
from elastic.runtime.worker_ports import ANY_PORT, PortRange, listen_within, remedy

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 16
"""Authenticated connections (with a job's secret) served at once."""
ROOM_S = 3.0
"""How long an authenticated one waits for another to end; less than its client's reply timeout."""
BACKLOG = 64


class CopyServer:
    """Accepts connections until it is closed.

    Attributes:
        address: "host:port", "" if no port could be bound.
    """

    def __init__(
        self,
        host: str,
        store: CopyStore,
        own: LocalSnapshots | None = None,
        ports: PortRange = ANY_PORT,
    ) -> None:
        """Listen on a free port of this address; connections are served after `start`.

        Args:
            host: this node's address for other nodes.
            store: of the copies.
            own: snapshots in this node's own memory, None for none.
            ports: the range of the port.
        """
        self._store, self._own = store, own
        self._room = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._server: SecretServer | None = None
        self.address = ""
        try:
            found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
            *_, where = min(found, key=lambda one: one[0] != socket.AF_INET)
            listener = listen_within(ports, str(where[0]), backlog=BACKLOG)
        except OSError as error:
            log.warning("no_copies_here host=%s error=%r", host, f"{error}; {remedy(error)}")
            return
        port = listener.getsockname()[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._server = SecretServer(
            listener,
            self._talk,
            what="copies of snapshots",
            connections_max=CONNECTIONS_MAX,
            begin_thread=yield_to_training,
        )

    def start(self) -> None:
        """Serve connections from here on; idempotent."""
        if self._server is not None:
            self._server.start()

    def close(self) -> None:
        """Accept no more connections, and end the open ones."""
        if self._server is not None:
            self._server.close()

    def _talk(self, sock: socket.socket, proven: Callable[[], None]) -> None:
        line = CopyConnection(sock, is_client=False)
        request, key = line.listen(self._store.key_of)
        proven()
        self._converse(line, request, key, sock)

    def _converse(
        self, line: CopyConnection, request: CopyRequest, key: str, sock: socket.socket
    ) -> None:
        """Serve an authenticated request."""
        if not self._room.acquire(timeout=ROOM_S):
            line.answer(key, refused=f"{CONNECTIONS_MAX} copies are being brought or fetched here")
            return
        try:
            if request.verb == LIST:
                own = self._own.list(request.job_id) if self._own is not None else ()
                line.answer(key, CopyAnswer(copies=(*self._store.list(request.job_id), *own)))
            elif request.verb in (FETCH, TEXT):
                self._give(line, request, key)
            elif request.verb == PUSH:
                self._take(line, request, key, sock)
            else:
                raise Refused(f"a request for {request.verb[:20]!r}: this agent knows none such")
        except (Refused, MemoryError) as error:
            line.answer(key, refused=str(error))
        finally:
            self._room.release()

    def _give(self, line: CopyConnection, request: CopyRequest, key: str) -> None:
        mark, own = request.mark, self._own
        if own is not None and mark is not None and request.source == own.node_id:
            with own.reading(request.job_id, mark) as (body, is_whole):
                line.answer(key, CopyAnswer(mark))
                if request.verb == TEXT:
                    line.send_body(key, body[mark.data_bytes :], is_whole)
                    return
                line.send_body(key, body, is_whole)
            self._log("own_rows_given", request)
            return
        with self._store.reading(request.job_id, mark, request.source) as (body, crc):
            line.answer(key, CopyAnswer(mark))
            if mark is not None and request.verb == TEXT:
                line.send_body(key, body[mark.data_bytes :], lambda: True, mark.skeleton_crc)
                return
            line.send_body(key, body, lambda: True, crc)
        self._log("copy_given", request)

    def _take(
        self, line: CopyConnection, request: CopyRequest, key: str, sock: socket.socket
    ) -> None:
        mark, job_id, source = request.mark, request.job_id, request.source
        if mark is None:
            raise Refused("a push without a mark")
        if self._store.has(job_id, source, mark):
            line.answer(key, CopyAnswer(mark))
            return
        taking = self._store.writing(job_id, mark, lambda: end(sock), source)
        with contextlib.ExitStack() as stack:
            try:
                body, commit = stack.enter_context(taking)
            except OSError as error:
                raise Refused(str(error)) from error
            line.answer(key)
            commit(line.read_body(key, body))
        line.answer(key)
        self._log("copy_taken", request)

    def _log(self, event: str, request: CopyRequest) -> None:
        mark, of = request.mark, f" source={request.source!r}" if request.source else ""
        if mark is not None:
            log.info(
                "%s job=%s%s generation=%d steps=%d bytes=%d",
                event, request.job_id, of, mark.generation, mark.steps, mark.num_bytes,
            )  # fmt: skip
