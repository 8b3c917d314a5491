"""The connections of one generation, from the first attempt to form to the last reference.

Rule: `abort` may be called from any thread at any time. After it no thread of this generation
blocks on a peer, except in waits that gloo never wakes (see `abortable_wait`). Teardown takes up to
10 ms for each connection, so a reaper thread does it in the background.

gloo writes into tensors from its event loop, until it has closed the connections, and from the
threads of each backend, which copy and add up. Such a thread has left the works before once it runs
the callback of a later one: so each is given a work of ours, which holds it until all are held.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from elastic.errors import GroupError
from elastic.worker.group import c10d, connections
from elastic.worker.group.gloo_sockets import (
    GlooEpoll,
    WatchedDescriptor,
    any_hung_up,
    end_reading,
    received_bytes,
)

log = logging.getLogger(__name__)

BURIAL_S = 2.0
KEEP_UP_S = 0.2
"""How long after an abort our peers' connections are kept up: they are asked to leave, too, and
until they have, a connection that is reset can make gloo forget what they wait for."""
FORGOTTEN_S = 1.0
"""How long gloo may take to close connections that have ended, and to copy or add up what had come.
It takes milliseconds, or for ever: if a message was cut in its middle, gloo never wakes who waits
for its end, and never closes the connection of one whose receiver is gone."""
POLL_S = 0.0005
"""Between two polls."""
HOLD_S = 0.005
"""How long to wait for a thread of gloo's to take a work of ours before it gets another one."""


@dataclass
class GlooBackend:
    """A gloo backend and the connections that it made."""

    backend: Any
    sockets: tuple[WatchedDescriptor, ...]


@dataclass
class GroupResources:
    """What has to be cut and released when a generation ends.

    Attributes:
        deadline: `time.monotonic()` by which the group must be formed.
        store: the group's store, once the leader has answered.
        device: gloo's device; all groups of a generation share one, and no two generations do.
        loop: the device's event loop.
    """

    deadline: float
    spec: Any
    store: Any = None
    device: Any = None
    loop: GlooEpoll | None = None
    is_formed: bool = False
    aborted: bool = False
    _backends: list[GlooBackend] = field(default_factory=list)
    _waiting: Future[Any] | None = None
    _nccl: list[threading.Thread] = field(default_factory=list)
    _kept_up: list[socket.socket] = field(default_factory=list)
    _kept_until: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def left_s(self) -> float:
        """Return the seconds left for forming, at least 0.01."""
        return max(0.01, self.deadline - time.monotonic())

    # ---------------------------------------------------------------------------------- waiting

    def begin_wait(self, future: Future[Any]) -> None:
        """Register a future that `abort` completes with an error; GroupError if that was before."""
        with self._lock:
            if self.aborted:
                raise GroupError("aborted by order")
            self._waiting = future

    def end_wait(self) -> None:
        with self._lock:
            self._waiting = None

    # --------------------------------------------------------------------------------- backends

    def add_backend(self, backend: Any, before: frozenset[WatchedDescriptor]) -> None:
        """Remember a gloo backend, and the connections made since `before`."""
        now = self.loop.watched() if self.loop else ()
        sockets = tuple(one for one in now if one not in before)
        self._backends.append(GlooBackend(backend, sockets))

    def forget_subgroup(self, group: Any) -> bool:
        """Forget a subgroup's connections, because user code destroys it; return whether it may.

        Not if its connections could then pass for lost ones.
        """
        try:
            backend = group._get_backend(torch.device("cpu"))
        except (AttributeError, RuntimeError):
            return True  # not gloo
        for index, known in enumerate(self._backends):
            if known.backend is backend:
                del self._backends[index]
                return True
        return False

    # ------------------------------------------------------------------------------- any thread

    def abort(self) -> bool:
        """Cut every connection and end every wait of this generation; False if that was done."""
        with self._lock:
            is_first, self.aborted = not self.aborted, True
            waiting = self._waiting
        if waiting is not None:
            with contextlib.suppress(InvalidStateError):
                waiting.set_exception(GroupError("aborted by order"))
        self._cut()
        if is_first:
            self.abort_nccl()
        return is_first

    def abort_nccl(self) -> None:
        """Start aborting every present NCCL communicator; may be called again."""
        if "nccl" in self.spec.backend:
            self._nccl += c10d.start_nccl_aborts(c10d.all_groups())

    def is_broken(self) -> bool:
        """Return whether this group was aborted, or a member has closed a connection."""
        if self.aborted:
            return True
        backends = list(self._backends)
        if any(any_hung_up(known.sockets) for known in backends):
            return True
        return "nccl" in self.spec.backend and c10d.any_nccl_error(c10d.all_groups())

    def has_closed_all(self) -> bool:
        """Return whether gloo has closed all of an aborted group's connections."""
        ours = {one.inode for known in list(self._backends) for one in known.sockets}
        with self._lock:  # `release` ends the device, and its descriptor may then be reused
            return self.loop is None or ours.isdisjoint(one.inode for one in self.loop.watched())

    @property
    def timeout(self) -> timedelta:
        """How long to wait for a message."""
        return timedelta(seconds=self.spec.timeout_s)

    def join_gloo(self) -> bool:
        """Wait until gloo writes nothing more for this group, once aborted.

        Returns:
            Whether that is so within `FORGOTTEN_S`; usually takes milliseconds.
        """
        deadline = time.monotonic() + FORGOTTEN_S
        while not self.has_closed_all():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return all(join_threads(known.backend, deadline) for known in list(self._backends))

    def received_bytes(self) -> int:
        ours = connections.received_bytes()
        return ours + sum(received_bytes(known.sockets) for known in list(self._backends))

    def join_nccl(self, timeout_s: float) -> bool:
        """Wait until NCCL's aborts are done; return whether they are."""
        deadline = time.monotonic() + timeout_s
        for thread in self._nccl:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._nccl)

    def release(self) -> None:
        """Release everything, once aborted; slow.

        The device's own reference goes first: then a backend's destructor ends the device, which
        torch runs without holding the interpreter lock.
        """
        time.sleep(max(0.0, self._kept_until - time.monotonic()))
        with self._lock:
            handles, self._kept_up = self._kept_up, []
            self.loop = None
            self.device = None
        for handle in handles:
            handle.close()
        self._backends.clear()
        store, self.store = self.store, None
        if store is not None:
            store.close()

    def _cut(self) -> None:
        with self._lock:  # `release` ends the device, and its descriptor may then be reused
            if self.loop is not None:
                self._kept_up += end_reading(self.loop.watched())
                self._kept_until = time.monotonic() + KEEP_UP_S
        store = self.store
        if store is not None:
            store.cut()
        connections.cut_all()


