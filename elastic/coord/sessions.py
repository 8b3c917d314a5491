"""Sessions: the streams of agents as the driver sees them, each with a bounded send queue.

Rule: sending never blocks. An agent that does not read is disconnected, because others must not
wait for it; it reconnects, and the answer to its hello has all that it missed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import anyio

from elastic.core.messages import CoordinatorMessage
from elastic.core.world import NodeId, SessionId

OUT_MESSAGES_MAX = 2048
"""Messages that wait for one agent. A Hello after a restart is answered with a few for each of
the node's workers; nobody has thousands of workers on one node."""


LAST_WORDS_S = 10.0
"""What was sent before a stream is closed has so long to go out."""


def _nothing() -> None:
    """Nobody writes yet, or any more."""


class Session:
    """One stream of one agent, from its first message to its end.

    Attributes:
        session_id: names it; never used again in this process.
        peer: the agent's network address, for logs.
        node_id: the node that introduced itself over it, None before.
        reason: why it ended; the first reason counts.
    """

    def __init__(self, session_id: SessionId, peer: str, *, limit: int = OUT_MESSAGES_MAX) -> None:
        """Begin with an empty queue."""
        self.session_id = session_id
        self.peer = peer
        self.node_id: NodeId | None = None
        self.reason = ""
        self._limit = limit
        self._out: deque[CoordinatorMessage] = deque()
        self._check: Callable[[], None] = _nothing
        self._closing = False
        self._cut = anyio.Event()

    def on_news(self, look: Callable[[], None]) -> None:
        """Call `look`, which never raises, for what waits now, for each message, and at the end."""
        self._check = look
        look()

    def send(self, message: CoordinatorMessage) -> None:
        """Queue a message; a session that is closing drops it, a full one is cut off."""
        if self._closing:
            return
        if len(self._out) >= self._limit:
            self.cut(f"the agent does not read: {self._limit} messages wait for it")
            return
        self._out.append(message)
        self._check()

    def close(self, reason: str) -> None:
        """End after what was sent before; nothing is queued any more.

        A peer that reads nothing must not keep the stream: what waits is dropped after a while.
        """
        self.reason = self.reason or reason
        if self._closing:
            return
        self._closing = True
        if not self._cut.is_set():
            asyncio.get_running_loop().call_later(LAST_WORDS_S, self._cut.set)
        self._check()

    def cut(self, reason: str) -> None:
        """End now; what waits is dropped. From any callback, any number of times."""
        self._cut.set()
        self._out.clear()
        self.close(reason)
        self._check = _nothing  # No cycle is left for the collector.

    def next_message(self) -> CoordinatorMessage | None:
        """Take the next message to write, None if there is none now."""
        return self._out.popleft() if self._out else None

    def is_over(self) -> bool:
        """Return whether there is nothing to write and never will be."""
        return self._closing and not self._out

    def is_cut(self) -> bool:
        """Return whether the session was cut off."""
        return self._cut.is_set()

    async def wait_cut(self) -> None:
        """Wait until the session was cut off."""
        await self._cut.wait()


class Sessions:
    """All sessions that stand, and which node speaks over which of them."""

    def __init__(self, *, limit: int = OUT_MESSAGES_MAX) -> None:
        """Begin with none.

        Args:
            limit: messages that may wait for one agent.
        """
        self._limit = limit
        self._number = 0
        self._sessions: dict[SessionId, Session] = {}
        self._nodes: dict[NodeId, SessionId] = {}
        self._leavers: list[Callable[[SessionId], None]] = []

    def __len__(self) -> int:
        return len(self._sessions)

    def on_end(self, callback: Callable[[SessionId], None]) -> None:
        """Call `callback` with the id of each session that ends from now on."""
        self._leavers.append(callback)

    def open(self, peer: str) -> Session:
        """Enter a new stream."""
        self._number += 1
        session = Session(SessionId(f"s{self._number}"), peer, limit=self._limit)
        self._sessions[session.session_id] = session
        return session

    def end(self, session: Session, reason: str) -> bool:
        """Strike a stream from the list; True the first time, False ever after."""
        if self._sessions.pop(session.session_id, None) is None:
            return False
        session.cut(reason)
        node_id = session.node_id
        if node_id is not None and self._nodes.get(node_id) == session.session_id:
            del self._nodes[node_id]
        for callback in self._leavers:
            callback(session.session_id)
        return True

    def find(self, session_id: SessionId) -> Session | None:
        """Return the session if it still stands."""
        return self._sessions.get(session_id)

    def register(self, session: Session) -> None:
        """Remember that the session's node was registered over it."""
        if session.node_id is not None and session.session_id in self._sessions:
            self._nodes[session.node_id] = session.session_id

    def registered(self) -> list[Session]:
        """Return the sessions over which nodes are registered now."""
        return [self._sessions[session_id] for session_id in self._nodes.values()]

    def of_node(self, node_id: NodeId) -> Session | None:
        """Return the session over which a node is registered now."""
        session_id = self._nodes.get(node_id)
        return self._sessions.get(session_id) if session_id is not None else None

    def close_all(self, reason: str, *, at_once: bool = False) -> None:
        """End every session, after what was sent before unless `at_once`."""
        for session in list(self._sessions.values()):
            if at_once:
                session.cut(reason)
            else:
                session.close(reason)
