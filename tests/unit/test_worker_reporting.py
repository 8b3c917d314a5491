"""`train.report` by several ranks at once: each is a thread; they share a store and a directory."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from elastic.core.config import JobSpec
from elastic.core.events.worker import (
    RequestLeave,
    TrainLeft,
    TrainReturned,
    UserReported,
    WorkerEvent,
)
from elastic.core.facts import Generation, JobId, ReportKind
from elastic.core.messages import Progress
from elastic.errors import GroupError, StorageError, UsageError
from elastic.runtime.clock import SystemClock
from elastic.storage.files import Files
from elastic.storage.run_directory import RunDirectory
from elastic.worker.base.interrupt import GroupChanged, Interrupter
from elastic.worker.base.mailboxes import Mailboxes, ReportAnswer
from elastic.worker.checkpoint import report_votes
from elastic.worker.checkpoint import reported_checkpoints as reported
from elastic.worker.checkpoint.committer import Committer
from elastic.worker.checkpoint.delivery import NO_PART, CheckpointUploadMode, DeliveredParts
from elastic.worker.checkpoint.report_votes import ReportVotes
from elastic.worker.checkpoint.reported_checkpoints import ReportOrigin
from elastic.worker.checkpoint.reporting import Reporter
from elastic.worker.process.runner import Runner, _UserCall
from tests.harness.faulty_storage import Faults
from tests.patience import DEADLINE_S, is_set, wait_for
from tests.strategies import SCRIPT

SPEC = JobSpec(job_id=JobId("j1"), name="a", entry=SCRIPT, min_workers=1, max_workers=1)


@dataclass
class Coordinator:
    """What a rank's link leads to; answers as it is told."""

    request_reason: str = ""
    answers: bool = True
    accepts: bool = True
    posted: list[UserReported] = field(default_factory=list)
    waiting: list[ReportAnswer] = field(default_factory=list)

    def come_back(self) -> None:
        """Answer all that was asked, and whatever is asked from now on."""
        self.answers = True
        for answer in self.waiting:
            answer.ready.set()

    def deliver(self) -> None:
        pass

    def post(self, item: WorkerEvent | Progress) -> None:
        assert isinstance(item, UserReported)
        self.posted.append(item)

    def leave_request(self, generation: Generation) -> RequestLeave | None:
        return RequestLeave(generation, self.request_reason) if self.request_reason else None

    def expect_answer(self, generation: Generation, kind: ReportKind, index: int) -> ReportAnswer:
        answer = ReportAnswer(accepted=self.accepts, reason="because")
        self.waiting.append(answer)
        if self.answers:
            answer.ready.set()
        return answer


@dataclass
class Rank:
    """One rank's view of a group, and what its calls of `report` came to."""

    rank: int
    reporter: Reporter
    link: Coordinator
    barrier: threading.Barrier
    """Of all ranks, until one of them fails."""

    def report(self, metrics: dict[str, Any], checkpoint: Path | None = None) -> None:
        path = None if checkpoint is None else str(checkpoint)
        self.reporter.report(json.dumps(metrics), path)


def run_group(
    run_path: Path | str,
    links: list[Coordinator],
    train: Callable[[Rank], None],
    *,
    is_over: Callable[[], bool] = lambda: False,
) -> list[BaseException | None]:
    """Run `train` on as many ranks as there are links; return what each raised."""
    store = dist.HashStore()
    barrier = threading.Barrier(len(links))

    def watch() -> None:
        if barrier.broken:
            raise GroupError("another rank has failed")

    def one(rank: int) -> BaseException | None:
        run = RunDirectory(str(run_path))
        committer = Committer(run, SPEC, links[rank])
        reporter = Reporter(
            ReportOrigin(JobId("j1"), 2, rank, len(links)),
            run,
            committer=committer,
            votes=ReportVotes(store, rank, world_size=len(links), watch=watch),
            link=links[rank],
            clock=SystemClock(),
            newest_checkpoint="before",
            is_over=is_over,
        )
        try:
            train(Rank(rank, reporter, links[rank], barrier))
        except AssertionError as error:
            barrier.abort()
            return error
        except BaseException as error:
            return error
        finally:
            committer.close()
        return None

    with ThreadPoolExecutor(len(links)) as pool:
        futures = [pool.submit(one, rank) for rank in range(len(links))]
        return [future.result(DEADLINE_S) for future in futures]


