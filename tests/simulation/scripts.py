"""The train functions of a simulated run, and the state that in-place loops keep.

Rule: a step that a process has committed is in its memory until it dies, and in storage once a
checkpoint of it was stored; nothing else keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from elastic.core.events.worker import CheckpointWritten, TrainLeft, WorkerEvent
from elastic.core.facts import Generation, JobId, WorkerId
from tests.simulation.world import MS, Timeline

BOUNDARY_SAVES = 500_000
"""First number of checkpoints that are saved when all leave; above those of save requests."""


@dataclass(frozen=True)
class Script:
    """The behavior of a job's train function, drawn from the seed.

    Attributes:
        steps: optimizer steps until it returns.
        report_every: steps between two reports with a checkpoint.
        tell_every: steps between two reports without one, 0 for none.
        step_ns: duration of a step.
        raise_at: the step at which user code raises in rank 0, -1 for never.
        raises: how often it does so before it is "fixed".
        copies_every: steps between two copies on another node, 0 for none.
        is_sharded: every node has rows of its own.
        micro_batches: micro-batches per step, 0 if they are not reported.
        in_place: its loop continues in the next group, and can leave and save at any step.
        in_parts: its ranks also synchronize in subgroups of the group.
        saved_from_ns: time before which storage accepts no checkpoint of it.
        save_ns: time that its slowest members need to save when they leave.
        evaluates_ns: delay of rank 0's return after the others.
        starts_ns: time of a process's first step, without visible progress, as with compilers and
            devices that start in native code.
        works_ns: time that rank 0 works after each report with a checkpoint; the others wait.
        leaves_at: the step in which the last rank returns, while the others wait for it; -1 for
            never.
        leaves: how often it does so before it is "fixed".
    """

    steps: int
    report_every: int
    step_ns: int
    raise_at: int = -1
    raises: int = 0
    copies_every: int = 0
    is_sharded: bool = False
    micro_batches: int = 0
    in_place: bool = False
    in_parts: bool = False
    saved_from_ns: int = 0
    save_ns: int = 0
    evaluates_ns: int = 0
    starts_ns: int = 0
    works_ns: int = 0
    tell_every: int = 0
    leaves_at: int = -1
    leaves: int = 0


class Holder(Protocol):
    """A process with the state of a run in its memory.

    Attributes:
        held_step: the step that it committed last.
        rests: the generation at whose last boundary it must save its state, 0 for none.
    """

    worker_id: WorkerId
    held_step: int
    rests: Generation

    def moves(self) -> bool:
        """Return whether its main thread makes progress."""
        ...

    def is_in(self, generation: Generation) -> bool:
        """Return whether its main thread is in the train function in this generation."""
        ...

    def report_machine(self, event: WorkerEvent) -> None:
        """Pass an event to its control thread."""
        ...

    def answer_main(self, event: WorkerEvent) -> None:
        """Pass its main thread's reply to an order."""
        ...


@dataclass
class Leaving:
    """A group whose members save their state when they leave.

    Attributes:
        members: the members, by rank.
        step: the step that is saved.
        written: ranks whose part is in storage.
    """

    job_id: JobId
    generation: Generation
    members: Mapping[int, Holder]
    step: int
    written: set[int] = field(default_factory=set)


class Loops:
    """The progress of all loops that continue in place, over one run."""

    def __init__(self, timeline: Timeline, scripts: Mapping[JobId, Script]) -> None:
        """Start with nothing saved.

        Args:
            timeline: the run's virtual time.
            scripts: the scripts of all jobs.
        """
        self._timeline, self._scripts = timeline, scripts
        self._saved: dict[JobId, int] = {}
        self._leaving: dict[JobId, Leaving] = {}
        self._owed: dict[tuple[JobId, Generation], tuple[int, WorkerId]] = {}

    def stepped(self, members: Iterable[Holder], step: int) -> None:
        """Record that all members have committed a step."""
        for member in members:
            member.held_step = step

    def save(self, job_id: JobId, step: int) -> bool:
        """Store a checkpoint; return whether storage has accepted it."""
        if self._timeline.now_ns < self._scripts[job_id].saved_from_ns:
            return False
        self._saved[job_id] = step
        return True

    def go_on(self, job_id: JobId, members: Iterable[Holder]) -> int:
        """Return the step from which a new group continues."""
        return max(self._saved.get(job_id, 0), *(member.held_step for member in members))

    def owe(self, job_id: JobId, generation: Generation, holder: Holder) -> None:
        """Record that a worker was well and had its steps when this generation was announced."""
        known = self._owed.get((job_id, generation), (0, WorkerId("")))
        self._owed[job_id, generation] = max(known, (holder.held_step, holder.worker_id))

    def owed(self, job_id: JobId, generation: Generation) -> tuple[int, WorkerId]:
        """Return the step from which a group must continue at least, and who has it."""
        return self._owed.get((job_id, generation), (0, WorkerId("")))

    # ------------------------------------------------------------ where all members leave

    def leave(self, leaving: Leaving) -> None:
        """Let all members leave at the last boundary; if requested, they save first."""
        self._leaving[leaving.job_id] = leaving
        rests = any(m.rests == leaving.generation for m in leaving.members.values())
        longest_ns = self._scripts[leaving.job_id].save_ns if rests else 0
        for rank in leaving.members:
            delay_ns = self._timeline.between(longest_ns // 20, longest_ns)
            self._timeline.after(delay_ns, self._write if rests else self._go, leaving, rank)

    def _write(self, leaving: Leaving, rank: int) -> None:
        """Store a member's part; the leader completes the checkpoint when it has all parts."""
        if leaving.members[rank].moves():
            leaving.written.add(rank)
        if rank:
            self._go(leaving, rank)
        leader = leaving.members[0]
        if leaving.written != set(leaving.members) or not leader.is_in(leaving.generation):
            return
        if self.save(leaving.job_id, leaving.step):
            index = BOUNDARY_SAVES + leaving.step
            saved = CheckpointWritten(leaving.generation, index, "{}", f"auto-{index}")
            leader.report_machine(saved)
        self._go(leaving, 0)

    def _go(self, leaving: Leaving, rank: int) -> None:
        event = TrainLeft(leaving.generation, at_boundary=True)
        delay_ns = self._timeline.between(0, 10 * MS)
        self._timeline.after(delay_ns, leaving.members[rank].answer_main, event)

    def called_off(self, job_id: JobId, member: Holder) -> None:
        """Let a member leave without waiting for storage: its job continues after all."""
        leaving = self._leaving.get(job_id)
        for rank, one in leaving.members.items() if leaving is not None else ():
            if one is member and leaving is not None:
                self._go(leaving, rank)

    def waits(self, job_id: JobId) -> bool:
        """Return whether a member of a job is leaving and waits for storage."""
        leaving = self._leaving.get(job_id)
        if leaving is None:
            return False
        return any(member.is_in(leaving.generation) for member in leaving.members.values())
