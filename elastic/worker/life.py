"""One generation's connections, from the first attempt to form to the last reference.

Rule: `abort` may come from any thread at any moment of that life, and after it nothing of this
generation waits for a peer. Taking things apart is left to the undertaker: it can take 10 ms
for each connection, and nobody waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

import torch

from elastic.errors import GroupError
from elastic.worker import c10d, mesh
from elastic.worker.gloo_threads import Quiet
from elastic.worker.sockets import (
    EventLoop,
    Watched,
    any_hung_up,
    end_both_ways,
    end_reading,
    find_connections,
    received_bytes,
)

log = logging.getLogger(__name__)

BURIAL_S = 2.0
QUIET_S = 0.2
"""How long after an abort our peers' connections are kept up: they are told to leave, too, and
until they have, a connection that is reset can make gloo forget what they wait for."""


CLOSE_S = 1.0
"""How long gloo may take to close connections that have ended; it takes some microseconds."""
CLOSING_S = 0.0005
AT_WORK_S = 5.0
"""How long gloo may take to copy or add up what had come, once nothing more comes."""
QUIET_LOOKS_S = 0.005


@dataclass
class Backend:
    """A gloo backend and the connections that it made."""

    backend: Any
    sockets: tuple[Watched, ...]


@dataclass
class Life:
    """What there is to cut when a generation ends.

    Attributes:
        generation: whose life this is.
        deadline: `time.monotonic()` by which the group must stand.
        spec: the `GroupSpec`, for messages.
        known: inodes of the sockets that were there before this life began.
        leader: (IP, port) of the leader's store, once it has answered.
        store: this generation's client of it.
        store_sockets: that client's connection, None while it is being made.
        device: gloo's device; all groups of a generation share one, and no two generations do.
        loop: the device's event loop.
        stands: the default group is formed.
        aborted: it is over.
        left_early: a wait in it was left while gloo may still have been at work for it.
    """

    generation: int
    deadline: float
    spec: Any
    known: frozenset[int] = frozenset()
    leader: tuple[str, int] | None = None
    store: Any = None
    store_sockets: tuple[Watched, ...] | None = None
    device: Any = None
    loop: EventLoop | None = None
    stands: bool = False
    aborted: bool = False
    left_early: bool = False
    _backends: list[Backend] = field(default_factory=list)
    _waiting: Future[Any] | None = None
    _nccl: list[threading.Thread] = field(default_factory=list)
    _handles: list[socket.socket] = field(default_factory=list)
    _quiet_at: float = 0.0
    _cut_at: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def left_s(self) -> float:
        """Return the seconds left for forming, at least a little."""
        return max(0.01, self.deadline - time.monotonic())

    # ---------------------------------------------------------------------------------- waiting

    def begin_wait(self, future: Future[Any]) -> None:
        """Let `abort` end a wait for this future.

        Raises:
            GroupError: this life is over.
        """
        with self._lock:
            if self.aborted:
                raise GroupError("aborted by order")
            self._waiting = future

    def end_wait(self) -> None:
        """Nobody waits any more."""
        with self._lock:
            self._waiting = None

    # --------------------------------------------------------------------------------- backends

    def add_backend(self, backend: Any, before: frozenset[Watched]) -> None:
        """Remember a gloo backend, and the connections made since `before`."""
        now = self.loop.watched() if self.loop else ()
        sockets = tuple(one for one in now if one not in before)
        self._backends.append(Backend(backend, sockets))

    def let_go(self, group: Any) -> bool:
        """Forget a subgroup's connections, because user code destroys it.

        Returns:
            Whether it may be destroyed: not if its connections could then pass for lost ones.
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
        """Cut every connection and end every wait of this generation.

        Returns:
            Whether this was the first time.
        """
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
        """Begin to abort every NCCL communicator there is now; again is no harm."""
        if "nccl" in self.spec.backend:
            self._nccl += c10d.start_nccl_aborts(c10d.all_groups())

    def is_broken(self) -> bool:
        """Return whether this life is over, or a member has closed a connection."""
        if self.aborted:
            return True
        backends = list(self._backends)
        if any(any_hung_up(known.sockets) for known in backends):
            return True
        return "nccl" in self.spec.backend and c10d.any_nccl_error(c10d.all_groups())

    def has_let_go(self) -> bool:
        """Return whether this life is over, and gloo has let go of all connections of its groups.

        Nothing more comes then; a thread of gloo's may still copy or add up what has come.
        """
        if not self._cut_at:
            return False
        ours = {one.inode for known in list(self._backends) for one in known.sockets}
        with self._lock:  # the event loop's descriptor is its own until `release`
            if self.loop is None:
                return True
            left = ours.intersection(one.inode for one in self.loop.watched())
            if left and time.monotonic() - self._cut_at > CLOSE_S:
                self.loop.silence(left)
                return True
        return not left

    def join_gloo(self) -> None:
        """Wait until gloo has let go of this life, once aborted."""
        while not self.has_let_go():
            time.sleep(CLOSING_S)
        if self.left_early:
            quiet, end = Quiet(), time.monotonic() + AT_WORK_S
            while not quiet.lasts(QUIET_LOOKS_S) and time.monotonic() < end:
                time.sleep(CLOSING_S)

    def received_bytes(self) -> int:
        """Return what has come from the other members through gloo."""
        return sum(received_bytes(known.sockets) for known in list(self._backends))

    def join_nccl(self, timeout_s: float) -> bool:
        """Wait until NCCL's aborts are done; return whether they are."""
        deadline = time.monotonic() + timeout_s
        for thread in self._nccl:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._nccl)

    def release(self) -> None:
        """Let go of everything, once aborted; takes its time.

        The device's own reference first: then it is a backend that ends it, which torch does
        without holding the interpreter.
        """
        time.sleep(max(0.0, self._quiet_at - time.monotonic()))
        with self._lock:
            handles, self._handles = self._handles, []
            self.loop = None
            self.device = None
        for handle in handles:
            handle.close()
        self._backends.clear()
        self.store = None

    def _cut(self) -> None:
        with self._lock:  # the event loop's descriptor is its own until `release`
            if self.loop is not None:
                self._handles += end_reading(self.loop.watched())
                self._quiet_at = time.monotonic() + QUIET_S
        store_sockets = self.store_sockets
        if store_sockets is None and self.leader is not None:
            store_sockets = find_connections(self.known, self.leader)
        end_both_ways(store_sockets or ())
        mesh.cut_all()
        self._cut_at = self._cut_at or time.monotonic()


