"""When an automatic checkpoint is due, and which ones are kept."""

from __future__ import annotations

import pytest

from elastic.core.policy.saving import SavingPlan, is_due
from elastic.errors import ConfigError


def test_every_so_many_seconds() -> None:
    plan = SavingPlan(every_s=30.0)
    assert not is_due(plan, steps=900, last_steps=0, waited_s=29.9).value
    decision = is_due(plan, steps=900, last_steps=0, waited_s=30.0)
    assert decision.value
    assert "step 900" in decision.reason


@pytest.mark.parametrize("fields", [{"every_n_steps": -1}, {"every_s": -1.0}, {"every_s": 1e999}])
def test_a_plan_that_cannot_work_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="every"):
        SavingPlan(**fields)  # type: ignore[arg-type]
