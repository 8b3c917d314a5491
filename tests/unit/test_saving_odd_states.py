"""States that cannot be saved, or only look as if they could: training goes on."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elastic import train
from elastic.core.policy.cursor import Cursor
from elastic.errors import UsageError
from elastic.storage.run_directory import RunDirectory
from elastic.worker.checkpoint.snapshot import RankInfo
from elastic.worker.checkpoint.snapshotter import Snapshotter
from elastic.worker.engine import state_restore as restoring
from elastic.worker.process.local import LocalRun, local_context
from elastic.worker.state import replica_checksums as likeness
from elastic.worker.state.arena import SnapshotSlot
from elastic.worker.state.packing import pack
from tests.unit.engine_under_test import Loop, square
from tests.unit.saving_under_test import Coordinator, Run, writer_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Thing:
    """Something that a user has registered."""

    def __init__(self, state: Callable[[], Any]) -> None:
        self.state_dict = state

    def load_state_dict(self, state: Any) -> None:
        del state


def missing() -> Any:
    return {}["key"]


@pytest.mark.parametrize(
    "state",
    [
        missing,
        lambda: {"big-endian": np.arange(3, dtype=">f4")},
        lambda: {"date": np.datetime64("2020-01-01")},
        lambda: {"long double": np.longdouble(1.5)},
        lambda: {"lazy": torch.nn.UninitializedParameter()},
        lambda: {"huge": 2**3000},
        lambda: {"thing": object()},
        lambda: {"sparse": torch.eye(2).to_sparse()},
    ],
)
def test_training_goes_on_without_what_cannot_be_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, state: Callable[[], Any]
) -> None:
    options = {"every_n_steps": 1}
    with local_context(LocalRun(job_name="r", run_path=str(tmp_path), options=options)) as context:
        train.register(thing=Thing(state))
        loop, steps = Loop.make(), 0
        for _, x, y in loop.batches():
            square(loop.model(x), y).backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            steps += train.stepped()
        context.snapshotter.finish()
    assert steps == 3
    assert "failed" in caplog.text
    assert RunDirectory(str(tmp_path)).markers() == []


def test_an_array_of_another_byte_order_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"state\['big'\]: a NumPy array of >f4"):
        pack({"big": np.arange(3, dtype=">f4")})


def test_a_snapshot_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    """And does not end the workers that look for one."""
    run = Run(tmp_path)
    snapshotter = run.savers[0]
    state = {"huge": 2**3000}
    snapshotter.take(lambda: state, Cursor(0, 1), 1)
    problems: list[str] = []
    assert (
        restoring._attempt(lambda: snapshotter.read_held(1), "this node's memory", problems) is None
    )
    assert "this node's memory" in problems[0]


class Own:
    """The state of one member, which is not that of the others."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def state(self) -> dict[str, Any]:
        return {"objects": self.tensors, "steps": 1}


@pytest.mark.parametrize(
    "other",
    [
        {"b": torch.full((8,), 2.0), "a": torch.full((8,), 1.0)},  # In another order.
        {"a": torch.full((4, 2), 1.0), "b": torch.full((8,), 2.0)},
        {"a": torch.full((8,), 1.0), "b": torch.full((4,), 2, dtype=torch.int64)},
    ],
)
def test_members_whose_states_differ_save_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, other: dict[str, torch.Tensor]
) -> None:
    """Parts of both would make a checkpoint of neither, with every checksum right."""
    run = Run(tmp_path, workers=2)
    states = [Own({"a": torch.full((8,), 1.0), "b": torch.full((8,), 2.0)}), Own(other)]
    for snapshotter, own in zip(run.savers, states, strict=True):
        snapshotter.take(own.state, Cursor(0, 1), 1)
    for snapshotter in run.savers:
        snapshotter.finish()
    assert run.committed() == []
    assert "rank 1 has saved other tensors than rank 0" in caplog.text


