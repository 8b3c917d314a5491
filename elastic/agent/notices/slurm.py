"""The end of a SLURM job: its time limit, and the signal that it was asked to send before.

`SLURM_JOB_END_TIME` says when the time is over: the node leaves in good time before that by itself.
A job that is preempted ends earlier: SLURM sends SIGTERM and waits `KillWait` seconds (30), or
sends what `--signal=USR1@90` names, that many seconds before.

Source: the manual pages sbatch(1) and slurm.conf(5).
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass

import anyio

from elastic.agent.notices.source import Notice, Tell

LEAD_S = 90.0
"""Leaving begins so long before the job's time is over; a boundary is reached long before."""
SUSPEND_S = 30.0
NEAR_S = 900.0
"""A signal that comes earlier before the end than this is about something else."""


@dataclass(frozen=True)
class Slurm:
    """One SLURM job.

    Attributes:
        job_id: for people.
        end_unix_s: when its time is over, None if it has no limit or nobody said.
    """

    job_id: str
    end_unix_s: float | None = None
    lead_s: float = LEAD_S

    @property
    def name(self) -> str:
        """Return what --notices calls it."""
        return "slurm"

    async def watch(self, tell: Tell) -> None:
        """Tell of a notice at the signal, and of one in good time before the end.

        The signal is caught without a gap: uncaught, it would end the agent.
        """
        with anyio.open_signal_receiver(signal.SIGUSR1) as signals:
            due_s = self.end_unix_s - self.lead_s if self.end_unix_s is not None else None
            while True:
                if due_s is not None and time.time() >= due_s:
                    due_s = None
                    reason = f"the time of SLURM job {self.job_id} is nearly over"
                    tell(Notice(reason, deadline_unix_s=self.end_unix_s))
                # Wall clocks jump: the time is looked at again.
                suspend_s = (
                    min(SUSPEND_S, max(0.0, due_s - time.time()))
                    if due_s is not None
                    else SUSPEND_S
                )
                with anyio.move_on_after(suspend_s):
                    await anext(signals)
                    tell(self._at_signal())

    def _at_signal(self) -> Notice:
        """Return the notice for SIGUSR1; the job's end is its deadline if that is near."""
        end_s = self.end_unix_s
        is_near = end_s is not None and 0 < end_s - time.time() <= NEAR_S
        return Notice(f"SIGUSR1 of SLURM job {self.job_id}", end_s if is_near else None)
