"""Snapshots of a GPU's state, copied in a stream of their own, have the state of their boundary."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from elastic.core.policy.cursor import Cursor  # noqa: E402
from elastic.worker.checkpoint import snapshot_copier  # noqa: E402
from tests.patience import DEADLINE_S  # noqa: E402
from tests.unit.saving_under_test import Run, assert_same  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]

BUSY_CYCLES = 200_000_000
"""The device is behind the host by about 0.1 s: longer than the host needs for what it queues."""


def test_a_copy_beside_the_loop_follows_what_was_queued_and_delays_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path)
    wide = nn.Linear(4096, 4096).cuda()
    run.objects.models.append(wide)
    run.objects.optimizers.append(optimizer := torch.optim.AdamW(wide.parameters()))
    (snapshotter,) = run.savers
    assert sum(one.nbytes for one in wide.parameters()) > snapshot_copier.BESIDE_BYTES_MIN
    x = torch.randn(64, 4096, device="cuda")

    def backward() -> None:
        wide(x).square().mean().backward()

    for number in range(1, 6):
        backward()
        torch.cuda._sleep(BUSY_CYCLES)
        optimizer.step()  # Still in the device's queue at the boundary.
        optimizer.zero_grad()
        run.steps = number
        done = snapshotter.take(
            run.state, Cursor(0, number), number, still=run.objects.still_between_steps()
        )
        assert snapshotter.is_busy()
        expected = wide.weight.detach().clone()
        moments = [kept["exp_avg"].clone() for kept in optimizer.state.values()]
        torch.cuda._sleep(BUSY_CYCLES)
        queued = torch.cuda.Event()
        queued.record()
        snapshotter.settle()
        if number > 3:  # The memory of both slots is registered with the device by now.
            assert not queued.query()  # What the loop has queued meanwhile is not waited for.
        assert snapshotter.held() == number
        with torch.no_grad():
            wide.weight.zero_()
        _, held = snapshotter.read_held(number)
        saved = held["objects"]
        assert_same(saved["models"][1]["weight"], expected.cpu())
        found = [one["exp_avg"] for one in saved["optimizers"][1]["state"].values()]
        assert_same(found, [one.cpu() for one in moments])
        with torch.no_grad():
            wide.weight.copy_(expected)
        assert done.wait(DEADLINE_S)
    snapshotter.finish()
