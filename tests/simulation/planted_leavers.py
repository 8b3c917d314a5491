"""Bugs in how jobs leave on request: saving, calling off, expected slots; see `planting`."""

from __future__ import annotations

import dataclasses
from typing import Any

from elastic.core.machine import jobs, reconcile, timeouts
from elastic.core.machine.transitions import GroupPhase
from elastic.core.policy import membership
from elastic.core.policy.decision import Decision
from elastic.core.policy.membership import GroupAction, GroupPlan
from tests.simulation.planting import Patch, bug


@bug
def cuts_off_who_saves_longer_than_others(patch: Patch) -> None:
    """Members that save get no more time than at any other boundary."""
    patch.setattr(timeouts, "is_saving", lambda cluster, job: False)


@bug
def lets_a_job_that_goes_on_wait_for_storage(patch: Patch) -> None:
    """Members finish saving, though their job continues and needs no checkpoint."""
    honest = membership._request_leave

    def ask(saves: bool, wake_ns: Any) -> Any:
        decision = honest(saves, wake_ns)
        return (
            decision
            if saves
            else Decision(GroupPlan(GroupAction.KEEP), "it comes by itself", wake_ns)
        )

    patch.setattr(membership, "_request_leave", ask)


@bug
def replaces_all_members_and_saves_nothing(patch: Patch) -> None:
    """All members are replaced by others at once, and their state is lost."""
    honest = reconcile.request_leave

    def ask(cluster: Any, job: Any, plan: Any, reason: str) -> None:
        if plan.cause == "drain":
            honest(cluster, job, dataclasses.replace(plan, saves=False), reason)
            job.newest.phase = GroupPhase.SAVING if plan.saves else GroupPhase.LEAVING
        else:
            honest(cluster, job, plan, reason)

    patch.setattr(reconcile, "request_leave", ask)


@bug
def counts_on_a_pause_without_end(patch: Patch) -> None:
    """A paused job's slots are expected to become free, however long its leader takes."""
    patch.setattr(jobs.JobState, "is_late", lambda self, now_ns: False)