Grave = tuple[list[Any], Callable[[], None] | None]


class Undertaker:
    """A thread that lets go of what takes long to take apart.

    A group in which gloo has forgotten somebody ends with that one's timeout: who waits for that
    is left to it, and another thread goes on with the rest.
    """

    def __init__(self) -> None:
        """Start nothing yet."""
        self._graves: queue.SimpleQueue[Grave | None] = queue.SimpleQueue()
        self._digger: Digger | None = None
        self._lock = threading.Lock()

    def bury(self, things: list[Any], first: Callable[[], None] | None = None) -> None:
        """Let go of these things, after a last call; the caller keeps no reference."""
        if not things:
            return
        with self._lock:
            if self._digger is None or self._digger.is_held_up():
                if self._digger is not None:
                    self._digger.is_replaced = True
                self._digger = Digger(self._graves)
        self._graves.put((things, first))

    def close(self) -> None:
        """Finish, within reason."""
        with self._lock:
            digger, self._digger = self._digger, None
        if digger is not None:
            self._graves.put(None)
            digger.thread.join(BURIAL_S)


class Digger:
    """One thread of the undertaker's.

    Attributes:
        is_replaced: another one goes on.
    """

    def __init__(self, graves: queue.SimpleQueue[Grave | None]) -> None:
        """Start it; a grave that is None is the last."""
        self._graves = graves
        self._busy_since = 0.0
        self.is_replaced = False
        self.thread = threading.Thread(target=self._dig, name="elastic-undertaker", daemon=True)
        self.thread.start()

    def is_held_up(self) -> bool:
        """Return whether it has been at one grave for long."""
        since = self._busy_since
        return since > 0 and time.monotonic() - since > BURIAL_S

    def _dig(self) -> None:
        while not self.is_replaced and (grave := self._graves.get()) is not None:
            self._busy_since = time.monotonic()
            things, first = grave
            if first is not None:
                first()
            things.clear()
            del grave, things, first
            self._busy_since = 0.0
