"""A model of worker processes: the real worker state machine, simulated main threads and groups.

Rule: a group makes a step only while all its members are alive, not stopped and inside their train
functions. The computation of a step is not modelled, only its generation and members.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from elastic.core.events.worker import (
    CheckpointWritten,
    CopiesRequested,
    EnterTrain,
    GroupFormed,
    LoopStateChanged,
    MicroBatchesDeclared,
    TrainLeft,
    TrainRaised,
    TrainReturned,
    UserReported,
)
from elastic.core.facts import (
    Assignment,
    Failure,
    Generation,
    JobId,
)
from tests.simulation import parts
from tests.simulation.checkers import Checkers
from tests.simulation.copying import Copying, Trained
from tests.simulation.links import Links
from tests.simulation.process import SimProcess
from tests.simulation.scripts import Leaving, Loops, Script
from tests.simulation.world import MS, Timeline


@dataclass
class SimGroup:
    """One generation of one job, in the data plane."""

    job_id: JobId
    generation: Generation
    world_size: int
    assignment: Assignment
    told: dict[int, Assignment] = field(default_factory=dict)
    waiting: dict[int, SimProcess] = field(default_factory=dict)
    members: dict[int, SimProcess] = field(default_factory=dict)
    inside: set[int] = field(default_factory=set)
    is_over: bool = False
    step: int = 0
    first_step: int = 0
    step_running: bool = False
    is_stalled: bool = False
    left_ns: int = 0


class DataPlane:
    """All groups of all jobs, and the progress of the scripts."""

    def __init__(self, timeline: Timeline, checkers: Checkers) -> None:
        """Start without groups."""
        self.timeline = timeline
        self.checkers = checkers
        self.groups: dict[tuple[JobId, Generation], SimGroup] = {}
        self.scripts: dict[JobId, Script] = {}
        self.raised: dict[JobId, int] = {}
        self.left: dict[JobId, int] = {}
        self.saves_served: dict[JobId, int] = {}
        self.copying = Copying(timeline, checkers, self._trained)
        self.copying.is_wanted = lambda job_id: bool(self.scripts[job_id].copies_every)
        self.loops = Loops(timeline, self.scripts)
        self.links = Links(timeline)

    def arrive(self, process: SimProcess, assignment: Assignment) -> None:
        """Let a main thread wait in the rendezvous of its generation."""
        key = (assignment.job_id, assignment.generation)
        group = self.groups.get(key)
        if group is None:
            group = SimGroup(*key, assignment.world_size, assignment)
            self.groups[key] = group
            script = self.scripts[group.job_id]
            if not (script.is_sharded or script.in_place):
                self._begin(group, self.copying.fetch(assignment))
        group.waiting[assignment.rank], group.told[assignment.rank] = process, assignment
        self.try_form(group)

    def try_form(self, group: SimGroup) -> None:
        """Form the group, if all ranks wait and none is held back."""
        if group.is_over or group.members or len(group.waiting) < group.world_size:
            return
        if self.is_held(group, group.waiting.values()):
            return
        group.members = dict(sorted(group.waiting.items()))
        if self.scripts[group.job_id].is_sharded:
            nodes = [process.node_id for process in group.members.values()]
            stored = _step_of(group.assignment.reported_checkpoint)
            self._begin(group, self.copying.go_on(group.told, nodes, stored))
        elif self.scripts[group.job_id].in_place:
            self._begin(group, self.loops.go_on(group.job_id, group.members.values()))
        self.checkers.group_formed(
            group.job_id,
            group.generation,
            tuple(p.worker_id for p in group.members.values()),
        )
        for process in group.members.values():
            delay = self.timeline.between(MS, 15 * MS)
            self.timeline.after(delay, process.answer_main, GroupFormed(group.generation))

    def _begin(self, group: SimGroup, copied: int) -> None:
        """Start from storage, or from copies in memory that have `copied` steps."""
        group.step = group.first_step = max(_step_of(group.assignment.reported_checkpoint), copied)
        cause = group.assignment.cause
        owed, holder = self.loops.owed(group.job_id, group.generation)
        self.checkers.require(
            group.step >= owed,
            "no group begins from an older state than a living worker has",
            f"job {group.job_id} generation {group.generation} begins at step {group.step}, "
            f"{holder} has {owed}",
        )
        self.checkers.begins(group.job_id, group.generation, group.step, cause)

    def is_held(self, group: SimGroup, members: Collection[SimProcess]) -> bool:
        """Return whether these make no progress: one of them does not, or a link is cut."""
        nodes = [p.node_id for p in members]
        is_parted = self.links.hold(group.job_id, group.generation, nodes)
        return is_parted or not all(p.moves() for p in members)

    def group_of(self, process: SimProcess) -> SimGroup | None:
        """Return the group in which a process trains, None if there is none or it is over."""
        busy = process.busy_with
        if not isinstance(busy, EnterTrain):
            return None
        group = self.groups.get((busy.assignment.job_id, busy.assignment.generation))
        return group if group is not None and not group.is_over else None

    def _trained(self, job_id: JobId) -> Trained | None:
        """Return the progress of a job's newest group, None if there is no formed group."""
        groups = [g for (j, _), g in self.groups.items() if j == job_id and not g.is_over]
        group = max(groups, key=lambda g: g.generation, default=None)
        if group is None or not group.members:
            return None
        nodes = tuple(process.node_id for process in group.members.values())
        return Trained((group.generation, group.step), group.step - group.first_step, nodes)

    def enter(self, process: SimProcess, assignment: Assignment) -> None:
        """Put a main thread into the train function."""
        group = self.groups[(assignment.job_id, assignment.generation)]
        group.inside.add(assignment.rank)
        script = self.scripts[group.job_id]
        self.checkers.require(
            script.in_place or not process.has_begun,
            "a process begins a script once",
            f"job {group.job_id} generation {group.generation}: {process.worker_id} begins again",
        )
        process.has_begun = True
        if script.copies_every:
            process.report_machine(CopiesRequested(script.copies_every, script.is_sharded))
        if script.micro_batches:
            process.report_machine(MicroBatchesDeclared(script.micro_batches))
        if script.in_place:
            process.report_machine(LoopStateChanged(inside=True))
        if script.starts_ns:
            process.start(script.starts_ns)
        if group.is_over:
            process.break_out(assignment.generation)
        else:
            self._next_step(group)

    def _next_step(self, group: SimGroup) -> None:
        if group.step_running or group.is_over or len(group.inside) < group.world_size:
            return
        group.step_running = True
        script = self.scripts[group.job_id]
        self.timeline.after(script.step_ns, self._end_step, group)

    def _end_step(self, group: SimGroup) -> None:
        group.step_running = False
        if group.is_over:
            self._await_hung(group)
            return
        members = group.members.values()
        if self.is_held(group, members) or any(p.is_slow() for p in members):
            # A member is stopped, hung, starting, slow or unreachable: the others wait.
            self.timeline.after(20 * MS, self._end_step, group)
            if self.scripts[group.job_id].in_parts:
                parts.stall(group.members, group.step)
            group.step_running = group.is_stalled = True
            for process in group.members.values():
                process.linger()
            return
        if group.is_stalled:
            group.is_stalled = False
            for process in group.members.values():
                process.go_on()
        script = self.scripts[group.job_id]
        group.step += 1
        self.checkers.stepped(group.job_id, group.generation, group.step)
        if script.is_sharded:
            nodes = [process.node_id for process in group.members.values()]
            self.copying.shards.stepped(
                group.job_id,
                group.generation,
                script.copies_every,
                nodes,
                step=group.step,
                first=group.first_step,
            )
        self._save_if_requested(group)
        if script.in_place:
            self.loops.stepped(group.members.values(), group.step)
        if group.step == script.leaves_at and self.left.get(group.job_id, 0) < script.leaves:
            self._leave_early(group)
        elif group.step == script.raise_at and self.raised.get(group.job_id, 0) < script.raises:
            self.raised[group.job_id] = self.raised.get(group.job_id, 0) + 1
            self._raise(group)
        elif group.step >= script.steps:
            self._finish(group)
        elif script.in_place and self._is_left(group):
            group.is_over = True
            self.loops.leave(Leaving(group.job_id, group.generation, group.members, group.step))
        else:
            if script.tell_every and group.step % script.tell_every == 0:
                self._tell(group)
            if group.step % script.report_every == 0:
                self._report(group)
            else:
                self._next_step(group)

    def _await_hung(self, group: SimGroup) -> None:
        """Let hung members of a group that is over report that they do not leave their loop."""
        hung = [p for p in group.members.values() if p.is_hung and p.is_in(group.generation)]
        if hung and self.scripts[group.job_id].in_place:
            for process in hung:
                process.take_time()
            self.timeline.after(20 * MS, self._await_hung, group)

    def _save_if_requested(self, group: SimGroup) -> None:
        """Save a checkpoint that a user requested; the leader reports it, with the request's id."""
        requests = [p.save_request for p in group.members.values() if p.save_request is not None]
        newest = max((w.request for w in requests if w.generation == group.generation), default=0)
        if newest > self.saves_served.get(group.job_id, 0):
            self.saves_served[group.job_id] = newest
            if not self.loops.save(group.job_id, group.step):
                return  # Storage rejected it: given up; the next request tries again.
            saved = CheckpointWritten(group.generation, newest, "{}", f"auto-{newest}", newest)
            group.members[0].report_machine(saved)

    def _raise(self, group: SimGroup) -> None:
        """Raise in rank 0's user code; the others see a broken group when that process ends."""
        failure = Failure("ValueError", "bad batch", position=f"step {group.step}")
        event = TrainRaised(group.generation, failure, group_broken=False)
        group.members[0].answer_main(event)

    def _leave_early(self, group: SimGroup) -> None:
        """Let the last rank return; the others wait for it from now on."""
        self.left[group.job_id] = self.left.get(group.job_id, 0) + 1
        if group.world_size == 1:
            self._next_step(group)
            return
        group.left_ns = self.timeline.now_ns
        self._return(group, group.world_size - 1)
        self._await_who_left(group)

    def _await_who_left(self, group: SimGroup) -> None:
        """Let the members wait, without steps, until the group is over."""
        if group.is_over:
            return
        for process in group.members.values():
            if process.is_in(group.generation):
                process.linger()
            else:
                process.take_time()
        self.timeline.after(20 * MS, self._await_who_left, group)

    def let_go(self, process: SimProcess, generation: Generation) -> None:
        """Close the connections of a process that has returned, which its neighbours detect."""
        group = self.groups.get((process.job_id, generation))
        if group is not None and not group.is_over:
            self.lost(process)

    def waits_in_vain_ns(self, job_id: JobId) -> int:
        """Return for how long a group has waited for a member that has left, 0 if none has."""
        group = max(
            (g for (j, _), g in self.groups.items() if j == job_id),
            key=lambda g: g.generation,
            default=None,
        )
        if group is None or not group.left_ns:
            return 0
        waits = any(p.is_in(group.generation) and p.moves() for p in group.members.values())
        return self.timeline.now_ns - group.left_ns if waits else 0

    def _finish(self, group: SimGroup) -> None:
        group.is_over = True
        for rank in group.members:
            delay = 0 if rank else self.scripts[group.job_id].evaluates_ns
            self.timeline.after(delay + self.timeline.between(0, 5 * MS), self._return, group, rank)

    def _return(self, group: SimGroup, rank: int) -> None:
        process = group.members[rank]
        if self.scripts[group.job_id].in_place:
            process.report_machine(LoopStateChanged(inside=False))
        if process.is_alive:
            self.checkers.train_returned(group.job_id, group.generation, rank)
        event = TrainReturned(group.generation, f'{{"steps": {group.step}}}')
        process.answer_main(event)

    def _report(self, group: SimGroup) -> None:
        """Report with a checkpoint from rank 0; all members agree whether to leave here."""
        self._tell(group, f"checkpoint-{group.step}")
        works_ns = self.scripts[group.job_id].works_ns
        if works_ns:
            group.members[0].slow_until_ns = self.timeline.now_ns + works_ns
        if self._is_left(group):
            self._leave(group)
        else:
            self._next_step(group)

    def _tell(self, group: SimGroup, path: str = "") -> None:
        """Report metrics from all ranks, and a checkpoint from rank 0 if there is a path."""
        metrics = f'{{"step": {group.step}}}'
        self.checkers.told(group.job_id, group.generation, metrics)
        for rank, process in group.members.items():
            process.report_machine(
                UserReported(group.generation, rank, metrics, path if rank == 0 else "")
            )

    def _is_left(self, group: SimGroup) -> bool:
        """Return whether a member knows that the group ends at this boundary."""
        return any(p.wish == group.generation for p in group.members.values())

    def _leave(self, group: SimGroup) -> None:
        """Let all members leave at this boundary."""
        group.is_over = True
        for process in group.members.values():
            event = TrainLeft(group.generation, at_boundary=True)
            delay = self.timeline.between(0, 10 * MS)
            self.timeline.after(delay, process.answer_main, event)

    def lost(self, process: SimProcess) -> None:
        """Break a process's group: its neighbours detect it, the others wait for an abort."""
        for group in self.groups.values():
            if process not in [*group.members.values(), *group.waiting.values()]:
                continue
            ranks = [r for r, p in group.members.items() if p is process]
            group.is_over = True
            for rank in ranks:
                neighbours = {(rank + 1) % group.world_size, (rank - 1) % group.world_size}
                for neighbour in sorted(neighbours - {rank}):
                    other = group.members[neighbour]
                    delay = self.timeline.between(MS, 5 * MS)
                    self.timeline.after(delay, other.break_out, group.generation)


def _step_of(checkpoint: str) -> int:
    return int(checkpoint.rpartition("-")[2]) if checkpoint else 0