def directory(path: Path, **texts: str) -> Path:
    path.mkdir(parents=True)
    for name, text in texts.items():
        (path / name).write_text(text)
    return path


def committed(run_path: Path) -> list[str]:
    return sorted(path.parent.name for path in run_path.glob("checkpoints/*/_COMMITTED"))


def test_one_rank_that_cannot_store_its_part_fails_the_checkpoint_for_all(tmp_path: Path) -> None:
    links = [Coordinator() for _ in range(3)]
    seen = []

    def train(rank: Rank) -> None:
        part = directory(tmp_path / f"part{rank.rank}", **{f"shard{rank.rank}": "x"})
        with pytest.raises(StorageError) as caught:
            rank.report({}, part if rank.rank != 1 else tmp_path / "not-there")
        seen.append(str(caught.value))
        rank.report({}, part)

    run = tmp_path / "run"
    assert run_group(run, links, train) == [None] * 3
    assert len(set(seen)) == 1
    assert "rank 1" in seen[0]
    assert "not-there" in seen[0]
    (name,) = committed(run)
    assert name.endswith("000001")
    assert [path.name for path in (run / "checkpoints").iterdir()] == [name]


def test_the_same_file_from_several_ranks_is_stored_once_if_it_has_one_size(
    tmp_path: Path,
) -> None:
    links = [Coordinator(), Coordinator()]

    def train(rank: Rank) -> None:
        rank.report({}, directory(tmp_path / f"same{rank.rank}", model="xy"))
        rank.report({}, directory(tmp_path / f"differs{rank.rank}", model="x" * rank.rank))

    run = tmp_path / "run"
    errors = run_group(run, links, train)
    assert len(committed(run)) == 1
    assert all("ranks 0 and 1 both have a file model" in str(error) for error in errors)


def test_nobody_leaves_while_the_coordinator_does_not_record_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reported, "LEAVING_TIMEOUT_S", 0.05)
    links = [Coordinator(request_reason="join", answers=False) for _ in range(2)]

    def train(rank: Rank) -> None:
        rank.report({}, directory(tmp_path / f"first{rank.rank}", model="x"))
        assert committed(tmp_path / "run") == []
        rank.barrier.wait(DEADLINE_S)
        links[rank.rank].come_back()
        rank.report({}, directory(tmp_path / f"second{rank.rank}", model="x"))

    errors = run_group(tmp_path / "run", links, train)
    assert [type(error) for error in errors] == [GroupChanged, GroupChanged]
    assert len(committed(tmp_path / "run")) == 2


def test_without_a_coordinator_training_goes_on_and_the_markers_come_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reported, "TIMEOUT_S", 0.05)
    links, run = [Coordinator(answers=False) for _ in range(2)], tmp_path / "run"

    def train(rank: Rank) -> None:
        for epoch in range(3):
            rank.report({}, directory(tmp_path / f"e{epoch}r{rank.rank}", **{str(rank.rank): "x"}))
            assert committed(run) == []
            assert rank.reporter.newest_checkpoint == "before"
        with pytest.raises(StorageError, match="000002 was reported already"):
            rank.reporter.report("{}", str(tmp_path / f"e0r{rank.rank}"), names[-1])
        rank.barrier.wait(DEADLINE_S)
        links[rank.rank].come_back()
        rank.reporter.finish()
        wait_for(lambda: committed(run) == names)
        assert rank.reporter.newest_checkpoint.endswith(names[-1])

    names = [f"checkpoint-j1-g000002-00000{epoch}" for epoch in range(3)]
    assert run_group(run, links, train) == [None, None]
    told = sorted(links[0].posted, key=lambda one: one.index)
    assert [one.checkpoint != "" for one in told] == [True] * 3 + [False]


def test_a_marker_that_storage_refuses_comes_with_the_next_checkpoint(tmp_path: Path) -> None:
    faults, run = Faults(tmp_path), tmp_path / "run"

    def train(rank: Rank) -> None:
        rank.report({}, directory(tmp_path / "first", model="x"))
        assert committed(run) == []  # The coordinator has it, though.
        name = rank.link.posted[0].checkpoint.rpartition("/")[2]
        with pytest.raises(StorageError, match="was reported already"):
            rank.reporter.report("{}", str(tmp_path / "first"), name)
        faults.remove()
        rank.report({}, directory(tmp_path / "second", model="x"))
        assert len(committed(run)) == 2

    faults.add("denied", on="write", match="*_COMM*")
    assert run_group(f"faulty://{run}", [Coordinator()], train) == [None]