def registered(value: Any) -> Callable[[], dict[str, Any]]:
    """The state of a member that has registered this."""
    nothing: dict[str, Any] = {
        kind: [] for kind in ("loose", "frozen", "optimizers", "schedulers", "scalers")
    }
    models = [{"weight": torch.ones(8)}]
    objects = {
        "models": models,
        "extra": [{} for _ in models],
        **nothing,
        "registered": {"same": 1, "mine": value},
    }
    return lambda: {"objects": objects, "steps": 1}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"counts": torch.tensor([1, 2, 3])}, {"counts": torch.tensor([4, 5, 6])}),
        ([torch.tensor(1.0)], [torch.tensor(2.0)]),
        (np.arange(1000.0), np.arange(1000.0) + 1),
        (torch.zeros(4, 6).t(), torch.ones(4, 6).t()),
        (torch.zeros(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)),
    ],
)
def test_what_members_have_registered_with_other_values_is_refused_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ours: Any, theirs: Any
) -> None:
    """Each writes some rows of it: together they would be nobody's state."""
    run = Run(tmp_path, workers=2)
    for snapshotter, value in zip(run.savers, (ours, theirs), strict=True):
        snapshotter.take(registered(value), Cursor(0, 1), 1)
    for snapshotter in run.savers:
        snapshotter.finish()
    assert run.committed() == []
    assert "rank 1 and rank 0 differ in registered mine: each rank writes" in caplog.text
    for snapshotter in run.savers:
        snapshotter.take(registered(ours), Cursor(0, 2), 2)
    for snapshotter in run.savers:
        snapshotter.finish()
    assert len(run.committed()) == 1, "the next one, of equal values, counts"


def test_members_whose_weights_differ_in_a_bit_save_nothing_and_name_the_object(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, workers=2)
    for kind, snapshotter in [
        (k, s) for k in ("models", "optimizers", "caches") for s in run.savers
    ]:
        state = registered(torch.ones(1))()
        many = torch.arange(10_000, dtype=torch.int32)
        many[7_000] ^= snapshotter is run.savers[1]  # The lowest bit of one of them.
        name = "mask (buffer)" if kind == "caches" else "weight"
        state["objects"]["models" if kind == "caches" else kind] = [{name: many}]
        snapshotter.take(
            lambda s=state: s, Cursor(0, 1), 1, own=likeness.PerRankState([{"mask (buffer)"}])
        )  # type: ignore[misc]
        if snapshotter is run.savers[1]:
            for one in run.savers:
                one.finish()
    assert "rank 1 and rank 0 differ in model 0: each rank writes" in caplog.text
    assert "rank 1 and rank 0 differ in optimizer 0: each rank writes" in caplog.text
    assert len(run.committed()) == 1, "what is left out of state_dict may differ"


def shared_savers(tmp_path: Path, memories: list[tuple[str, ...]]) -> list[Snapshotter]:
    """The workers of one node, each with the memory that it got."""
    run = RunDirectory(str(tmp_path))
    savers = []
    for rank, paths in enumerate(memories):
        writer = writer_of(run, Coordinator())
        snapshotter = Snapshotter(paths, writer)
        snapshotter.enter(RankInfo(1, rank, len(memories), rank, len(memories)))
        savers.append(snapshotter)
    return savers


@pytest.mark.parametrize("lacks", ["none at all", "what cannot be opened", "another"])
def test_workers_of_a_node_that_do_not_all_have_its_memory_do_without_at_once(
    tmp_path: Path, lacks: str
) -> None:
    descriptors = [os.memfd_create("arena") for _ in range(4)]
    try:
        paths = [f"/proc/{os.getpid()}/fd/{number}" for number in descriptors]
        given = tuple(paths[:2])
        other: dict[str, tuple[str, ...]] = {
            "none at all": (),
            "what cannot be opened": ("/nowhere/a", "/nowhere/b"),
            "another": tuple(paths[2:]),
        }
        savers = shared_savers(tmp_path, [given, other[lacks]])
        memories = [snapshotter.memory() for snapshotter in savers]
        for snapshotter in savers:
            snapshotter.agree_on_memory(memories)
        for snapshotter in savers:
            snapshotter.take(registered(1), Cursor(0, 1), 1)
        for snapshotter in savers:
            snapshotter.finish()
            assert snapshotter.held() == 1
        assert len(RunDirectory(str(tmp_path)).markers()) == 1
        assert [snapshotter.memory() for snapshotter in savers] == [0, 0], "for good"
    finally:
        for number in descriptors:
            os.close(number)


def test_workers_that_share_memory_keep_it(tmp_path: Path) -> None:
    descriptors = [os.memfd_create("arena") for _ in range(2)]
    try:
        given = tuple(f"/proc/{os.getpid()}/fd/{number}" for number in descriptors)
        savers = shared_savers(tmp_path, [given, given])
        memories = [snapshotter.memory() for snapshotter in savers]
        assert len(set(memories)) == 1
        assert memories[0] > 0
        for snapshotter in savers:
            snapshotter.agree_on_memory(memories)
        assert [snapshotter.memory() for snapshotter in savers] == memories
    finally:
        for number in descriptors:
            os.close(number)


