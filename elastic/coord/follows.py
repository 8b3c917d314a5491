"""Output of workers on its way from agents to those who follow it; the machine never sees it.

Rule: a reader that is slower than the workers loses output and is told how much. Neither an
agent's stream nor the coordinator's memory waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import anyio

from elastic.coord.sessions import Sessions
from elastic.core.messages import FollowLogs, LogLines
from elastic.core.world import NodeId, SessionId, WorkerId

MERGED_CHARS_MAX = 8 * 1024 * 1024
ALL_CHARS_MAX = 128 * 1024 * 1024
"""What waits for all readers together; one that never reads must not cost the others theirs for
long: the guard ends it."""


@dataclass
class Waiting:
    """How many characters wait for all readers together."""

    chars: int = 0
    limit: int = ALL_CHARS_MAX


@dataclass(frozen=True)
class Follow:
    """One wish to see one worker's output, open until its end came."""

    follow_id: str
    session_id: SessionId
    worker_id: WorkerId


class Merged:
    """The output of several workers, in order of arrival, for one reader."""

    def __init__(self, limit: int = MERGED_CHARS_MAX, all_waiting: Waiting | None = None) -> None:
        """Begin empty.

        Args:
            limit: characters that wait for the reader.
            all_waiting: shared with the other readers.
        """
        self._limit = limit
        self._all = all_waiting or Waiting()
        self._texts: deque[tuple[WorkerId, str]] = deque()
        self._waiting = 0
        self._dropped: dict[WorkerId, int] = {}
        self._awake = anyio.Event()
        self.follows: dict[WorkerId, Follow] = {}
        self.lost: set[WorkerId] = set()

    def put(self, worker_id: WorkerId, text: str) -> None:
        """Queue output, or count it as dropped."""
        if not text:
            return
        waiting = self._all
        if self._waiting + len(text) > self._limit or waiting.chars + len(text) > waiting.limit:
            self._dropped[worker_id] = self._dropped.get(worker_id, 0) + len(text)
        else:
            self._texts.append((worker_id, text))
            self._waiting += len(text)
            waiting.chars += len(text)
        self._awake.set()

    def finish(self, worker_id: WorkerId, *, lost: bool) -> None:
        """Take the end of one worker's output; `lost` when its agent went away instead."""
        self.follows.pop(worker_id, None)
        if lost:
            self.lost.add(worker_id)
        self._awake.set()

    def take(self) -> Iterator[tuple[WorkerId, str]]:
        """Yield what is queued, then what was dropped."""
        while self._texts:
            worker_id, text = self._texts.popleft()
            self._waiting -= len(text)
            self._all.chars -= len(text)
            yield worker_id, text
        dropped, self._dropped = self._dropped, {}
        for worker_id, number in sorted(dropped.items()):
            yield (
                worker_id,
                f"[elastic] {number} characters of output are left out here: they came faster "
                f"than they were read; the file on the node has them\n",
            )

    def drop(self) -> None:
        """Forget what waits: the reader is gone."""
        self._all.chars -= self._waiting
        self._waiting = 0
        self._texts.clear()

    def wake(self) -> None:
        """Say that there may be other workers now."""
        self._awake.set()

    async def wait(self, timeout_s: float) -> None:
        """Wait until there is something new, at most this long."""
        with anyio.move_on_after(timeout_s):
            await self._awake.wait()
        self._awake = anyio.Event()


class Follows:
    """All open wishes, by id."""

    def __init__(self, sessions: Sessions) -> None:
        """Learn of sessions that end, so that nobody waits for them."""
        self._sessions = sessions
        self._open: dict[str, tuple[Follow, Merged]] = {}
        self._number = 0
        self._waiting = Waiting()
        sessions.on_end(self._on_session_end)

    @contextmanager
    def merged(self) -> Iterator[Merged]:
        """Gather output for the length of a `with` block; then the agents are told to stop."""
        merged = Merged(all_waiting=self._waiting)
        try:
            yield merged
        finally:
            merged.drop()
            for follow in list(merged.follows.values()):
                self._open.pop(follow.follow_id, None)
                session = self._sessions.find(follow.session_id)
                if session is not None:
                    session.send(FollowLogs(follow.follow_id, follow.worker_id, stop=True))

    def start(
        self,
        merged: Merged,
        worker_id: WorkerId,
        node_id: NodeId,
        *,
        tail_lines: int,
        follow: bool,
    ) -> bool:
        """Ask the worker's agent for its output; False if that agent is not connected."""
        session = self._sessions.of_node(node_id)
        if session is None:
            return False
        self._number += 1
        wish = Follow(f"f{self._number}", session.session_id, worker_id)
        self._open[wish.follow_id] = (wish, merged)
        merged.follows[worker_id] = wish
        session.send(FollowLogs(wish.follow_id, worker_id, tail_lines=tail_lines, follow=follow))
        return True

    def take(self, session_id: SessionId, lines: LogLines) -> None:
        """Pass output on; what nobody asked this agent for is ignored."""
        wish, merged = self._open.get(lines.follow_id, (None, None))
        if wish is None or merged is None or wish.session_id != session_id:
            return
        merged.put(wish.worker_id, lines.text)
        if lines.end:
            del self._open[lines.follow_id]
            merged.finish(wish.worker_id, lost=False)

    def _on_session_end(self, session_id: SessionId) -> None:
        for wish, merged in list(self._open.values()):
            if wish.session_id == session_id:
                del self._open[wish.follow_id]
                merged.finish(wish.worker_id, lost=True)
