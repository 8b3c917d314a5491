"""The unacknowledged reports of one worker in one group.

Rule: each is answered once, and none is left unanswered when the generation is over.
"""

from __future__ import annotations

from dataclasses import replace

from elastic.core.events.worker import (
    NEXT_INDEX,
    CheckpointWritten,
    ResolveReport,
    UserReported,
    Validated,
)
from elastic.core.facts import Generation, RefusalCode, ReportKind
from elastic.core.messages import Assign, Report, ReportAck

Reporting = UserReported | CheckpointWritten | Validated


class ReportBook:
    """Numbers reports, and remembers the unanswered ones."""

    def __init__(self) -> None:
        self._count = 0
        self._unanswered: dict[tuple[ReportKind, int], None] = {}

    def reported(self, event: Reporting, assign: Assign, rank: int) -> Report:
        """Take a report of a worker of this rank; one of the script may have no number yet."""
        index = event.index
        if index == NEXT_INDEX:
            index, self._count = self._count, self._count + 1
        kind = _kind(event)
        self._unanswered[kind, index] = None
        report = Report(
            worker_id=assign.worker_id,
            job_id=assign.spec.job_id,
            generation=event.generation,
            index=index,
            rank=event.rank if isinstance(event, UserReported) else rank,
            metrics=event.metrics,
            checkpoint=event.checkpoint,
            kind=kind,
        )
        if isinstance(event, CheckpointWritten):
            return replace(report, request=event.request)
        return replace(report, status=event.status)

    def acked(self, ack: ReportAck) -> list[ResolveReport]:
        """Return the answer for the waiting thread; empty if it was answered before."""
        key = (ack.kind, ack.index)
        if key not in self._unanswered:
            return []
        del self._unanswered[key]
        return [
            ResolveReport(
                ack.generation, ack.index, ack.accepted, ack.reason, ack.code, kind=ack.kind
            )
        ]

    def close(self, generation: Generation) -> list[ResolveReport]:
        """Return the answers for waiting threads, now that the group is over."""
        reason = f"generation {generation} is over"
        return [_over(generation, index, kind, reason) for kind, index in self._unanswered]


def refused(event: Reporting) -> ResolveReport:
    """Return the answer between two groups, when a report cannot be accepted."""
    reason = f"generation {event.generation} does not train"
    return _over(event.generation, event.index, _kind(event), reason)


def _over(generation: Generation, index: int, kind: ReportKind, reason: str) -> ResolveReport:
    return ResolveReport(generation, index, False, reason, RefusalCode.GENERATION_OVER, kind=kind)


def _kind(event: Reporting) -> ReportKind:
    if isinstance(event, UserReported):
        return ReportKind.SCRIPT
    return ReportKind.AUTOMATIC if isinstance(event, CheckpointWritten) else ReportKind.VALIDATION
