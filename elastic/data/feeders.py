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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Protocol

import cloudpickle

from elastic.core.policy.feeding import SETTLE_S, WAIT_SHARE
from elastic.data.batches import Batch
from elastic.data.context import with_context
from elastic.data.feeder import MessageConnection
from elastic.data.operations import Operation
from elastic.data.table_reader import Gathered, finish
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

    def connect(self, number: int) -> AbstractContextManager[MessageConnection]:
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

    def start(self, name: str) -> Feeder: ...

    def grow(self) -> None:
        """Have one more, if it can."""
        ...


class _Requests:
    """What is requested ahead: each request waits for a feeder, is begun, or is answered.

    Its owner holds a lock.

    Attributes:
        num_bytes: of waiting requests and of answers.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._positions: dict[int, Position] = {}
        self._waiting: OrderedDict[int, bytes] = OrderedDict()
        # Since when, on the monotonic clock.
        self._begun: dict[int, float] = {}
        self._answers: dict[int, bytearray] = {}

    def __len__(self) -> int:
        return len(self._positions)

    def __contains__(self, key: int) -> bool:
        return key in self._positions

    def add(self, key: int, pickled: bytes, position: Position) -> None:
        self._waiting[key] = pickled
        self._positions[key] = position
        self.num_bytes += len(pickled)

    def has_waiting(self) -> bool:
        """Return whether there is a request that no feeder has begun."""
        return bool(self._waiting)

    def begin_next(self) -> tuple[int, bytes]:
        """Return the key and the rows of the one that waits longest; a feeder begins it."""
        key, pickled = self._waiting.popitem(last=False)
        self.num_bytes -= len(pickled)
        self._begun[key] = time.monotonic()
        return key, pickled

    def begun_at(self, key: int) -> float | None:
        """Return when a feeder has begun it, None if none has, or it is answered."""
        return self._begun.get(key)

    def put_back(self, key: int, pickled: bytes) -> None:
        """Its feeder is lost: it is needed before all others that are requested."""
        if self._begun.pop(key, None) is not None:
            self._waiting[key] = pickled
            self._waiting.move_to_end(key, last=False)
            self.num_bytes += len(pickled)

    def answer(self, key: int, answer: bytearray) -> float | None:
        """Keep an answer; returns since when it was computed, None if it was dropped meanwhile."""
        since = self._begun.pop(key, None)
        if since is not None:
            self._answers[key] = answer
            self.num_bytes += len(answer)
        return since

    def take(self, key: int) -> bytearray | None:
        """Forget a request; returns its answer. One that still comes is dropped, too."""
        answer = self._answers.pop(key, None)
        self.num_bytes -= len(self._waiting.pop(key, b"")) + len(answer or b"")
        self._positions.pop(key, None)
        self._begun.pop(key, None)
        return answer

    def drop_before(self, position: Position) -> None:
        """Forget what was requested for earlier positions."""
        for earlier in [one for one, when in self._positions.items() if when < position]:
            self.take(earlier)

    def drop_waiting(self) -> None:
        for key in [*self._waiting]:
            self.take(key)


@dataclass
class _Trouble:
    """Losses of a feeder since it last answered.

    Attributes:
        losses: in a row.
        again_at: when it is tried again, on the monotonic clock.
        is_reported: in the log.
    """

    losses: int = 0
    again_at: float = 0.0
    is_reported: bool = False


class Feeders:
    """A pool of feeders, and its requests.

    Attributes:
        depth: steps that are requested ahead.
    """

    def __init__(self, operations: Sequence[Sequence[Operation]], source: FeederSource) -> None:
        """Look for feeders; until some are ready, the training process computes batches.

        Each part of a table has operations of its own.
        """
        self.depth = max(2, source.highest)
        self._source = source
        work = with_context(partial(finish, [list(one) for one in operations]))
        self._setup = cloudpickle.dumps(work)
        self._changed = threading.Condition()
        self._is_closed = False
        self._open: dict[str, Feeder] = {}
        self._troubles: dict[str, _Trouble] = {}
        self._num_ready = 0
        self._requests = _Requests()
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
            is_below = self._requests.num_bytes < AHEAD_BYTES_MAX
            return is_below and len(self._requests) < 2 * self._num_ready

    def has(self, key: int) -> bool:
        with self._changed:
            return key in self._requests

    def request(self, key: int, rows: Gathered, position: Position) -> None:
        """Request a batch of these rows; its key seeds random operations."""
        pickled = pickle.dumps((key, rows), protocol=5)
        with self._changed:
            self._requests.add(key, pickled, position)
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
            self._requests.drop_before(position)
            while (since := self._requests.begun_at(key)) is not None:
                patience = max(TIMEOUT_S, TIMEOUT_TIMES * self._usual_s)
                left_s = min(since + patience, began + self._own_s) - time.monotonic()
                if left_s <= 0:
                    log.info("feeder_slow: a batch is computed here")
                    break
                self._changed.wait(min(left_s, WAIT_SLICE_S))
            answer = self._requests.take(key)
            if answer is None:
                return None
        is_good, value = pickle.loads(answer)
        if not is_good:
            log.info("feeder_failed: the batch is computed here, to show where: %s", value)
            return None
        return value

    def note_own(self, seconds: float) -> None:
        """Take how long this process took to compute a batch."""
        self._own_s = seconds

    def note_wait(self, seconds: float) -> None:
        """Count time in which training waited for a batch; if it is much, there are to be more."""
        self._waited_s += seconds

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            feeders, self._open = [*self._open.values()], {}
            self._requests.drop_waiting()
            self._changed.notify_all()
        for feeder in feeders:
            feeder.close()

    # --------------------------------------------------------------------- feeders

    def _look(self) -> None:
        """Connect to feeders that are not connected yet, and let their number grow."""
        while True:
            try:
                names = self._source.names()
                self._troubles.pop(NOBODY, None)
            except (ElasticError, OSError, ValueError) as error:
                self._report(NOBODY, error)
                names = ()
            now = time.monotonic()
            with self._changed:
                if self._is_closed:
                    return
                for name in names:
                    trouble = self._troubles.get(name)
                    if name not in self._open and (trouble is None or trouble.again_at <= now):
                        self._begin(name)
                for gone in self._troubles.keys() - {*names, *self._open, NOBODY}:
                    del self._troubles[gone]
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
            with feeder.connect(number) as line:
                line.send(self._setup)
                is_good, why = pickle.loads(line.receive())
                if not is_good:
                    raise Refused(why)
                with self._changed:
                    self._num_ready, is_ready = self._num_ready + 1, True
                while (request := self._next(name, feeder)) is not None:
                    line.send(request[1])
                    self._answered(name, request[0], line.receive())
        except (ElasticError, OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
            with self._changed:
                if request is not None:
                    self._requests.put_back(*request)
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
            self._changed.wait_for(
                lambda: self._requests.has_waiting() or self._open.get(name) is not feeder
            )
            return self._requests.begin_next() if self._open.get(name) is feeder else None

    def _answered(self, name: str, key: int, answer: bytearray) -> None:
        with self._changed:
            self._troubles.pop(name, None)
            since = self._requests.answer(key, answer)
            if since is not None:
                took_s = min(time.monotonic() - since, USUAL_S_MAX)
                self._usual_s = max(0.9 * self._usual_s, took_s)
            self._changed.notify_all()

    def _put_off(self, name: str, error: BaseException) -> None:
        """Try a feeder again after a while, longer after each loss in a row."""
        trouble = self._troubles.setdefault(name, _Trouble())
        trouble.losses += 1
        times = 2 ** min(trouble.losses - 1, 10)
        pause_s = min(AGAIN_S_MAX, AGAIN_S * times) if trouble.losses > 1 else 0.0
        trouble.again_at = time.monotonic() + pause_s
        if not self._is_closed:
            self._report(name, error)

    def _report(self, name: str, error: BaseException) -> None:
        """Log why a feeder is lost: once, until it is back."""
        trouble = self._troubles.setdefault(name, _Trouble())
        if not trouble.is_reported:
            trouble.is_reported = True
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

    @contextlib.contextmanager
    def connect(self, number: int) -> Iterator[MessageConnection]:
        with self._sockets[number] as sock:
            yield MessageConnection(sock)

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
        self.present[name] = _Process()
        return self.present[name]

    def grow(self) -> None:
        """Have one more, if it can."""
        self._count = min(self._count + 1, self.highest)


def beside(low: int, high: int | None = None) -> Callable[[], FeederSource] | None:
    """Return what makes a source of processes beside this one, None for no feeders.

    There may be `high` of them if training waits for data; None for no more than `low`.
    """
    return (lambda: Processes(low, max(low, high or low))) if high or low else None
