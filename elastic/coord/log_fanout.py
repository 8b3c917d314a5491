"""Passes the output of workers from agents to readers; the machine never sees it.

Rule: agents send only as much as a reader has credit for, and keep the remainder in their files, so
that a slow reader loses nothing. Output beyond its credit that does not fit is dropped, and the
reader gets the number of characters dropped: the coordinator's memory is bounded.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import anyio

from elastic.coord.sessions import Sessions
from elastic.core.facts import NodeId, SessionId, WorkerId
from elastic.core.messages import FollowLogs, LogLines

MERGED_CHARS_MAX = 8 * 1024 * 1024
ALL_CHARS_MAX = 128 * 1024 * 1024
"""Limits of the characters queued for one reader, and for all. A reader that never reads uses up
the share of others only for a while: the guard ends its call."""


ROOM, LITTLE_ROOM, FEW = 256 * 1024, 4096, 16
"""Characters that an agent may send ahead for a worker, and one piece more. The second applies if
at least as many workers as the third are followed, with smaller pieces: a thousand fit at once."""


@dataclass
class BufferBudget:
    """How many characters are queued for all readers together."""

    chars: int = 0
    limit: int = ALL_CHARS_MAX


@dataclass(frozen=True)
class LogSubscription:
    """One request for one worker's output, open until that output ends."""

    follow_id: str
    session_id: SessionId
    worker_id: WorkerId


class MergedOutput:
    """The output of several workers, merged by time, for one reader.

    Existing output is merged exactly: nothing is yielded while a worker that may have older lines
    has none queued. New output is merged in the order of its arrival.
    """

    def __init__(self, all_waiting: BufferBudget) -> None:
        """Start empty."""
        self._all = all_waiting
        self._queues: dict[WorkerId, deque[LogLines]] = {}
        self._heads: list[tuple[int, int, WorkerId]] = []
        self._number = 0
        self._waiting = 0
        self._dropped: dict[WorkerId, int] = {}
        self._taken: Counter[WorkerId] = Counter()
        # Workers that are followed, and have nothing queued.
        self._awaited: set[WorkerId] = set()
        self._awake = anyio.Event()
        self.follows: dict[WorkerId, LogSubscription] = {}
        self.lost: set[WorkerId] = set()

    def begin(self, subscription: LogSubscription) -> None:
        """Record that an agent was asked for a worker's output."""
        self.follows[subscription.worker_id] = subscription
        if subscription.worker_id not in self._queues:
            self._awaited.add(subscription.worker_id)

    def put(self, worker_id: WorkerId, text: str, lines: LogLines | None = None) -> None:
        """Queue output, or count it as dropped.

        Args:
            worker_id: the worker that printed it.
            text: what it printed.
            lines: the same with its time, rank and generation, None for a remark of ours.
        """
        if not text:
            return
        waiting = self._all
        is_full = self._waiting + len(text) > MERGED_CHARS_MAX
        if is_full or waiting.chars + len(text) > waiting.limit:
            self._dropped[worker_id] = self._dropped.get(worker_id, 0) + len(text)
        else:
            queue = self._queues.setdefault(worker_id, deque())
            self._awaited.discard(worker_id)
            queue.append(lines or LogLines("", worker_id, text))
            if len(queue) == 1:
                self._show_head(worker_id)
            self._waiting += len(text)
            waiting.chars += len(text)
        self._awake.set()

    def _show_head(self, worker_id: WorkerId) -> None:
        self._number += 1  # Lines of the same time keep the order of their arrival.
        moment = self._queues[worker_id][0].unix_ns
        heapq.heappush(self._heads, (moment, self._number, worker_id))

    def finish(self, worker_id: WorkerId, *, lost: bool) -> None:
        """Record the end of one worker's output; `lost` if its agent disconnected instead."""
        self.follows.pop(worker_id, None)
        self._awaited.discard(worker_id)
        if lost:
            self.lost.add(worker_id)
        self._awake.set()

    def take(self, *, is_exact: bool = False) -> Iterator[LogLines]:
        """Yield what is queued, oldest first, then how much was dropped.

        Args:
            is_exact: stop where a worker may still send something older.
        """
        while self._heads and not (is_exact and self._awaited):
            worker_id = heapq.heappop(self._heads)[2]
            queue = self._queues[worker_id]
            lines = queue.popleft()
            if queue:
                self._show_head(worker_id)
            else:
                del self._queues[worker_id]
                if worker_id in self.follows:
                    self._awaited.add(worker_id)
            self._waiting -= len(lines.text)
            self._all.chars -= len(lines.text)
            self._taken[worker_id] += len(lines.text)
            yield lines
        dropped, self._dropped = self._dropped, {}
        for worker_id, number in sorted(dropped.items()):
            yield LogLines(
                "",
                worker_id,
                f"[elastic] {number} characters of output are left out here: they came faster "
                f"than they were read; the file on the node has them\n",
            )

    def taken(self) -> dict[WorkerId, int]:
        """Return how many characters were taken since the last call, by worker."""
        taken, self._taken = self._taken, Counter()
        return taken

    def drop(self) -> None:
        """Discard what is queued: the reader is gone."""
        self._all.chars -= self._waiting
        self._waiting = 0
        self._queues.clear()
        self._heads.clear()

    def wake(self) -> None:
        """End `wait` early, because there may be new workers."""
        self._awake.set()

    async def wait(self, timeout_s: float) -> None:
        """Wait until there is something new, at most this long."""
        with anyio.move_on_after(timeout_s):
            await self._awake.wait()
        self._awake = anyio.Event()


