"""What can be sent of a training state, and that it arrives as it was."""

from __future__ import annotations

import copy
import io
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elastic.errors import UsageError
from elastic.worker.state.checksums import values_print
from elastic.worker.state.packing import bytes_of, pack, tensors_of, unpack
from elastic.worker.state.train_state import TrainState

Pair = namedtuple("Pair", ["left", "right"])


class Holder:
    """An object of the script's that is registered."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def sent(state: Any) -> Any:
    """Return what a receiver makes of a state: skeleton and bytes are all that it gets."""
    text, tensors = pack(state)
    skeleton = torch.load(io.BytesIO(text), weights_only=True)
    wanted = tensors_of(skeleton)
    arrived = [torch.empty(one.shape, dtype=getattr(torch, one.dtype)) for one in wanted]
    for mine, theirs in zip(arrived, tensors, strict=True):
        bytes_of(mine).copy_(bytes_of(theirs))
    return unpack(skeleton, arrived)


def same(one: Any, other: Any) -> bool:
    """Return whether both have the same types, shapes and bits all the way down."""
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and torch.equal(bytes_of(one.detach()), bytes_of(other))
        )
    if isinstance(one, np.ndarray):
        return (
            isinstance(other, np.ndarray)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and one.tobytes() == other.tobytes()
        )
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return (
            type(one) is type(other)
            and len(one) == len(other)
            and all(same(a, b) for a, b in zip(one, other, strict=True))
        )
    return type(one) is type(other) and repr(one) == repr(other)


def test_what_only_looks_like_a_container_arrives_as_the_plain_one() -> None:
    counts: defaultdict[str, int] = defaultdict(int, a=1)
    state = {"order": OrderedDict(b=1, a=2), "counts": counts, "set": {3, 1}, "pair": Pair(1, 2)}
    back = sent(state)
    assert back == {"order": {"b": 1, "a": 2}, "counts": {"a": 1}, "set": {1, 3}, "pair": (1, 2)}
    assert list(back["order"]) == ["b", "a"]


@pytest.mark.parametrize(
    "value", [np.float32(0.1), np.float64(0.1), np.int64(5), np.bool_(True), np.str_("a")]
)
def test_a_scalar_of_numpys_arrives_as_one(value: Any) -> None:
    """Sums of float32 differ from those of Python's; and ranks compare what they have."""
    assert type(sent({"best": value})["best"]) is type(value)
    assert sent(value) == value
    assert values_print(value) == values_print(sent(value)) == values_print(value.item())


def test_types_arrive_and_matrices_in_their_order() -> None:
    """Optimizers have a type among their options, and multiply what LAPACK gave them by columns."""
    by_columns = torch.randn(5, 5).t()
    back = sent({"type": torch.bfloat16, "matrices": [by_columns, torch.ones(6)[::2]]})
    assert back["type"] is torch.bfloat16
    matrix, row = back["matrices"]
    assert torch.equal(matrix, by_columns)
    assert (matrix.stride(), row.stride()) == (by_columns.stride(), (1,))


def test_moments_and_dicts_that_cannot_be_changed_arrive_as_plain_values() -> None:
    assert type(sent(np.datetime64(5, "ns"))) is int

    class Fixed(dict[str, int]):
        def clear(self) -> None:
            raise TypeError("fixed")

    state = TrainState()
    state.register("counts", Holder(Fixed(a=1)))
    state.put(sent(state.take()))
    assert state.registered["counts"].state_dict() == {"value": {"a": 1}}


