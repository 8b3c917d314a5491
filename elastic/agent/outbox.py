"""Queue of what is sent to the coordinator: messages first, then output lines, as room permits.

Rule: sending a message never blocks; sending output does. So a reader of logs can neither delay the
report of an exit nor fill the agent's memory.
"""

from __future__ import annotations

from collections import deque

import anyio

from elastic.core.messages import AgentMessage, LogLines

MESSAGES_MAX = 50_000
"""More than an agent sends at once after a reconnect: the state of its workers, 20,000 reports."""
LINES_MAX = 8


class Outbox:
    """The queue of one session, for one sender."""

    def __init__(self) -> None:
        self._messages: deque[AgentMessage] = deque()
        self._lines: deque[LogLines] = deque()
        self._closed = False
        self._finishing = False
        self._arrived = anyio.Event()
        self._moved = anyio.Event()

    def put(self, message: AgentMessage) -> bool:
        """Queue a message; False when the queue is full or closed."""
        if self._closed or self._finishing or len(self._messages) >= MESSAGES_MAX:
            return False
        self._messages.append(message)
        self._arrived.set()
        return True

    async def put_lines(self, lines: LogLines) -> bool:
        """Queue output, waiting for room; False when the queue is closed."""
        while len(self._lines) >= LINES_MAX and not self._closed:
            await self._moved.wait()
        if self._closed or self._finishing:
            return False
        self._lines.append(lines)
        self._arrived.set()
        return True

    async def get(self) -> AgentMessage | None:
        """Wait for the next message to send; None when there will be no more."""
        while not self._closed:
            if self._messages:
                return self._messages.popleft()
            if self._lines:
                self._notify()
                return self._lines.popleft()
            if self._finishing:
                break
            self._arrived = anyio.Event()
            await self._arrived.wait()
        return None

    def finish(self) -> None:
        """Accept nothing more; queued messages and lines are still sent."""
        self._finishing = True
        self._arrived.set()

    def close(self) -> None:
        """Drop the queues, and wake all waiting tasks."""
        self._closed = True
        self._messages.clear()
        self._lines.clear()
        self._arrived.set()
        self._notify()

    def _notify(self) -> None:
        """Wake all tasks that wait for room; each checks again."""
        self._moved.set()
        self._moved = anyio.Event()
