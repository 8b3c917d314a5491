"""Feeders of a training process: other processes that apply operations to rows ahead of time.

The training process reads the rows, each once, and sends those of a micro-batch to a feeder, which
replies with the batch. Feeders are processes beside it (`beside`), or workers of a job of their own
on any node (`feeder_network`); the pool is the same. Each connection takes the next request when it
is free, so that the fastest feeder gets most.

Rule: a batch depends on the request alone, so that any feeder can compute it. The open request of a
lost feeder goes to another; a batch that no feeder has begun when it is needed, or that takes too
long, is computed by the training process itself. What is requested ahead has a limit, in number and
in bytes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from math import inf
from typing import Protocol

import cloudpickle

from elastic.core.policy.feeding import SETTLE_S, WAIT_SHARE
from elastic.data.batches import Batch
from elastic.data.feeder import receive, send
from elastic.data.operations import Operation
from elastic.data.table_reader import Gathered
from elastic.errors import ElasticError, Refused

log = logging.getLogger(__name__)

CONNECTIONS = 2
"""To each feeder: it computes for one while the other's batch is sent and the next is received."""
NOBODY = "none is known"
WAIT_SLICE_S = 0.05
LOOK_S = 0.5
"""How often the pool looks for feeders that have come, or are to be replaced."""
TIMEOUT_TIMES, TIMEOUT_S = 3.0, 1.0
"""The timeout of a reply is three times the usual duration, at least a second; then the batch is
computed here, so that a hung feeder does not block training."""
USUAL_S_MAX = 10.0
"""Limit of that duration: a feeder that was frozen for minutes is not to be waited for as long."""
AHEAD_BYTES_MAX = 256 * 1024**2
"""Rows that no feeder has begun with, and batches that are not needed yet, held here."""

AGAIN_S, AGAIN_S_MAX = 0.5, 30.0
"""After so long a lost feeder is tried again; twice as long after each further loss in a row."""


Position = tuple[int, int]
"""Epoch and step in which a batch is needed."""


class Feeder(Protocol):
    """One feeder."""

    def connect(self, number: int) -> AbstractContextManager[socket.socket]:
        """Open one of its `CONNECTIONS`; it ends with the block.

        Raises:
            OSError: it cannot be reached.
            ElasticError: it refuses.
        """
        ...

    def close(self) -> None:
        """Give it up."""
        ...


class FeederSource(Protocol):
    """Where feeders come from.

    Attributes:
        highest: number of them, at most.
    """

    highest: int

    def names(self) -> Sequence[str]:
        """Return the names of the present ones."""
        ...

    def start(self, name: str) -> Feeder:
        """Return the feeder of this name."""
        ...

    def grow(self) -> None:
        """Have one more, if it can."""
        ...


