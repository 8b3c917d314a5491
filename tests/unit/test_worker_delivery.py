"""Checkpoints that are uploaded in the background, or lie there already, by several ranks."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from elastic.core.facts import JobId
from elastic.errors import GroupError, StorageError, UsageError
from elastic.runtime.clock import SystemClock
from elastic.storage.marker import CheckpointMarker, StoredFile
from elastic.storage.run_directory import RunDirectory
from elastic.train.checkpoint import Checkpoint
from elastic.train.uploading import bring
from elastic.worker.base.interrupt import GroupChanged
from elastic.worker.checkpoint.committer import Committer
from elastic.worker.checkpoint.delivery import CheckpointUploadMode, DeliveredParts
from elastic.worker.checkpoint.report_votes import ReportVotes
from elastic.worker.checkpoint.reported_checkpoints import ReportOrigin
from elastic.worker.checkpoint.reporting import Reporter
from tests.patience import DEADLINE_S
from tests.unit.test_worker_reporting import SPEC, Coordinator, committed, directory

ASYNC, NO_UPLOAD = CheckpointUploadMode.ASYNC, CheckpointUploadMode.NO_UPLOAD


@dataclass
class Storage:
    """A run directory that takes its time: uploads wait at a gate."""

    path: Path
    gate: threading.Event = field(default_factory=threading.Event)
    uploading: threading.Event = field(default_factory=threading.Event)

    def run(self) -> RunDirectory:
        storage = self

        class Slow(RunDirectory):
            def upload(
                self, source: Path, name: str, *, claim: Callable[[str], bool]
            ) -> tuple[StoredFile, ...]:
                storage.uploading.set()
                assert storage.gate.wait(DEADLINE_S)
                return super().upload(source, name, claim=claim)

        return Slow(str(self.path))


@dataclass
class Rank:
    """One rank's view of a group."""

    rank: int
    reporter: Reporter
    link: Coordinator
    over: threading.Event = field(default_factory=threading.Event)

    def report(
        self, metrics: dict[str, Any], brought: DeliveredParts | None = None, **more: Any
    ) -> None:
        self.reporter.report(json.dumps(metrics), brought, **more)


def members(storage: Storage, world_size: int) -> list[Rank]:
    store = dist.HashStore()
    ranks = []
    for rank in range(world_size):
        link, over = Coordinator(), threading.Event()
        run = storage.run()
        reporter = Reporter(
            ReportOrigin(JobId("j1"), 2, rank, world_size),
            run,
            committer=Committer(run, SPEC, link),
            votes=ReportVotes(store, rank, world_size=world_size),
            link=link,
            clock=SystemClock(),
            is_over=over.is_set,
        )
        ranks.append(Rank(rank, reporter, link, over))
    return ranks


def together(ranks: list[Rank], train: Callable[[Rank], None]) -> list[BaseException | None]:
    """Run `train` on all ranks; return what each raised."""

    def one(rank: Rank) -> BaseException | None:
        rank.reporter._thread = (rank.reporter._thread[0], threading.get_ident())
        try:
            train(rank)
        except BaseException as error:
            return error
        return None

    with ThreadPoolExecutor(len(ranks)) as pool:
        return [future.result(DEADLINE_S) for future in [pool.submit(one, r) for r in ranks]]


def part(tmp_path: Path, rank: Rank, epoch: int = 0, **more: Any) -> DeliveredParts:
    path = directory(tmp_path / f"r{rank.rank}-e{epoch}", **{f"shard{rank.rank}": "x", "same": "y"})
    return DeliveredParts(str(path), ASYNC, **more)


def posted(rank: Rank) -> list[tuple[int, bool]]:
    return [(event.index, event.checkpoint != "") for event in rank.link.posted]


def test_a_second_checkpoint_waits_for_the_first(tmp_path: Path) -> None:
    storage = Storage(tmp_path / "run")
    storage.gate.set()
    ranks = members(storage, 2)

    def train(rank: Rank) -> None:
        for epoch in range(4):
            rank.report({"epoch": epoch}, part(tmp_path, rank, epoch))
            assert len(committed(storage.path)) >= epoch
        rank.reporter.finish()

    assert together(ranks, train) == [None, None]
    assert len(committed(storage.path)) == 4
    assert ranks[0].reporter.newest_checkpoint.endswith("000003")
    assert ranks[0].reporter.position() == "report 0 after checkpoint-j1-g000002-000003"


