"""When an automatic checkpoint is due."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.core.policy.decision import Decision
from elastic.errors import ConfigError


@dataclass(frozen=True)
class SavingPlan:
    """How often the state of a run is saved automatically.

    Attributes:
        every_n_steps: after each n committed steps of the run; 0 for never.
        every_s: when so many seconds have passed since the last time; 0 for never.
    """

    every_n_steps: int = 0
    every_s: float = 0.0

    def __post_init__(self) -> None:
        if self.every_n_steps < 0:
            raise ConfigError(
                f"every_n_steps={self.every_n_steps}: expected an int >= 1, or None for never"
            )
        if not 0 <= self.every_s < float("inf"):
            raise ConfigError(f"every_s={self.every_s}: expected seconds > 0, or None for never")

    @property
    def is_on(self) -> bool:
        return bool(self.every_n_steps or self.every_s)


def is_due(plan: SavingPlan, *, steps: int, last_steps: int, waited_s: float) -> Decision[bool]:
    """Decide whether the state is saved after this step.

    A failed checkpoint is not retried before the next one is due: if storage is down, a try at
    every step would be useless.

    Args:
        plan: the user's settings.
        steps: committed in the run, including this one.
        last_steps: the same at the last save or attempt.
        waited_s: since then.
    """
    n = plan.every_n_steps
    if n and steps // n > last_steps // n:
        return Decision(True, f"step {steps}: every {n} steps")
    if plan.every_s and waited_s >= plan.every_s:
        return Decision(True, f"step {steps}: {waited_s:.0f} s since the last one")
    return Decision(False, "not due")
