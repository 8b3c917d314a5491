"""Whether the categories of goodput sum to what was allocated, by a count of its own.

Rule: between two events of workers their number is the same; so a job has held as many of them, for
as long, as the events say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastic.core.events.coordinator import CoordinatorEffect
from elastic.core.events.shared import Note
from elastic.core.view import ClusterView, JobView
from elastic.core.world import JobId

CHANGES = frozenset({"recovered", "worker_adopted", "worker_gone", "worker_starting"})
"""With these the number of a job's workers changes."""


@dataclass
class _Held:
    """How much of a job's time is known, and how many workers it has since when."""

    total_ns: int
    count: int
    since_ns: int


class GoodputChecks:
    """Looks at one coordinator's machine, life after life."""

    def __init__(self, fail: Callable[[str, str], None]) -> None:
        """Know nothing; `fail` takes a property that does not hold, and what contradicts it."""
        self._fail = fail
        self._life = 0
        self._held: dict[JobId, _Held] = {}

    def stepped(
        self,
        life: int,
        effects: Sequence[CoordinatorEffect],
        look: Callable[[], ClusterView],
        now_ns: int,
    ) -> None:
        """The machine took a step, of which these effects came."""
        if life != self._life:
            self._life, self._held = life, {}
        if any(isinstance(effect, Note) and effect.name in CHANGES for effect in effects):
            for job in look().jobs:
                self._check(job, now_ns)

    def _check(self, job: JobView, now_ns: int) -> None:
        reported_ns = job.record.goodput.allocated_ns + job.unreported_ns
        held = self._held.get(job.record.spec.job_id)
        if held is not None:
            held.total_ns += held.count * (now_ns - held.since_ns)
            held.count, held.since_ns = len(job.workers), now_ns
            if reported_ns != held.total_ns:
                self._fail(
                    "the categories of goodput sum to what was allocated",
                    f"job {job.record.spec.job_id}: {reported_ns} ns, allocated {held.total_ns} ns",
                )
        else:
            # What it held in the life before is in its record.
            self._held[job.record.spec.job_id] = _Held(reported_ns, len(job.workers), now_ns)
