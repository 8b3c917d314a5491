"""A train function that is left at any line and called again has the same bits at every step."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import pickle
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, WeightedRandomSampler

from elastic import train
from elastic.core.policy.cursor import Cursor
from elastic.core.policy.program_points import ProgramPoint, next_program_points
from elastic.core.policy.recovery import PassPosition, RunPosition, plan_transfers
from elastic.errors import UsageError
from elastic.train.torch import (
    prepare_data_loader,
    prepare_model,
    prepare_optimizer,
    prepare_scheduler,
)
from elastic.worker.base.interrupt import GroupChanged, Interrupter
from elastic.worker.engine import step_engine
from elastic.worker.engine.recovery_modes import ResumeState
from elastic.worker.engine.run_state import RunState
from elastic.worker.engine.step_engine import StepEngine
from elastic.worker.process.local import NoNextGroup
from elastic.worker.state.packing import pack, read_skeleton, unpack
from tests.unit.engine_under_test import (
    GLOBAL,
    SAMPLES,
    SIZE,
    called,
    data,
    square,
)

# Torch does not know that the optimizer has stepped, in an earlier call.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")

EPOCHS = 2


class Left(RuntimeError):
    """What a collective raises whose peer is gone."""


class Tally:
    """A user's own object, that counts what it is told."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts = state["counts"]


class Home(NoNextGroup):
    """Has a call of the train function interrupted as a worker's main loop has."""

    def __init__(self) -> None:
        self.interrupter = Interrupter()
        self.broken = 0

    def must_leave(self, generation: int) -> bool:
        return self.interrupter.is_over(generation)

    def is_group_over(self, generation: int) -> bool:
        return generation == self.broken or self.must_leave(generation)

    def has_failed(self, generation: int) -> bool:
        return generation == self.broken

    def defer(self, on: bool) -> None:
        self.interrupter.defer(on)


class Life:
    """Calls a train function again and again until it ends."""

    def __init__(
        self,
        leaves: Callable[[int], bool],
        *,
        by_order: bool = False,
        sends: bool = False,
        recovery: str = "reenter",
    ) -> None:
        """Have it left at these lines, each time that a step or an epoch comes to them first.

        Args:
            leaves: by the number of the line.
            by_order: the group changes there; if not, a collective of the script's own raises.
            sends: the next call is that of another worker, which receives the state.
            recovery: as in `FailureConfig`.
        """
        self._leaves, self._by_order, self._sends = leaves, by_order, sends
        self._recovery = recovery
        self._left: set[tuple[Cursor, int]] = set()
        self._generation = 0
        self.states: dict[Cursor, set[str]] = {}
        self.resumed: list[Cursor | None] = []

    def live(self, function: Callable[[StepEngine, Life], Any]) -> Any:
        resume, home = None, Home()
        while True:
            self._generation += 1
            with called(home, resume, self._generation) as engine:
                engine.configure({"recovery": self._recovery})
                try:
                    call = functools.partial(function, engine, self)
                    return home.interrupter.run(self._generation, call)
                except (Left, GroupChanged) as error:
                    resume = engine.resume_state(has_raised=isinstance(error, Left))
                    if resume is not None and self._sends:
                        skeleton, tensors = pack(resume.state)
                        arrived = [tensor.clone() for tensor in tensors]
                        resume = replace(resume, state=unpack(read_skeleton(skeleton), arrived))
                    self.resumed.append(resume.cursor if resume is not None else None)

    def line(self, engine: StepEngine, number: int) -> None:
        """Be a line of the script's."""
        if not self._by_order:
            dist.all_reduce(torch.ones(1))
        if not self._leaves(number) or (engine.cursor, number) in self._left:
            return
        self._left.add((engine.cursor, number))
        home: Any = engine.groups
        if not self._by_order:
            home.broken = self._generation
            raise Left("Connection closed by peer")
        home.interrupter.interrupt(self._generation, "one is lost")
        home.interrupter.check()

    def break_group(self, engine: StepEngine, number: int) -> bool:
        """Have the group broken without an error, if it is left at this line; return whether."""
        if not self._leaves(number) or (engine.cursor, number) in self._left:
            return False
        self._left.add((engine.cursor, number))
        home: Any = engine.groups
        home.broken = self._generation
        return True

    def note(self, engine: StepEngine) -> None:
        whole = pickle.dumps(_plain(engine.state.take()))
        digest = hashlib.sha256(whole).hexdigest()
        self.states.setdefault(engine.cursor, set()).add(digest)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), value.detach().numpy().tobytes())
    if isinstance(value, dict):
        return [(repr(key), _plain(one)) for key, one in value.items()]
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return repr(value)


