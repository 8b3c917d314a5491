"""Steps on a played device, whose results come late and whose abort leaves partial sums."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic.errors import check
from elastic.worker.group import accelerators
from elastic.worker.reduce import bucket_exchanges, commit_gate
from elastic.worker.reduce import reducer as reducer_module
from elastic.worker.reduce.reducer import Reducer, StepShare
from tests.unit.reduce_under_test import SIZE, bits, mean_square, mlp, unit_of

V, STEPS, KILLS = 4, 8, 200


class PlayedEvent:
    """A place in the device's stream."""

    def __init__(self, device: PlayedDevice) -> None:
        self.device, self.is_there = device, False

    def query(self) -> bool:
        self.device.moment()
        self.device.advance()
        return self.is_there


class PlayedDevice:
    """A device, and the only other rank of its group.

    It gets further by one piece of work whenever the host looks at an event, and never before. At
    a given moment the group is aborted: that is announced, and then all work ends at once. Or the
    other rank alone is: it gives us what it has, and we hear of it by its closed connection.
    """

    def __init__(self) -> None:
        self.form(None)

    def form(self, abort_at: int | None, *, hangs: bool = False, is_theirs: bool = False) -> None:
        """Be in a new group, that is aborted at this moment; if it hangs, its work never ends."""
        self.work: deque[Callable[[bool], None]] = deque()
        self.moments = 0
        self.abort_at = abort_at
        self.hangs = hangs
        self.is_theirs = is_theirs
        self.is_over = self.has_closed = False

    def moment(self) -> None:
        self.moments += 1
        if self.moments - 1 == self.abort_at:
            self.has_closed = True
            self.is_over = not self.is_theirs
            while self.work and not self.hangs:
                self.work.popleft()(False)

    def advance(self) -> None:
        if self.work and not (self.is_over and self.hangs):
            self.work.popleft()(not self.has_closed)

    def record(self, device: torch.device) -> PlayedEvent:
        del device
        event = PlayedEvent(self)
        self.work.append(lambda _: setattr(event, "is_there", True))
        return event

    def messages(self, group: Any) -> None:
        """Played exchanges carry the tensors."""

    def register(self, device: torch.device, address: int, num_bytes: int) -> None:
        """Nothing is copied."""

    def unregister(self, address: int) -> None:
        """Nothing is copied."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


class PlayedExchange:
    """A bucket's exchange: `finish` returns at once, and the total comes later, or a part of it."""

    carries_rows, has_tags, bytes_sent = False, True, 0

    def __init__(self, deal: Any, like: torch.Tensor, group: Any, **_: Any) -> None:
        self.total, self.device, self.deal = torch.full_like(like, torch.nan), group, deal

    def start(self, sums: Any, row: Any = (), divisor: float | None = None) -> None:
        del row, divisor
        self.ours = sums[self.deal.mine[0]].clone()
        self.total.fill_(torch.nan)
        self.device.moment()

    def finish(self, divisor: float) -> None:
        ours, total = self.ours, self.total

        def arrive(is_whole: bool) -> None:
            last = total.numel() if is_whole else total.numel() // 2
            total[:last] = (ours + 0.5 * ours.flip(0))[:last] / divisor

        self.device.work.append(arrive)
        self.device.moment()

    def close(self) -> None:
        """Expect nothing: the device has no messages."""


class PlayedRows:
    """Messages of the hosts: they come, unless the group is over."""

    def __init__(self, rank: int, world_size: int, group: Any, size: int = 0) -> None:
        del rank, world_size, size
        self.device = group

    def start(self, values: Sequence[float]) -> None:
        self.values = tuple(values)
        self.device.moment()

    def finish(self) -> list[tuple[float, ...]]:
        self.device.moment()
        if self.device.has_closed:
            raise RuntimeError("Connection closed")
        # Whoever has sent the gate's row was at a device that has done the exchange.
        check(self.values != (1.0,) or not self.device.work, "told before the device is done")
        return [self.values, self.values]


@pytest.fixture(name="device")
def _device(monkeypatch: pytest.MonkeyPatch) -> PlayedDevice:
    device = PlayedDevice()
    monkeypatch.setitem(accelerators.KINDS, "cpu", device)
    monkeypatch.setattr(reducer_module, "links_of", lambda _: SimpleNamespace(memory={}))
    monkeypatch.setattr(bucket_exchanges, "make_exchange", PlayedExchange)
    monkeypatch.setattr(bucket_exchanges, "MetadataExchange", PlayedRows)
    monkeypatch.setattr(commit_gate, "MetadataExchange", PlayedRows)
    return device


class Run:
    """A run of rank 0, as the step engine drives it."""

    def __init__(self, device: PlayedDevice) -> None:
        self.device, self.model = device, mlp()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.unit = unit_of(self.model)
        self.reducer = Reducer([self.unit], is_over=lambda: device.is_over)
        self.states: list[list[bytes]] = []

    def step(self) -> bool:
        """Try the next step; whether it was committed."""
        step, share = len(self.states), StepShare(0, 2, V, SIZE, (SIZE,) * V)
        self.reducer.begin_step(share)
        for number in range(*share.held):
            self.reducer.begin_micro_batch(number)
            mean_square(self.model, V * step + number).backward()
        if not self.reducer.settle(self.unit):
            return False
        grads = self.state(p.grad for p in self.model.parameters())
        is_whole = self.reducer.settle_buffers(lambda: not self.device.is_over)
        if is_whole:
            self.reducer.keep_buffers()
            self.optimizer.step()
            momenta = (one["momentum_buffer"] for one in self.optimizer.state.values())
            self.states.append(grads + self.state([*self.model.parameters(), *momenta]))
        self.seen = grads
        return is_whole

    @staticmethod
    def state(tensors: Any) -> list[bytes]:
        return [bits(tensor) for tensor in tensors]


def test_aborts_at_any_moment_leave_the_bits_of_an_undisturbed_run(device: PlayedDevice) -> None:
    right = Run(device)
    right.reducer.attach(device)
    moments = []
    for _ in range(STEPS):
        before = device.moments
        assert right.step()
        moments.append(device.moments - before)
    right.reducer.close()
    grads = len(list(right.model.parameters()))
    chance, kills, voids = random.Random(0), 0, 0
    while kills < KILLS:
        run = Run(device)
        while len(run.states) < STEPS:
            step = len(run.states)
            is_killed = chance.random() < 0.8
            kills += is_killed
            at = chance.randrange(moments[step]) if is_killed else None
            kind = chance.random()
            device.form(at, hangs=kind < 0.3, is_theirs=kind > 0.7)
            run.reducer.attach(device)
            run.seen = right.states[step][:grads]
            is_committed = run.step()
            voids += not is_committed
            if not device.is_theirs:
                assert run.seen == right.states[step][:grads], "p.grad held a partial sum"
            assert run.states == right.states[: step + is_committed]
        run.reducer.close()
    assert voids > KILLS // 2
