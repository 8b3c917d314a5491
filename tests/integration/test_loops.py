"""Training loops as people write them, in real groups of one to three ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.workers.members import Crew, all_ask

CREW = Crew()


@pytest.fixture(autouse=True, scope="module")
def _crew_goes_home() -> Iterator[None]:
    CREW.take(3)  # They start at the same time.
    yield
    CREW.end()


def trained(size: int, name: str, **arguments: Any) -> list[Any]:
    """Return what each rank of such a loop returned."""
    members = CREW.take(size)
    answers = CREW.form(members)
    assert not any(one.error for one in answers), [one.error for one in answers]
    return all_ask(members, "loop", name=name, **arguments)


def refused(size: int, name: str, **arguments: Any) -> str:
    """Return what such a loop is refused with, by all ranks."""
    with pytest.raises(AssertionError) as caught:
        trained(size, name, **arguments)
    text = str(caught.value)
    assert text.count("UsageError: ") == size, text
    return text


# --------------------------------------------------------------------------- ranks that differ


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    (alone,) = trained(1, "differing", what="bit", ranks=[])
    return dict(alone)


@pytest.mark.parametrize("what", ["bit", "buffer", "average", "counter"])
@pytest.mark.parametrize("at", [2, 8])  # In an epoch, and after the last step of the run.
def test_one_rank_that_differs_gets_the_state_of_the_others(
    what: str, at: int, undisturbed: dict[str, Any]
) -> None:
    said = trained(3, "differing", what=what, ranks=[1], at=at)
    assert [one["bits"] for one in said] == [undisturbed["bits"]] * 3
    assert [one["count"] for one in said] == [undisturbed["count"]] * 3


@pytest.mark.parametrize(
    ("size", "what", "says"),
    [
        (2, "gradient", r"module.2.bias: rank 0 and rank 1 have different values"),
        (3, "bit", r"module.2.weight: rank 0 and rank 1, 2 have different values"),
        (2, "buffer", r"module.1.running_mean (buffer): rank 0 and rank 1"),
        (2, "average", "registered average: module.0.weight: rank 0 and rank 1"),
        (3, "counter", "registered counter: rank 0 and rank 1, 2"),
    ],
)
def test_ranks_of_which_nobody_knows_who_is_right_are_refused(
    size: int, what: str, says: str
) -> None:
    assert says in refused(size, "differing", what=what, ranks=[*range(size)])


def test_a_rank_that_goes_on_to_differ_is_refused() -> None:
    text = refused(3, "differing", what="gradient", ranks=[2], times=100)
    assert "module.2.bias: rank 2 and the other ranks have different values" in text
    assert "3 times before, and the others' state has not helped" in text
