"""Sharded models in checkpoints and in the nodes' memory: by rows, read again by any group."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import _functional_collectives
from torch.distributed.tensor import DTensor, Replicate, Shard

from elastic.core.facts import JobId
from elastic.errors import UsageError
from elastic.storage.verify import verify
from elastic.worker.checkpoint import snapshot_copier
from elastic.worker.checkpoint.checkpoint_reader import read_checkpoint
from elastic.worker.checkpoint.snapshot import RankInfo
from elastic.worker.checkpoint.snapshotter import Snapshotter
from elastic.worker.engine.peer_copies import PeerCopies
from elastic.worker.engine.prepared_optimizers import data_waits
from elastic.worker.engine.sharded_restore import ShardedRestorer
from elastic.worker.engine.still_weights import StillWeights
from elastic.worker.engine.unregistered import UnregisteredObjects
from elastic.worker.group import member_links
from elastic.worker.state.arena import SnapshotSlot
from elastic.worker.state.sharded_state import check_shards, rows_of, spread_of
from elastic.worker.state.train_state import State, TrainState
from tests.patience import DEADLINE_S
from tests.unit.sharded_under_test import (
    Member,
    Memory,
    ShardedRun,
    assert_rows_of,
    mesh_of,
    sharded,
    together,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]

GROUPS = [(1,), (2,), (3,), (4,), (2, 2)]


@pytest.mark.parametrize("shape", GROUPS)
@pytest.mark.parametrize("other", [(1,), (3,), (2, 2)])
def test_any_group_reads_its_rows_of_a_checkpoint(
    tmp_path: Path, shape: tuple[int, ...], other: tuple[int, ...]
) -> None:
    run = ShardedRun(tmp_path, shape=shape)
    run.save()
    (name,) = run.committed()
    marker = dict(run.directory.committed())[name]
    assert verify(run.directory.checkpoint_path(name)).is_whole
    for rank in range(int(torch.tensor(other).prod())):
        member = Member(rank, other, seed=9, stepped=False)
        state = read_checkpoint(run.directory, name, marker, ours=member.ours(), rank=rank)
        member.objects.put(state["objects"])
        assert_rows_of(member, run.members[0].whole, run.members[0].optimizer_state)


def test_rows_are_copied_while_the_next_step_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(snapshot_copier, "BESIDE_BYTES_MIN", 0)
    may_copy = threading.Semaphore(0)  # Each member has one copy; an event would lose one of two.
    put = SnapshotSlot.put

    def late_put(slot: SnapshotSlot, *args: Any) -> None:
        assert may_copy.acquire(timeout=DEADLINE_S)
        put(slot, *args)

    def compute(member: Member) -> None:
        member.model.get_buffer("mean").add_(1)
        may_copy.release()

    def change(member: Member) -> None:
        with torch.no_grad():
            rows = member.model.get_parameter("wide_weight")
            assert isinstance(rows, DTensor)
            (rows if member.place[0] == 0 else rows.to_local()).mul_(0.5)
        may_copy.release()

    monkeypatch.setattr(SnapshotSlot, "put", late_put)
    run = ShardedRun(tmp_path, shape=(2,))
    run.save(1, beside=compute)
    (name,) = run.committed()
    member = Member(1, (3,), seed=9, stepped=False)
    marker = dict(run.directory.committed())[name]
    state = read_checkpoint(run.directory, name, marker, ours=member.ours(), rank=1)
    member.objects.put(state["objects"])
    assert_rows_of(member, run.members[0].whole, run.members[0].optimizer_state)
    run.save(2, beside=change)
    assert run.committed() == [name]
    assert caplog.text.count("changed before the next optimizer.step()") == 2


def test_data_of_a_sharded_parameter_waits_for_its_copy() -> None:
    parameter, seen = nn.Parameter(sharded(torch.zeros(3, 2), mesh_of(0, (2,)))), list[int]()
    with data_waits(lambda: seen.append(1), StillWeights(())):
        parameter.data.add_(1)
    parameter.data.add_(1)
    assert seen == [1]
    assert "data" not in vars(DTensor)


def test_weights_that_an_earlier_call_has_left_are_looked_at_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who has joined since has none, and would take a collective for the first of its group."""
    left, called = nn.Module(), list[object]()
    left.weight = nn.Parameter(sharded(torch.randn(4, 2), mesh_of(0, (2,))))
    monkeypatch.setattr(_functional_collectives, "all_gather_tensor", lambda *_: called.append(1))
    looks = UnregisteredObjects(TrainState())
    before = looks._print(left, set())
    with torch.no_grad():
        left.weight.to_local().add_(1)
    assert before
    assert looks._print(left, set()) not in (before, ())
    assert not called


def test_what_cannot_be_saved_is_refused_when_the_model_is_prepared() -> None:
    mesh = mesh_of(0, (2,))
    columns = DTensor.from_local(torch.zeros(2, 2), mesh, [Shard(1)], run_check=False)
    with pytest.raises(UsageError, match=r"head.*expected one Shard\(0\)"):
        check_shards("head", columns, 2)
    with pytest.raises(UsageError, match=r"head is not sharded.*fully_shard on the whole model"):
        check_shards("head", torch.zeros(2), 2)
    with pytest.raises(UsageError, match="mesh of 2 ranks, and the group has 4"):
        check_shards("head", sharded(torch.zeros(4), mesh), 4)
    copied = DTensor.from_local(torch.zeros(2), mesh, [Replicate()], run_check=False)
    assert spread_of(copied) is None
    assert rows_of(copied, 0) is None


