"""What workers in large groups say, held back by their agent until it is their turn.

Rule: only what `policy.spreading` names waits, and the newest of it replaces what waited.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic.core.config import AgentConfig, ns
from elastic.core.messages import Progress
from elastic.core.policy.spreading import answer_after_ns, telemetry_every_ns
from elastic.core.world import Assignment, Generation, WorkerId, WorkerPhase, WorkerReport


@dataclass
class Turn:
    """When one member of a large group speaks.

    Attributes:
        answer_at_ns: that it forms or trains.
        progress_at_ns, every_ns: how far it is, next and from then on.
        progress: what waits for that.
    """

    generation: Generation
    answer_at_ns: int
    progress_at_ns: int
    every_ns: int
    progress: Progress | None = None


class Spreading:
    """Whose turn is when."""

    def __init__(self, config: AgentConfig) -> None:
        """Begin without groups."""
        self._member_ns = ns(config.spread_s_per_member)
        self._turns: dict[WorkerId, Turn] = {}

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
            self._turns[place.worker_id] = Turn(place.generation, at_ns, at_ns, every_ns)

    def forget(self, worker_id: WorkerId) -> None:
        """A worker is no more."""
        self._turns.pop(worker_id, None)

    def answer_at_ns(self, said: WorkerReport) -> int:
        """Return until when a worker's report may wait, 0 if it may not."""
        turn = self._turns.get(said.worker_id)
        is_answer = said.phase in (WorkerPhase.FORMING, WorkerPhase.TRAINING)
        is_fine = is_answer and said.failure is None
        if turn is None or not is_fine or said.generation != turn.generation:
            return 0
        return turn.answer_at_ns

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
