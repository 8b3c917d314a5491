"""Snapshots in shared memory: whole or not there, whatever dies in the middle."""

from __future__ import annotations

import os
import zlib

import pytest
import torch

from elastic.core.policy.shares import Piece, cut
from elastic.runtime import snapshot_memory
from elastic.runtime.snapshot_memory import HEADER, Mark
from elastic.worker import arena
from elastic.worker.arena import Layout, Slot
from elastic.worker.transfer import pack, places_print, read_skeleton, tensors_of

STATE = {
    "weights": torch.arange(12.0).reshape(4, 3),
    "count": torch.tensor(7),
    "none": torch.empty(0, 5),
    "bits": torch.tensor([True, False, True]),
    "half": torch.randn(3, 2).to(torch.bfloat16),
    "name": "ü",
}


def take(slot: Slot, part: int, parts: int, number: int = 1, generation: int = 1) -> Mark:
    """Copy one worker's share of the state."""
    skeleton, tensors = pack(STATE)
    layout = Layout.of(tensors_of(read_skeleton(skeleton)))
    tensors_print = places_print(read_skeleton(skeleton))
    slot.unmark(part)
    slot.reserve(layout.data_bytes + len(skeleton))
    slot.put(layout, tensors, cut(layout.extents(), part, parts))
    if part == 0:
        slot.put_skeleton(layout, skeleton)
    of_all = (number, generation, 10 * number, parts, layout.data_bytes, tensors_print)
    mark = Mark(*of_all, len(skeleton), zlib.crc32(skeleton))
    slot.mark(part, mark)
    return mark


def assert_is_state(slot: Slot, mark: Mark) -> None:
    skeleton = read_skeleton(slot.skeleton(mark))
    _, found = slot.tensors(skeleton)
    _, expected = pack(STATE)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_a_node_shares_the_copying(parts: int) -> None:
    slot = Slot()
    for part in reversed(range(parts)):
        assert slot.whole() is None
        mark = take(slot, part, parts)
    assert slot.whole() == mark
    assert_is_state(slot, mark)


def test_memory_is_shared_between_processes() -> None:
    """As the workers of a node open the agent's."""
    fd = os.memfd_create("test")
    try:
        ours, theirs = (Slot(f"/proc/{os.getpid()}/fd/{fd}") for _ in range(2))
        take(ours, 0, 2)
        mark = take(theirs, 1, 2)
        assert ours.whole() == theirs.whole() == mark
        assert_is_state(ours, mark)
    finally:
        os.close(fd)


def test_a_worker_that_dies_while_it_copies_leaves_no_snapshot() -> None:
    slot = Slot()
    for part in (0, 1):
        take(slot, part, 2)
    slot.unmark(1)
    assert slot.whole() is None
    take(slot, 1, 2, number=2)
    assert slot.whole() is None  # Two halves of different snapshots.
    take(slot, 0, 2, number=2)
    assert slot.whole() is not None


def test_a_number_that_comes_again_is_another_snapshot() -> None:
    """All were lost before the number counted, and what is done again may differ in a bit."""
    slot = Slot()
    take(slot, 0, 2, number=2)
    take(slot, 1, 2, number=2, generation=2)
    assert slot.whole() is None
    take(slot, 0, 2, number=2, generation=2)
    assert slot.whole() is not None


def test_a_group_of_another_size_begins_its_own() -> None:
    slot = Slot()
    for part in range(3):
        take(slot, part, 3)
    take(slot, 0, 1, number=2)
    assert slot.whole() == take(slot, 0, 1, number=2)


def test_a_state_that_grows_gets_more_room() -> None:
    slot = Slot()
    mark = take(slot, 0, 1)
    view = slot.tensors(read_skeleton(slot.skeleton(mark)))[1]
    slot.reserve(1 << 20)
    assert torch.equal(view[0], STATE["weights"])  # What reads the old mapping goes on.
    assert_is_state(slot, mark)


def test_a_flipped_bit_in_what_is_no_tensor_is_noticed() -> None:
    slot = Slot()
    mark = take(slot, 0, 1)
    memory = slot._mapped()
    memory[HEADER + mark.data_bytes + 20] ^= 1
    with pytest.raises(ValueError, match="checksum"):
        slot.skeleton(mark)


def test_nothing_is_whole_before_the_first_snapshot() -> None:
    assert Slot().whole() is None


def test_warming_up_changes_nothing() -> None:
    slot = Slot()
    slot.warm_up(1 << 20)
    assert slot.whole() is None
    assert_is_state(slot, take(slot, 0, 1))


def test_a_piece_has_a_storage_of_its_own() -> None:
    """Or torch.save would write all of the memory for each."""
    slot = Slot()
    take(slot, 0, 1)
    layout = Layout.of(tensors_of(read_skeleton(pack(STATE)[0])))
    chunk = slot.chunk(layout, Piece(0, 1, 2))
    assert chunk.untyped_storage().nbytes() == chunk.nbytes == 24
    assert torch.equal(chunk, STATE["weights"][1:3])


def test_more_memory_than_there_is_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not by the kernel, which kills somebody later."""
    assert snapshot_memory.available_memory()
    monkeypatch.setattr(snapshot_memory, "available_memory", lambda: 1 << 20)
    slot = Slot()
    slot.reserve(1 << 18)
    with pytest.raises(OSError, match="1048576 are available on this node"):
        slot.reserve(1 << 21)


def test_room_that_another_worker_made_since_we_looked_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it maps must not end under it: the kernel would kill it."""
    ours = Slot()
    theirs = Slot(f"/proc/{os.getpid()}/fd/{ours._fd}")

    def looked(*_: object) -> None:
        monkeypatch.undo()
        theirs.reserve(1_000_000)

    monkeypatch.setattr(arena, "check_room", looked)
    ours.reserve(0)
    assert os.fstat(ours._fd).st_size == HEADER + 1_000_000
