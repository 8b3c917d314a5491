"""A worker's machine, and workers brought to each phase in which a test may begin."""

from __future__ import annotations

import pytest

from elastic.core.config import JobSpec
from elastic.core.events.shared import Note
from elastic.core.events.worker import (
    GroupFailed,
    GroupFormed,
    OrderReceived,
    SendPipe,
    Started,
    StoreOpened,
    TrainReturned,
    WorkerEffect,
    WorkerEvent,
)
from elastic.core.facts import (
    Assignment,
    Entry,
    EntryKind,
    JobId,
    WorkerId,
    WorkerPhase,
    WorkerReport,
)
from elastic.core.machine.worker import WorkerMachine
from elastic.core.messages import (
    Announce,
    Assign,
    LeaveGroup,
    PipeToWorker,
    WorkerUpdate,
)

ME = WorkerId("a/1")
JOB = JobId("j")
SPEC = JobSpec(
    job_id=JOB, name="job", entry=Entry(EntryKind.SCRIPT, "t.py"), min_workers=1, max_workers=4
)
ASSIGN = Assign(ME, SPEC, "10.0.0.1")


def assignment(generation: int, worker_id: WorkerId = ME) -> Assignment:
    return Assignment(JOB, worker_id, generation, 0, 2, 0, 1, 0, 2, "10.0.0.1:5000")


def announce(generation: int) -> Announce:
    return Announce(assignment(generation))


def leave(generation: int, *, at_boundary: bool) -> LeaveGroup:
    return LeaveGroup(ME, generation, at_boundary, "why")


class Worker:
    """A machine under test; `told` and `event` return effects, notes left out."""

    def __init__(self) -> None:
        self.machine = WorkerMachine()
        self.notes: list[Note] = []
        self.reports: list[WorkerReport] = []
        self.now_ns = 0

    def event(self, event: WorkerEvent) -> list[WorkerEffect]:
        self.now_ns += 1_000_000
        effects = self.machine.step(event, self.now_ns)
        self.notes += [effect for effect in effects if isinstance(effect, Note)]
        for effect in effects:
            if isinstance(effect, SendPipe) and isinstance(effect.message, WorkerUpdate):
                self.reports.append(effect.message.report)
        return [effect for effect in effects if not isinstance(effect, Note)]

    def told(self, message: PipeToWorker) -> list[WorkerEffect]:
        return self.event(OrderReceived(message))

    @property
    def report(self) -> WorkerReport:
        return self.reports[-1]

    def stands(self) -> tuple[WorkerPhase, int]:
        return self.report.phase, self.report.generation


def spare() -> Worker:
    worker = Worker()
    worker.event(Started(77))
    return worker


def setting_up() -> Worker:
    worker = spare()
    worker.told(ASSIGN)
    return worker


def ready() -> Worker:
    worker = setting_up()
    worker.event(StoreOpened("10.0.0.1:5000"))
    return worker


def forming(generation: int = 1) -> Worker:
    worker = ready()
    worker.told(announce(generation))
    return worker


def training(generation: int = 1) -> Worker:
    worker = forming(generation)
    worker.event(GroupFormed(generation))
    return worker


def broken(generation: int = 1) -> Worker:
    worker = forming(generation)
    worker.event(GroupFailed(generation, "no"))
    return worker


def finished(generation: int = 1) -> Worker:
    worker = training(generation)
    worker.event(TrainReturned(generation, "7"))
    return worker


EVERYWHERE = pytest.mark.parametrize(
    "make",
    [spare, setting_up, ready, forming, training, broken, finished],
    ids=lambda make: make.__name__,
)
