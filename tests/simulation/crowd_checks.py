"""Properties when several jobs share a cluster: bounds, pauses, cordons.

Rule: as all checkers, they compare only what is visible outside: records as they become durable,
and users' requests. A property that does not hold is returned by name, "" for none.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.core.facts import JobId
from elastic.core.records import JobRecord


@dataclass
class CrowdChecks:
    """Properties of queue, pause and scale, over one run.

    Attributes:
        resumes: jobs that a user has resumed.
        asked: (min, max) that users requested, by job.
        bounds: durable (min, max) of each job.
        micro_batches: micro-batches per step of a job, where that is more than max.
        went_for: the job for which each job was last asked to make room.
        unsaved: a job of which storage accepts no checkpoint, "" for none.
        careful: jobs that always get time to save before they are interrupted.
    """

    resumes: dict[JobId, None] = field(default_factory=dict)
    asked: dict[JobId, list[tuple[int, int]]] = field(default_factory=dict)
    bounds: dict[JobId, tuple[int, int]] = field(default_factory=dict)
    micro_batches: dict[JobId, int] = field(default_factory=dict)
    went_for: dict[str, str] = field(default_factory=dict)
    unsaved: str = ""
    careful: set[JobId] = field(default_factory=set)
    _records: dict[JobId, JobRecord] = field(default_factory=dict)

    def persisted(self, record: JobRecord) -> str:
        """Check a job's record that became durable."""
        job_id = record.spec.job_id
        before = self._records.get(job_id)
        self._records[job_id] = record
        self.bounds[job_id] = record.bounds
        goes_on = before is not None and before.paused and not record.paused
        if goes_on and job_id not in self.resumes:
            return "a job that was paused goes on only when a user says so"
        low, high = record.bounds
        requests = [(record.spec.min_workers, record.spec.max_workers), *self.asked.get(job_id, [])]
        if low not in [w[0] for w in requests] or high not in [w[1] for w in requests]:
            return "a job has the bounds that somebody asked for"
        most = max(record.spec.max_workers, self.micro_batches.get(job_id, 0))
        if high > most and not record.spec.own_steps and not self._has_own_loop(record):
            return "no group is larger than a step has micro-batches"
        is_news = record.preempted_by and (before is None or not before.preempted_by)
        return self._taken_down(record) if is_news else ""

    def _has_own_loop(self, record: JobRecord) -> bool:
        """Return whether a job's code has shown that this runtime does not divide its steps."""
        is_cut = record.spec.job_id in self.micro_batches
        return not is_cut and any(not one.automatic for one in record.checkpoints)

    def _taken_down(self, record: JobRecord) -> str:
        """Return the property that a job's full preemption by another violates."""
        first = self._records.get(JobId(record.preempted_by.partition(" ")[0]))
        if first is None or first.spec.priority <= record.spec.priority:
            return "a job is taken down for one of greater priority only"
        if not record.checkpoints:
            return "no job is taken down that has nothing to go on from"
        return ""

    def waits(self, job_id: JobId) -> str:
        """Check the job of the greatest priority, long after its submission."""
        record = self._records.get(job_id)
        has_trained = record is not None and record.generation > 0
        return "" if has_trained else "nobody waits for jobs of lower priority"

    def in_vain(self, job_id: JobId) -> str:
        """Check the jobs that made room for a job, long after they did."""
        left = [
            one
            for one in self._records.values()
            if one.preempted_by.partition(" ")[0] == job_id
            and one.phase.value == "pending"
            # A job that was already leaving for another one counts for the later one.
            and self.went_for.get(one.spec.job_id) == job_id
        ]
        return "nobody gives way in vain" if left and self.waits(job_id) else ""
