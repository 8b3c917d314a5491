"""The connections of one generation, from the first attempt to form to the last reference.

Rule: `abort` may be called from any thread at any time. After it no thread of this generation
blocks on a peer, except in waits that gloo never wakes (see `abortable_wait`). Teardown takes up to
10 ms for each connection, so a reaper thread does it in the background.
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
from elastic.worker.group.gloo_threads import IdleDetector, numbers_of_gloo, wait_for_peers
from elastic.worker.group.sockets import (
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
CLOSE_S = 1.0
"""How long gloo may take to close connections that have ended; it takes some microseconds."""
SILENT_S = 0.1
"""How long after a connection was silenced gloo may still read from it."""
AT_WORK_S = 30.0
"""How long gloo may take to copy or add up what had come, once nothing more comes."""
QUIET_POLLS_S = 0.005
POLL_S = 0.0005
"""Between two polls."""
FORGOTTEN_POLL_S = 1.0


@dataclass
class GlooBackend:
    """A gloo backend and the connections that it made."""

    backend: Any
    sockets: tuple[WatchedDescriptor, ...]


@dataclass
class _Cut:
    """How far the end of a generation's connections is; times are of `time.monotonic`, 0 before.

    Attributes:
        at: when they had been cut.
        kept_until: until when our ends of them are kept up.
        silenced_at: when those were silenced that gloo had not closed.
        handles: our ends.
    """

    at: float = 0.0
    kept_until: float = 0.0
    silenced_at: float = 0.0
    handles: list[socket.socket] = field(default_factory=list)


@dataclass
class GroupResources:
    """What has to be cut and released when a generation ends.

    Attributes:
        deadline: `time.monotonic()` by which the group must be formed.
        store: the group's store, once the leader has answered.
        device: gloo's device; all groups of a generation share one, and no two generations do.
        threads: ids of the threads in which gloo carries out its collectives.
    """

    deadline: float
    spec: Any
    store: Any = None
    device: Any = None
    loop: GlooEpoll | None = None
    is_formed: bool = False
    aborted: bool = False
    threads: frozenset[int] = frozenset()
    _backends: list[GlooBackend] = field(default_factory=list)
    _waiting: Future[Any] | None = None
    _nccl: list[threading.Thread] = field(default_factory=list)
    _end: _Cut = field(default_factory=_Cut)
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

    def add_backend(
        self, backend: Any, before: frozenset[WatchedDescriptor], threads: frozenset[int]
    ) -> None:
        """Remember a gloo backend, and connections and threads made since `before`, `threads`."""
        self.threads |= numbers_of_gloo() - threads
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
        """Return whether the group was aborted and gloo has closed all of its connections.

        Nothing more is received then; a gloo thread may still copy or add up earlier data.
        """
        end = self._end
        if not end.at:
            return False
        ours = {one.inode for known in list(self._backends) for one in known.sockets}
        with self._lock:  # `release` ends the device, and its descriptor may then be reused
            left = ours.intersection(one.inode for one in self.loop.watched()) if self.loop else ()
            now = time.monotonic()
            if not left or now - end.at < CLOSE_S:
                return not left
            if self.loop is not None and not end.silenced_at:
                self.loop.silence(ours)
                end.silenced_at = now
            return now - end.silenced_at > SILENT_S

    @property
    def timeout(self) -> timedelta:
        """How long to wait for a message."""
        return timedelta(seconds=self.spec.timeout_s)

    def quiet(self) -> IdleDetector:
        """Return a detector for the gloo threads that run this group's collectives."""
        return IdleDetector(self.threads, are_all=not self._backends or bool(numbers_of_gloo()))

    def join_gloo(self) -> bool:
        """Wait until gloo does nothing more for this group, once aborted; return whether it is so.

        Usually takes milliseconds, at most `CLOSE_S` and `AT_WORK_S`.
        """
        while not self.has_closed_all():
            time.sleep(POLL_S)
        quiet, end = self.quiet(), time.monotonic() + AT_WORK_S
        while not quiet.lasts(QUIET_POLLS_S):
            if time.monotonic() > end:
                return False
            time.sleep(POLL_S)
        return True

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
        time.sleep(max(0.0, self._end.kept_until - time.monotonic()))
        with self._lock:
            handles, self._end.handles = self._end.handles, []
            self.loop = None
            self.device = None
        for handle in handles:
            handle.close()
        # The thread that releases a group last waits for what it has forgotten: never a script's.
        while wait_for_peers(self.threads):
            time.sleep(FORGOTTEN_POLL_S)
        self._backends.clear()
        store, self.store = self.store, None
        if store is not None:
            store.close()

    def _cut(self) -> None:
        with self._lock:  # `release` ends the device, and its descriptor may then be reused
            if self.loop is not None:
                self._end.handles += end_reading(self.loop.watched())
                self._end.kept_until = time.monotonic() + KEEP_UP_S
        store = self.store
        if store is not None:
            store.cut()
        connections.cut_all()
        self._end.at = self._end.at or time.monotonic()


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
