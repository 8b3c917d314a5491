"""Users' requests for several jobs in a simulated run: priorities, pause, scale, cordon.

Rule: only every fourth seed has a crowd, with its own random source, so that the draws of other
seeds do not depend on it. In the liveness phase all paused jobs are resumed and all cordons
removed, repeatedly until it succeeds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from elastic.core.config import JobSpec
from elastic.core.events.coordinator import (
    CoordinatorEvent,
    NodeCordonRequested,
    NodeDrainRequested,
    PauseRequested,
    ResumeRequested,
    ScaleRequested,
)
from elastic.core.facts import Entry, EntryKind, JobId, NodeId
from tests.simulation.crowd_checks import CrowdChecks
from tests.simulation.disk import Disk
from tests.simulation.leavers import Leavers, Story, Users
from tests.simulation.training import Script
from tests.simulation.world import MS, S, Timeline

EVERY = 4
"""Seeds 3, 7, 11, ... have a crowd."""
RIVALS = 7
"""Of eight seeds, the one with an urgent job that is submitted while another has all slots."""
UNSAVED = 15
"""Of sixteen seeds, the one in which a job without stored checkpoints has some of the slots."""
TOGETHER = 31
"""Of thirty-two, the one in which the urgent job needs the slots of both."""
PATIENT_NS, URGENT_NS = 50 * S, 75 * S
"""Times of the two submissions; by the second, all faults are healed."""
WAIT_NS_MAX = 40 * S
"""Time within which an urgent job trains: others have made room, its workers have started."""
NEVER_NS = 1_000_000 * S
NO_LIMIT = 1_000_000


def has_crowd(seed: int) -> bool:
    """Return whether users do more than submit and stop jobs in this run."""
    return seed % EVERY == EVERY - 1


@dataclass(frozen=True)
class Place:
    """The cluster that users see: the store and the nodes' ids."""

    disk: Disk
    nodes: list[str]


