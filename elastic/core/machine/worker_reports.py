"""The reports of one worker in one generation that the coordinator has not answered yet.

Rule: each is answered once, and none is left without an answer when the generation is over,
except for those whose thread was interrupted for that very reason.
"""

from __future__ import annotations

from elastic.core.events.worker import (
    NEXT_INDEX,
    ResolveReport,
    StateSaved,
    UserReported,
    Validated,
)
from elastic.core.messages import Assign, Report, ReportAck
from elastic.core.world import CheckpointStatus, Generation, RefusalCode, is_of_script


class ReportBook:
    """Numbers reports, and remembers who waits."""

    def __init__(self) -> None:
        """Begin before the first report."""
        self._count = 0
        self._unanswered: dict[int, None] = {}

    def reported(self, event: UserReported, assign: Assign) -> Report:
        """Take a report of the script; the book numbers it, unless it has its number."""
        index = event.index
        if index == NEXT_INDEX:
            index, self._count = self._count, self._count + 1
        return self._sent(event, assign, index, event.rank, status=event.status)

    def found_out(self, event: StateSaved | Validated, assign: Assign, rank: int) -> Report:
        """Take an automatic checkpoint, or what a validation came to; it has its number."""
        if isinstance(event, StateSaved):
            return self._sent(event, assign, event.index, rank, request=event.request)
        return self._sent(event, assign, event.index, rank, status=event.status)

    def acked(self, ack: ReportAck) -> list[ResolveReport]:
        """Return the answer that the waiting thread is to have; nothing the second time."""
        if ack.index not in self._unanswered:
            return []
        del self._unanswered[ack.index]
        return [ResolveReport(ack.generation, ack.index, ack.accepted, ack.reason, ack.code)]

    def turn_over(self, generation: Generation) -> list[ResolveReport]:
        """Begin anew for the next generation; returns answers for those who ask again."""
        reason = f"generation {generation} is over"
        left = [index for index in self._unanswered if not is_of_script(index)]
        self._count, self._unanswered = 0, {}
        code = RefusalCode.GENERATION_OVER
        return [ResolveReport(generation, index, False, reason, code) for index in left]

    def _sent(
        self,
        event: UserReported | StateSaved | Validated,
        assign: Assign,
        index: int,
        rank: int,
        *,
        status: CheckpointStatus = CheckpointStatus.COMMITTED,
        request: int = 0,
    ) -> Report:
        self._unanswered[index] = None
        return Report(
            worker_id=assign.worker_id,
            job_id=assign.spec.job_id,
            generation=event.generation,
            index=index,
            rank=rank,
            metrics=event.metrics,
            checkpoint=event.checkpoint,
            status=status,
            request=request,
        )


def unheard(event: StateSaved | Validated) -> ResolveReport:
    """Return the answer between two groups, when nobody could consent."""
    reason = f"generation {event.generation} does not train"
    code = RefusalCode.GENERATION_OVER
    return ResolveReport(event.generation, event.index, False, reason, code)