@pytest.mark.parametrize("match", ["*_PREPARED*", "*.metadata.json*"])
def test_a_full_disk_keeps_nothing_of_a_report_that_failed(tmp_path: Path, match: str) -> None:
    faults, run = Faults(tmp_path), tmp_path / "run"

    def train(rank: Rank) -> None:
        rank.reporter.add_metadata({"of": "the trainer"})
        with pytest.raises(StorageError, match="disk full"):
            rank.report({}, directory(tmp_path / "part", model="x"))
        assert [*(run / "checkpoints").iterdir()] == []

    faults.add("full", on="write", match=match)
    assert run_group(f"faulty://{run}", [Coordinator()], train) == [None]


def test_nobody_leaves_on_a_checkpoint_that_was_refused(tmp_path: Path) -> None:
    links = [Coordinator(request_reason="join", accepts=False) for _ in range(2)]

    def train(rank: Rank) -> None:
        rank.report({}, directory(tmp_path / f"part{rank.rank}", model="x"))

    assert run_group(tmp_path / "run", links, train) == [None, None]


def test_who_swallows_the_order_to_leave_gets_it_again_at_the_next_report(tmp_path: Path) -> None:
    links = [Coordinator(request_reason="join")]

    def train(rank: Rank) -> None:
        with pytest.raises(GroupChanged):
            rank.report({}, directory(tmp_path / "part", model="x"))
        rank.report({})

    (error,) = run_group(tmp_path / "run", links, train)
    assert isinstance(error, GroupChanged)
    assert len(links[0].posted) == 1


def test_metrics_that_cannot_be_written_are_told_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    links = [Coordinator(), Coordinator()]
    (tmp_path / "metrics-rank1.jsonl").mkdir()

    def train(rank: Rank) -> None:
        rank.report({}, directory(tmp_path / f"part{rank.rank}", model="x"))

    assert run_group(tmp_path, links, train) == [None, None]
    assert "metrics_kept" in caplog.text
    assert "metrics-rank1.jsonl" in caplog.text
    assert len(committed(tmp_path)) == 1


def test_a_file_of_metrics_is_written_beside_training_and_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, writers, hangs = Files.append, set(), threading.Event()

    def append(files: Files, name: str, data: bytes) -> None:
        writers.add(threading.current_thread())
        if b'"step": 1}' in data:
            hangs.wait(DEADLINE_S)
        real(files, name, data)

    monkeypatch.setattr(Files, "append", append)
    monkeypatch.setattr("elastic.storage.metrics.WAIT_S", DEADLINE_S)

    def train(rank: Rank) -> None:
        for step in range(20):
            rank.report({"step": step})
            if not step:
                monkeypatch.setattr("elastic.storage.metrics.WAIT_S", 0.0)
                (row,) = RunDirectory(str(tmp_path)).read_metrics()
                assert row["metrics"] == {"step": 0}, "a kill loses no line that was written"
        assert threading.current_thread() not in writers
        hangs.set()
        rank.reporter.flush()

    assert run_group(tmp_path, [Coordinator()], train) == [None]
    rows = RunDirectory(str(tmp_path)).read_metrics()
    assert [row["metrics"]["step"] for row in rows] == list(range(20))


def test_metrics_that_hang_in_storage_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, hangs = Files.append, threading.Event()

    def append(files: Files, name: str, data: bytes) -> None:
        hangs.wait(DEADLINE_S)
        real(files, name, data)

    monkeypatch.setattr(Files, "append", append)
    monkeypatch.setattr("elastic.storage.metrics.KEPT_BYTES_MAX", 2000)

    def train(rank: Rank) -> None:
        for step in range(100):
            rank.report({"step": step})
        hangs.set()
        rank.reporter.flush()

    assert run_group(tmp_path, [Coordinator()], train) == [None]
    steps = [row["metrics"]["step"] for row in RunDirectory(str(tmp_path)).read_metrics()]
    assert steps == [0, *range(101 - len(steps), 100)]
    assert 2 < len(steps) < 30
    assert "metrics_lost" in caplog.text


