"""Snapshots of a device's state: marked when it has copied, to memory that is registered with it.

That memory is our own share of it, for as long as it is mapped.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.core.policy.shares import cut
from elastic.runtime.snapshot_memory import HEADER
from elastic.worker.group import accelerators
from elastic.worker.state.arena import SnapshotSlot, StateLayout
from elastic.worker.state.packing import pack, read_skeleton, tensors_of
from tests.unit.saving_under_test import Run

CPU = torch.device("cpu")
STATE = {"weights": torch.zeros(64, mmap.PAGESIZE), "bias": torch.zeros(7)}


class Registry:
    """A device that knows what memory is registered with it, and has room for so many spans.

    It is its own event, too.
    """

    def __init__(self, room: int = 100) -> None:
        self.known: dict[int, int] = {}
        self.room = room
        self.asked = 0
        self.on_query: Callable[[], object] = lambda: None

    def record(self, device: torch.device) -> Registry:
        del device
        return self

    def query(self) -> bool:
        """Say that all is done, once it was asked twice."""
        self.asked += 1
        self.on_query()
        return self.asked % 2 == 0

    def register(self, device: torch.device, address: int, num_bytes: int) -> None:
        del device
        if len(self.known) == self.room:
            raise OSError("cudaHostRegister: CUDA error 2, out of memory")
        assert is_mapped(address, num_bytes)
        assert not any(a < address + num_bytes and address < a + n for a, n in self.known.items())
        self.known[address] = num_bytes

    def unregister(self, address: int) -> None:
        assert is_mapped(address, self.known.pop(address)), "unmapped while it was registered"


def is_mapped(address: int, num_bytes: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "elastic-snapshot" in line:
            first, last = (int(one, 16) for one in line.split()[0].split("-"))
            if first <= address and address + num_bytes <= last:
                return True
    return False


@pytest.fixture(name="registry")
def _registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    registry: Any = Registry()
    monkeypatch.setitem(accelerators.KINDS, "cpu", registry)
    return registry


def slot_and_layout() -> tuple[SnapshotSlot, StateLayout]:
    layout = StateLayout.of(tensors_of(read_skeleton(pack(STATE)[0])))
    slot = SnapshotSlot()
    slot.warm_up(layout.data_bytes)
    return slot, layout


def test_a_worker_registers_its_own_share_and_nothing_twice(registry: Registry) -> None:
    slot, layout = slot_and_layout()
    shares = [cut(layout.extents(), part, 4) for part in range(4)]
    for pieces in (shares[1], shares[1], shares[2]):  # Its place in the group changes.
        slot.pin(layout, pieces, CPU)
        assert slot.is_pinned(layout, pieces)
        assert abs(sum(registry.known.values()) - layout.data_bytes // 4) <= 2 * mmap.PAGESIZE
    assert not slot.is_pinned(layout, shares[1])
    slot.close()
    assert not registry.known


def test_memory_is_unregistered_before_it_is_mapped_anew_or_let_go_of(registry: Registry) -> None:
    slot, layout = slot_and_layout()
    pieces = cut(layout.extents(), 0, 1)
    slot.pin(layout, pieces, CPU)
    assert registry.known
    slot.reserve(2 * layout.data_bytes + HEADER)
    assert not registry.known
    assert not slot.is_pinned(layout, pieces)
    slot.pin(layout, pieces, CPU)
    assert registry.known
    del slot
    assert not registry.known


def test_a_device_that_refuses_leaves_nothing_registered(registry: Registry) -> None:
    slot, layout = slot_and_layout()
    first, last = cut(layout.extents(), 0, 8), cut(layout.extents(), 7, 8)
    registry.room = 1
    with pytest.raises(OSError, match="out of memory"):
        slot.pin(layout, [*first, *last], CPU)
    assert not registry.known
    assert not slot.is_pinned(layout, first)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_snapshot_is_marked_once_the_device_has_copied_it(
    registry: Registry, tmp_path: Path
) -> None:
    run, seen = Run(tmp_path), []

    def held() -> list[int]:
        return [mark.steps for _, mark in run.savers[0].held_snapshots()]

    registry.on_query = lambda: seen.append(held())
    run.save()
    assert (seen, held()) == ([[], []], [1])
    run.save()
    assert (seen[2:], held()) == ([[1], [1]], [2, 1])
    if (warming := run.savers[0]._copier.take_warming()) is not None:
        warming.join()  # What another thread has begun, and the next snapshot waits for.
    for slot, _ in run.savers[0].held_snapshots():
        pinned = slot._pinned
        assert pinned is not None
        assert pinned.spans
