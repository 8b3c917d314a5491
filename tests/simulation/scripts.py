"""What the train functions of a simulated run do, and what loops that go on in place remember.

Rule: a step that a process has committed is in its memory until it dies, and in storage once a
checkpoint of it was taken; nothing else keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from elastic.core.events.worker import CheckpointWritten, TrainLeft, WorkerEvent
from elastic.core.world import Generation, JobId
from tests.simulation.world import MS, Timeline

BOUNDARY_SAVES = 500_000
"""What is saved where all leave is numbered from here on, above what anybody wishes for."""


@dataclass(frozen=True)
class Script:
    """What a job's train function does, drawn from the seed.

    Attributes:
        steps: optimizer steps until it returns.
        report_every: steps between two reports with a checkpoint.
        tell_every: steps between two reports without one, 0 for none.
        step_ns: duration of a step.
        raise_at: the step at which user code raises in rank 0, -1 for never.
        raises: how often it does so before it is "fixed".
        copies_every: steps between two copies on another node, 0 for none.
        is_sharded: every node has rows of its own.
        micro_batches: that a step is shared out in, 0 for none that anybody hears of.
        in_place: its loop goes on in the next group, and can be left and saved at any step.
        in_parts: its ranks meet in groups within the group, too.
        saved_from_ns: storage takes nothing of it before.
        save_ns: its slowest members need so long to save what they leave behind.
        evaluates_ns: rank 0 returns so much later than the others.
        starts_ns: a process needs so long for its first step, and shows no movement meanwhile, as
            compilers and devices that start in native code do not.
        works_ns: rank 0 works so long after each report with a checkpoint; the others wait.
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
        held_step: that it has committed last.
        rests: the generation at whose last boundary its state is to be saved, 0 for none.
    """

    held_step: int
    rests: Generation

    def moves(self) -> bool:
        """Return whether its main thread gets further."""
        ...

    def is_in(self, generation: Generation) -> bool:
        """Return whether its main thread is in the train function in this generation."""
        ...

    def report_machine(self, event: WorkerEvent) -> None:
        """Let its control thread hear of something."""
        ...

    def answer_main(self, event: WorkerEvent) -> None:
        """Let its main thread answer its order."""
        ...


@dataclass
class Leaving:
    """A group whose members save their state where they leave.

    Attributes:
        members: by rank.
        step: that is saved.
        written: ranks whose part is in storage.
    """

    job_id: JobId
    generation: Generation
    members: Mapping[int, Holder]
    step: int
    written: set[int] = field(default_factory=set)


class Loops:
    """Where loops that go on in place stand, over one run."""

    def __init__(self, timeline: Timeline, scripts: Mapping[JobId, Script]) -> None:
        """Begin with nothing saved.

        Args:
            timeline: of the run.
            scripts: of all jobs.
        """
        self._timeline, self._scripts = timeline, scripts
        self._saved: dict[JobId, int] = {}
        self._leaving: dict[JobId, Leaving] = {}

    def stepped(self, members: Iterable[Holder], step: int) -> None:
        """All members have committed a step."""
        for member in members:
            member.held_step = step

    def save(self, job_id: JobId, step: int) -> bool:
        """Return whether storage has taken a checkpoint."""
        if self._timeline.now_ns < self._scripts[job_id].saved_from_ns:
            return False
        self._saved[job_id] = step
        return True

    def go_on(self, job_id: JobId, members: Iterable[Holder]) -> int:
        """Return the step that a new group goes on from."""
        return max(self._saved.get(job_id, 0), *(member.held_step for member in members))

    # ------------------------------------------------------------ where all members leave

    def leave(self, leaving: Leaving) -> None:
        """All members are at the last boundary: some save their part first, and leave after."""
        self._leaving[leaving.job_id] = leaving
        rests = any(m.rests == leaving.generation for m in leaving.members.values())
        longest_ns = self._scripts[leaving.job_id].save_ns if rests else 0
        for rank in leaving.members:
            delay_ns = self._timeline.between(longest_ns // 20, longest_ns)
            self._timeline.after(delay_ns, self._write if rests else self._go, leaving, rank)

    def _write(self, leaving: Leaving, rank: int) -> None:
        """A part is in storage; the leader's makes a checkpoint of all, when all are there."""
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
        """A member was told that its job goes on: it waits for storage no more."""
        leaving = self._leaving.get(job_id)
        for rank, one in leaving.members.items() if leaving is not None else ():
            if one is member and leaving is not None:
                self._go(leaving, rank)

    def waits(self, job_id: JobId) -> bool:
        """Return whether a member of a job stands where it leaves, and waits for storage."""
        leaving = self._leaving.get(job_id)
        if leaving is None:
            return False
        return any(member.is_in(leaving.generation) for member in leaving.members.values())