class Feeders:
    """A pool of feeders, and its requests.

    Attributes:
        depth: steps that are requested ahead.
    """

    def __init__(self, operations: Sequence[Sequence[Operation]], source: FeederSource) -> None:
        """Look for feeders; until some are ready, the training process computes batches.

        Args:
            operations: for the rows of each part of a table.
            source: of the feeders.
        """
        self.depth = max(2, source.highest)
        self._source = source
        self._setup = cloudpickle.dumps([list(one) for one in operations])
        self._changed = threading.Condition()
        self._is_closed = False
        self._open: dict[str, Feeder] = {}
        self._losses: dict[str, int] = {}
        self._again: dict[str, float] = {}
        self._reported: set[str] = set()
        self._num_ready = 0
        # By key: requests nobody has begun, since when others are computed, and the replies.
        self._queue: OrderedDict[int, bytes] = OrderedDict()
        self._since: dict[int, float] = {}
        self._answers: dict[int, bytearray] = {}
        self._positions: dict[int, Position] = {}
        self._num_bytes = 0
        self._usual_s = 0.0
        self._own_s = inf
        self._waited_s, self._measured = 0.0, time.monotonic()
        threading.Thread(target=self._look, name="elastic-feeders", daemon=True).start()

    # --------------------------------------------------------------------- requests

    @property
    def num_ready(self) -> int:
        """Return the number of connections that take requests."""
        return self._num_ready

    @property
    def has_room(self) -> bool:
        """Return whether a feeder is ready, and what is requested is below its limits."""
        with self._changed:
            count = len(self._queue) + len(self._since) + len(self._answers)
            return count < 2 * self._num_ready and self._num_bytes < AHEAD_BYTES_MAX

    def has(self, key: int) -> bool:
        """Return whether a batch was requested already."""
        with self._changed:
            return key in self._queue or key in self._since or key in self._answers

    def request(self, key: int, rows: Gathered, position: Position) -> None:
        """Request a batch.

        Args:
            key: identifies the batch, and seeds its random operations.
            rows: the input rows.
            position: when it is needed.
        """
        pickled = pickle.dumps((key, rows), protocol=5)
        with self._changed:
            self._queue[key] = pickled
            self._positions[key] = position
            self._num_bytes += len(pickled)
            self._changed.notify_all()

    def take(self, key: int, position: Position) -> Batch | None:
        """Wait for a requested batch; None if it must be computed here.

        That is so if no feeder has begun it, after a timeout, and after an error in the feeder, to
        show it in this process. A begun one may lie behind those of other training processes, so
        it is waited for no longer than it takes here. What was requested for earlier positions is
        dropped: since the group has changed, another rank may have needed it.
        """
        began = time.monotonic()
        with self._changed:
            for earlier in [one for one, when in self._positions.items() if when < position]:
                self._drop(earlier)
            while key in self._since:
                patience = max(TIMEOUT_S, TIMEOUT_TIMES * self._usual_s)
                left_s = min(self._since[key] + patience, began + self._own_s) - time.monotonic()
                if left_s <= 0:
                    log.info("feeder_slow: a batch is computed here")
                    break
                self._changed.wait(min(left_s, WAIT_SLICE_S))
            answer = self._answers.get(key)
            self._drop(key)
            if answer is None:
                return None
        is_good, value = pickle.loads(answer)
        if not is_good:
            log.info("feeder_failed: the batch is computed here, to show where: %s", value)
            return None
        return value

    def _drop(self, key: int) -> None:
        """Forget a request; a reply that still comes is dropped, too."""
        self._positions.pop(key, None)
        self._since.pop(key, None)
        self._num_bytes -= len(self._queue.pop(key, b"")) + len(self._answers.pop(key, b""))

    def note_own(self, seconds: float) -> None:
        """Take how long this process took to compute a batch."""
        self._own_s = seconds

    def note_wait(self, seconds: float) -> None:
        """Count time in which training waited for a batch; if it is much, there are to be more."""
        self._waited_s += seconds

    def close(self) -> None:
        """Give up all feeders."""
        with self._changed:
            self._is_closed = True
            feeders, self._open = [*self._open.values()], {}
            self._queue.clear()
            self._changed.notify_all()
        for feeder in feeders:
            feeder.close()

    # --------------------------------------------------------------------- feeders

    def _look(self) -> None:
        """Connect to feeders that are not connected yet, and let their number grow."""
        while True:
            try:
                names = self._source.names()
                self._reported.discard(NOBODY)
            except (ElasticError, OSError, ValueError) as error:
                self._report(NOBODY, error)
                names = ()
            now = time.monotonic()
            with self._changed:
                if self._is_closed:
                    return
                new = [
                    name
                    for name in names
                    if name not in self._open and self._again.get(name, now) <= now
                ]
                for name in new:
                    self._begin(name)
                for gone in self._again.keys() - {*names, *self._open}:
                    del self._again[gone], self._losses[gone]
                    self._reported.discard(gone)
                if now - self._measured > SETTLE_S:
                    share = self._waited_s / (now - self._measured)
                    self._waited_s, self._measured = 0.0, now
                    if share > WAIT_SHARE and self._num_ready >= CONNECTIONS * len(names):
                        self._source.grow()
                self._changed.wait_for(lambda: self._is_closed, LOOK_S)

    def _begin(self, name: str) -> None:
        try:
            feeder = self._open[name] = self._source.start(name)
        except OSError as error:
            self._put_off(name, error)
            return
        for number in range(CONNECTIONS):
            threading.Thread(
                target=self._talk, args=(name, feeder, number), name="elastic-feeder", daemon=True
            ).start()

    def _talk(self, name: str, feeder: Feeder, number: int) -> None:
        """Bring requests to a feeder, one at a time, until it is lost or the pool is closed."""
        request: tuple[int, bytes] | None = None
        is_ready = False
        try:
            with feeder.connect(number) as sock:
                send(sock, self._setup)
                is_good, why = pickle.loads(receive(sock))
                if not is_good:
                    raise Refused(why)
                with self._changed:
                    self._num_ready, is_ready = self._num_ready + 1, True
                while (request := self._next(name, feeder)) is not None:
                    send(sock, request[1])
                    self._answered(name, request[0], receive(sock))
        except (ElasticError, OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
            with self._changed:
                if request is not None and self._since.pop(request[0], None) is not None:
                    # It is needed before all others that are requested.
                    self._queue[request[0]] = request[1]
                    self._queue.move_to_end(request[0], last=False)
                    self._num_bytes += len(request[1])
                if self._open.get(name) is feeder:
                    del self._open[name]
                    self._put_off(name, error)
        finally:
            with self._changed:
                self._num_ready -= is_ready
                self._changed.notify_all()
            feeder.close()

    def _next(self, name: str, feeder: Feeder) -> tuple[int, bytes] | None:
        """Return the next request, None once this feeder is given up."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._open.get(name) is not feeder)
            if self._open.get(name) is not feeder:
                return None
            key, pickled = self._queue.popitem(last=False)
            self._num_bytes -= len(pickled)
            self._since[key] = time.monotonic()
            return key, pickled

    def _answered(self, name: str, key: int, answer: bytearray) -> None:
        with self._changed:
            self._losses[name] = 0
            self._reported.discard(name)
            since = self._since.pop(key, None)
            if since is not None and not self._is_closed:
                took_s = min(time.monotonic() - since, USUAL_S_MAX)
                self._usual_s = max(0.9 * self._usual_s, took_s)
                self._answers[key] = answer
                self._num_bytes += len(answer)
            self._changed.notify_all()

    def _put_off(self, name: str, error: BaseException) -> None:
        """Try a feeder again after a while, longer after each loss in a row."""
        losses = self._losses[name] = self._losses.get(name, 0) + 1
        pause_s = min(AGAIN_S_MAX, AGAIN_S * 2 ** min(losses - 1, 10)) if losses > 1 else 0.0
        self._again[name] = time.monotonic() + pause_s
        if not self._is_closed:
            self._report(name, error)

    def _report(self, name: str, error: BaseException) -> None:
        """Log why a feeder is lost: once, until it is back."""
        if name not in self._reported:
            self._reported.add(name)
            log.warning("feeder_lost feeder=%r error=%r", name, str(error))


# ------------------------------------------------------------------------- processes beside us


class _Process:
    """A feeder that is a process beside this one."""

    def __init__(self) -> None:
        pairs = [socket.socketpair() for _ in range(CONNECTIONS)]
        self._sockets = [ours for ours, _ in pairs]
        theirs = [one for _, one in pairs]
        descriptors = [str(one.fileno()) for one in theirs]
        arguments = [json.dumps(sys.path), str(os.getpid()), *descriptors]
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "elastic.data.feeder", *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=[one.fileno() for one in theirs],
            )
        finally:
            for one in theirs:
                one.close()

    def connect(self, number: int) -> AbstractContextManager[socket.socket]:
        return self._sockets[number]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # Wakes the thread that waits on it.


class Processes:
    """Feeders that are processes beside this one.

    Attributes:
        highest: number of them, at most.
        present: those that were started, by name; some may be gone.
    """

    def __init__(self, low: int, high: int) -> None:
        """Start none yet: `low` of them at first, up to `high` if training waits for data."""
        self.highest = high
        self._count = low
        self.present: dict[str, _Process] = {}

    def names(self) -> Sequence[str]:
        """Return the names of the present ones."""
        return [f"process {number}" for number in range(self._count)]

    def start(self, name: str) -> Feeder:
        """Start the process of this name."""
        self.present[name] = _Process()
        return self.present[name]

    def grow(self) -> None:
        """Have one more, if it can."""
        self._count = min(self._count + 1, self.highest)


def beside(low: int, high: int | None = None) -> Callable[[], FeederSource] | None:
    """Return what makes a source of processes beside this one, None for no feeders.

    Args:
        low: how many are started.
        high: how many there may be if training waits for data; None for `low`.
    """
    return (lambda: Processes(low, max(low, high or low))) if high or low else None
