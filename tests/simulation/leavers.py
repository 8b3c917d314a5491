"""Jobs of a simulated run that leave on request, but slowly: pauses, drains, evaluations.

Rule: they start when all faults are healed, and no other fault affects them. So none of their work
may be repeated, and other jobs may wait for them only within the limits here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from elastic.core.config import JobSpec
from elastic.core.facts import Entry, EntryKind, JobId, NodeId
from tests.simulation.crowd_checks import CrowdChecks
from tests.simulation.disk import Disk
from tests.simulation.scripts import Script
from tests.simulation.world import MS, S, Timeline

EVERY, FIRST = 8, 3
"""Seeds 3, 11, 19, ... have such a job, except those of GENTLE."""
GENTLE = (10, 7)
"""Of ten seeds, the one in which machines may still be preempted at that time."""
BEGIN_NS = 60 * S - 10 * MS
"""As late as possible: 10 ms later, a run without unfinished jobs may end."""
CAREFUL_NS, CHANGE_NS, URGENT_NS = 75 * S, 80 * S, 85 * S
WAIT_NS_MAX = 40 * S
"""Time within which an urgent job trains."""
CALLED_OFF_NS_MAX = 5 * S
"""Time within which a job trains again after its pause was called off."""
NO_LIMIT = 1_000_000

Enter = Callable[[JobSpec, Script, int], None]


class Story(Enum):
    """How the job leaves."""

    SLOW = "slow"
    """It is paused, and some members take much longer to save than others."""
    RESUMED = "resumed"
    """It is paused, and resumed while members save."""
    EVALUATES = "evaluates"
    """It is paused while rank 0 evaluates; an urgent job comes, for which others can make room."""
    SWAPPED = "swapped"
    """All its nodes are drained, and others take over."""


@dataclass(frozen=True)
class Users:
    """The requests of users."""

    pause: Callable[[JobId], None]
    resume: Callable[[JobId], None]
    drain: Callable[[NodeId, int], None]


class Leavers:
    """The job of one run that leaves on request, if the run has one."""

    def __init__(
        self, timeline: Timeline, disk: Disk, checks: CrowdChecks, users: Users, *, seed: int
    ) -> None:
        """Select how the job leaves, by the seed.

        Args:
            timeline: the run's virtual time.
            disk: the store, which has the nodes of each job.
            checks: records that the job always gets time to save.
            users: make the requests.
            seed: the run's seed.
        """
        self._timeline, self._disk, self._checks, self._users = timeline, disk, checks, users
        is_there = seed % EVERY == FIRST and seed % GENTLE[0] != GENTLE[1]
        self.story = [*Story][seed // EVERY % len(Story)] if is_there else None
        self.waits: Callable[[JobId], bool] = lambda job_id: False
        self._fail: Callable[[str, str], None] = lambda prop, detail: None

    def plan(self, slots: int, enter: Enter, fail: Callable[[str, str], None]) -> None:
        """Plan the job and the requests.

        Args:
            slots: number of slots of the cluster.
            enter: submits a job at a time.
            fail: ends the run if a property is named.
        """
        if self.story is None:
            return
        self._fail = fail
        workers = min(slots, 3)
        spec = JobSpec(
            job_id=JobId("leaver"), name="leaver", entry=Entry(EntryKind.FUNCTION, "train"),
            min_workers=workers, max_workers=workers, priority=7, run_path="/results",
            max_failures=-1,
        )  # fmt: skip
        script = Script(steps=1600, report_every=NO_LIMIT, step_ns=50 * MS, in_place=True)
        if self.story is Story.EVALUATES:
            self._plan_evaluation(spec, script, slots, enter)
            return
        after = self._timeline.at
        after(CAREFUL_NS, self._checks.careful.add, spec.job_id)
        if self.story is Story.SWAPPED:
            spec = replace(spec, min_workers=1, max_workers=1)
            script = replace(script, save_ns=2 * S)
            after(CHANGE_NS, self._drain_all, spec.job_id)
        else:
            is_slow = self.story is Story.SLOW
            script = replace(script, save_ns=(70 if is_slow else 100) * S)
            after(CHANGE_NS, self._users.pause, spec.job_id)
            after(CHANGE_NS + (80 if is_slow else 3) * S, self._go_on, spec.job_id)
        enter(spec, script, BEGIN_NS)

    def _plan_evaluation(self, spec: JobSpec, script: Script, slots: int, enter: Enter) -> None:
        if slots < 3:
            return
        long = replace(script, steps=60, evaluates_ns=120 * S)
        enter(replace(spec, min_workers=2, max_workers=2), long, BEGIN_NS)
        patient = replace(
            spec, job_id=JobId("patient"), name="patient", priority=-1, min_workers=slots - 2,
            max_workers=slots - 2,
        )  # fmt: skip
        enter(patient, script, BEGIN_NS)
        urgent = replace(
            patient, job_id=JobId("urgent"), name="urgent", priority=6, min_workers=1, max_workers=1
        )
        enter(urgent, replace(script, steps=20), URGENT_NS)
        self._timeline.at(CHANGE_NS, self._users.pause, spec.job_id)
        self._timeline.at(URGENT_NS + WAIT_NS_MAX, self._check, urgent.job_id)
        self._timeline.at(2 * URGENT_NS, self._go_on, spec.job_id)

    def _check(self, job_id: JobId) -> None:
        self._fail(self._checks.waits(job_id), f"job {job_id}")

    def _go_on(self, job_id: JobId) -> None:
        record = self._disk.records.get(job_id)
        if record is None or record.phase.value in ("succeeded", "failed", "stopped"):
            return
        self._users.resume(job_id)
        self._timeline.after(CALLED_OFF_NS_MAX, self._check_whether_it_waits, job_id)

    def _check_whether_it_waits(self, job_id: JobId) -> None:
        prop = "a job that goes on after all waits for no storage"
        self._fail(prop if self.waits(job_id) else "", f"job {job_id}")

    def _drain_all(self, job_id: JobId) -> None:
        record = self._disk.records.get(job_id)
        group = record.group if record is not None else None
        for member in group.members if group is not None else ():
            self._users.drain(member.node_id, 40 * S)
