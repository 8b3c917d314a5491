"""Bugs in how jobs leave by plan: what is saved, called off, and counted on; see `planting`."""

from __future__ import annotations

import dataclasses
from typing import Any

from elastic.core.machine import jobs
from elastic.core.machine import reconcile as settle
from elastic.core.machine import timeouts as lateness
from elastic.core.policy import membership
from elastic.core.policy.decision import Decision
from elastic.core.policy.membership import GroupAction, GroupPlan
from tests.simulation.planting import Patch, bug


@bug
def cuts_off_who_saves_longer_than_others(patch: Patch) -> None:
    """Where members save, they have as long as at any other boundary."""
    patch.setattr(lateness, "is_saving", lambda cluster, job: False)


@bug
def lets_a_job_that_goes_on_wait_for_storage(patch: Patch) -> None:
    """What was to be saved is saved, though nobody needs it any more."""
    honest = membership._ask

    def ask(saves: bool, wake_ns: Any) -> Any:
        decision = honest(saves, wake_ns)
        return (
            decision
            if saves
            else Decision(GroupPlan(GroupAction.KEEP), "it comes by itself", wake_ns)
        )

    patch.setattr(membership, "_ask", ask)


@bug
def replaces_all_members_and_saves_nothing(patch: Patch) -> None:
    """Others are there, so the group can do without its own."""
    honest = settle.ask

    def ask(cluster: Any, job: Any, plan: Any, reason: str) -> None:
        if plan.cause == "drain":
            honest(cluster, job, dataclasses.replace(plan, saves=False), reason)
            job.is_save_requested = plan.saves
        else:
            honest(cluster, job, plan, reason)

    patch.setattr(settle, "ask", ask)


@bug
def counts_on_a_pause_without_end(patch: Patch) -> None:
    """Its slots come free by themselves, whatever its leader does meanwhile."""
    patch.setattr(jobs.JobState, "is_late", lambda self, now_ns: False)
