"""Delays reports of workers in large groups, so that they reach the coordinator spread over time.

Rule: only reports that `policy.pacing` covers are delayed, and a newer one replaces an older one.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic.core.config import AgentConfig, ns
from elastic.core.facts import Assignment, Generation, WorkerId, WorkerPhase, WorkerReport
from elastic.core.messages import LeaveGroup, Progress
from elastic.core.policy.pacing import answer_after_ns, telemetry_every_ns, telemetry_offset_ns


@dataclass
class SendSlot:
    """When the reports of one member of a large group are sent.

    Attributes:
        after_ns: delay between an order and its turn to reply.
        answer_at_ns: for the report that it forms or trains.
        out_at_ns: for the report that it left its group, while the next one is being computed.
        progress_at_ns: for its next progress.
        every_ns: interval of its progress, 0 for none.
        offset_ns: of its turn in this interval.
        turn_ns: one moment of those at which its progress is sent, `every_ns` apart.
        progress: the delayed progress.
        has_stepped: it has reported a step.
    """

    generation: Generation
    after_ns: int
    answer_at_ns: int
    progress_at_ns: int
    every_ns: int
    offset_ns: int
    turn_ns: int
    out_at_ns: int = 0
    progress: Progress | None = None
    has_stepped: bool = False

    def sent(self, now_ns: int) -> None:
        """Set when the progress after this one is due."""
        self.progress, self.progress_at_ns = None, now_ns
        if self.every_ns:
            turns = (now_ns - self.turn_ns) // self.every_ns + 1
            self.progress_at_ns = self.turn_ns + turns * self.every_ns


class Pacer:
    """The send slots of all workers in large groups."""

    def __init__(self, config: AgentConfig) -> None:
        self._member_ns = ns(config.spread_s_per_member)
        self._turns: dict[WorkerId, SendSlot] = {}

    def announced(self, place: Assignment, now_ns: int) -> None:
        """Assign slots to a worker whose group is announced to it.

        What it spent until now is in its next progress, too.
        """
        known = self._turns.get(place.worker_id)
        if known is not None and known.generation == place.generation:
            return
        after_ns = answer_after_ns(place.rank, place.world_size, self._member_ns)
        self.forget(place.worker_id)
        if after_ns:
            every_ns = telemetry_every_ns(place.rank, place.world_size, self._member_ns)
            at_ns = now_ns + after_ns
            self._turns[place.worker_id] = SendSlot(
                generation=place.generation,
                after_ns=after_ns,
                answer_at_ns=at_ns,
                progress_at_ns=at_ns,
                every_ns=every_ns,
                offset_ns=telemetry_offset_ns(place.rank, place.world_size, every_ns),
                turn_ns=at_ns,
            )

    def leave_requested(self, order: LeaveGroup, now_ns: int) -> None:
        """Delay a worker's report that it left its group at once, if another group follows.

        By twice the time: its report about the next group replaces this one. If none follows, its
        last progress is not delayed: it has all the time that was spent.
        """
        turn = self._turns.get(order.worker_id)
        if turn is not None and order.generation == turn.generation:
            if not order.follows:
                turn.every_ns, turn.progress_at_ns = 0, now_ns
            turn.out_at_ns = now_ns + 2 * turn.after_ns if order.follows else 0

    def forget(self, worker_id: WorkerId) -> None:
        """Remove the slots of a worker that is gone, or whose group is over."""
        self._turns.pop(worker_id, None)

    def take_held(self, worker_id: WorkerId) -> Progress | None:
        """Return the delayed progress of a worker, to be sent now, None for none."""
        turn = self._turns.get(worker_id)
        if turn is None:
            return None
        held, turn.progress = turn.progress, None
        return held

    def answer_at_ns(self, report: WorkerReport) -> int:
        """Return until when a worker's report may be delayed, 0 if it may not."""
        turn = self._turns.get(report.worker_id)
        if turn is None or report.failure is not None or report.generation != turn.generation:
            return 0
        if report.phase is WorkerPhase.READY:
            return turn.out_at_ns
        is_answer = report.phase in (WorkerPhase.FORMING, WorkerPhase.TRAINING)
        return turn.answer_at_ns if is_answer else 0

    def hold(self, progress: Progress, now_ns: int) -> bool:
        """Return whether a worker's progress is delayed; if so, it is kept here."""
        turn = self._turns.get(progress.worker_id)
        if turn is None or progress.generation != turn.generation:
            return False
        if progress.steps and not turn.has_stepped:  # People wait for the first step.
            turn.has_stepped = True
            turn.progress_at_ns = min(turn.progress_at_ns, now_ns + turn.after_ns)
            # All members make it at the same time: each counts its turns from there.
            turn.turn_ns = now_ns + turn.offset_ns
        if now_ns >= turn.progress_at_ns:
            turn.sent(now_ns)
            return False
        turn.progress = progress
        return True

    def reconnected(self, now_ns: int) -> None:
        """Let all report soon: a coordinator that was restarted knows no progress."""
        for turn in self._turns.values():
            turn.progress_at_ns = min(turn.progress_at_ns, now_ns + turn.after_ns)

    def take_due(self, now_ns: int) -> list[Progress]:
        found = []
        for turn in self._turns.values():
            if turn.progress is not None and now_ns >= turn.progress_at_ns:
                found.append(turn.progress)
                turn.sent(now_ns)
        return found

    def next_deadline_ns(self) -> int | None:
        """Return when the next delayed progress is due, None for none."""
        turns = self._turns.values()
        return min((t.progress_at_ns for t in turns if t.progress is not None), default=None)
