"""The agent's endpoint for copies of other nodes' snapshots: orders in, the held copies reported.

Rule: threads of the server never touch the agent's machine; changes are posted to its event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from elastic.agent.copy_server import CopyServer
from elastic.agent.copy_store import CopyStore
from elastic.agent.local_snapshots import LocalSnapshots
from elastic.core.copy_messages import DropCopy, KeepCopy
from elastic.core.events.agent import CopiesChanged
from elastic.runtime.worker_ports import ANY_PORT, PortRange


class CopyHost:
    """Holds copies for other nodes.

    Attributes:
        address: "host:port" for them, "" if no port could be bound.
    """

    def __init__(
        self,
        host: str,
        post: Callable[[CopiesChanged], None],
        *,
        own: LocalSnapshots | None = None,
        ports: PortRange = ANY_PORT,
    ) -> None:
        """Listen on this address; connections are served after the first order to keep copies.

        Args:
            host: this node's address for other nodes.
            post: receives the list of held copies, on the event loop.
            own: snapshots in this node's own memory, None for none.
            ports: the range of the port.
        """
        self._post = post
        self._loop: asyncio.AbstractEventLoop | None = None
        self._store = CopyStore(self._changed)
        self._server = CopyServer(host, self._store, own, ports)
        self.address = self._server.address

    def order(self, order: KeepCopy | DropCopy) -> None:
        """Carry out an order of the coordinator; on the event loop."""
        self._loop = asyncio.get_running_loop()
        if isinstance(order, KeepCopy):
            self._store.grant(order.job_id, order.key)
            self._server.start()
        else:
            self._store.drop(order)

    def close(self) -> None:
        """Close the server, and free all copies."""
        self._loop = None
        self._server.close()
        self._store.close()

    def _changed(self) -> None:
        """Report the full list, read later on the event loop: threads may call in any order."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._post_change)

    def _post_change(self) -> None:
        if self._loop is not None:
            self._post(CopiesChanged(self._store.held()))
