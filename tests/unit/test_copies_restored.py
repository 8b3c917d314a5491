"""What a run goes on from when a copy of its state lies on another node; and when one is taken."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.agent.copy_server import CopyServer
from elastic.agent.copy_store import CopyStore
from elastic.core.facts import HeldCopy, JobId
from elastic.core.policy.cursor import Cursor
from elastic.errors import Refused
from elastic.runtime import secret_connection
from elastic.runtime.copy_wire import PUSH, CopyRequest, calling
from elastic.runtime.snapshot_memory import HEADER, SnapshotMark, set_sent, whole
from elastic.worker.base.activity import Activity
from elastic.worker.checkpoint.snapshot import RankInfo
from elastic.worker.checkpoint.snapshotter import Snapshotter
from elastic.worker.data.stream_book import StreamBook
from elastic.worker.engine import state_restore as restoring
from elastic.worker.engine.checkpoint_schedule import CheckpointScheduler
from elastic.worker.engine.run_state import RunState
from elastic.worker.reduce.step_metadata import StepMetadata
from elastic.worker.state.train_state import TrainState
from tests.patience import DEADLINE_S
from tests.unit.saving_under_test import Run, Table

KEY = "a secret"
NOBODY = "127.0.0.1:1"


class Peer:
    """Another node, and its copy of a run's state."""

    def __init__(self) -> None:
        self.store = CopyStore(lambda: None)
        self.store.grant(JobId("j1"), KEY)
        self.server = CopyServer("127.0.0.1", self.store)
        self.server.start()
        self.address = self.server.address

    def take(self, snapshotter: Snapshotter, steps: int) -> None:
        """Be brought a snapshot out of a worker's memory."""
        slot = next(slot for slot, mark in snapshotter.slots.whole() if mark.steps == steps)
        content = os.pread(slot._fd, os.fstat(slot._fd).st_size, 0)
        mark = whole(content[:HEADER])
        assert mark is not None
        body = memoryview(content)[HEADER : HEADER + mark.num_bytes]
        with calling(self.address) as line:
            line.request(CopyRequest(PUSH, "j1", mark), KEY)
            line.send_body(KEY, body, lambda: True)
            line.read_answer(KEY)


@pytest.fixture
def peer() -> Iterator[Peer]:
    found = Peer()
    yield found
    found.server.close()


def snapshot(run: Run, snapshotter: Snapshotter) -> None:
    """Step, and take a snapshot that is not written."""
    run.step()
    snapshotter.take(run.state, Cursor(0, run.steps), run.steps, durable=False)


def memory_only() -> Snapshotter:
    snapshotter = Snapshotter((), None)
    snapshotter.enter(RankInfo(generation=1))
    return snapshotter


