"""Checks that the categories of goodput sum to the allocated time, which it counts itself.

Rule: a job's number of workers is constant between two events of workers, so the events give the
time for which it has held each worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastic.core.events.coordinator import CoordinatorEffect
from elastic.core.events.shared import Note
from elastic.core.facts import JobId
from elastic.core.view import ClusterView, JobView

CHANGES = frozenset({"recovered", "worker_adopted", "worker_gone", "worker_starting"})
"""Notes with which the number of a job's workers changes."""


@dataclass
class _Held:
    """The time of a job that is counted so far, and its number of workers since `since_ns`."""

    total_ns: int
    count: int
    since_ns: int


class GoodputChecks:
    """Checks one coordinator's state machine, over all its lives."""

    def __init__(self, fail: Callable[[str, str], None]) -> None:
        """Start without jobs; `fail` receives a violated property and its counterexample."""
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
        """Check the machine's jobs after a step with these effects."""
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
            # Its record has the time of the coordinator's earlier lives.
            self._held[job.record.spec.job_id] = _Held(reported_ns, len(job.workers), now_ns)