@pytest.mark.parametrize(
    ("shape", "numbers"), [((4,), [0, 1, 2, 3]), ((2, 2), [0, 1, 0, 1]), ((4, 1), [0] * 4)]
)
def test_ranks_that_hold_the_same_rows_draw_the_same(
    shape: tuple[int, ...], numbers: list[int]
) -> None:
    found = []
    for rank in range(4):
        # No nn.Parameter: torch would take the mesh that it knows already, that of rank 0.
        rows = sharded(torch.zeros(4, 1), mesh_of(rank, shape)).requires_grad_()
        state = TrainState()
        state.optimizers.append(torch.optim.SGD([nn.Parameter(torch.zeros(2)), rows]))
        found.append(state.shard_number)
    assert found == numbers
    plain = TrainState()
    plain.optimizers.append(torch.optim.SGD([nn.Parameter(torch.zeros(2))]))
    assert plain.shard_number == 0


# ------------------------------------------------------------------------------ nodes' memory


def restored(
    run: ShardedRun, places: Sequence[Memory | None], *, reads: bool = True, late: int = -1
) -> tuple[list[Member], list[tuple[State | None, bool]]]:
    """Return the members of a new group, and what each has come to.

    Args:
        run: the one before.
        places: the node of each member, None for one that has held nothing.
        reads: they can reach storage.
        late: a rank that has looked before the newest checkpoint was committed.
    """
    size, polls = len(places), [0] * len(places)
    members = [Member(rank, (size,), seed=9, stepped=False) for rank in range(size)]

    def listed(rank: int) -> Any:
        found = [(int(m.about("steps", 0)), n, m) for n, m in run.directory.automatic()]
        polls[rank] += 1
        if rank == late and polls[rank] == 1:
            found.pop()
        return found[::-1] if reads else None

    def restore(rank: int, group: Any) -> tuple[State | None, bool]:
        node, ours = places[rank], members[rank].ours()
        snapshotter = Snapshotter((node or Memory()).paths, None)
        snapshotter.enter(RankInfo(2, rank, size))
        restorer = ShardedRestorer(
            group,
            snapshotter,
            ours,
            listed=lambda: listed(rank),
            read=lambda name, marker: read_checkpoint(
                run.directory, name, marker or run.directory.marker(name), ours=ours, rank=rank
            ),
            copies=PeerCopies((), JobId("j1"), key=""),
        )
        state, is_any = restorer.restore()
        if state is not None:
            members[rank].objects.put(state["objects"])
        return state, is_any

    return members, together(size, restore)


@pytest.mark.parametrize(("size", "nodes"), [(1, 1), (2, 2), (3, 1), (4, 2)])
@pytest.mark.parametrize("others", [1, 2, 3, 4])
def test_rows_come_from_the_memory_of_all_nodes(
    tmp_path: Path, size: int, nodes: int, others: int
) -> None:
    """Storage is empty; a newcomer's node has nothing, and every old node has a member."""
    run = ShardedRun(tmp_path, shape=(size,), nodes=nodes)
    run.save()
    if others < nodes:
        pytest.skip("a node without a member in the group is not asked")
    for name in run.committed():
        run.directory.remove(name)
    places = [run.nodes[rank] if rank < nodes else None for rank in range(others)]
    members, found = restored(run, places)
    assert all(state is not None and state["steps"] == 1 for state, _ in found), found
    for member in members:
        assert_rows_of(member, run.members[0].whole, run.members[0].optimizer_state)


def test_rows_come_also_where_not_all_members_are_connected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_links, "FEW", 1)
    test_rows_come_from_the_memory_of_all_nodes(tmp_path, 4, 2, 3)


def test_what_one_node_lacks_comes_from_storage(tmp_path: Path) -> None:
    run = ShardedRun(tmp_path, shape=(4,), nodes=2)
    run.save(steps=1)
    newest = run.savers[0]
    assert newest.held_snapshots()[0][1].steps == 1
    members, found = restored(run, [run.nodes[0], None])
    assert all(state is not None and state["steps"] == 1 for state, _ in found), found
    for member in members:
        assert_rows_of(member, run.members[0].whole, run.members[0].optimizer_state)


def test_nothing_is_begun_anew_while_storage_is_away(tmp_path: Path) -> None:
    run = ShardedRun(tmp_path, shape=(2,), nodes=2)
    run.save()
    _, found = restored(run, [run.nodes[0], None], reads=False)
    assert found == [(None, True), (None, True)]
    empty = ShardedRun(tmp_path / "empty", shape=(2,), nodes=2)
    _, found = restored(empty, [None, None])
    assert found == [(None, False), (None, False)]


def test_a_part_that_one_member_finds_torn_is_used_by_nobody(tmp_path: Path) -> None:
    run = ShardedRun(tmp_path, shape=(2,), nodes=2)
    run.save(steps=1)
    run.save(steps=2)
    torn = Path(run.directory.checkpoint_path(run.committed()[-1])) / "part-00001.distcp"
    content = bytearray(torn.read_bytes())
    content[len(content) // 2] ^= 1
    torn.write_bytes(content)
    members, found = restored(run, [None, None])
    assert all(state is not None and state["steps"] == 1 for state, _ in found), found
    for member in members:
        assert_rows_of(member, run.members[0].whole, run.members[0].optimizer_state)
