"""What must hold when several jobs share a cluster: limits, bounds, pauses, cordons.

Rule: as for all checkers, only what became visible outside is compared: records as they become
durable, and what users asked for. A property that does not hold is returned by name, "" for none.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.core.events.coordinator import JobRecord
from elastic.core.world import JobId


@dataclass
class CrowdChecks:
    """Properties of queue, pause and scale, over one run.

    Attributes:
        limits: largest number of workers of a project, for projects that have one.
        resumes: jobs that some user wanted to go on.
        asked: (min, max) that users asked for, by job.
        bounds: (min, max) of each job, as it is durable.
    """

    limits: dict[str, int] = field(default_factory=dict)
    resumes: dict[JobId, None] = field(default_factory=dict)
    asked: dict[JobId, list[tuple[int, int]]] = field(default_factory=dict)
    bounds: dict[JobId, tuple[int, int]] = field(default_factory=dict)
    _records: dict[JobId, JobRecord] = field(default_factory=dict)

    def persisted(self, record: JobRecord) -> str:
        """A record became durable."""
        job_id = record.spec.job_id
        before = self._records.get(job_id)
        self._records[job_id] = record
        self.bounds[job_id] = record.bounds
        goes_on = before is not None and before.paused and not record.paused
        if goes_on and job_id not in self.resumes:
            return "a job that was paused goes on only when a user says so"
        low, high = record.bounds
        wishes = [(record.spec.min_workers, record.spec.max_workers), *self.asked.get(job_id, [])]
        if low not in [w[0] for w in wishes] or high not in [w[1] for w in wishes]:
            return "a job has the bounds that somebody asked for"
        if high > record.spec.max_workers:
            return "no group is larger than a step has micro-batches"
        return self._above_limit(record, before)

    def _above_limit(self, record: JobRecord, before: JobRecord | None) -> str:
        """Return what is wrong if a new group takes its project above the limit."""
        if before is not None and before.generation == record.generation:
            return ""
        project = record.spec.project
        sizes = [
            len(other.group.members)
            for other in self._records.values()
            if other.spec.project == project and other.group and other.phase.value == "running"
        ]
        if sum(sizes) > self.limits.get(project, sum(sizes)):
            return f"no project has more workers than its limit ({sizes})"
        return ""
