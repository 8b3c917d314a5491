"""Checksums see every bit, whatever the type and place; what a group concludes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elastic.worker.engine.divergence import SLICES, Divergence, compare
from elastic.worker.state.checksums import checksum, checksum_there, flat_bytes, values_print
from elastic.worker.state.train_state import TrainState

TENSORS = [
    torch.arange(3, dtype=torch.uint8),
    torch.tensor(1.5),
    torch.randn(1, 3, dtype=torch.float64),
    torch.randn(41, 50).bfloat16(),
    torch.randn(4, 3, 20, 20).contiguous(memory_format=torch.channels_last),
    torch.randn(3000)[1:],
    torch.randn(60, 50).t(),
    torch.arange(10_001, dtype=torch.uint8)[3:],
    torch.randn(90, 90)[:, ::3],
    torch.tensor([True, False]),
]


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda t: f"{t.dtype}-{tuple(t.shape)}")
def test_one_bit_is_seen_wherever_it_is(tensor: torch.Tensor) -> None:
    size = flat_bytes(tensor).numel()
    for measure in (checksum, lambda one: int(checksum_there(one))):
        right = measure(tensor)
        assert measure(tensor.clone(memory_format=torch.preserve_format)) == right
        for place in {0, size // 2, size - 1}:
            other = flat_bytes(tensor).clone()
            other[place] ^= 1 << (place % 8)
            assert measure(other) != right


def test_values_of_a_state_are_told_apart_and_copies_are_not() -> None:
    order = torch.randperm(10_000)
    states: list[Any] = [
        {"order": order}, {"order": order.flip(0)}, {"order": order.numpy()[::2]}, {"n": 1},
        {"n": 2}, {"n": True}, {"n": "1"}, {"n": [1, 2]}, {"n": [2, 1]}, {"m": 1}, {},
        {"big": np.arange(3, dtype=">f4")},
    ]  # fmt: skip
    prints = [values_print(state) for state in states]
    assert len(set(prints)) == len(states)
    assert values_print({"order": order.clone()}) == prints[0]
    assert values_print({"a": 1, "b": 2}) == values_print({"b": 2, "a": 1})


@pytest.mark.parametrize("size", [3, 700, 2_000])
def test_every_bit_of_a_model_is_seen_within_some_steps(size: int) -> None:
    """By the slices that it is cut into, however large one of its tensors is."""
    state = TrainState()
    state.models.append(nn.Sequential(nn.Linear(size, size), nn.Linear(size, 2)))
    watch = Divergence(state)
    watch.begin()
    before = [watch.step_checksum(step, 2) for step in range(SLICES)]
    assert [watch.step_checksum(step, 2) for step in range(SLICES, 2 * SLICES)] == before
    for parameter in state.models[0].parameters():
        bits = parameter.data.view(-1).view(torch.int32)
        for place in (0, len(bits) // 2, len(bits) - 1):
            bits[place] ^= 1
            after = [watch.step_checksum(step, 2) for step in range(SLICES)]
            assert sum(one != other for one, other in zip(before, after, strict=True)) >= 1
            bits[place] ^= 1
    assert watch.step_checksum(0, 1) == 0, "nobody to differ from"


@pytest.mark.parametrize(
    ("ranks", "odd", "is_majority"),
    [
        ("aab", (2,), True),
        ("baa", (0,), True),
        ("ab", (1,), False),
        ("aabb", (2, 3), False),
        ("abc", (1, 2), False),
        ("abaca", (1, 3), True),
    ],
)
def test_most_ranks_are_right_and_half_are_not(
    ranks: str, odd: tuple[int, ...], is_majority: bool
) -> None:
    verdict = compare([{"same": 1, "weight": ord(one)} for one in ranks])
    assert (verdict.names, verdict.differing, verdict.is_majority) == (
        ("weight",),
        odd,
        is_majority,
    )
