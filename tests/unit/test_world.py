"""Facts are values: equal fields are one fact, sums are exact, and nonsense is refused by name."""

from __future__ import annotations

import dataclasses
import math

import pytest

from elastic.core import world
from elastic.core.world import (
    Group,
    Member,
    NodeId,
    Resources,
    WorkerId,
    host_of,
    sorted_pairs,
)
from elastic.errors import ConfigError, UsageError


def test_the_order_in_which_resources_are_named_does_not_matter() -> None:
    assert Resources.of({"GPU": 1, "CPU": 4}) == Resources.of({"CPU": 4, "GPU": 1})
    assert hash(Resources.of({"GPU": 1, "CPU": 4})) == hash(Resources.of({"CPU": 4, "GPU": 1}))


@pytest.mark.parametrize(
    ("amounts", "milli"),
    [
        ({}, ()),
        ({"GPU": 1}, (("GPU", 1000),)),
        ({"GPU": 0.5}, (("GPU", 500),)),
        ({"GPU": 0}, ()),
        ({"GPU": 0.0004}, ()),
        ({"GPU": 0.0006}, (("GPU", 1),)),
        ({"b": 1, "a": 2, "c": 0}, (("a", 2000), ("b", 1000))),
    ],
)
def test_amounts_are_kept_in_thousandths_and_zeros_are_left_out(
    amounts: dict[str, float], milli: tuple[tuple[str, int], ...]
) -> None:
    assert Resources.of(amounts).milli == milli


@pytest.mark.parametrize("amount", [-1, -0.001, math.nan, math.inf, -math.inf])
def test_an_amount_that_is_no_amount_is_refused_by_name(amount: float) -> None:
    with pytest.raises(ConfigError, match=r"resource GPU=.*expected a finite number >= 0"):
        Resources.of({"CPU": 1, "GPU": amount})


def test_a_refused_configuration_is_a_usage_error_and_a_value_error() -> None:
    assert issubclass(ConfigError, UsageError)
    assert issubclass(ConfigError, ValueError)


def test_amounts_come_back_as_plain_numbers_and_missing_ones_are_zero() -> None:
    some = Resources.of({"GPU": 1.5, "CPU": 2})
    assert some.as_dict() == {"GPU": 1.5, "CPU": 2.0}
    assert (some.amount("GPU"), some.amount("TPU")) == (1.5, 0.0)


@pytest.mark.parametrize(
    ("have", "need", "fits"),
    [
        ({}, {}, True),
        ({"GPU": 1}, {}, True),
        ({}, {"GPU": 0.001}, False),
        ({"GPU": 1}, {"GPU": 1}, True),
        ({"GPU": 1}, {"GPU": 1.001}, False),
        ({"GPU": 8}, {"GPU": 1, "CPU": 1}, False),
        ({"GPU": 8, "CPU": 1}, {"GPU": 1, "CPU": 1}, True),
    ],
)
def test_resources_cover_what_is_at_most_as_much_in_every_name(
    have: dict[str, float], need: dict[str, float], fits: bool
) -> None:
    assert Resources.of(have).covers(Resources.of(need)) is fits


def test_ten_tenths_taken_from_one_leave_exactly_nothing() -> None:
    left = Resources.of({"GPU": 1})
    for _ in range(10):
        assert left.covers(Resources.of({"GPU": 0.1}))
        left = left.minus(Resources.of({"GPU": 0.1}))
    assert left == Resources()


@pytest.mark.parametrize(
    ("have", "take", "left"),
    [
        ({"GPU": 2}, {"GPU": 1}, {"GPU": 1}),
        ({"GPU": 2}, {"GPU": 3}, {}),
        ({"GPU": 2}, {"CPU": 1}, {"GPU": 2}),
        ({"GPU": 2, "CPU": 1}, {"CPU": 1}, {"GPU": 2}),
    ],
)
def test_what_is_taken_is_gone_and_nothing_falls_below_zero(
    have: dict[str, float], take: dict[str, float], left: dict[str, float]
) -> None:
    assert Resources.of(have).minus(Resources.of(take)) == Resources.of(left)


def test_a_group_lists_its_workers_by_rank() -> None:
    members = tuple(
        Member(WorkerId(f"n{rank}/1"), NodeId(f"n{rank}"), rank, "h:1") for rank in range(3)
    )
    assert Group(1, members).worker_ids() == ("n0/1", "n1/1", "n2/1")


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("10.0.0.1:5000", "10.0.0.1"),
        ("node-a.example:1", "node-a.example"),
        ("[::1]:5000", "::1"),
        ("", ""),
        ("no-port", ""),
    ],
)
def test_the_host_of_an_address_has_neither_port_nor_brackets(address: str, host: str) -> None:
    assert host_of(address) == host


def test_pairs_are_sorted_whether_they_come_as_a_dict_or_as_pairs() -> None:
    assert sorted_pairs({"b": "2", "a": "1"}) == (("a", "1"), ("b", "2"))
    assert sorted_pairs([("b", "2"), ("a", "1")]) == (("a", "1"), ("b", "2"))


def test_every_fact_is_frozen() -> None:
    facts = [
        kind
        for kind in vars(world).values()
        if dataclasses.is_dataclass(kind) and kind.__module__ == world.__name__
    ]
    assert len(facts) >= 10
    assert all(kind.__dataclass_params__.frozen for kind in facts)
