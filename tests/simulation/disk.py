"""The simulated store's records; each is passed to the checkers when it becomes durable."""

from __future__ import annotations

from elastic.core.facts import JobId, JobPhase
from elastic.core.records import JobRecord, NodesRecord
from tests.simulation.checkers import Checkers, DurableGroup


class Disk:
    """The content of the store; survives every crash."""

    def __init__(self, checkers: Checkers) -> None:
        """Create an empty store."""
        self.records: dict[JobId, JobRecord] = {}
        self.nodes = NodesRecord()
        self._checkers = checkers

    def write(self, records: tuple[JobRecord, ...]) -> None:
        """Make the records durable, and check them."""
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