@pytest.fixture
def on_one_node(tmp_path: Path) -> Iterator[list[Snapshotter]]:
    """Two workers that share memory."""
    descriptors = [os.memfd_create("arena") for _ in range(2)]
    given = tuple(f"/proc/{os.getpid()}/fd/{number}" for number in descriptors)
    yield shared_savers(tmp_path, [given, given])
    for number in descriptors:
        os.close(number)


def copy(snapshotter: Snapshotter, steps: int, state: Callable[[], Any] | None = None) -> None:
    snapshotter.take(state or registered(1), Cursor(0, steps), steps, durable=False)


def test_memory_that_cannot_be_mapped_costs_snapshots_and_not_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (snapshotter,) = Run(tmp_path).savers
    copy(snapshotter, 1)

    def reserve(*_: object) -> None:
        raise OSError(errno.ENOMEM, "as by ulimit -v")

    monkeypatch.setattr(SnapshotSlot, "reserve", reserve)
    assert not snapshotter.is_busy()
    with pytest.raises(OSError, match="as by ulimit"):
        copy(snapshotter, 2)


def test_one_that_not_all_workers_have_marked_takes_no_whole_one_with_it(
    on_one_node: list[Snapshotter],
) -> None:
    first, second = on_one_node
    copy(first, 1)
    copy(second, 1)
    copy(first, 2)
    with pytest.raises(KeyError):
        copy(second, 2, missing)
    for one in on_one_node:
        one.know_all_settled()
    copy(first, 3)
    assert first.held() == 1
    copy(second, 3)
    assert first.held() == 3


def test_rows_that_one_node_lacks_take_no_earlier_ones_from_the_others(tmp_path: Path) -> None:
    """Of a sharded model only what all nodes have can be gone on from."""
    first, second = run = Run(tmp_path, workers=2).savers  # Each with memory of its own.

    def held() -> list[list[int]]:
        return [[mark.steps for _, mark in one.held_snapshots()] for one in run]

    copy(first, 1)
    copy(second, 1)
    for steps in (2, 3):
        copy(first, steps)
        with pytest.raises(KeyError):
            copy(second, steps, missing)
        assert [one.lacks_newest for one in run] == [False, True]
        for one in run:
            one.know_all_settled(gives_up=True)
            one.wait_for_room(lambda: False)  # As where members leave by plan.
        assert held() == [[steps, 1], [1]]
    copy(first, 4)
    copy(second, 4)
    assert held() == [[4, 1], [4, 1]]


def test_workers_that_do_not_wait_for_each_other_choose_the_same_place(
    on_one_node: list[Snapshotter],
) -> None:
    """Behind the last epoch each takes the last one once it has settled the one before."""
    first, second = on_one_node
    copy(first, 1)
    copy(second, 1)
    copy(first, 2)

    def meanwhile() -> Any:
        copy(second, 2)
        second.wait_for_room(lambda: False)
        copy(second, 3)
        return registered(1)()

    first.wait_for_room(lambda: False)
    copy(first, 3, meanwhile)
    assert first.held() == second.held() == 3


def test_workers_of_one_node_that_registered_other_values_are_told_apart_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    descriptors = [os.memfd_create("arena") for _ in range(2)]
    try:
        given = tuple(f"/proc/{os.getpid()}/fd/{number}" for number in descriptors)
        savers = shared_savers(tmp_path, [given, given])
        for value, snapshotter in enumerate(savers):
            snapshotter.take(registered(torch.tensor([float(value)])), Cursor(0, 1), 1)
        for snapshotter in savers:
            snapshotter.finish()
        assert RunDirectory(str(tmp_path)).markers() == []
        assert "a worker of this node has other tensors, or other values" in caplog.text
        assert [snapshotter.held() for snapshotter in savers] == [-1, -1], (
            "nor is it read from memory"
        )
    finally:
        for number in descriptors:
            os.close(number)


class Still(Run):
    """One whose state stays."""

    def step(self) -> None:
        self.steps += 1


def test_weights_that_do_not_lie_by_rows_are_read_by_stock_torch(tmp_path: Path) -> None:
    run, stock = Still(tmp_path), torch.nn.Conv2d(3, 4, 2)
    model = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    run.objects.models[:] = [model]
    run.objects.optimizers[:] = [torch.optim.AdamW(model.parameters())]
    run.save()
    folder = run.folder(run.committed()[-1])
    torch.distributed.checkpoint.load({"model": stock.state_dict()}, checkpoint_id=folder)
    torch.testing.assert_close(stock.state_dict(), model.state_dict(), rtol=0, atol=0)
