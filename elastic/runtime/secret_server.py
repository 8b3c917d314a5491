"""A server for peers that know a secret: one thread for each connection, in limited number.

Rule: a connection that is unauthenticated, malformed, or slow costs no more than its thread. A
flood of them locks no peer out: each new one replaces the oldest.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable

from elastic.errors import ElasticError
from elastic.runtime.listening import AcceptErrors
from elastic.runtime.secret_connection import STRANGERS_MAX, UnauthenticatedConnections, end

log = logging.getLogger(__name__)

Talk = Callable[[socket.socket, Callable[[], None]], None]
"""Has a conversation until it returns; calls what it is given once the secret is proven."""


class SecretServer:
    """Accepts connections until it is closed."""

    def __init__(
        self,
        listener: socket.socket,
        talk: Talk,
        *,
        what: str,
        connections_max: int,
        begin_thread: Callable[[], None] = lambda: None,
    ) -> None:
        """Serve nobody before `start`.

        Args:
            listener: is closed with this server.
            talk: with one client, in a thread of its own.
            what: the service, for the log.
            connections_max: how many authenticated ones there may be.
            begin_thread: called first in each thread.
        """
        self._listener = listener
        self._talk = talk
        self._what = what
        self._begin_thread = begin_thread
        # Twice: the threads of replaced connections may take a moment to end.
        self._threads = threading.BoundedSemaphore(connections_max + 2 * STRANGERS_MAX)
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._strangers = UnauthenticatedConnections()
        self._errors = AcceptErrors(what)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Serve connections from here on; idempotent."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._accept, name="elastic-listener", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """Accept no more connections, and end the open ones."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # Wakes the thread in `accept`.
        self._listener.close()
        with self._lock:
            for sock in self._open:
                end(sock)

    def _accept(self) -> None:
        self._begin_thread()
        while self._listener.fileno() >= 0:
            try:
                sock, peer = self._listener.accept()
            except OSError as error:
                if self._listener.fileno() >= 0:
                    time.sleep(self._errors.pause_s(error))
                continue
            self._strangers.make_room()
            if not self._threads.acquire(timeout=1.0):
                sock.close()  # A real client retries.
                continue
            thread = threading.Thread(target=self._serve, args=(sock, str(peer[0])), daemon=True)
            try:
                thread.start()
            except RuntimeError:  # There is no thread to be had; it retries, too.
                self._threads.release()
                sock.close()

    def _serve(self, sock: socket.socket, host: str) -> None:
        self._begin_thread()
        is_proven = False
        self._strangers.add(sock, host)
        with self._lock:
            self._open.add(sock)

        def proven() -> None:
            nonlocal is_proven
            is_proven = True
            self._strangers.discard(sock)

        try:
            with sock:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._talk(sock, proven)
        except (ElasticError, OSError, ValueError) as error:
            if is_proven or self._strangers.is_news(host):
                log.info("not_served what=%r host=%s error=%r", self._what, host, str(error)[:200])
        except Exception:
            log.exception("not_served what=%r", self._what)
        finally:
            with self._lock:
                self._open.discard(sock)
            self._strangers.discard(sock)
            self._threads.release()