def plain(engine: StepEngine, life: Life) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 1))
    model = prepare_model(net)
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    by_step = prepare_scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9))
    by_epoch = prepare_scheduler(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    average = torch.optim.swa_utils.AveragedModel(net, avg_fn=lambda old, new, _: (old + new) / 2)
    tally = Tally()
    train.register(average=average, tally=tally)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    loader = prepare_data_loader(
        DataLoader(data(), batch_size=SIZE, shuffle=True), global_batch_size=GLOBAL
    )
    for epoch in train.epochs(EPOCHS):
        by_epoch.step()
        life.line(engine, 7)
        with torch.no_grad():
            net[0].weight[0].mul_(1.5 + epoch)
        tally.counts.append(epoch)
        life.line(engine, 8)
        for _, x, y in loader:
            scaler.scale(torch.ones(()))  # It is known from its first use on.
            life.note(engine)
            scaler.scale(square(model(x), y)).backward()
            if engine.is_due(optimizer):
                life.line(engine, 0)
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            if train.stepped():
                life.line(engine, 1)
            scaler.update()
            by_step.step()
            if train.stepped():
                life.line(engine, 2)
                average.update_parameters(net)
                tally.counts.append(engine.cursor.step)
                life.line(engine, 3)
            optimizer.zero_grad()
        life.note(engine)
        by_epoch.step()
        life.line(engine, 4)
        tally.counts.append(-epoch)
        average.update_parameters(net)
        life.line(engine, 5)
    with torch.no_grad():
        for own, mean in zip(net.parameters(), average.module.parameters(), strict=True):
            own.data, mean.data = mean.data, own.data
    life.line(engine, 6)
    life.note(engine)


def whole_and_left_early(engine: StepEngine, life: Life) -> None:
    net = nn.Linear(5, 1)
    nn.init.ones_(net.weight)
    model = prepare_model(net)
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    by_step = prepare_scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9))
    by_epoch = prepare_scheduler(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    loader = prepare_data_loader(DataLoader(data(), batch_size=SIZE), global_batch_size=GLOBAL)
    for _ in train.epochs(EPOCHS):
        for step in train.steps(loader):
            life.note(engine)
            for _, x, y in step:
                square(model(x), y).backward()
            life.line(engine, 0)
            if engine.cursor == Cursor(1, 1):
                break
            optimizer.step()
            life.line(engine, 1)
            by_step.step()
            if engine.cursor == Cursor(0, 2):
                break
            life.line(engine, 2)
        life.line(engine, 3)
        by_epoch.step()
        life.line(engine, 4)
    life.note(engine)


def tallied(momentum: float = 0.0) -> tuple[Any, Any, Tally, Any]:
    """Return model, optimizer, a registered tally and loader, prepared."""
    model, tally = prepare_model(nn.Linear(5, 1)), Tally()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    optimizer = prepare_optimizer(sgd)
    train.register(tally=tally)
    loader = prepare_data_loader(DataLoader(data(), batch_size=SIZE), global_batch_size=GLOBAL)
    return model, optimizer, tally, loader


def counts_before_it_steps(engine: StepEngine, life: Life) -> None:
    model, optimizer, tally, loader = tallied()
    for _ in train.epochs(EPOCHS):
        for step in train.steps(loader):
            life.note(engine)
            for _, x, y in step:
                square(model(x), y).backward()
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
            tally.counts.append(step.samples)
            life.line(engine, 0)
            optimizer.step()
    life.note(engine)


def test_what_a_loop_counts_before_its_optimizer_steps_counts_once() -> None:
    """The step needs nobody else by then, so that whoever is asked to leave commits it first."""
    undisturbed, called_back = Life(lambda _: False), Life(lambda _: True, by_order=True)
    undisturbed.live(counts_before_it_steps)
    called_back.live(counts_before_it_steps)
    assert called_back.states == undisturbed.states
    assert len(called_back.resumed) > EPOCHS


def test_nor_does_it_where_a_collective_of_its_own_fails_there() -> None:
    undisturbed, broken = Life(lambda _: False), Life(lambda _: True)
    undisturbed.live(counts_before_it_steps)
    broken.live(counts_before_it_steps)
    assert broken.states == undisturbed.states
    assert None not in broken.resumed


@pytest.mark.parametrize("recovery", ["auto", "reenter"])
def test_a_sum_of_the_scripts_own_that_an_abort_cuts_short_is_in_no_weight(
    monkeypatch: pytest.MonkeyPatch, recovery: str
) -> None:
    """NCCL's return before the device is there, and an abort ends them without an error."""
    aborts: list[Callable[[], Any]] = []

    class Event:
        def query(self) -> bool:
            for abort in aborts:
                abort()
            return True

    monkeypatch.setattr("elastic.worker.engine.resume_point.all_by_gloo", lambda: False)
    monkeypatch.setattr("elastic.worker.engine.resume_point.record", lambda _: [Event()])

    def smooths_gradients(engine: StepEngine, life: Life) -> None:
        model = prepare_model(nn.Linear(5, 1))
        optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        loader = prepare_data_loader(DataLoader(data(), batch_size=SIZE), global_batch_size=GLOBAL)
        for _ in train.epochs(EPOCHS):
            for step in train.steps(loader):
                life.note(engine)
                for _, x, y in step:
                    square(model(x), y).backward()
                dist.all_reduce(torch.ones(1))
                if life._leaves(0) and (engine.cursor, 0) not in life._left:
                    model.module.weight.grad.mul_(0.5)  # What had arrived until then.
                aborts[:] = [functools.partial(life.break_group, engine, 0)]
                optimizer.step()
                aborts.clear()
        life.note(engine)

    undisturbed = Life(lambda _: False, recovery=recovery)
    undisturbed.live(smooths_gradients)
    broken = Life(lambda _: True, recovery=recovery)
    broken.live(smooths_gradients)
    assert broken.states == undisturbed.states
    assert None not in broken.resumed
    assert len(broken.resumed) == EPOCHS * 3


def test_what_a_script_makes_of_gradients_after_such_an_error_is_in_no_weight() -> None:
    def forgiving(engine: StepEngine, life: Life) -> None:
        model = prepare_model(nn.Linear(5, 1))
        optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        loader = prepare_data_loader(DataLoader(data(), batch_size=SIZE), global_batch_size=GLOBAL)
        for _ in train.epochs(EPOCHS):
            for _, x, y in loader:
                life.note(engine)
                square(model(x), y).backward()
                if engine.is_due(optimizer):
                    try:
                        life.line(engine, 0)
                    except Left:
                        model.module.weight.grad.mul_(0.5)
                optimizer.step()
        life.note(engine)

    undisturbed, broken = Life(lambda _: False), Life(lambda _: True)
    undisturbed.live(forgiving)
    broken.live(forgiving)
    assert broken.states == undisturbed.states
    assert None not in broken.resumed


def test_a_script_that_goes_on_after_such_an_error_is_called_again_all_the_same() -> None:
    def forgiving(engine: StepEngine, life: Life) -> None:
        model = prepare_model(nn.Linear(5, 1))
        optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        by_step = prepare_scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9))
        by_epoch = prepare_scheduler(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
        loader = prepare_data_loader(DataLoader(data(), batch_size=SIZE), global_batch_size=GLOBAL)
        for _ in train.epochs(EPOCHS):
            for _, x, y in loader:
                life.note(engine)
                square(model(x), y).backward()
                optimizer.step()
                with contextlib.suppress(Left):
                    if train.stepped():
                        life.line(engine, 0)
                    by_step.step()
            with contextlib.suppress(Left):
                life.line(engine, 1)
                by_epoch.step()
        life.note(engine)

    undisturbed, broken = Life(lambda number: False), Life(lambda number: True)
    undisturbed.live(forgiving)
    broken.live(forgiving)
    assert broken.states == undisturbed.states
    assert broken.resumed[0] is None  # No copy was taken before it was known to be needed.
    assert None not in broken.resumed[1:]


def test_a_loss_after_a_collective_that_succeeded_takes_nothing_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("elastic.worker.engine.resume_point.COPIED_WEIGHTS_BYTES_MAX", 0)
    home = Home()
    with called(home, None, 1) as engine:
        engine.configure({"recovery": "reenter"})
        model = prepare_model(nn.Linear(5, 1))
        optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        loader = prepare_data_loader(DataLoader(data(), batch_size=SIZE), global_batch_size=GLOBAL)

        def trained() -> None:
            for _ in train.epochs(EPOCHS):
                for _, x, y in loader:
                    square(model(x), y).backward()
                    optimizer.step()
                    dist.all_reduce(torch.ones(1))
                    if engine.cursor == Cursor(0, 3):
                        home.interrupter.interrupt(1, "one is lost")

        with pytest.raises(GroupChanged):
            home.interrupter.run(1, trained)
        left = engine.resume_state()
    assert left is not None
    assert left.cursor == Cursor(0, 3)


def test_state_that_cannot_be_taken_does_not_stand_for_the_end_of_a_call() -> None:
    """The worker's process ended there, whatever its train function had returned or raised."""

    class Closed(Tally):
        def state_dict(self) -> dict[str, Any]:
            raise ValueError("it is closed")

    with called(Home(), None, 1) as engine:
        model = prepare_model(nn.Linear(5, 1))
        optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        loader = prepare_data_loader(DataLoader(data(), batch_size=SIZE), global_batch_size=GLOBAL)
        train.register(closed=Closed())
        for _ in train.epochs(1):
            for _, x, y in loader:
                square(model(x), y).backward()
                optimizer.step()
        assert engine.resume_state() is None


@pytest.mark.parametrize(("epoch", "step"), [(0, 0), (0, 2), (1, 0), (1, 3)])
def test_code_at_the_head_of_an_epoch_counts_once_in_a_state_that_is_received(
    epoch: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sender has run that code before its first step, and the receiver runs it once more."""
    sent: dict[str, Any] = {}

    def send(engine: StepEngine) -> None:
        if engine.cursor == Cursor(epoch, step) and not sent:
            sent.update(copy.deepcopy(engine._checkpoints.take()))

    def trained(engine: StepEngine) -> float:
        model = prepare_model(nn.Linear(5, 1))
        optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        loader = prepare_data_loader(DataLoader(data(), batch_size=SIZE), global_batch_size=GLOBAL)
        for number in train.epochs(EPOCHS):
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
            for _, x, y in loader:
                send(engine)
                assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5 ** (number + 1)
                square(model(x), y).backward()
                optimizer.step()
            send(engine)
        return float(optimizer.param_groups[0]["lr"])

    def received(run: RunState, *_: Any, put: Callable[[Any], None]) -> Any:
        put(copy.deepcopy(sent))
        points = (ProgramPoint(run.cursor),)
        return SimpleNamespace(cursors=(run.cursor,), program_points=points, num_bytes=0)

    with called(Home(), None, 1) as engine:
        undisturbed = trained(engine)
    monkeypatch.setattr(step_engine, "catch_up", received)
    with called(Home(), None, 2) as engine:
        assert trained(engine) == undisturbed


def test_a_collective_that_the_others_are_past_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that is called again runs the code before its pass alone, and would wait."""
    monkeypatch.setattr(step_engine, "ASK_EVERY_S", 0.0)
    refused: dict[str, bool] = {}

    def collective(engine: StepEngine, where: str) -> None:
        place = engine.context
        engine.enter(replace(place, world_size=2))
        try:
            refused[where] = False
            engine._check_others_come()
        except UsageError as error:
            refused[where] = "before its first pass" in str(error)
        finally:
            engine.enter(place)

    def trained(engine: StepEngine, life: Life) -> None:
        model = prepare_model(nn.Linear(5, 1))
        optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        loader = prepare_data_loader(DataLoader(data(), batch_size=SIZE), global_batch_size=GLOBAL)
        collective(engine, "before the loop")
        for epoch in train.epochs(EPOCHS):
            collective(engine, f"at the head of {epoch}")
            for _, x, y in loader:
                square(model(x), y).backward()
                optimizer.step()
                collective(engine, "in a pass")
                if engine.cursor == Cursor(0, 1) and train.stepped():
                    monkeypatch.setattr(step_engine, "others_have_begun", lambda **_: True)
                    life.line(engine, 0)
            collective(engine, "behind a pass")
        collective(engine, "behind the loop")

    Life(lambda number: True, by_order=True).live(trained)
    assert [where for where, is_it in refused.items() if is_it] == [
        "before the loop",
        "at the head of 0",
    ]
    assert len(refused) == 6


def test_weights_changed_at_the_head_of_an_epoch_are_refused_where_no_copy_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("elastic.worker.engine.resume_point.COPIED_WEIGHTS_BYTES_MAX", 0)

    def trained(engine: StepEngine, life: Life) -> None:
        model = prepare_model(nn.Linear(5, 1))
        optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        loader = prepare_data_loader(DataLoader(data(), batch_size=SIZE), global_batch_size=GLOBAL)
        for epoch in train.epochs(EPOCHS):
            if epoch == 1:
                nn.init.ones_(model.module.weight)
            for _, x, y in loader:
                square(model(x), y).backward()
                optimizer.step()
                if engine.cursor.step == 2 and train.stepped():
                    life.line(engine, engine.cursor.epoch)

    Life(lambda epoch: epoch == 0, by_order=True).live(trained)
    with pytest.raises(UsageError, match=r"changes weights in epoch 1.* behind the loop"):
        Life(lambda epoch: epoch == 1, by_order=True).live(trained)


@pytest.mark.parametrize("function", [plain, whole_and_left_early])
def test_a_loop_that_is_left_at_every_line_has_the_bits_of_one_that_is_not(
    function: Callable[[StepEngine, Life], None],
) -> None:
    """A mean over ranks, say, fails there, with a peer that is gone; or a new group is formed."""
    undisturbed = Life(lambda number: False)
    undisturbed.live(function)
    assert all(len(one) == 1 for one in undisturbed.states.values())
    broken = Life(lambda number: True)
    broken.live(function)
    assert broken.states == undisturbed.states
    # A copy of the state is taken before a step whose commit collectives follow, once that is seen.
    lost = [number for number, place in enumerate(broken.resumed) if place is None]
    assert lost == [*range(lost[0], lost[0] + len(lost))]
    called_back = Life(lambda number: True, by_order=True)
    called_back.live(function)
    assert called_back.states == undisturbed.states
    assert None not in called_back.resumed


def freezes_inside(engine: StepEngine, life: Life) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1))
    model = prepare_model(net)
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    loader = prepare_data_loader(DataLoader(data(), batch_size=SIZE), global_batch_size=GLOBAL)
    for epoch in train.epochs(3):
        if epoch == 1:
            net[0].requires_grad_(False)
        for _, x, y in loader:
            life.note(engine)
            square(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            life.line(engine, 0)
    life.note(engine)


class Adaptive(WeightedRandomSampler):
    """Draws again what was hard."""

    def __init__(self) -> None:
        super().__init__([1.0] * SAMPLES, SAMPLES)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = state["weights"]


def samples_adaptively(engine: StepEngine, life: Life, *, registers: bool = True) -> None:
    model = prepare_model(nn.Linear(5, 1))
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    sampler = Adaptive()
    if registers:
        train.register(sampler=sampler)
    made = DataLoader(data(), batch_size=SIZE, sampler=sampler)
    loader = prepare_data_loader(made, global_batch_size=GLOBAL)
    for epoch in train.epochs(EPOCHS):
        for _, x, y in loader:
            life.note(engine)
            square(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if epoch and train.stepped():
                life.line(engine, 0)
        sampler.weights = torch.arange(float(SAMPLES))
    life.note(engine)


class Warm(nn.Linear):
    """Has a state that is no tensor."""

    steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / (1.0 + self.steps)

    def get_extra_state(self) -> dict[str, int]:
        return {"steps": self.steps}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def keeps_more_than_tensors(engine: StepEngine, life: Life) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 5), Warm(5, 1))
    model = prepare_model(net)
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    rates = torch.optim.lr_scheduler
    parts = [rates.LinearLR(optimizer), rates.MultiStepLR(optimizer, [1])]
    scheduler = prepare_scheduler(rates.SequentialLR(optimizer, parts, [3]))
    loader = prepare_data_loader(DataLoader(data(), batch_size=SIZE), global_batch_size=GLOBAL)
    for _ in train.epochs(EPOCHS):
        for _, x, y in loader:
            life.note(engine)
            square(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if train.stepped():
                net[1].steps += 1
            life.line(engine, 0)
    life.note(engine)


def test_an_epoch_is_not_continued_in_another_order() -> None:
    joined = Life(lambda number: True, by_order=True, sends=True)
    with pytest.raises(UsageError, match=r"at step 1 of epoch 1, with order=\d+; the loader has"):
        joined.live(functools.partial(samples_adaptively, registers=False))


def draws_at_the_head_of_steps(engine: StepEngine, life: Life) -> None:
    model = prepare_model(nn.Linear(5, 1))
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    loader = prepare_data_loader(DataLoader(data(), batch_size=SIZE), global_batch_size=GLOBAL)
    for _ in train.epochs(EPOCHS):
        for step in train.steps(loader):
            life.note(engine)
            factor = torch.rand(())  # Such as the size of the images of this step.
            for _, x, y in step:
                square(model(x * factor), y).backward()
            optimizer.step()
            life.line(engine, 0)
    life.note(engine)


@pytest.mark.parametrize(
    "function",
    [
        freezes_inside,
        samples_adaptively,
        keeps_more_than_tensors,
        draws_at_the_head_of_steps,
    ],
)
def test_who_receives_the_state_in_the_middle_of_a_run_goes_on_with_its_bits(
    function: Callable[[StepEngine, Life], None],
) -> None:
    undisturbed, joined = (
        Life(lambda _: False, by_order=True),
        Life(lambda _: True, by_order=True, sends=True),
    )
    undisturbed.live(function)
    joined.live(function)
    assert len(joined.resumed) > EPOCHS
    assert joined.states == undisturbed.states


def counts_at_the_head_of_steps(engine: StepEngine, life: Life) -> None:
    model, optimizer, tally, loader = tallied()
    for _ in train.epochs(EPOCHS):
        for step in train.steps(loader):
            tally.counts.append(engine.cursor.step)
            life.line(engine, 0)
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
            for _, x, y in step:
                life.note(engine)
                life.line(engine, 1)
                square(model(x), y).backward()
            optimizer.step()
            life.line(engine, 2)
    life.note(engine)


@pytest.mark.parametrize("sends", [False, True])
def test_what_a_loop_counts_before_the_micro_batches_of_a_step_counts_once(*, sends: bool) -> None:
    """Who sends the state is within the step; who receives it, or is called again, begins it."""
    undisturbed, joined = Life(lambda _: False), Life(lambda _: True, by_order=True, sends=sends)
    undisturbed.live(counts_at_the_head_of_steps)
    joined.live(counts_at_the_head_of_steps)
    assert joined.states == undisturbed.states
    assert len(joined.resumed) > EPOCHS


def shrinks_behind_steps(engine: StepEngine, life: Life) -> None:
    model, optimizer, tally, loader = tallied(momentum=0.9)
    model.module.register_buffer("temperature", torch.ones(()))
    for _ in train.epochs(EPOCHS):
        for step in train.steps(loader):
            for _, x, y in step:
                life.line(engine, 1)
                square(model(x), y).backward()
            optimizer.step()
            tally.counts.append(1)
            model.module.temperature.mul_(0.9)
            with torch.no_grad():
                model.module.weight.mul_(0.9)
            life.note(engine)


class Meeting(Home):
    """Lets a member that is within a step meet one that has a newer state, and send it that."""

    def __init__(self, function: Callable[[StepEngine, Life], None]) -> None:
        super().__init__()
        self.function, self.undisturbed = function, Life(lambda _: False)
        self.undisturbed.live(function)
        self.is_over = False

    def must_leave(self, generation: int) -> bool:
        return self.is_over

    def rejoin(self, *_: Any) -> None:
        self.is_over = False

    def meet(
        self, monkeypatch: pytest.MonkeyPatch, ours: Cursor, theirs: Cursor
    ) -> tuple[Life, list[Cursor]]:
        """Return the life of the member, and where it was called again."""
        sent: dict[str, Any] = {}
        meeting, breaks, resumed = self, list[bool](), list[Cursor]()

        class Watched(Life):
            def line(self, engine: StepEngine, number: int) -> None:
                if number == 1 and engine.cursor == ours and breaks:
                    meeting.is_over = breaks.pop()

        def catch_up(run: RunState, *_: Any, put: Callable[[Any], None]) -> Any:
            rows = [
                RunPosition(True, ours, 3, PassPosition.WITHIN_STEP, committed_in=1),
                RunPosition(True, theirs, 3, PassPosition.BETWEEN_STEPS, committed_in=2),
            ]
            plan = plan_transfers(rows).value
            points = next_program_points(rows, plan)
            if run.cursor == ours:
                assert plan.pairs == ((0, 1),)
                put(copy.deepcopy(sent))
            return SimpleNamespace(cursors=plan.cursors[:1], program_points=points, num_bytes=0)

        def look(engine: StepEngine) -> None:
            if engine.cursor == theirs and not sent:
                sent.update(copy.deepcopy(engine._checkpoints.take()))

        def call(life: Life, resume: ResumeState | None) -> ResumeState | None:
            with called(self, resume, 1) as engine:
                engine.at_boundary = functools.partial(look, engine)
                try:
                    self.function(engine, life)
                except GroupChanged:
                    return engine.resume_state(in_this_group=True)
            return None

        call(Watched(lambda _: False), None)
        monkeypatch.setattr(step_engine, "catch_up", catch_up)
        breaks.append(True)
        life = Watched(lambda _: False)
        left = call(life, None)
        while left is not None:
            resumed.append(left.cursor)
            assert left.generation == 1, "it would meet the others again, who have gone on"
            left = call(life, left)
        return life, resumed


def test_what_a_loop_does_behind_a_step_that_others_have_done_counts_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rest of that iteration runs here, too, with a state in which all of it is done."""
    meeting = Meeting(shrinks_behind_steps)
    life, resumed = meeting.meet(monkeypatch, Cursor(0, 1), Cursor(0, 2))
    del life.states[Cursor(0, 2)], meeting.undisturbed.states[Cursor(0, 2)]
    assert life.states == meeting.undisturbed.states
    assert not resumed


def test_who_has_begun_a_step_and_receives_the_state_of_before_it_is_called_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was cut off after a step that the others have done again, and is a step's head ahead."""
    meeting = Meeting(counts_at_the_head_of_steps)
    life, resumed = meeting.meet(monkeypatch, Cursor(0, 1), Cursor(0, 1))
    assert life.states == meeting.undisturbed.states
    assert resumed == [Cursor(0, 1)]
