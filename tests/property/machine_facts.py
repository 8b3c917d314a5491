"""Nodes, jobs and messages that the models of agent and worker share."""

from __future__ import annotations

from hypothesis import strategies as st

from elastic.core.config import JobSpec
from elastic.core.facts import (
    Assignment,
    Entry,
    EntryKind,
    ExitCause,
    ExitKind,
    Failure,
    JobId,
    Node,
    NodeId,
    Resources,
    WorkerId,
    WorkerPhase,
    WorkerReport,
)
from elastic.core.messages import (
    Announce,
    Report,
    Reported,
    WorkerUpdate,
)

S = 1_000_000_000
JOB = JobId("j")
WORKERS = [WorkerId(f"n/{serial}") for serial in range(1, 7)]
ME = WORKERS[0]
BOOM = Failure("ValueError", "boom")
KILLED = ExitCause(ExitKind.SIGNAL, 9)
CAUSES = [KILLED, ExitCause(ExitKind.CODE, 0), ExitCause(ExitKind.CODE, 1)]
NODE = Node(NodeId("n"), 1, "10.0.0.1", 4)
GENERATIONS = st.integers(1, 6)
workers_of = st.sampled_from(WORKERS)


def spec(gpus: int) -> JobSpec:
    return JobSpec(
        job_id=JOB,
        name="job",
        entry=Entry(EntryKind.SCRIPT, "t.py"),
        min_workers=1,
        max_workers=8,
        resources_per_worker=Resources.of({"GPU": gpus}),
    )


def announce(worker_id: WorkerId, generation: int) -> Announce:
    return Announce(Assignment(JOB, worker_id, generation, 0, 1, 0, 1, 0, 1, "h:1"))


def update(worker_id: WorkerId, phase: WorkerPhase, generation: int) -> WorkerUpdate:
    cause = KILLED if phase is WorkerPhase.EXITED else None
    return WorkerUpdate(WorkerReport(worker_id, JOB, phase, generation, exit=cause))


def reported(worker_id: WorkerId, generation: int, index: int) -> Reported:
    return Reported(Report(worker_id, JOB, generation, index, 0, "{}", "/c" if index else ""))
