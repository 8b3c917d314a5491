"""Which checkpoints are kept: the newest always, then the best ones, or the newest ones."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from elastic.core.facts import CheckpointRecord, CheckpointStatus, ReportKind
from elastic.core.policy.retention import keep


def records(*metrics: Any) -> list[CheckpointRecord]:
    """Checkpoints 0, 1, 2, ... whose metrics are {"loss": value}; text is taken as it is."""
    return [
        CheckpointRecord(
            str(index), 1, index, value if isinstance(value, str) else json.dumps({"loss": value})
        )
        for index, value in enumerate(metrics)
    ]


def kept(found: list[CheckpointRecord], count: int, attribute: str = "", order: str = "max") -> str:
    return "".join(
        record.path
        for record in keep(found, num_to_keep=count, score_attribute=attribute, score_order=order)
    )


@pytest.mark.parametrize(
    ("count", "left"),
    [(-1, "01234"), (5, "01234"), (9, "01234"), (4, "1234"), (2, "34"), (1, "4")],
)
def test_without_a_score_the_newest_ones_are_kept_in_their_order(count: int, left: str) -> None:
    assert kept(records(1, 2, 3, 4, 5), count) == left


def test_of_no_checkpoints_none_are_kept() -> None:
    assert keep([], num_to_keep=1) == ()
    assert keep([], num_to_keep=-1, score_attribute="loss") == ()


@pytest.mark.parametrize(
    ("losses", "count", "order", "left"),
    [
        ((3, 1, 2, 9), 2, "min", "13"),
        ((3, 1, 2, 9), 3, "min", "123"),
        ((3, 1, 2, 0), 2, "max", "03"),
        ((3, 1, 2, 0), 3, "max", "023"),
        # The newest is kept though it is the worst: it is what a recovery reads.
        ((1, 2, 3), 1, "min", "2"),
        # Of equals the later one is kept.
        ((5, 5, 5, 0), 2, "max", "23"),
        ((5, 5, 5, 0), 2, "min", "23"),
    ],
)
def test_with_a_score_the_newest_is_kept_and_then_the_best(
    losses: tuple[float, ...], count: int, order: str, left: str
) -> None:
    assert kept(records(*losses), count, "loss", order) == left


HUGE = json.dumps({"loss": 10**400})
DEEP = '{"loss": ' + "[" * 200_000 + "]" * 200_000 + "}"


@pytest.mark.parametrize(
    "metrics",
    [
        "", "{", "[]", "7", "null", "{}", '{"loss": null}', '{"loss": "high"}', '{"loss": [1]}',
        '{"loss": NaN}', '{"other": 1}', '"loss"', HUGE, DEEP,
    ],
    ids=lambda text: text[:12],
)  # fmt: skip
@pytest.mark.parametrize("order", ["min", "max"])
def test_a_checkpoint_whose_score_is_no_number_ranks_last(metrics: str, order: str) -> None:
    assert kept(records(1, metrics, 2, 3), 3, "loss", order) == "023"


def test_an_infinite_loss_is_the_worst_one_and_an_infinite_reward_the_best() -> None:
    infinite = '{"loss": Infinity}'
    assert kept(records(1, infinite, 2, 3), 2, "loss", "max") == "13"
    assert kept(records(1, infinite, 2, 3), 3, "loss", "min") == "023"


def test_numbers_that_came_as_text_or_truth_values_count_as_numbers() -> None:
    assert kept(records('{"loss": "2.5"}', '{"loss": 2}', '{"loss": true}', 0), 2, "loss") == "03"


# ----------------------------------------------------------------------- the step engine's own


def mixed(kinds: str) -> list[CheckpointRecord]:
    """Checkpoints 0, 1, 2, ..., reported for "r" and automatic for "a", with rising losses."""
    return [
        CheckpointRecord(
            str(at),
            at,
            0,
            json.dumps({"loss": at}),
            kind=ReportKind.AUTOMATIC if kind == "a" else ReportKind.SCRIPT,
        )
        for at, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize(
    ("kinds", "count", "left"),
    [
        # Of automatic ones two are enough, whatever happens to the others.
        ("aaaaa", -1, "34"),
        ("aaaaa", 1, "34"),
        ("aaaaa", 2, "34"),
        ("aaaaa", 4, "1234"),
        ("a", 1, "0"),
        # Neither kind counts as the other, nor pushes it out.
        ("rarara", -1, "02345"),
        ("rarara", 1, "345"),
        ("raaaaaa", 1, "056"),
        ("arrrrrr", 1, "06"),
        ("rrraaarrr", 3, "345678"),
    ],
)
def test_automatic_ones_are_counted_apart(kinds: str, count: int, left: str) -> None:
    assert kept(mixed(kinds), count) == left


def test_automatic_ones_are_never_kept_for_their_score() -> None:
    assert kept(mixed("ararara"), 2, "loss", "min") == "1456"


# ------------------------------------------------------------------------------ validation


def pending(*numbers: int, of: list[CheckpointRecord]) -> list[CheckpointRecord]:
    """The same records, and some of them are to be validated."""
    status = CheckpointStatus.PENDING_VALIDATION
    return [replace(r, status=status) if r.index in numbers else r for r in of]


def test_what_is_to_be_validated_is_kept_and_takes_no_place() -> None:
    found = pending(0, 2, of=records(5, 4, 3, 2, 1, 0))
    assert kept(found, 2) == "0245"
    assert kept(found, 1) == "025"


def test_a_score_that_only_validation_brings_decides_once_it_is_there() -> None:
    found = pending(1, 2, of=records(*["{}"] * 4))
    assert kept(found, 2, "score") == "0123"
    validated = replace(found[1], status=CheckpointStatus.VALIDATED, metrics='{"score": 9}')
    assert kept([found[0], validated, *found[2:]], 2, "score") == "123"
    failed = replace(found[2], status=CheckpointStatus.VALIDATION_FAILED)
    assert kept([found[0], validated, failed, found[3]], 2, "score") == "13"
