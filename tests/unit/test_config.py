"""Configuration is refused when it is made: with who, which value, and what was expected."""

from __future__ import annotations

import math
from typing import Any

import pytest

from elastic.core.config import (
    ENTRY_BYTES_MAX,
    KNOWN_ACCELERATORS,
    AgentConfig,
    CoordinatorConfig,
    JobSpec,
    check_name,
    ns,
)
from elastic.core.facts import Entry, EntryKind, JobId
from elastic.errors import ConfigError
from tests.strategies import SCRIPT


def spec(**changes: Any) -> JobSpec:
    fields: dict[str, Any] = {
        "job_id": JobId("j1"), "name": "digits", "entry": SCRIPT, "min_workers": 2,
        "max_workers": 4,
    }  # fmt: skip
    return JobSpec(**{**fields, **changes})


@pytest.mark.parametrize(
    ("seconds", "nanoseconds"),
    [(0, 0), (1, 1_000_000_000), (0.5, 500_000_000), (1e-9, 1), (0.3, 300_000_000)],
)
def test_seconds_become_whole_nanoseconds(seconds: float, nanoseconds: int) -> None:
    assert ns(seconds) == nanoseconds


@pytest.mark.parametrize("name", ["a", "A1", "run-7", "a.b_c", "9", "x" * 100])
def test_a_name_that_can_be_part_of_a_path_is_taken(name: str) -> None:
    check_name("job", name)
    assert spec(name=name).name == name


@pytest.mark.parametrize(
    "name", ["", "-a", ".hidden", "..", "a/b", "a b", "a\n", "é", "x" * 101, "a\0b", "/etc"]
)
def test_a_name_that_cannot_be_part_of_a_path_is_refused_with_the_rule(name: str) -> None:
    with pytest.raises(ConfigError, match=r"job name .*: expected 1 to 100 letters") as refused:
        spec(name=name)
    assert repr(name) in str(refused.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"min_workers": 1, "max_workers": 1},
        {"min_workers": 2, "max_workers": 8, "workers_per_replica": 2},
        {"max_failures": -1},
        {"max_failures": 0},
        {"num_to_keep": -1},
        {"num_to_keep": 1},
        {"score_order": "min", "score_attribute": "loss"},
        {"backend": "gloo"},
        {"backend": "nccl"},
        {"collective_timeout_s": 0.001},
        {"hang_timeout_s": 0},
        {"hang_timeout_s": 0.5},
        {"entry": Entry(EntryKind.FUNCTION, "f", payload=bytes(ENTRY_BYTES_MAX))},
    ],
)
def test_a_job_that_can_work_is_taken(changes: dict[str, Any]) -> None:
    spec(**changes)


BOUNDS = r"job digits: min_workers=.* and max_workers=.*: expected 1 <= min <= max"
REPLICA = r"job digits: workers_per_replica=.* must be at least 1 and divide"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"min_workers": 0}, BOUNDS),
        ({"min_workers": -1}, BOUNDS),
        ({"min_workers": 5}, BOUNDS),
        ({"min_workers": 5}, "min_workers=5 and max_workers=4"),
        ({"workers_per_replica": 0}, REPLICA),
        ({"workers_per_replica": -2}, REPLICA),
        ({"workers_per_replica": 3}, REPLICA),
        ({"workers_per_replica": 4}, r"workers_per_replica=4 .* divide min_workers=2"),
        ({"min_workers": 2, "max_workers": 3, "workers_per_replica": 2}, "max_workers=3"),
        ({"backend": "mpi"}, r"job digits: backend='mpi': expected auto, gloo or nccl"),
        ({"backend": ""}, "expected auto, gloo or nccl"),
        ({"collective_timeout_s": 0}, r"collective_timeout_s=0: expected a finite number > 0"),
        ({"collective_timeout_s": -1}, "collective_timeout_s=-1"),
        ({"collective_timeout_s": math.inf}, "collective_timeout_s=inf"),
        ({"collective_timeout_s": math.nan}, "collective_timeout_s=nan"),
        ({"hang_timeout_s": -1}, r"hang_timeout_s=-1: expected a finite number >= 0"),
        ({"hang_timeout_s": math.inf}, "hang_timeout_s=inf"),
        ({"hang_timeout_s": math.nan}, "hang_timeout_s=nan"),
        ({"max_failures": -2}, r"max_failures=-2: expected -1 \(for ever\) or more"),
        ({"num_to_keep": 0}, r"num_to_keep=0: expected -1 \(all\) or >= 1"),
        ({"num_to_keep": -2}, "num_to_keep=-2"),
        ({"score_order": "best"}, r"score_order='best': expected max or min"),
        (
            {"entry": Entry(EntryKind.FUNCTION, "f", payload=bytes(ENTRY_BYTES_MAX + 1))},
            r"has 16777217 bytes, at most 16777216 are sent; load large data inside the function",
        ),
    ],
)
def test_a_job_that_cannot_work_is_refused_with_the_value_and_what_was_expected(
    changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        spec(**changes)
    assert str(refused.value).startswith("job digits: ")


def test_a_job_is_described_by_names_only() -> None:
    with pytest.raises(TypeError):
        JobSpec(JobId("j1"), "digits", SCRIPT, 1, 2)  # type: ignore[misc]


ABOVE_ZERO = ("probe_timeout_s", "preemption_deadline_s")
NO_DURATIONS = (-0.001, -1, math.nan, math.inf)


@pytest.mark.parametrize("value", [0, *NO_DURATIONS])
@pytest.mark.parametrize("name", ABOVE_ZERO)
def test_the_coordinator_takes_some_time_for_an_answer_and_between_two_attempts(
    name: str, value: float
) -> None:
    with pytest.raises(ConfigError, match=rf"^coordinator: {name}={value}: expected"):
        CoordinatorConfig(**{name: value})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_spares": -1}, "^--spares -1: expected"),
        *[
            ({"drain_timeout_s": value}, f"^--drain-timeout {value}: expected")
            for value in NO_DURATIONS
        ],
    ],
)
def test_an_agents_configuration_that_cannot_work_is_refused_by_value(
    changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        AgentConfig(**changes)


def test_the_defaults_are_taken() -> None:
    assert CoordinatorConfig() == CoordinatorConfig()
    assert AgentConfig() == AgentConfig()


def test_the_known_accelerators_are_sorted_out_by_name_only_once() -> None:
    assert len(set(KNOWN_ACCELERATORS)) == len(KNOWN_ACCELERATORS)
    assert all(name == name.upper() for name in KNOWN_ACCELERATORS)
