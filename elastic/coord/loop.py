"""The coordinator's event loop: asyncio's own, which takes all that gRPC has to say at once.

Rule: nothing here is needed for an answer to be right. gRPC's thread puts a byte into a socket for
each operation that is done; its reader in the loop takes one byte, and then all that is done. After
ten thousand messages nearly as many turns of the loop are left that find a byte and nothing else,
which is a tenth of the time that it takes to write them.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

QUEUE = "PollerCompletionQueue"
"""gRPC's class whose reader it is; were it called otherwise, nothing would be lost but time."""
BYTES_MAX = 4096
"""Taken at once; a socket holds some hundreds."""


class Loop(asyncio.SelectorEventLoop):
    """asyncio's loop with a reader of gRPC's socket that leaves no byte for later.

    Attributes:
        num_queues: of gRPC's that were found.
    """

    num_queues = 0

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        """Watch a descriptor; see asyncio."""
        reader = getattr(callback, "func", callback)  # It is a `partial`.
        owner = type(getattr(reader, "__self__", None)).__name__
        if owner == QUEUE and isinstance(fd, socket.socket):
            self.num_queues += 1
            callback = _taking_all(fd, callback)
        super().add_reader(fd, callback, *args)


def _taking_all(wakes: socket.socket, callback: Callable[[], Any]) -> Callable[[], Any]:
    """Return what leaves one byte of those that are there, and calls gRPC's reader for all.

    Each was put there after what it stands for was put into gRPC's queue.
    """

    def take() -> None:
        try:
            waiting = len(wakes.recv(BYTES_MAX, socket.MSG_PEEK | socket.MSG_DONTWAIT))
            if waiting > 1:
                wakes.recv(waiting - 1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        callback()

    return take
