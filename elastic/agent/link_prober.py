"""Tests whether other nodes can be reached, for a coordinator whose group makes no progress.

Rule: a connection is opened and closed without data. A refused connection counts as reached; a name
that cannot be resolved is not reported either way.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

import anyio

from elastic.core.events.agent import LinksProbed
from elastic.core.facts import NodeId
from elastic.core.messages import Link, LinksTried, TryLinks

LIMIT_S = 3.0
"""Long enough for two further SYNs on a network that loses some."""
ORDERS_MAX = 8
"""Orders at once; more are dropped, because the coordinator repeats its orders."""


class LinkProber:
    """Runs the orders to test connections, each as a task."""

    def __init__(self, post: Callable[[LinksProbed], None], limit_s: float = LIMIT_S) -> None:
        self._post = post
        self._limit_s = limit_s
        self._tasks: set[asyncio.Task[None]] = set()

    def order(self, order: TryLinks) -> None:
        """Start to test; the result is posted."""
        if len(self._tasks) < ORDERS_MAX:
            task = asyncio.get_running_loop().create_task(self._try(order))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Cancel all tests."""
        for task in self._tasks:
            task.cancel()

    async def _try(self, order: TryLinks) -> None:
        found = await asyncio.gather(*(self._reaches(link) for link in order.links))

        def those(answer: bool) -> tuple[NodeId, ...]:
            pairs = zip(order.links, found, strict=True)
            return tuple(link.node_id for link, reached in pairs if reached is answer)

        self._post(LinksProbed(LinksTried(order.job_id, those(True), those(False))))

    async def _reaches(self, link: Link) -> bool | None:
        """Return whether the address replied, None if that cannot be tested."""
        host, _, port = link.address.rpartition(":")
        try:
            with anyio.fail_after(self._limit_s):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except ConnectionRefusedError:
            return True
        except (ValueError, OverflowError, socket.gaierror):
            return None
        except OSError:  # Of which a timeout is one.
            return False
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return True
