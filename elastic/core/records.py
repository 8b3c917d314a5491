"""Durable records of the coordinator: what the store holds of jobs and nodes."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.core.config import JobSpec
from elastic.core.facts import (
    CheckpointRecord,
    Failure,
    Generation,
    Group,
    JobPhase,
    NodeId,
    WorkerId,
)
from elastic.core.telemetry import Goodput


@dataclass(frozen=True)
class RankFailure:
    """The exception that a worker's code raised."""

    rank: int
    failure: Failure


@dataclass(frozen=True)
class FormerWorker:
    """A worker that is gone.

    Attributes:
        worker_id: "node/serial".
        rank: in its last group, -1 if it was in none.
        generation: of that group, 0 if it was in none.
    """

    worker_id: WorkerId
    rank: int
    generation: Generation


FORMER_MAX = 1000


@dataclass(frozen=True)
class JobRecord:
    """The durable state of one job; written whole.

    Attributes:
        group: the newest group, None before the first.
        generation: of the newest group; never decreases, also while there is no group.
        failures: how often user code raised so far.
        losses: how many workers were lost in a row without a healthy period.
        preemptions: how many nodes an announced drain took from its groups so far.
        checkpoints: recorded and kept, oldest first.
        reason: why it waits, or how it ended.
        failure, failed_worker: the first failure of the last attempt, shown once and last.
        rank_failures: of the group in which that was, in the order of their reports; at most
            `RANK_FAILURES_MAX`.
        result: JSON that rank 0's train function returned.
        metrics: JSON of rank 0's newest report.
        sequence: order of submission.
        min_workers, max_workers: the bounds that a user set later, 0 for those of the spec.
        paused: a user paused it; the phase shows whether it still holds workers.
        stopping: why it ends as soon as it holds no workers, "" if it does not; then `paused`, too.
        preempted_by: the job that it gave all its workers to, and the priorities: "j-1 (priority
            10 over 0)"; "" once it trains again.
        submitter: name of the token or certificate, "" if callers are not identified.
        is_save_requested: the newest group's members must save their state where they leave.
        leaves_for: the job that they leave for, and the priorities; "" for none.
        since_unix_ns: wall clock when it entered its phase, 0 if unknown. For people only: no
            decision may depend on a clock that can be set.
        goodput: the time of its workers by category, when this was written.
        former: workers that it had, oldest first; the newest `FORMER_MAX`. Their output is on
            their nodes.
    """

    spec: JobSpec
    phase: JobPhase
    generation: Generation = 0
    group: Group | None = None
    failures: int = 0
    losses: int = 0
    preemptions: int = 0
    checkpoints: tuple[CheckpointRecord, ...] = ()
    reason: str = ""
    failure: Failure | None = None
    failed_worker: str = ""
    result: str = ""
    metrics: str = ""
    sequence: int = 0
    min_workers: int = 0
    max_workers: int = 0
    paused: bool = False
    preempted_by: str = ""
    submitter: str = ""
    is_save_requested: bool = False
    leaves_for: str = ""
    since_unix_ns: int = 0
    stopping: str = ""
    rank_failures: tuple[RankFailure, ...] = ()
    goodput: Goodput = field(default_factory=Goodput)
    former: tuple[FormerWorker, ...] = ()

    @property
    def bounds(self) -> tuple[int, int]:
        """Return the smallest and largest permitted group size now."""
        return self.min_workers or self.spec.min_workers, self.max_workers or self.spec.max_workers


@dataclass(frozen=True)
class Cordon:
    """A node on which no new workers start, by order of an operator."""

    node_id: NodeId
    reason: str


@dataclass(frozen=True)
class NodesRecord:
    """The durable state of nodes; written whole.

    Attributes:
        cordons: by node, also of nodes that are not connected now.
    """

    cordons: tuple[Cordon, ...] = ()
