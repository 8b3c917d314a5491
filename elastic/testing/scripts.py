"""What the train functions of a simulated run do, and what loops that go on in place remember.

Rule: a step that a process has committed is in its memory until it dies, and in storage once a
checkpoint of it was taken; nothing else keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from elastic.core.world import JobId
from elastic.testing.world import Timeline


@dataclass(frozen=True)
class Script:
    """What a job's train function does, drawn from the seed.

    Attributes:
        steps: optimizer steps until it returns.
        report_every: steps between two reports with a checkpoint.
        step_ns: duration of a step.
        raise_at: the step at which user code raises in rank 0, -1 for never.
        raises: how often it does so before it is "fixed".
        copies_every: steps between two copies on another node, 0 for none.
        is_sharded: every node has rows of its own.
        micro_batches: that a step is shared out in, 0 for none that anybody hears of.
        in_place: its loop goes on in the next group, and can be left and saved at any step.
        in_parts: its ranks meet in groups within the group, too.
        saved_from_ns: storage takes nothing of it before.
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


class Holder(Protocol):
    """A process with the state of a run in its memory.

    Attributes:
        held_step: that it has committed last.
    """

    held_step: int


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
