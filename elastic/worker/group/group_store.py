"""A member's client of its group's key-value store, through which torch forms its groups.

torch's own TCPStore answers any client, although its keys decide where gloo connects
to. This one answers only clients that prove that they know the generation's secret.

Rule: one request at a time on a connection, which any thread may cut. A connection on which a
request was interrupted is cut, since its answer would be taken for the next one's.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import DistNetworkError, DistStoreError, Store

from elastic.errors import GroupError
from elastic.runtime.rpc import parse_endpoint
from elastic.worker.group import store_wire
from elastic.worker.group.store_wire import StoreVerb

ATTEMPT_S = 2.0
"""Limit of one attempt to connect to the leader."""
PAUSE_S = 0.005
PAUSE_S_MAX = 0.1
GRACE_S = 5.0
"""How much later than the end of a wait its answer may arrive."""


_known_to_torch: deque[GroupStore] = deque(maxlen=256)
"""torch's own objects, such as a PrefixStore, do not keep what Python adds to a store: a call
to one of a group that is over must report that, and not that it has no methods."""


class StoreAddress(NamedTuple):
    """Address and secret of a group's store.

    Attributes:
        address: "host:port" of the leader's server.
        key: its secret.
    """

    address: str
    generation: int
    key: str


class GroupStore(Store):
    """A connection to the store of one group; each thread that waits in it needs its own.

    Attributes:
        timeout: how long it waits for keys; stored by torch, which sets it by `set_timeout`.
    """

    timeout: timedelta

    def __init__(self, where: StoreAddress, sock: socket.socket) -> None:
        super().__init__()
        self._where = where
        self._sock = sock
        self._lock = threading.Lock()
        self._clones: list[GroupStore] = []
        self._is_cut = False
        _known_to_torch.append(self)

    @classmethod
    def connect(
        cls, where: StoreAddress, left_s: Callable[[], float], is_over: Callable[[], bool]
    ) -> GroupStore:
        """Connect, with as many attempts as needed.

        Args:
            where: the store.
            left_s: returns the seconds left.
            is_over: returns whether to give up.

        Raises:
            GroupError: no server that knows the generation's secret answers in time.
        """
        pause_s = PAUSE_S
        while True:
            try:
                return cls(where, _known(where, max(0.01, min(ATTEMPT_S, left_s()))))
            except OSError as error:
                if is_over() or left_s() <= pause_s:
                    raise GroupError(f"no answer at {where.address} ({error})") from error
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, PAUSE_S_MAX)

    def cut(self) -> None:
        """End this connection and those of its clones, from any thread; waiters raise."""
        self._is_cut = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        for one in list(self._clones):
            one.cut()

    def close(self) -> None:
        """Close the connections; later calls raise."""
        self.cut()
        self._sock.close()
        for one in list(self._clones):
            one.close()

    # ---------------------------------------------------------------- torch's names

    def clone(self) -> GroupStore:
        until = time.monotonic() + self.timeout.total_seconds()
        one = GroupStore.connect(
            self._where, lambda: until - time.monotonic(), lambda: self._is_cut
        )
        one.set_timeout(self.timeout)
        # torch would keep only the C++ part of it alive.
        self._clones.append(one)
        if self._is_cut:
            one.cut()
        return one

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key; no answer is awaited."""
        self._send(StoreVerb.SET, key.encode(), _bytes(value))

    def append(self, key: str, value: str | bytes) -> None:
        """Add bytes to a key's; no answer is awaited."""
        self._send(StoreVerb.APPEND, key.encode(), _bytes(value))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several keys; does not wait for the server."""
        fields: list[bytes] = []
        for key, value in zip(keys, values, strict=True):
            fields += (key.encode(), _bytes(value))
        self._send(StoreVerb.MULTI_SET, *fields)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._await(StoreVerb.MULTI_GET, keys, self.timeout)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._await(StoreVerb.WAIT, keys, self.timeout if timeout is None else timeout)

    def check(self, keys: Sequence[str]) -> bool:
        return self._request(StoreVerb.CHECK, *(key.encode() for key in keys))[0] == b"1"

    def add(self, key: str, value: int) -> int:
        return int(self._request(StoreVerb.ADD, key.encode(), b"%d" % value)[0])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._request(
            StoreVerb.COMPARE_SET, key.encode(), _bytes(expected), _bytes(desired)
        )[0]

    def delete_key(self, key: str) -> bool:
        return self._request(StoreVerb.DELETE, key.encode())[0] == b"1"

    def num_keys(self) -> int:
        return int(self._request(StoreVerb.COUNT)[0])

    def has_extended_api(self) -> bool:
        return True

    # The names that torch's C++ looks up.
    deleteKey = delete_key
    getNumKeys = num_keys

    # ---------------------------------------------------------------- inside

    def _await(self, verb: StoreVerb, keys: Sequence[str], timeout: timedelta) -> list[bytes]:
        limit_s = timeout.total_seconds()
        fields = [b"%d" % (limit_s * 1e3), *(key.encode() for key in keys)]
        return self._request(verb, *fields, limit_s=limit_s, keys=keys)

    def _send(self, verb: StoreVerb, *fields: bytes) -> None:
        with self._lock, self._unbroken():
            self._sock.settimeout(self.timeout.total_seconds())
            self._sock.sendall(store_wire.packed(verb, fields))

    def _request(
        self,
        verb: StoreVerb,
        *fields: bytes,
        limit_s: float | None = None,
        keys: Sequence[str] = (),
    ) -> list[bytes]:
        limit_s = self.timeout.total_seconds() if limit_s is None else limit_s
        with self._lock, self._unbroken():
            self._sock.settimeout(limit_s + GRACE_S)
            self._sock.sendall(store_wire.packed(verb, fields))
            (size,) = store_wire.LENGTH.unpack(_read(self._sock, store_wire.LENGTH.size))
            status, answer = store_wire.unpacked(_read(self._sock, size))
        if status == store_wire.TIMED_OUT:
            named = ", ".join(keys[:3]) + (", ..." if len(keys) > 3 else "")
            raise DistStoreError(f"wait timeout after {limit_s * 1e3:.0f}ms, keys: {named}")
        return answer

    @contextlib.contextmanager
    def _unbroken(self) -> Iterator[None]:
        """Cut the connection if a request is interrupted."""
        try:
            yield
        except BaseException as error:
            self.cut()
            if isinstance(error, OSError | ValueError):
                raise DistNetworkError(
                    f"the store of generation {self._where.generation} at {self._where.address} "
                    f"is gone: {error}"
                ) from error
            raise


def _known(where: StoreAddress, limit_s: float) -> socket.socket:
    """Connect, show the server that we have the secret, and see that it has it; else OSError."""
    sock = socket.create_connection(parse_endpoint(where.address), limit_s)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        greeting = _read(sock, store_wire.GREETING_BYTES)
        if not greeting.startswith(store_wire.MAGIC):
            raise ConnectionError("what listens there is no store of a group")
        nonce = os.urandom(store_wire.NONCE_BYTES)
        number = store_wire.GENERATION.pack(where.generation)
        ours = store_wire.proof(where.key, "client", greeting, nonce, number)
        sock.sendall(nonce + number + ours)
        theirs = _read(sock, store_wire.PROOF_BYTES)
        if not store_wire.is_proof(
            theirs, store_wire.proof(where.key, "server", greeting, nonce, number)
        ):
            raise ConnectionError("what listens there does not know the secret of this generation")
    except BaseException:
        sock.close()
        raise
    return sock


def _read(sock: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    view, at = memoryview(data), 0
    while at < count:
        got = sock.recv_into(view[at:])
        if not got:
            raise ConnectionResetError("Connection closed by peer")
        at += got
    return bytes(data)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
