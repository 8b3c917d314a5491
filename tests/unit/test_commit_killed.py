"""SIGKILL between any two calls that a checkpoint makes to the file system, or to the coordinator.

A child does one checkpoint, and kills itself at the first such call, the second, and so on; then
the run goes on as its next group does.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from elastic.core.events.worker import CheckpointWritten, UserReported
from elastic.core.facts import CheckpointRecord, JobId, ReportKind
from elastic.core.policy.retention import keep
from elastic.runtime.clock import SystemClock
from elastic.storage.integrity import verify
from elastic.storage.run_directory import RunDirectory
from elastic.worker.base.mailboxes import ReportAnswer
from elastic.worker.checkpoint.committer import Committer
from elastic.worker.checkpoint.report_votes import ReportVotes
from elastic.worker.checkpoint.reported_checkpoints import ReportOrigin
from elastic.worker.checkpoint.reporting import Reporter
from elastic.worker.checkpoint.snapshot import RankInfo, SnapshotId
from tests.unit.saving_under_test import Run
from tests.unit.test_worker_pruning import spec

CALLS = {"open", "os.rename", "os.remove", "os.link", "os.mkdir", "os.rmdir", "os.scandir"}
KEPT = 1


class Books:
    """A coordinator that outlives the child: what it has recorded lies in a file."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "records.json"
        self.answers: dict[tuple[int, ReportKind, int], ReportAnswer] = {}

    def records(self) -> list[CheckpointRecord]:
        rows = json.loads(self.file.read_text()) if self.file.exists() else []
        return [CheckpointRecord(*row, kind=ReportKind(kind)) for *row, kind in rows]

    def newest(self, kind: ReportKind) -> str:
        """Return what `Assignment` says of a kind."""
        return [record.path for record in self.records() if record.kind is kind][-1]

    def expect_answer(self, generation: int, kind: ReportKind, index: int) -> ReportAnswer:
        return self.answers.setdefault((generation, kind, index), ReportAnswer())

    def post(self, item: Any) -> None:
        assert isinstance(item, (UserReported, CheckpointWritten))
        kind = ReportKind.SCRIPT if isinstance(item, UserReported) else ReportKind.AUTOMATIC
        told = CheckpointRecord(item.checkpoint, item.generation, item.index, kind=kind)
        known = [record for record in self.records() if record.path != told.path]
        rows = [
            [one.path, one.generation, one.index, one.kind.value]
            for one in keep([*known, told], num_to_keep=KEPT)
        ]
        beside = self.file.with_suffix(".new")
        beside.write_text(json.dumps(rows))
        beside.rename(self.file)
        answer = self.answers.pop((item.generation, kind, item.index))
        answer.accepted = True
        answer.ready.set()

    def deliver(self) -> None:
        pass

    def leave_request(self, generation: int) -> None:
        return None


def report(folder: Path, books: Books, generation: int) -> None:
    """Report a checkpoint, as the only member of this generation."""
    source = folder.parent / "source"
    source.mkdir(exist_ok=True)
    for name in ("model", "optimizer"):
        (source / name).write_text(f"{name} {generation}")
    run = RunDirectory(str(folder / "run"))
    committer = Committer(run, spec(KEPT), books)
    newest = books.newest(ReportKind.SCRIPT) if books.records() else ""
    committer.enter(generation, [newest], leads=False)
    reporter = Reporter(
        ReportOrigin(JobId("j1"), generation, 0, 1),
        run,
        votes=ReportVotes(dist.HashStore(), 0, world_size=1),
        link=books,  # type: ignore[arg-type]
        clock=SystemClock(),
        newest_checkpoint=newest,
        committer=committer,
    )
    reporter.report("{}", str(source))
    committer.close()


class Still(Run):
    """A run without autograd, whose threads a forked child does not have."""

    def step(self) -> None:
        self.model.seen += 1
        self.steps += 1


def save(folder: Path, books: Books, generation: int) -> None:
    """Take an automatic checkpoint, as the only member of this generation."""
    run = Still(folder / "run", coordinator=books, num_to_keep=KEPT)  # type: ignore[arg-type]
    (snapshotter,) = run.savers
    snapshotter.enter(RankInfo(generation))
    if books.records():
        newest = books.newest(ReportKind.AUTOMATIC)
        committer = snapshotter._writer._committer  # type: ignore[union-attr]
        committer.enter(generation, [newest], leads=False)
        markers = dict(run.directory.automatic())
        run.steps = int(markers[run.directory.name_of(newest)].about("steps"))
        snapshotter.newest = SnapshotId(run.steps, run.steps, generation)
    run.save()
    snapshotter.close()


def killed_at(call: int, folder: Path, act: Callable[[], None]) -> bool:
    """Act in a child that dies before its n-th call; return whether it came so far."""
    pid = os.fork()
    if pid:
        return os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    count = 0

    def look(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if event in CALLS and str(args[0]).startswith(str(folder)):
            count += 1
            if count == call:
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        sys.addaudithook(look)
        act()
    finally:
        os._exit(0)


@pytest.mark.parametrize(
    ("kind", "take"), [(ReportKind.SCRIPT, report), (ReportKind.AUTOMATIC, save)]
)
def test_nothing_that_was_recorded_is_lost(
    tmp_path: Path, kind: ReportKind, take: Callable[[Path, Books, int], None]
) -> None:
    before = tmp_path / "before"
    before.mkdir()
    kept = 1 if kind is ReportKind.SCRIPT else 2
    for generation in range(1, kept + 1):
        take(before, Books(before), generation)
    call, outcomes, is_killed = 0, set(), True
    while is_killed:
        call += 1
        folder = tmp_path / "now"
        shutil.copytree(before, folder)
        text = Books(folder).file.read_text().replace(str(before), str(folder))
        Books(folder).file.write_text(text)
        books, run = Books(folder), RunDirectory(str(folder / "run"))
        is_killed = killed_at(call, folder, lambda: take(folder, books, 5))  # noqa: B023
        recorded = [run.name_of(record.path) for record in books.records()]
        run.finish(recorded[-1])
        found = [name for name, _ in run.committed()]
        assert found[-1] == recorded[-1], call
        assert set(recorded) <= set(found), call
        for name, marker in run.committed():
            verify(run.checkpoint(name), marker)
        outcomes.add((len(found), len(run.names()), recorded[-1]))
        if call % 4 == 0:  # The next groups take as long as all that comes before.
            for generation in (6, 7):
                take(folder, books, generation)
            assert {run.name_of(one.path) for one in books.records()} == {*run.names()}, call
            assert len(run.names()) == kept, call
        shutil.rmtree(folder)
    assert call > 20
    assert len(outcomes) > 3
