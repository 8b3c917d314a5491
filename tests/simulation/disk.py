"""The simulated store's records: what is durable, told to the checkers as it becomes so."""

from __future__ import annotations

from elastic.core.events import coordinator as events
from elastic.core.world import JobId, JobPhase
from tests.simulation.checkers import Checkers, DurableGroup


class Disk:
    """What the store holds; survives every crash."""

    def __init__(self, checkers: Checkers) -> None:
        """Begin empty."""
        self.records: dict[JobId, events.JobRecord] = {}
        self.nodes = events.NodesRecord()
        self._checkers = checkers

    def write(self, records: tuple[events.JobRecord, ...]) -> None:
        """The records are durable from here on."""
        for record in records:
            job_id = record.spec.job_id
            group = record.group
            durable = DurableGroup(group.generation, group.worker_ids()) if group else None
            wrong = self._checkers.crowd.persisted(record)
            self._checkers.failed(wrong, f"job {job_id}: {record.reason}")
            self._checkers.persisted(job_id, durable, record.generation, record.phase.value)
            if record.phase is JobPhase.SUCCEEDED:
                self._checkers.succeeded(job_id, record.generation, record.metrics)
            if record.phase is JobPhase.FAILED:
                self._checkers.ended_by_script(job_id, record)
            self._checkers.charged(job_id, record.losses, record.preemptions)
            for checkpoint in record.checkpoints:
                self._checkers.checkpoint_recorded(
                    job_id, checkpoint.path, checkpoint.generation, record.generation
                )
            self.records[job_id] = record