def join_threads(backend: Any, deadline: float) -> bool:
    """Wait until all threads of a gloo backend have left what they had to do.

    Args:
        backend: whose connections are closed, so that a new work fails at once.
        deadline: of `time.monotonic`.

    Returns:
        Whether they have by then.
    """
    ours, held, over = threading.get_ident(), threading.Semaphore(0), threading.Event()
    missing, is_late = c10d.GLOO_THREADS, False

    def hold(_: object) -> None:
        nonlocal is_late
        if threading.get_ident() == ours:
            is_late = True  # The work had failed before it had this callback.
        else:
            held.release()
            over.wait()

    try:
        while missing and time.monotonic() < deadline:
            is_late = False
            backend.allreduce([torch.zeros(1, device="cpu")]).get_future().add_done_callback(hold)
            if not is_late:
                missing -= held.acquire(timeout=HOLD_S)
        return not missing
    finally:
        over.set()


class BackgroundReaper:
    """Releases objects with slow destructors, each lot in a thread of its own.

    A group takes 10 ms per connection, and one with a stuck wait ends only after that wait's
    timeout.
    """

    def __init__(self) -> None:
        self._newest: threading.Thread | None = None

    def release_later(self, things: list[Any], first: Callable[[], None] | None = None) -> None:
        """Release these objects, after a last call; the caller must keep no reference."""
        if things:
            thread = threading.Thread(
                target=_release, args=(things, first), name="elastic-reaper", daemon=True
            )
            thread.start()
            self._newest = thread  # Only once it runs: several threads call this.

    def close(self) -> None:
        """Finish, within reason."""
        if self._newest is not None:
            self._newest.join(BURIAL_S)


def _release(things: list[Any], first: Callable[[], None] | None) -> None:
    if first is not None:
        first()
    things.clear()
