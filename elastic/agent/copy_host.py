"""The agent's endpoint for copies of other nodes: orders in, and what is held told to the loop.

An agent without a certificate of the cluster, that others reach over a network, makes one of its
own, and answers over TLS with that.

Rule: threads of the server never touch the agent's machine; what they change is posted to its
event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from elastic.agent.copy_server import CopyServer
from elastic.agent.copy_store import CopyStore
from elastic.agent.local_snapshots import LocalSnapshots
from elastic.core.copy_messages import CopyEndpoint, DropCopy, KeepCopy
from elastic.core.events.agent import CopiesChanged
from elastic.runtime.own_tls import OwnCertificate
from elastic.runtime.peer_tls import PeerTls
from elastic.runtime.rpc import is_loopback


class CopyHost:
    """Holds copies for other nodes.

    Attributes:
        endpoint: where they reach it.
    """

    def __init__(
        self,
        host: str,
        post: Callable[[CopiesChanged], None],
        tls: PeerTls | None = None,
        *,
        own: LocalSnapshots | None = None,
    ) -> None:
        """Listen on this address, and answer once something is to be held.

        Args:
            host: of this node, as others reach it.
            post: takes what is held now, on the event loop.
            tls: of this node, None if it has no certificate of the cluster.
            own: what lies in this node's own memory, None for nothing.
        """
        self._post = post
        self._loop: asyncio.AbstractEventLoop | None = None
        self._store = CopyStore(self._changed)
        made = OwnCertificate() if tls is None and not is_loopback(host) else None
        self._server = CopyServer(host, self._store, made or tls, own)
        self.endpoint = CopyEndpoint(self._server.address, made.fingerprint if made else "")

    def order(self, order: KeepCopy | DropCopy) -> None:
        """Do what the coordinator says; on the event loop."""
        self._loop = asyncio.get_running_loop()
        if isinstance(order, KeepCopy):
            self._store.grant(order.job_id, order.key)
            self._server.start()
        else:
            self._store.drop(order)

    def close(self) -> None:
        """Free everything."""
        self._loop = None
        self._server.close()
        self._store.close()

    def _changed(self) -> None:
        """Tell all that is held, as it is by then: threads may come in any order."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        if self._loop is not None:
            self._post(CopiesChanged(self._store.held()))
