"""When an automatic checkpoint is due, and which ones are kept."""

from __future__ import annotations

import pytest

from elastic.core.policy.retention import superfluous_automatic
from elastic.core.policy.saving import SavingPlan, is_due
from elastic.errors import ConfigError


@pytest.mark.parametrize(
    ("steps", "last_steps", "due"),
    [(4, 0, False), (5, 0, True), (6, 5, False), (10, 5, True), (11, 4, True), (12, 11, False)],
)
def test_every_n_steps(steps: int, last_steps: int, due: bool) -> None:
    plan = SavingPlan(every_n_steps=5)
    assert is_due(plan, steps=steps, last_steps=last_steps, waited_s=1e9).value is due


def test_every_so_many_seconds() -> None:
    plan = SavingPlan(every_s=30.0)
    assert not is_due(plan, steps=900, last_steps=0, waited_s=29.9).value
    decision = is_due(plan, steps=900, last_steps=0, waited_s=30.0)
    assert decision.value
    assert "step 900" in decision.reason


def test_nothing_is_due_without_a_plan() -> None:
    assert not SavingPlan().is_on
    assert not is_due(SavingPlan(), steps=10**6, last_steps=0, waited_s=1e9).value


@pytest.mark.parametrize("fields", [{"every_n_steps": -1}, {"every_s": -1.0}, {"every_s": 1e999}])
def test_a_plan_that_cannot_work_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="every"):
        SavingPlan(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(("keep", "left"), [(-1, "de"), (1, "de"), (2, "de"), (3, "cde")])
def test_two_are_kept_at_least(keep: int, left: str) -> None:
    """The newest may turn out to be damaged."""
    assert superfluous_automatic(list("abcde"), keep) == tuple("abcde"[: -len(left)])
    assert superfluous_automatic(["a"], keep) == ()