def test_the_line_that_names_a_checkpoint_is_on_the_disk_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, synced = Files.sync, []

    def sync(files: Files, name: str) -> None:
        real(files, name)
        synced.append((name, committed(tmp_path / "run"), len(links[0].posted)))

    monkeypatch.setattr(Files, "sync", sync)
    links = [Coordinator()]

    def train(rank: Rank) -> None:
        rank.report({"loss": 1})
        rank.report({"loss": 2}, directory(tmp_path / "part", model="x"))

    assert run_group(tmp_path / "run", links, train) == [None]
    assert synced == [("metrics.jsonl", [], 1)]
    assert len(committed(tmp_path / "run")) == 1
    rows = RunDirectory(str(tmp_path / "run")).read_metrics()
    assert [row.get("checkpoint", "") for row in rows] == ["", committed(tmp_path / "run")[0]]


class SlowDisk:
    """Storage whose syncs wait until told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.synced: list[str] = []
        self.asked, self.answers = threading.Event(), threading.Event()
        real = Files.sync

        def sync(files: Files, name: str) -> None:
            self.asked.set()
            assert is_set(self.answers)
            real(files, name)
            self.synced.append(name)

        monkeypatch.setattr(Files, "sync", sync)
        monkeypatch.setattr("elastic.storage.metrics.HANGS_S", DEADLINE_S)


def test_who_waits_for_the_disk_before_a_checkpoint_shows_that_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, signs = SlowDisk(monkeypatch), []

    def is_over() -> bool:
        signs.append(len(disk.synced))
        if len(signs) == 3:
            disk.answers.set()
        return False

    def train(rank: Rank) -> None:
        rank.report({"loss": 1}, directory(tmp_path / "part", model="x"))

    assert run_group(tmp_path / "run", [Coordinator()], train, is_over=is_over) == [None]
    assert signs[:3] == [0, 0, 0]
    assert disk.synced == ["metrics.jsonl"]
    assert len(committed(tmp_path / "run")) == 1


def test_nobody_waits_for_the_disk_once_the_group_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = SlowDisk(monkeypatch)
    monkeypatch.setattr("elastic.storage.metrics.LEAVES_S", 0.0)

    def train(rank: Rank) -> None:
        rank.report({"loss": 1}, directory(tmp_path / "part", model="x"))
        rank.reporter.flush()

    over = disk.asked.is_set
    assert run_group(tmp_path / "run", [Coordinator()], train, is_over=over) == [None]
    assert not disk.synced
    assert "metrics_kept" in caplog.text
    assert "metrics_lost" in caplog.text
    disk.answers.set()


def test_an_upload_in_the_background_waits_for_the_disk_and_training_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, links = SlowDisk(monkeypatch), [Coordinator()]
    part = directory(tmp_path / "part", model="x")

    def train(rank: Rank) -> None:
        brought = DeliveredParts(str(part), CheckpointUploadMode.ASYNC)
        rank.reporter.report('{"loss": 1}', brought)
        assert is_set(disk.asked)
        rank.report({"loss": 2})
        assert not (tmp_path / "run" / "checkpoints").exists()
        disk.answers.set()
        rank.reporter.finish()

    assert run_group(tmp_path / "run", links, train) == [None]
    assert disk.synced == ["metrics.jsonl"]
    assert len(committed(tmp_path / "run")) == 1


def test_lines_are_synced_once_and_not_where_the_group_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk(monkeypatch)
    disk.answers.set()

    def train(rank: Rank) -> None:
        rank.report({"step": 0})
        rank.reporter.flush(has_returned=False, group_over=True)
        assert len(RunDirectory(str(tmp_path)).read_metrics()) == 1
        assert not disk.synced
        rank.reporter.flush()
        rank.reporter.flush()
        assert disk.synced == ["metrics.jsonl"]
        rank.report({"step": 1})
        rank.reporter.flush()
        assert disk.synced == ["metrics.jsonl"] * 2

    assert run_group(tmp_path, [Coordinator()], train) == [None]


@pytest.mark.parametrize(
    ("end", "synced"), [(None, ["metrics.jsonl"]), (GroupChanged("a member has left", 2), [])]
)
def test_a_call_that_is_left_for_another_group_waits_for_no_disk(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    end: GroupChanged | None,
    synced: list[str],
) -> None:
    disk, mailboxes = SlowDisk(monkeypatch), Mailboxes()
    disk.answers.set()

    def call_again(runner: Runner, call: _UserCall) -> None:
        if end is not None:
            raise end

    monkeypatch.setattr(Runner, "_call_again", call_again)

    def train(rank: Rank) -> None:
        rank.report({"step": 0})
        runner = Runner(
            mailboxes,
            groups=SimpleNamespace(),  # type: ignore[arg-type]
            interrupter=Interrupter(),
            started_with={},
            clock=SystemClock(),
        )
        origin = ReportOrigin(JobId("j1"), 2, rank.rank, 1)
        event = runner._call(_UserCall(None, origin, rank.reporter))
        assert isinstance(event, TrainReturned if end is None else TrainLeft)

    assert run_group(tmp_path, [Coordinator()], train) == [None]
    assert disk.synced == synced


@pytest.mark.parametrize(
    ("metrics", "says"),
    [("[1]", "expected a dict"), ('{"x": "' + "y" * 2**20 + '"}', "write large data")],
)
def test_metrics_that_are_no_small_object_are_refused(
    tmp_path: Path, metrics: str, says: str
) -> None:
    def train(rank: Rank) -> None:
        rank.reporter.report(metrics)

    (error,) = run_group(tmp_path, [Coordinator()], train)
    assert isinstance(error, UsageError)
    assert says in str(error)


def test_a_report_from_another_thread_is_refused(tmp_path: Path) -> None:
    def train(rank: Rank) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(rank.report, {}).result(DEADLINE_S)

    (error,) = run_group(tmp_path, [Coordinator()], train)
    assert isinstance(error, UsageError)
    assert "another thread" in str(error)


def test_what_a_killed_attempt_left_under_the_name_is_no_part_of_the_next(tmp_path: Path) -> None:
    run, links = tmp_path / "run", [Coordinator()]
    left = {"shard1": "of a larger group", "_PREPARED": "{}", "_VALIDATED": "{}", "_DAMAGED": "why"}
    directory(run / "checkpoints" / "mine", **left)

    def train(rank: Rank) -> None:
        part = directory(tmp_path / "part", shard0="x")
        rank.reporter.report("{}", str(part), "mine")

    assert run_group(run, links, train) == [None]
    names = {path.name for path in (run / "checkpoints" / "mine").iterdir()}
    assert names == {"shard0", "_COMMITTED"}


@pytest.mark.parametrize("mode", list(CheckpointUploadMode))
def test_who_has_no_files_goes_on_once_the_others_count(
    tmp_path: Path, mode: CheckpointUploadMode
) -> None:
    links = [Coordinator() for _ in range(3)]

    def train(rank: Rank) -> None:
        for number in range(3):
            brought = NO_PART
            if rank.rank == 1 and number != 1:
                name = f"checkpoints/c{number}" if mode is CheckpointUploadMode.NO_UPLOAD else "in"
                brought = DeliveredParts(
                    str(directory(tmp_path / f"{name}-{number}", file="x")), mode
                )
            rank.reporter.report("{}", brought)
            if mode is not CheckpointUploadMode.ASYNC:
                assert len(committed(tmp_path)) == (1, 1, 2)[number]
                assert rank.reporter.newest_checkpoint.endswith(committed(tmp_path)[-1])
        rank.reporter.finish()

    assert run_group(tmp_path, links, train) == [None, None, None]
    assert len(committed(tmp_path)) == 2


def test_the_rank_that_has_not_reported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_votes, "WARN_INTERVAL_S", 0.05)
    warned = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "rank 1 has not" in record.getMessage():
                warned.set()

    listener = Listener()
    logging.getLogger("elastic.worker.checkpoint.report_votes").addHandler(listener)
    try:

        def train(rank: Rank) -> None:
            if rank.rank == 1:
                assert warned.wait(DEADLINE_S)
            rank.reporter.report("{}", NO_PART)

        assert run_group(tmp_path, [Coordinator() for _ in range(3)], train) == [None] * 3
    finally:
        logging.getLogger("elastic.worker.checkpoint.report_votes").removeHandler(listener)