def test_a_registered_counter_arrives_as_one() -> None:
    ours, theirs = TrainState(), TrainState()
    for state, counts in ((ours, Counter()), (theirs, Counter(a=2))):
        state.register("counts", Holder(counts))
    ours.put(sent(theirs.take()))
    held = ours.registered["counts"]
    assert isinstance(held, Holder)
    held.value["b"] += 1
    assert held.value == Counter(a=2, b=1)


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"a": {"words": np.array(["x", "y"])}}, r"state\['a'\]\['words'\]: a NumPy array of <U1"),
        ({"when": np.array(["2020-01-01"], dtype="M8[D]")}, r"state\['when'\]: a NumPy array of"),
        ({"a": torch.eye(2).to_sparse()}, r"state\['a'\]: a sparse tensor"),
        ({"a": {(1, object())}}, r"state\['a'\]: a key or set element of type object"),
        ({object(): 1}, r"state.*key"),
    ],
)
def test_what_torch_or_python_would_stumble_over_is_refused_with_its_place(
    state: Any, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        pack(state)


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_the_state_of_a_run_arrives_whole(make: Any) -> None:
    def run(steps: int) -> TrainState:
        torch.manual_seed(steps)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1).bfloat16())
        loose = nn.Parameter(torch.randn(2))
        optimizer = make([*model.parameters(), loose], lr=0.1, weight_decay=0.1)
        state = TrainState()
        state.models.append(model)
        state.optimizers.append(optimizer)
        state.schedulers.append(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10))
        state.register("ema", copy.deepcopy(model))
        for _ in range(steps):
            out = model[2](model[:2](torch.randn(5, 3)).bfloat16())
            (out.float().square().mean() + loose.square().sum()).backward()
            optimizer.step()
            state.schedulers[0].step()  # type: ignore[attr-defined]
        return state

    ahead, newcomer = run(3), run(0)
    state = sent(ahead.take())
    identities = [id(p) for p in newcomer.models[0].parameters()]
    newcomer.put(state)
    assert same(newcomer.take(), ahead.take())
    assert [id(p) for p in newcomer.models[0].parameters()] == identities


def test_a_part_that_no_optimizer_steps_may_be_another_one_of_its_shape_later() -> None:
    """As a teacher that is copied from its student."""
    state, teacher = TrainState(), nn.Sequential(nn.Linear(2, 1))
    state.models += [nn.Linear(2, 1), teacher]
    state.optimizers.append(torch.optim.SGD(state.models[0].parameters()))
    units = state.begin()
    teacher[0] = copy.deepcopy(teacher[0])
    state.check_known()
    assert state.changed_units(units) is None
    (unit,) = state.units(every=True).values()
    assert [name for name, _ in unit.parameters] == ["weight", "bias", "0.weight", "0.bias"]


@pytest.mark.parametrize("edited", [False, True])
def test_what_is_frozen_is_received_but_where_the_script_was_edited(edited: bool) -> None:
    def began(*, frozen: bool) -> TrainState:
        state = TrainState()
        state.models.append(nn.Linear(2, 1))
        state.optimizers.append(torch.optim.SGD(state.models[0].parameters()))
        state.models[0].weight.requires_grad = not frozen
        state.begin()
        return state

    theirs, ours = began(frozen=True), began(frozen=not edited)
    theirs.models[0].bias.requires_grad = False
    ours.put(sent(theirs.take()))
    assert not ours.models[0].bias.requires_grad
    assert ours.models[0].weight.requires_grad is edited
    (unit,) = ours.units().values()
    assert {name for name, _ in unit.parameters} == {"bias", *(["weight"] if edited else [])}


def test_a_state_of_other_objects_is_refused_and_changes_nothing() -> None:
    def of(*sizes: int) -> TrainState:
        state = TrainState()
        for size in sizes:
            state.models.append(nn.Linear(size, 1))
            state.optimizers.append(torch.optim.SGD(state.models[-1].parameters()))
        return state

    mine = of(3)
    before = copy.deepcopy(mine.take())
    with pytest.raises(
        UsageError, match=r"model 0, weight: \(1, 3\) in this worker, \(1, 4\) in"
    ) as refused:
        mine.put(sent(of(4).take()))
    assert "from another worker or a checkpoint: every worker must" in str(refused.value)
    with pytest.raises(UsageError, match=r"models prepared: 1 .*, 2 in .* or a checkpoint:"):
        mine.put(sent(of(3, 3).take()))
    other = of(3)
    other.register("ema", nn.Linear(1, 1))
    with pytest.raises(UsageError, match=r"registered objects: \[\] in this worker, \['ema'\]"):
        mine.put(sent(other.take()))
    assert same(mine.take(), before)


