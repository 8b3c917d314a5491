"""Sessions: the streams of agents as the driver sees them, each with a bounded send queue.

Rule: sending never blocks. An agent that does not read is disconnected, because others must not
wait for it. It reconnects, and the reply to its Hello includes all that it missed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import anyio

from elastic.core.facts import NodeId, SessionId
from elastic.core.messages import CoordinatorMessage

OUT_MESSAGES_MAX = 2048
"""Messages queued for one agent. The reply to a Hello after a restart is a few messages for each
of the node's workers; no node has thousands of workers."""


LAST_WORDS_S = 10.0
"""Time limit for writing the queued messages before a closing stream ends."""


def _nothing() -> None:
    """Do nothing: there is no writer, not yet or no longer."""


class Session:
    """One stream of one agent, from its first message to its end.

    Attributes:
        session_id: unique in this process; never reused.
        peer: the agent's network address, for logs.
        node_id: the node of the agent's Hello, None before it.
        reason: why it ended; the first reason counts.
    """

    def __init__(self, session_id: SessionId, peer: str, *, limit: int = OUT_MESSAGES_MAX) -> None:
        self.session_id = session_id
        self.peer = peer
        self.node_id: NodeId | None = None
        self.reason = ""
        self._limit = limit
        self._out: deque[CoordinatorMessage] = deque()
        self._check: Callable[[], None] = _nothing
        self._closing = False
        self._cut = anyio.Event()

    def on_news(self, check: Callable[[], None]) -> None:
        """Call `check`, which must not raise, now, after each message, and at the end."""
        self._check = check
        check()

    def send(self, message: CoordinatorMessage) -> None:
        """Queue a message. A closing session drops it; a full one is cut."""
        if self._closing:
            return
        if len(self._out) >= self._limit:
            self.cut(f"the agent does not read: {self._limit} messages wait for it")
            return
        self._out.append(message)
        self._check()

    def close(self, reason: str) -> None:
        """End after the queued messages; accept no new ones.

        A peer that does not read must not keep the stream open: the queue is dropped after
        LAST_WORDS_S.
        """
        self.reason = self.reason or reason
        if self._closing:
            return
        self._closing = True
        if not self._cut.is_set():
            asyncio.get_running_loop().call_later(LAST_WORDS_S, self._cut.set)
        self._check()

    def cut(self, reason: str) -> None:
        """End now and drop the queue. Safe in any callback, any number of times."""
        self._cut.set()
        self._out.clear()
        self.close(reason)
        self._check = _nothing  # Leaves no reference cycle for the garbage collector.

    def next_message(self) -> CoordinatorMessage | None:
        """Take the next message to write, None if there is none now."""
        return self._out.popleft() if self._out else None

    def is_over(self) -> bool:
        return self._closing and not self._out

    def is_cut(self) -> bool:
        return self._cut.is_set()

    async def wait_cut(self) -> None:
        await self._cut.wait()


class Sessions:
    """All open sessions, and which node is registered over which of them."""

    def __init__(self, *, limit: int = OUT_MESSAGES_MAX) -> None:
        """Start with none."""
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
        self._number += 1
        session = Session(SessionId(f"s{self._number}"), peer, limit=self._limit)
        self._sessions[session.session_id] = session
        return session

    def end(self, session: Session, reason: str) -> bool:
        """Remove a session; return True the first time, False afterwards."""
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
        """Return the session if it is still open."""
        return self._sessions.get(session_id)

    def register(self, session: Session) -> None:
        """Record that the session's node is registered over it."""
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
        """End every session, after its queued messages unless `at_once`."""
        for session in list(self._sessions.values()):
            if at_once:
                session.cut(reason)
            else:
                session.close(reason)
