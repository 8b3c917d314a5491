"""Ray's callback of a trainer that is fitted in the function of a trial."""

from __future__ import annotations

from elastic.train.config import UserCallback
from elastic.train.session import require_context


class TuneReportCallback(UserCallback):
    """Accepted as in Ray, where it passes on a trainer's reports; no effect.

    A trainer in a trial trains on the trial's own workers, so its reports are the trial's.
    """

    def __init__(self) -> None:
        """Check the place.

        Raises:
            UsageError: outside a trial.
        """
        require_context("TuneReportCallback()")