class Masters(torch.optim.SGD):
    """Keeps weights in full precision, and counts in whole numbers."""

    def step(self, closure: Any = None) -> None:
        assert closure is None
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                if parameter not in self.state:
                    count = torch.zeros(1, dtype=torch.int64)
                    self.state[parameter] = {"master": parameter.float(), "count": count}
                kept = self.state[parameter]
                kept["count"] += 1
                kept["master"] -= 0.01 * parameter.grad.float()
                parameter.copy_(kept["master"])


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [(Masters, {}), (torch.optim.NAdam, {}), (torch.optim.Adam, {"fused": True})],
)
def test_an_optimizer_goes_on_as_its_sender_does_with_types_and_strides_of_its_own(
    optimizer: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    members: list[tuple[nn.Module, torch.optim.Optimizer, TrainState]] = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 1))
        model = model.to(torch.bfloat16).to(memory_format=torch.channels_last)
        state = TrainState()
        state.models.append(model)
        state.optimizers.append(optimizer(model.parameters(), lr=0.01, **options))
        members.append((model, state.optimizers[0], state))

    def step(model: nn.Module, one: torch.optim.Optimizer) -> None:
        x = torch.arange(192.0).reshape(4, 3, 4, 4).sin().to(torch.bfloat16)
        model(x).square().mean().backward()
        one.step()
        one.zero_grad()

    (model, ours, state), (other, theirs, newcomer) = members
    for _ in range(3):
        step(model, ours)
    newcomer.put(sent(state.take()))
    for _ in range(3):
        step(model, ours)
        step(other, theirs)
    assert same(newcomer.take(), state.take())


class Rotary(nn.Module):
    """Has tables that grow with what it meets, and one that is part of its state."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("table", torch.arange(float(length)), persistent=False)
        self.register_buffer("late", None, persistent=False)
        self.register_buffer("same", torch.full((3,), float(length)), persistent=False)


def test_tables_that_have_grown_elsewhere_stay_as_they_are() -> None:
    ours, theirs = Rotary(2), Rotary(5)
    theirs.late = torch.ones(1)
    theirs.kept.fill_(7.0)
    states = []
    for model in (ours, theirs):
        states.append(TrainState())
        states[-1].models.append(nn.Sequential(model))
    states[0].put(sent(states[1].take()))
    assert same(ours.layer.weight, theirs.layer.weight)
    assert ours.kept.tolist() == [7.0, 7.0]
    assert ours.same.tolist() == [5.0] * 3
    assert ours.table.tolist() == [0.0, 1.0]
    assert ours.late is None


class Both(torch.optim.Optimizer):
    """One optimizer of two, with a state of both, as people write for Muon beside Adam."""

    def __init__(self, model: nn.Module) -> None:
        params = list(model.parameters())
        super().__init__(params, {"lr": 0.1})
        self.parts = (
            torch.optim.SGD(params[:1], lr=0.1, momentum=0.9), torch.optim.Adam(params[1:]),
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)


def test_an_optimizer_with_a_state_of_its_own_form_receives_it() -> None:
    states = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = nn.Linear(2, 2)
        state = TrainState()
        state.models.append(model)
        both = Both(model)
        state.optimizers.append(both)
        if seed == 0:
            model(torch.ones(1, 2)).sum().backward()
            for part in both.parts:
                part.step()
        states.append((state, both))
    states[1][0].put(copy.deepcopy(states[0][0].take()))
    kept = states[1][1].parts[0].state_dict()["state"][0]["momentum_buffer"]
    assert torch.equal(kept, states[0][1].parts[0].state_dict()["state"][0]["momentum_buffer"])
