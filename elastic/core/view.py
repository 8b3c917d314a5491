"""The coordinator's views: read-only data for status, command line and pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from elastic.core.facts import (
    ENDED,
    Generation,
    Group,
    JobId,
    Node,
    NodeId,
    NodePhase,
    WorkerReport,
)
from elastic.core.records import Cordon, JobRecord
from elastic.core.telemetry import Telemetry, first_reported


@dataclass(frozen=True)
class NodeView:
    """One node.

    Attributes:
        since_ns: when it entered its phase, on the coordinator's monotonic clock.
        free_slots: workers that could still start here.
        reason: why it drains, was lost or is cordoned, "" otherwise.
        cordoned: no new workers start here until an operator uncordons it.
    """

    node: Node
    phase: NodePhase
    since_ns: int
    free_slots: int
    reason: str = ""
    cordoned: bool = False


@dataclass(frozen=True)
class WorkerView:
    """One worker of a job.

    Attributes:
        rank: in the newest group, -1 if it is not part of it.
        steps: optimizer steps in its generation, as last reported.
        telemetry: of its newest steps.
    """

    report: WorkerReport
    node_id: NodeId
    rank: int
    since_ns: int
    steps: int = 0
    telemetry: Telemetry = field(default_factory=Telemetry)


@dataclass(frozen=True)
class CopyView:
    """A copy of a job's state in the memory of another node.

    Attributes:
        source: the node that sends it now, or whose rows it has; "" for none.
        generation, steps: of the snapshot.
        since_ns: when the node reported it.
    """

    node_id: NodeId
    source: NodeId
    generation: Generation
    steps: int
    since_ns: int


@dataclass(frozen=True)
class JobView:
    """One job, with the current reason for waiting (or for how it ended) in one line.

    Attributes:
        copies: of its state, by node and source.
        unreported_ns: time of its workers that is not in `record.goodput` yet, because they have
            not reported it: about a second for each.
    """

    record: JobRecord
    reason: str
    since_ns: int
    workers: tuple[WorkerView, ...]
    copies: tuple[CopyView, ...] = ()
    unreported_ns: int = 0

    def has_ended(self) -> bool:
        """Return whether the outcome is final; workers may still be ending."""
        return self.record.phase in ENDED

    @cached_property
    def telemetry(self) -> Telemetry:
        """Return the telemetry of the lowest rank that has reported any."""
        members = (worker for worker in self.workers if worker.rank >= 0)
        return first_reported(one.telemetry for one in sorted(members, key=lambda one: one.rank))


@dataclass(frozen=True)
class JobSample:
    """What the history keeps of a job each second, without a look at each worker."""

    job_id: JobId
    group: Group | None
    telemetry: Telemetry


@dataclass(frozen=True)
class ClusterView:
    """Everything, at one moment; nodes sorted by id, jobs by order of submission.

    Attributes:
        cordons: by node, also of nodes that are not connected now.
    """

    now_ns: int
    nodes: tuple[NodeView, ...]
    jobs: tuple[JobView, ...]
    cordons: tuple[Cordon, ...] = ()