class LogFanout:
    """All open subscriptions, by id."""

    def __init__(self, sessions: Sessions) -> None:
        """Subscribe to the end of sessions, so that no reader waits for one that is gone."""
        self._sessions = sessions
        self._open: dict[str, tuple[LogSubscription, MergedOutput]] = {}
        self._number = 0
        self._waiting = BufferBudget()
        sessions.on_end(self._on_session_end)

    @contextmanager
    def merged(self) -> Iterator[MergedOutput]:
        """Collect output during a `with` block; then ask the agents to stop sending."""
        merged = MergedOutput(self._waiting)
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
        merged: MergedOutput,
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
        room = ROOM if len(merged.follows) < FEW else LITTLE_ROOM
        subscription = LogSubscription(f"f{self._number}", session.session_id, worker_id)
        self._open[subscription.follow_id] = (subscription, merged)
        merged.begin(subscription)
        session.send(
            FollowLogs(
                subscription.follow_id, worker_id, tail_lines=tail_lines, follow=follow, room=room
            )
        )
        return True

    def take(self, session_id: SessionId, lines: LogLines) -> None:
        """Pass output on; ignore output that this agent was not asked for."""
        subscription, merged = self._open.get(lines.follow_id, (None, None))
        if subscription is None or merged is None or subscription.session_id != session_id:
            return
        merged.put(subscription.worker_id, lines.text, lines)
        if lines.end:
            del self._open[lines.follow_id]
            merged.finish(subscription.worker_id, lost=False)

    def make_room(self, merged: MergedOutput) -> None:
        """Give agents credit to send as much as the reader has taken."""
        for worker_id, chars in merged.taken().items():
            subscription = merged.follows.get(worker_id)
            session = (
                self._sessions.find(subscription.session_id) if subscription is not None else None
            )
            if subscription is not None and session is not None:
                session.send(FollowLogs(subscription.follow_id, worker_id, room=chars))

    def _on_session_end(self, session_id: SessionId) -> None:
        for subscription, merged in list(self._open.values()):
            if subscription.session_id == session_id:
                del self._open[subscription.follow_id]
                merged.finish(subscription.worker_id, lost=True)