@pytest.mark.parametrize("at", ["next", "end"])
def test_an_upload_that_fails_is_told_by_the_next_report_or_the_end(
    tmp_path: Path, at: str
) -> None:
    storage = Storage(tmp_path / "run")
    storage.gate.set()
    ranks = members(storage, 2)

    def train(rank: Rank) -> None:
        path = directory(tmp_path / "part0", model="x") if rank.rank == 0 else tmp_path / "none"
        rank.report({}, DeliveredParts(str(path), ASYNC))
        end = {
            "end": rank.reporter.finish,
            "next": lambda: rank.report({}, part(tmp_path, rank, 1)),
        }
        with pytest.raises(StorageError, match="rank 1: cannot store"):
            end[at]()
        rank.report({}, part(tmp_path, rank, 2))
        rank.reporter.finish()

    assert together(ranks, train) == [None, None]
    assert (tmp_path / "part0").exists()
    assert len(committed(storage.path)) == {"end": 1, "next": 2}[at]


def test_an_upload_under_way_is_given_up_when_the_group_is_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = Storage(tmp_path / "run")
    ranks = members(storage, 2)

    def train(rank: Rank) -> None:
        rank.report({}, part(tmp_path, rank))
        assert storage.uploading.wait(DEADLINE_S)
        rank.over.set()
        try:
            rank.reporter.finish()
        finally:
            rank.reporter.close()

    with caplog.at_level(logging.WARNING):
        errors = together(ranks, train)
        storage.gate.set()
    assert [type(error) for error in errors] == [GroupError, GroupError]
    assert caplog.text.count("checkpoint_given_up name=checkpoint-j1-g000002-000000") == 2
    wait_uploads_end()
    assert [posted(rank) for rank in ranks] == [[], []]
    assert committed(storage.path) == []


def test_a_name_is_used_again_only_when_nobody_writes_there_any_more(tmp_path: Path) -> None:
    storage = Storage(tmp_path / "run")
    (old,), (new,) = members(storage, 1), members(Storage(storage.path), 1)
    order: list[str] = []

    class Quick(RunDirectory):
        def upload(self, source: Path, name: str, **more: Any) -> tuple[StoredFile, ...]:
            order.append("new begins")
            return super().upload(source, name, **more)

    new.reporter._run = Quick(str(storage.path))

    def give_up(rank: Rank) -> None:
        rank.report({}, part(tmp_path, rank), name="mine")
        assert storage.uploading.wait(DEADLINE_S)
        rank.reporter.close()

    def end_old() -> None:
        storage.gate.set()
        wait_uploads_end()
        order.append("old is over")

    assert together([old], give_up) == [None]
    path = str(directory(tmp_path / "again", model="x"))
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(end_old)
        assert together([new], lambda rank: rank.report({}, DeliveredParts(path), name="mine")) == [
            None
        ]
        ended.result(DEADLINE_S)
    assert sorted(order) == ["new begins", "old is over"]
    assert committed(storage.path) == ["mine"]


def wait_uploads_end() -> None:
    """Wait for threads that were given up, so that nothing comes of them later."""
    for thread in threading.enumerate():
        if thread.name == "elastic-upload":
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


def test_a_planned_change_makes_all_wait_for_the_upload_and_leave(tmp_path: Path) -> None:
    storage = Storage(tmp_path / "run")
    storage.gate.set()
    ranks = members(storage, 3)
    for rank in ranks:
        rank.link.request_reason = "node n4 joins"

    def train(rank: Rank) -> None:
        rank.report({}, part(tmp_path, rank) if rank.rank != 1 else None)

    assert [type(error) for error in together(ranks, train)] == [GroupChanged] * 3
    assert len(committed(storage.path)) == 1


def test_ranks_that_bring_parts_in_different_ways_are_refused(tmp_path: Path) -> None:
    storage = Storage(tmp_path / "run")
    storage.gate.set()

    def train(rank: Rank) -> None:
        path = directory(tmp_path / f"part{rank.rank}", model="x")
        rank.report(
            {}, DeliveredParts(str(path), ASYNC if rank.rank else CheckpointUploadMode.SYNC)
        )

    errors = together(members(storage, 2), train)
    assert [type(error) for error in errors] == [UsageError, UsageError]
    assert all("the same checkpoint_upload_mode" in str(error) for error in errors)
    assert committed(storage.path) == []