class Crowd:
    """The users of one run."""

    def __init__(
        self,
        timeline: Timeline,
        place: Place,
        checks: CrowdChecks,
        post: Callable[[CoordinatorEvent], None],
        *,
        fail: Callable[[str, str], None],
        seed: int,
    ) -> None:
        """Draw the users' requests from their own random source.

        Args:
            timeline: the run's virtual time.
            place: the cluster that users see.
            checks: records the requests.
            post: sends a request to the leader.
            fail: ends the run if a property is named.
            seed: the run's seed.
        """
        self._timeline = timeline
        self._place = place
        self._post = post
        self._seed, self._fail = seed, fail
        self._checks = checks
        self._is_there = has_crowd(seed)
        self._rng = random.Random(f"crowd {seed}")
        self._requests = 0
        self._jobs: list[JobId] = []
        self.more_jobs = self._rng.randint(1, 3) if self._is_there else 0
        if self._is_there and self._rng.random() < 0.5:
            self._at(5, 50, self._cordon_some_node)
        self.leavers = Leavers(
            timeline, place.disk, checks, Users(self._pause, self._resume, self._drain), seed=seed
        )

    def plan_job(self, spec: JobSpec, script: Script) -> tuple[JobSpec, Script]:
        """Return a job adapted to this run, and plan the users' requests for it."""
        if not self._is_there:
            return spec, script
        rng = self._rng
        # Several jobs must be able to run one after the other within the liveness phase.
        script = replace(script, steps=min(script.steps, 100), step_ns=min(script.step_ns, 50 * MS))
        spec = replace(spec, priority=rng.choice([0, 0, 1, 5]))
        if rng.random() < 0.5:
            script = replace(script, micro_batches=spec.max_workers + rng.randint(0, 3))
            self._checks.micro_batches[spec.job_id] = script.micro_batches
        elif random.Random(f"own steps {self._seed} {spec.job_id}").random() < 0.5:
            spec = replace(spec, own_steps=True)
        self._jobs.append(spec.job_id)
        if rng.random() < 0.4:
            self._at(5, 50, self._pause, spec.job_id)
            if rng.random() < 0.5:
                self._at(30, 59, self._resume, spec.job_id)
        if rng.random() < 0.4:
            self._at(5, 59, self._scale, spec)
        return spec, script

    def plan_rivals(self, slots: int, enter: Callable[[JobSpec, Script, int], None]) -> None:
        """Plan a long job of low priority that needs every slot, and an urgent one."""
        # With a single node, no other can take over from it.
        if len(self._place.nodes) > 1 or self.leavers.story is not Story.SWAPPED:
            self.leavers.plan(slots, enter, self._fail)
        if self._seed % 8 != RIVALS:
            return
        entry = Entry(EntryKind.FUNCTION, "train")
        patient = JobSpec(
            job_id=JobId("patient"), name="patient", entry=entry, min_workers=slots,
            max_workers=slots, priority=-1, run_path="/results", max_failures=-1,
        )  # fmt: skip
        urgent = replace(
            patient, job_id=JobId("urgent"), name="urgent", min_workers=1, max_workers=1, priority=6
        )
        script = Script(steps=1200, report_every=300, step_ns=50 * MS)
        look, wait_ns = self._check, WAIT_NS_MAX
        if self._seed % 16 == UNSAVED and slots > 1:
            self._plan_unsaved(replace(patient, min_workers=1, max_workers=1), script, enter)
            patient = replace(patient, min_workers=slots - 1, max_workers=slots - 1)
            if self._seed % 32 == TOGETHER:
                urgent = replace(urgent, min_workers=slots, max_workers=slots)
                look, wait_ns = self._check_in_vain, 2 * WAIT_NS_MAX
        enter(patient, script, PATIENT_NS)
        enter(urgent, replace(script, steps=20), URGENT_NS)
        self._timeline.after(URGENT_NS + wait_ns, look, urgent.job_id)

    def _plan_unsaved(
        self, spec: JobSpec, script: Script, enter: Callable[[JobSpec, Script, int], None]
    ) -> None:
        """Plan a job that would be the first to be preempted, but has no checkpoint.

        Storage accepts a checkpoint of it late, or never. In half of these runs a user pauses it.
        """
        index = self._seed // 16  # Enumerated, so that a few seeds have all combinations.
        from_ns = NEVER_NS if index % 4 in (1, 2) else URGENT_NS + 15 * S
        unsaved = replace(spec, job_id=JobId("unsaved"), name="unsaved", priority=-2)
        self._checks.unsaved = unsaved.job_id
        # It still runs when the urgent job is checked.
        loop = replace(script, steps=2 * script.steps, report_every=NO_LIMIT)
        loop = replace(loop, in_place=True, saved_from_ns=from_ns)
        enter(unsaved, loop, PATIENT_NS)
        if index % 8 >= 4:
            moment = random.Random(f"unsaved {self._seed}").randint(60 * S, URGENT_NS)
            self._timeline.after(moment, self._pause, unsaved.job_id)
            self._timeline.after(2 * URGENT_NS, self._resume, unsaved.job_id)

    def _check(self, job_id: JobId) -> None:
        self._fail(self._checks.waits(job_id), f"job {job_id}")

    def _check_in_vain(self, job_id: JobId) -> None:
        self._fail(self._checks.in_vain(job_id), f"job {job_id}")

    def noted(self, name: str, job_id: str, said: Mapping[str, str]) -> str:
        """Record a note of the coordinator; return the property that it violates, "" for none."""
        if name == "gives_way":
            self._checks.went_for[job_id] = said["to"].partition(" ")[0]
        if name != "worker_starting":
            return ""
        cordoned = [cordon.node_id for cordon in self._place.disk.nodes.cordons]
        return "no worker starts on a cordoned node" if said["node"] in cordoned else ""

    def heal(self) -> None:
        """Resume all jobs and remove all cordons; repeat until it has succeeded."""
        if not self._is_there:
            return
        disk = self._place.disk
        for job_id in self._jobs:
            if job_id in disk.records and disk.records[job_id].paused:
                self._resume(job_id)
        for cordon in disk.nodes.cordons:
            self._post_cordon(cordon.node_id, cordoned=False)
        self._timeline.after(1 * S, self.heal)

    # --------------------------------------------------------------- requests

    def _at(self, first_s: int, last_s: int, act: Callable[..., None], *args: object) -> None:
        self._timeline.after(self._rng.randint(first_s * S, last_s * S), act, *args)

    def _drain(self, node_id: NodeId, timeout_ns: int) -> None:
        self._post(NodeDrainRequested(self._request(), node_id, timeout_ns, "the operator said so"))

    def _request(self) -> str:
        self._requests += 1
        return f"crowd {self._requests}"

    def _pause(self, job_id: JobId) -> None:
        self._post(PauseRequested(self._request(), job_id))

    def _resume(self, job_id: JobId) -> None:
        self._checks.resumes[job_id] = None
        self._post(ResumeRequested(self._request(), job_id))

    def _scale(self, spec: JobSpec) -> None:
        """Request other bounds, sometimes such that must be rejected."""
        replica = spec.workers_per_replica
        low = self._rng.randint(1, spec.max_workers // replica) * replica
        high = self._rng.randint(low // replica, spec.max_workers // replica + 3) * replica
        self._checks.asked.setdefault(spec.job_id, []).append((low, high))
        self._post(ScaleRequested(self._request(), spec.job_id, low, high))

    def _cordon_some_node(self) -> None:
        self._post_cordon(NodeId(self._rng.choice(self._place.nodes)), cordoned=True)

    def _post_cordon(self, node_id: NodeId, *, cordoned: bool) -> None:
        event = NodeCordonRequested(self._request(), node_id, cordoned, "the operator said so")
        self._post(event)
