"""Snapshots in shared memory: whole or not there, whatever dies in the middle."""

from __future__ import annotations

import zlib

import pytest
import torch

from elastic.core.policy.shares import cut
from elastic.runtime import snapshot_memory
from elastic.runtime.snapshot_memory import HEADER, SnapshotMark
from elastic.worker.state.arena import SnapshotSlot, StateLayout
from elastic.worker.state.packing import pack, places_print, read_skeleton, tensors_of

STATE = {
    "weights": torch.arange(12.0).reshape(4, 3),
    "count": torch.tensor(7),
    "none": torch.empty(0, 5),
    "bits": torch.tensor([True, False, True]),
    "half": torch.randn(3, 2).to(torch.bfloat16),
    "name": "ü",
}


def take(
    slot: SnapshotSlot, part: int, parts: int, number: int = 1, generation: int = 1
) -> SnapshotMark:
    """Copy one worker's share of the state."""
    skeleton, tensors = pack(STATE)
    layout = StateLayout.of(tensors_of(read_skeleton(skeleton)))
    tensors_print = places_print(read_skeleton(skeleton))
    slot.unmark(part, generation, number)
    slot.reserve(layout.data_bytes + len(skeleton))
    slot.put(layout, tensors, cut(layout.extents(), part, parts))
    if part == 0:
        slot.put_skeleton(layout, skeleton)
    of_all = (number, generation, 10 * number, parts, layout.data_bytes, tensors_print)
    mark = SnapshotMark(*of_all, len(skeleton), zlib.crc32(skeleton))
    slot.mark(part, mark)
    return mark


def test_a_flipped_bit_in_what_is_no_tensor_is_noticed() -> None:
    slot = SnapshotSlot()
    mark = take(slot, 0, 1)
    memory = slot._mapped()
    memory[HEADER + mark.data_bytes + 20] ^= 1
    with pytest.raises(ValueError, match="checksum"):
        slot.skeleton(mark)


def test_what_a_further_worker_has_begun_to_overwrite_is_not_whole() -> None:
    slot = SnapshotSlot()
    mark = take(slot, 0, 1)
    slot.unmark(1, 1, 2)  # The first one is still in its code after the step.
    assert slot.whole() is None
    take(slot, 1, 2, number=2)
    assert slot.whole() is None
    slot.unmark(1)
    assert slot.whole() == mark
    alone = take(slot, 0, 1, number=1, generation=2)
    slot.unmark(1, 1, 2)  # The further one of the group before was killed in its copy.
    assert slot.whole() == alone


def test_more_memory_than_there_is_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not by the kernel, which kills somebody later."""
    assert snapshot_memory.available_memory()
    monkeypatch.setattr(snapshot_memory, "available_memory", lambda: 1 << 20)
    slot = SnapshotSlot()
    slot.reserve(1 << 18)
    with pytest.raises(OSError, match="1048576 are available on this node"):
        slot.reserve(1 << 21)