@pytest.mark.parametrize("name", ["a/b", "..", "", "/x"])
def test_a_checkpoints_name_is_that_of_one_directory(tmp_path: Path, name: str) -> None:
    def train(rank: Rank) -> None:
        rank.report({}, part(tmp_path, rank), name=name)

    (error,) = together(members(Storage(tmp_path / "run"), 1), train)
    assert isinstance(error, UsageError)
    assert f"checkpoint_dir_name={name!r}" in str(error)


def test_what_lies_there_and_does_not_count_is_not_deleted(tmp_path: Path) -> None:
    storage = Storage(tmp_path / "run")
    for name in ("a", "b"):
        directory(storage.path / "checkpoints" / name, model="x")

    def train(rank: Rank) -> None:
        name = "ab"[rank.rank]
        rank.report({}, DeliveredParts(str(storage.path / "checkpoints" / name), NO_UPLOAD))

    errors = together(members(storage, 2), train)
    assert all("different names: a, b" in str(error) for error in errors)
    assert (storage.path / "checkpoints" / "a" / "model").exists()


@pytest.mark.parametrize("mode", [CheckpointUploadMode.SYNC, ASYNC])
def test_a_function_of_the_users_may_upload(tmp_path: Path, mode: CheckpointUploadMode) -> None:
    storage = Storage(tmp_path / "run")

    def train(rank: Rank) -> None:
        def upload(name: str) -> str:
            path = storage.path / "checkpoints" / name
            path.mkdir(parents=True, exist_ok=True)
            (path / f"shard{rank.rank}").write_text("x")
            return str(path)

        rank.report({}, DeliveredParts("nowhere", mode, upload=upload))
        rank.reporter.finish()

    assert together(members(storage, 2), train) == [None, None]
    (name,) = committed(storage.path)
    marker = CheckpointMarker.from_json(
        (storage.path / "checkpoints" / name / "_COMMITTED").read_text()
    )
    assert [file.path for file in marker.files] == ["shard0", "shard1"]


def test_a_checkpoint_that_a_function_returns_as_it_lies_there_is_not_deleted(
    tmp_path: Path,
) -> None:
    storage = Storage(tmp_path / "run")
    mine = directory(storage.path / "checkpoints" / "a", model="x")
    (rank,) = members(storage, 1)
    checkpoint = Checkpoint.from_directory(mine)
    rank.report({}, bring(checkpoint, ASYNC, delete_local=None, upload=lambda found, _: found))
    rank.reporter.finish()
    assert sorted(one.name for one in mine.iterdir()) == ["_COMMITTED", "model"]


def test_a_function_that_raises_or_returns_another_place_fails_the_checkpoint(
    tmp_path: Path,
) -> None:
    storage = Storage(tmp_path / "run")

    def train(rank: Rank) -> None:
        def upload(name: str) -> str:
            if rank.rank == 0:
                raise ValueError("no such bucket")
            return str(tmp_path)

        rank.report({}, DeliveredParts("nowhere", upload=upload))

    errors = together(members(storage, 2), train)
    assert [type(error) for error in errors] == [StorageError, StorageError]
    assert "rank 0: checkpoint_upload_fn: ValueError: no such bucket" in str(errors[1])


def test_in_place_a_group_that_breaks_takes_the_upload_and_not_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = Storage(tmp_path / "run")
    ranks = members(storage, 2)

    def train(rank: Rank) -> None:
        one = part(tmp_path, rank)
        rank.reporter.report_in_place("{}", one, where="e1", voters=2)
        assert storage.uploading.wait(DEADLINE_S)
        rank.over.set()
        rank.reporter.report_in_place("{}", None, where="e2", voters=2)
        rank.reporter.finish()

    with caplog.at_level(logging.WARNING):
        assert together(ranks, train) == [None, None]
        storage.gate.set()
    assert "checkpoint_given_up name=checkpoint-j1-g000002-e1" in caplog.text
