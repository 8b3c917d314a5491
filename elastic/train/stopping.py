"""`RunConfig(stop=...)`: ends a run, as a success, once rank 0's reports meet the criterion.

Rule: the driver decides, and stops the workers from outside, because ranks that decided for
themselves would not all stop at the same place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from elastic.errors import UsageError

if TYPE_CHECKING:
    from elastic.worker.process.local import LocalOutcome, LocalRun

ITERATION = "training_iteration"
"""Ray's name for the number of reports."""


class _Enough(BaseException):
    """Ends a train function in this process; a BaseException, so that user code lets it pass."""


class StopRule:
    """Whether a run has met its stop criterion.

    Attributes:
        is_met: the criterion is met.
    """

    def __init__(self, rule: Mapping[str, float] | Callable[..., bool] | None) -> None:
        """Begin before the first report; see `RunConfig.stop`."""
        self._rule = rule
        self._reports = 0
        self._unreported = ""
        self._is_here = False
        self.is_met = False

    def check(self, metrics: Mapping[str, Any]) -> None:
        """Check a report of rank 0 against the criterion."""
        self._reports += 1
        if self._rule is None or self.is_met:
            return
        reason = self._reason({ITERATION: self._reports, **metrics})
        if not reason:
            return
        self.is_met, self._unreported = True, f"stop criterion met: {reason}"
        if self._is_here:
            raise _Enough

    def take(self) -> str:
        """Return why the job is to be stopped, once; "" if it is not, or was returned before."""
        reason, self._unreported = self._unreported, ""
        return reason

    def run_here(
        self,
        function: Callable[..., Any],
        run: LocalRun,
        run_local: Callable[[Callable[..., Any], LocalRun], LocalOutcome],
    ) -> LocalOutcome:
        """Call a train function in this process, until it ends or the criterion is met.

        UsageError if there is a rule, and torchrun has started more than one process.
        """
        if self._rule is None:
            return run_local(function, run)
        import torch.distributed as dist

        from elastic.worker.process.entry import call_with_config

        if dist.is_initialized() and dist.get_world_size() > 1:
            raise UsageError(
                "RunConfig(stop=...) under torchrun: not all processes can be stopped at once; "
                "return from the train function instead"
            )

        def stoppable() -> Any:
            self._is_here = True
            try:
                return call_with_config(function, run.config)
            except _Enough:
                return None
            finally:
                self._is_here = False  # Reports of background uploads may arrive later.

        return run_local(stoppable, replace(run, config=None))

    def _reason(self, metrics: Mapping[str, Any]) -> str:
        rule = self._rule
        if callable(rule):
            arity = len(inspect.signature(rule).parameters)
            # Ray calls it with the trial's id before the metrics.
            is_met = rule("", dict(metrics)) if arity > 1 else rule(dict(metrics))
            return f"{getattr(rule, '__name__', rule)!s}" if is_met else ""
        for name, bound in (rule or {}).items():
            value = metrics.get(name)
            if isinstance(value, (int, float)) and value >= bound:
                return f"{name}={value:g} >= {bound:g}"
        return ""