def restored(
    run: Run, savers: list[Snapshotter], copies: list[tuple[str, ...]], patch: pytest.MonkeyPatch
) -> list[Any]:
    """Return what each member comes to."""
    table, found = Table(len(savers)), [None] * len(savers)
    patch.setattr(restoring, "send_metadata", table.tell)

    def restore(rank: int) -> None:
        checkpoints = CheckpointScheduler(RunState(run.objects, StreamBook()))
        checkpoints._entered = SimpleNamespace(  # type: ignore[assignment]
            snapshotter=savers[rank], world_rank=rank, run_path=run.directory.path, job_id="j1",
            saved="",
            copies=copies[rank], copies_key=KEY,
            worker_id=f"n{rank}/1", activity=Activity(),
        )  # fmt: skip
        found[rank] = checkpoints.restore(rank)  # type: ignore[call-overload]

    threads = [threading.Thread(target=restore, args=(rank,)) for rank in range(len(savers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    return found


@pytest.mark.parametrize("how", ["away", "flipped", "silent", "another key"])
def test_a_copy_that_cannot_be_had_leaves_storage(
    tmp_path: Path, peer: Peer, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    run.save()
    source = memory_only()
    snapshot(run, source)
    peer.take(source, 2)
    address = peer.address
    if how == "away":
        address = NOBODY
    elif how == "another key":
        peer.store.grant(JobId("j1"), "of the next coordinator")
    elif how == "silent":
        monkeypatch.setattr(secret_connection, "TALK_S", 0.1)
        monkeypatch.setattr(peer.store, "list", lambda job_id: threading.Event().wait(DEADLINE_S))
    else:
        ((_, mark),) = peer.store.list("j1")
        with peer.store.reading("j1", mark) as (body, _):
            body[100] ^= 4
    found = restored(run, [Snapshotter((), None)], [(address,)], monkeypatch)
    assert found[0]["steps"] == 1


def test_a_copy_whose_end_is_not_from_its_sender_is_refused(peer: Peer) -> None:
    body = memoryview(bytes(100))
    mark = SnapshotMark(1, 1, 1, 1, len(body), 0, 0, 0)
    with calling(peer.address) as line:
        line.request(CopyRequest(PUSH, "j1", mark), KEY)
        line.send_body("a guess", body, lambda: True)
        with pytest.raises(Refused, match="not from the peer"):
            line.read_answer(KEY)
    assert peer.store.list("j1") == ()


def test_one_member_fetches_and_the_others_receive(
    tmp_path: Path, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, source = Run(tmp_path), memory_only()
    snapshot(run, source)
    peer.take(source, 1)
    nobody: tuple[str, ...] = ()
    savers = [Snapshotter((), None) for _ in range(3)]
    found = restored(run, savers, [nobody, (peer.address,), (peer.address,)], monkeypatch)
    assert [one is not None for one in found] == [False, True, False]


# ------------------------------------------------------------------- when one is taken


class Loop:
    """A keeper that is led through steps, and what becomes of them."""

    def __init__(self, run: Run, options: dict[str, Any]) -> None:
        self.run, self.posted = run, list[Any]()
        self.state = RunState(run.objects, StreamBook())
        self.checkpoints = CheckpointScheduler(self.state)
        self.checkpoints.configure(options)
        link = SimpleNamespace(
            post=self.posted.append,
            save_request=lambda generation: 0,
        )
        self.checkpoints.enter(
            SimpleNamespace(  # type: ignore[arg-type]
                snapshotter=run.savers[0], generation=1, world_rank=0, world_size=1, local_rank=0,
                local_world_size=1, link=link, activity=Activity(),
            )
        )  # fmt: skip

    def step(self) -> None:
        self.run.step()
        saves, busy, *_ = self.checkpoints.flags(None)
        row = StepMetadata(False, self.state.cursor, 0, saves=saves, busy=busy)
        self.state.count_step()
        self.checkpoints.committed([row])
        self.checkpoints.at_boundary(lambda: False)

    def newest(self) -> int:
        return max((mark.steps for mark in self.marks()), default=0)

    def marks(self) -> list[SnapshotMark]:
        return [mark for _, mark in self.run.savers[0].slots.whole()]

    def stored(self) -> list[int]:
        assert self.run.savers[0]._writer is not None
        assert self.run.savers[0]._writer.finish(DEADLINE_S)
        return [m.about("steps") for _, m in sorted(self.run.directory.markers())]  # type: ignore[misc]


def test_the_newest_that_was_saved_is_a_copy_or_a_checkpoint() -> None:
    checkpoints = CheckpointScheduler(RunState(TrainState(), StreamBook()))
    for copied, newest in ((None, (2, 30)), (HeldCopy(JobId("j1"), 3, 40), (3, 40))):
        checkpoints._entered = SimpleNamespace(  # type: ignore[assignment]
            saved="run/checkpoints/auto-j1-s000000030-g000002-000003", job_id="j1", copied=copied
        )
        assert checkpoints.newest_saved() == newest


def test_the_last_step_is_stored_also_if_it_was_copied(tmp_path: Path) -> None:
    loop = Loop(Run(tmp_path), {"copies_every": 1, "every_n_steps": 100})
    for _ in range(3):
        loop.step()
    assert loop.stored() == []
    loop.checkpoints.end(holds=False)
    loop.checkpoints.at_end(lambda: False)
    assert loop.stored() == [3]


def test_a_snapshot_that_is_being_sent_is_not_written_over(tmp_path: Path) -> None:
    loop = Loop(Run(tmp_path), {"copies_every": 1})
    loop.step()
    loop.step()
    slot = loop.run.savers[0].slots.next(3)
    set_sent(slot._fd, 1)
    loop.step()
    assert sorted(mark.steps for mark in loop.marks()) == [1, 2]
    set_sent(slot._fd, 0)
    loop.step()
    assert sorted(mark.steps for mark in loop.marks()) == [2, 4]
