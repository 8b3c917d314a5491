"""What workers in large groups say, held back by their agent until it is their turn.

Rule: only what `policy.spreading` names waits, and the newest of it replaces what waited.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic.core.config import AgentConfig, ns
from elastic.core.messages import LeaveGroup, Progress
from elastic.core.policy.pacing import answer_after_ns, telemetry_every_ns
from elastic.core.world import Assignment, Generation, WorkerId, WorkerPhase, WorkerReport


@dataclass
class SendSlot:
    """When one member of a large group speaks.

    Attributes:
        after_ns: between what it is told and its turn to answer.
        answer_at_ns: that it forms or trains.
        out_at_ns: that it is out of its group, when the next one is being worked out.
        progress_at_ns, every_ns: how far it is, next and from then on.
        progress: what waits for that.
    """

    generation: Generation
    after_ns: int
    answer_at_ns: int
    progress_at_ns: int
    every_ns: int
    out_at_ns: int = 0
    progress: Progress | None = None


class Pacer:
    """Whose turn is when."""

    def __init__(self, config: AgentConfig) -> None:
        """Begin without groups."""
        self._member_ns = ns(config.spread_s_per_member)
        self._turns: dict[WorkerId, SendSlot] = {}

    def announced(self, place: Assignment, now_ns: int) -> None:
        """A worker is told of its group."""
        known = self._turns.get(place.worker_id)
        if known is not None and known.generation == place.generation:
            return
        after_ns = answer_after_ns(place.rank, place.world_size, self._member_ns)
        self._turns.pop(place.worker_id, None)
        if after_ns:
            every_ns = telemetry_every_ns(place.rank, place.world_size, self._member_ns)
            at_ns = now_ns + after_ns
            self._turns[place.worker_id] = SendSlot(
                place.generation, after_ns, at_ns, at_ns, every_ns
            )

    def leave_requested(self, order: LeaveGroup, now_ns: int) -> None:
        """A worker is told to leave its group at once, maybe because another one follows.

        With twice the time: what it says of that one replaces this.
        """
        turn = self._turns.get(order.worker_id)
        if turn is not None and order.generation == turn.generation:
            turn.out_at_ns = now_ns + 2 * turn.after_ns if order.follows else 0

    def forget(self, worker_id: WorkerId) -> None:
        """A worker is no more."""
        self._turns.pop(worker_id, None)

    def answer_at_ns(self, said: WorkerReport) -> int:
        """Return until when a worker's report may wait, 0 if it may not."""
        turn = self._turns.get(said.worker_id)
        if turn is None or said.failure is not None or said.generation != turn.generation:
            return 0
        if said.phase is WorkerPhase.READY:
            return turn.out_at_ns
        is_answer = said.phase in (WorkerPhase.FORMING, WorkerPhase.TRAINING)
        return turn.answer_at_ns if is_answer else 0

    def hold(self, progress: Progress, now_ns: int) -> bool:
        """Return whether a worker's progress waits for its turn; it is kept then."""
        turn = self._turns.get(progress.worker_id)
        if turn is None or progress.generation != turn.generation:
            return False
        if turn.progress is None and now_ns >= turn.progress_at_ns:
            turn.progress_at_ns = now_ns + turn.every_ns
            return False
        turn.progress = progress
        return True

    def take_due(self, now_ns: int) -> list[Progress]:
        """Return the progress of those whose turn it is."""
        found = []
        for turn in self._turns.values():
            if turn.progress is not None and now_ns >= turn.progress_at_ns:
                found.append(turn.progress)
                turn.progress, turn.progress_at_ns = None, now_ns + turn.every_ns
        return found

    def next_deadline_ns(self) -> int | None:
        """Return when the next one that waits has its turn."""
        turns = self._turns.values()
        return min((t.progress_at_ns for t in turns if t.progress is not None), default=None)
