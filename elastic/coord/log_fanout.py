"""Output of workers on its way from agents to those who follow it; the machine never sees it.

Rule: agents send what a reader has room for, and the rest stays in their files, so that a slow one
loses nothing. What comes all the same, and does not fit, is left out, and the reader is told how
much: the coordinator's memory waits for nobody.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
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


ROOM, LITTLE_ROOM, FEW = 256 * 1024, 4096, 16
"""Characters that an agent may send ahead for a worker, and a piece more; the second if more than
the third are followed, and pieces are no larger then: there is room for a thousand at once."""


@dataclass
class BufferBudget:
    """How many characters wait for all readers together."""

    chars: int = 0
    limit: int = ALL_CHARS_MAX


@dataclass(frozen=True)
class LogSubscription:
    """One wish to see one worker's output, open until its end came."""

    follow_id: str
    session_id: SessionId
    worker_id: WorkerId


class MergedOutput:
    """The output of several workers, merged by time, for one reader.

    What is there already is merged exactly: nothing is given out before everyone who has something
    to send has sent it. Of what is printed now, it is as it arrives.
    """

    def __init__(
        self, limit: int = MERGED_CHARS_MAX, all_waiting: BufferBudget | None = None
    ) -> None:
        """Begin empty.

        Args:
            limit: characters that wait for the reader.
            all_waiting: shared with the other readers.
        """
        self._limit = limit
        self._all = all_waiting or BufferBudget()
        self._queues: dict[WorkerId, deque[LogLines]] = {}
        self._heads: list[tuple[int, int, WorkerId]] = []
        self._number = 0
        self._waiting = 0
        self._dropped: dict[WorkerId, int] = {}
        self._taken: Counter[WorkerId] = Counter()
        # Who is followed, and has nothing here.
        self._awaited: set[WorkerId] = set()
        self._awake = anyio.Event()
        self.follows: dict[WorkerId, LogSubscription] = {}
        self.lost: set[WorkerId] = set()

    def begin(self, wish: LogSubscription) -> None:
        """Somebody was asked for a worker's output."""
        self.follows[wish.worker_id] = wish
        if wish.worker_id not in self._queues:
            self._awaited.add(wish.worker_id)

    def put(self, worker_id: WorkerId, text: str, lines: LogLines | None = None) -> None:
        """Queue output, or count it as dropped.

        Args:
            worker_id: whose.
            text: what it printed.
            lines: when and where it did.
        """
        if not text:
            return
        waiting = self._all
        if self._waiting + len(text) > self._limit or waiting.chars + len(text) > waiting.limit:
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
        self._number += 1  # Of those of one moment the first that came is the first.
        moment = self._queues[worker_id][0].unix_ns
        heapq.heappush(self._heads, (moment, self._number, worker_id))

    def finish(self, worker_id: WorkerId, *, lost: bool) -> None:
        """Take the end of one worker's output; `lost` when its agent went away instead."""
        self.follows.pop(worker_id, None)
        self._awaited.discard(worker_id)
        if lost:
            self.lost.add(worker_id)
        self._awake.set()

    def take(self, *, is_exact: bool = False) -> Iterator[LogLines]:
        """Yield what is queued, the oldest first, then what was dropped.

        Args:
            is_exact: only as far as nobody can still send something older.
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
        """Forget what waits: the reader is gone."""
        self._all.chars -= self._waiting
        self._waiting = 0
        self._queues.clear()
        self._heads.clear()

    def wake(self) -> None:
        """Say that there may be other workers now."""
        self._awake.set()

    async def wait(self, timeout_s: float) -> None:
        """Wait until there is something new, at most this long."""
        with anyio.move_on_after(timeout_s):
            await self._awake.wait()
        self._awake = anyio.Event()


class LogFanout:
    """All open wishes, by id."""

    def __init__(self, sessions: Sessions) -> None:
        """Learn of sessions that end, so that nobody waits for them."""
        self._sessions = sessions
        self._open: dict[str, tuple[LogSubscription, MergedOutput]] = {}
        self._number = 0
        self._waiting = BufferBudget()
        sessions.on_end(self._on_session_end)

    @contextmanager
    def merged(self) -> Iterator[MergedOutput]:
        """Gather output for the length of a `with` block; then the agents are told to stop."""
        merged = MergedOutput(all_waiting=self._waiting)
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
        wish = LogSubscription(f"f{self._number}", session.session_id, worker_id)
        self._open[wish.follow_id] = (wish, merged)
        merged.begin(wish)
        session.send(
            FollowLogs(wish.follow_id, worker_id, tail_lines=tail_lines, follow=follow, room=room)
        )
        return True

    def take(self, session_id: SessionId, lines: LogLines) -> None:
        """Pass output on; what nobody asked this agent for is ignored."""
        wish, merged = self._open.get(lines.follow_id, (None, None))
        if wish is None or merged is None or wish.session_id != session_id:
            return
        merged.put(wish.worker_id, lines.text, lines)
        if lines.end:
            del self._open[lines.follow_id]
            merged.finish(wish.worker_id, lost=False)

    def make_room(self, merged: MergedOutput) -> None:
        """Let agents send on, as much as the reader has taken."""
        for worker_id, chars in merged.taken().items():
            wish = merged.follows.get(worker_id)
            session = self._sessions.find(wish.session_id) if wish is not None else None
            if wish is not None and session is not None:
                session.send(FollowLogs(wish.follow_id, worker_id, room=chars))

    def _on_session_end(self, session_id: SessionId) -> None:
        for wish, merged in list(self._open.values()):
            if wish.session_id == session_id:
                del self._open[wish.follow_id]
                merged.finish(wish.worker_id, lost=True)
