"""Feeders: processes beside a training process that apply operations to rows ahead of time.

The training process reads the rows, each once, and sends those of a micro-batch to the feeder with
the fewest requests, which replies with the batch. Rule: a batch depends on the request alone, so
that any feeder can compute it. Open requests of a dead feeder are sent to another; a batch without
a reply is computed by the training process itself.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import queue
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, BinaryIO

import cloudpickle

from elastic.data.batches import Batch
from elastic.data.operations import Operation
from elastic.data.table_reader import Gathered

log = logging.getLogger(__name__)

LENGTH = struct.Struct(">Q")
WAIT_SLICE_S = 0.05
TIMEOUT_TIMES, TIMEOUT_S = 3.0, 1.0
"""The timeout of a reply is three times the usual duration, at least a second; then the batch is
computed here, so that a hung feeder does not block training."""
STARTS_MAX = 5
"""Consecutive deaths without a reply after which feeders are no longer replaced."""


def send(pipe: BinaryIO, value: bytes) -> None:
    """Write a message."""
    pipe.write(LENGTH.pack(len(value)))
    pipe.write(value)
    pipe.flush()


def receive(pipe: BinaryIO) -> bytes:
    """Read a message.

    Raises:
        EOFError: the other side is gone.
    """
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        raise EOFError("the other side has closed")
    (size,) = LENGTH.unpack(head)
    value = pipe.read(size)
    if len(value) < size:
        raise EOFError("the other side has closed within a message")
    return value


class _Feeder:
    """One process; a thread writes its requests, another one reads its replies."""

    def __init__(self, pool: Feeders, number: int) -> None:
        self.pending: dict[int, Gathered] = {}
        self.is_ready = self.is_lost = False
        self.number = number
        self._pool = pool
        self.process = subprocess.Popen(
            [sys.executable, "-m", "elastic.data.feeder"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=-1,
        )
        self._outbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.send(pool.setup)
        for work in (self._write, self._read):
            threading.Thread(target=work, name="elastic-feeder", daemon=True).start()

    def send(self, value: bytes) -> None:
        """Queue a request, without waiting; b"" ends the writing thread."""
        self._outbox.put(value)

    def _write(self) -> None:
        # Lost requests are sent to another feeder once the reader sees that this one is gone.
        with contextlib.suppress(OSError, ValueError):
            while value := self._outbox.get():
                send(self.process.stdin, value)  # type: ignore[arg-type]

    def _read(self) -> None:
        try:
            while True:
                answer = pickle.loads(receive(self.process.stdout))  # type: ignore[arg-type]
                self._pool.answered(self, *answer)
        except (EOFError, OSError, ValueError, pickle.UnpicklingError):
            self._pool.lost(self)

    def close(self) -> None:
        """End the process."""
        self.send(b"")
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError, ValueError):
                pipe.close()  # type: ignore[union-attr]


class Feeders:
    """A pool of feeders, and its requests.

    Attributes:
        depth: steps that are requested ahead.
        setup: the first message to each process.
    """

    def __init__(self, operations: Sequence[Sequence[Operation]], number: int) -> None:
        """Start the processes; until they are ready, the training process computes batches.

        Args:
            operations: for the rows of each part of a table.
            number: of processes.
        """
        self.depth = max(2, number)
        pickled = cloudpickle.dumps([list(one) for one in operations])
        self.setup = pickle.dumps((list(sys.path), pickled))
        self._changed = threading.Condition()
        self._answers: dict[int, Any] = {}
        self._seconds = 0.0
        self._since: dict[int, float] = {}
        self._deaths = 0
        self._is_closed = False
        self._most = 4 * number
        self._feeders = [_Feeder(self, one) for one in range(number)]

    def pids(self) -> list[int]:
        """Return the ids of the present processes."""
        return [one.process.pid for one in self._feeders]

    @property
    def has_room(self) -> bool:
        """Return whether a feeder is ready, and the number of requests is below its limit."""
        with self._changed:
            ready = any(one.is_ready for one in self._feeders)
            return ready and len(self._since) + len(self._answers) < self._most

    def has(self, key: int) -> bool:
        """Return whether a batch was requested already."""
        with self._changed:
            return key in self._since or key in self._answers

    def request(self, key: int, rows: Gathered) -> None:
        """Request a batch.

        Args:
            key: identifies the batch, and seeds its random operations.
            rows: the input rows.
        """
        with self._changed:
            self._since[key] = time.monotonic()
        self._send(key, rows)

    def _send(self, key: int, rows: Gathered) -> None:
        with self._changed:
            ready = [one for one in self._feeders if one.is_ready]
            if not ready:
                self._since.pop(key, None)
                self._changed.notify_all()
                return
            feeder = min(ready, key=lambda one: len(one.pending))
            feeder.pending[key] = rows
        feeder.send(pickle.dumps((key, rows), protocol=5))

    def take(self, key: int) -> Batch | None:
        """Wait for a requested batch; None if it must be computed here.

        That is so after a timeout, and after an error in the feeder, to show it in this process.
        """
        with self._changed:
            while key in self._since:
                patience = max(TIMEOUT_S, TIMEOUT_TIMES * self._seconds)
                if time.monotonic() - self._since[key] > patience * (1 + len(self._since)):
                    log.warning("feeder_slow: a batch is computed here after %.1f s", patience)
                    self._forget(key)
                    return None
                self._changed.wait(WAIT_SLICE_S)
            if key not in self._answers:
                return None
            is_good, value = self._answers.pop(key)
        if not is_good:
            log.info("feeder_failed: the batch is computed here, to show where: %s", value)
            return None
        return value

    def _forget(self, key: int) -> None:
        self._since.pop(key, None)
        for feeder in self._feeders:
            feeder.pending.pop(key, None)

    def answered(self, feeder: _Feeder, key: int, is_good: bool, value: Any) -> None:
        """Record a reply; the first one of a feeder means that it is ready."""
        with self._changed:
            if not feeder.is_ready:
                feeder.is_ready = True
            else:
                self._deaths = 0
                feeder.pending.pop(key, None)
                since = self._since.pop(key, None)
                if since is not None:
                    self._seconds = max(0.9 * self._seconds, time.monotonic() - since)
                    self._answers[key] = is_good, value
            self._changed.notify_all()

    def lost(self, feeder: _Feeder) -> None:
        """Send the open requests of a lost feeder to others, and start a replacement."""
        with self._changed:
            if self._is_closed:
                return
            feeder.is_ready, self._deaths = False, self._deaths + 1
            pending, feeder.pending = dict(feeder.pending), {}
            log.warning("feeder_lost pid=%d; others do what it was asked for", feeder.process.pid)
            self._feeders.remove(feeder)
            if self._deaths <= STARTS_MAX:
                self._feeders.append(_Feeder(self, feeder.number))
        feeder.close()
        for key, rows in pending.items():
            self._send(key, rows)

    def close(self) -> None:
        """End all processes."""
        with self._changed:
            self._is_closed = True
            feeders, self._feeders = self._feeders, []
            self._since, self._answers = {}, {}
        for feeder in feeders:
            feeder.close()
