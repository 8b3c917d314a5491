"""The end of a SLURM job: its time limit, and the signal that SLURM can send before it.

`SLURM_JOB_END_TIME` is the end of the time limit: the node leaves by itself `LEAD_S` before that.
A preempted job ends earlier: SLURM sends SIGTERM and waits `KillWait` seconds (30), or sends the
signal that `--signal=USR1@90` names, that many seconds before.

Source: the manual pages sbatch(1) and slurm.conf(5).
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass

import anyio

from elastic.agent.notices.source import Notice, Notify

LEAD_S = 90.0
"""The node starts to leave this long before the job's end: ample time to reach a step boundary."""
SUSPEND_S = 30.0
NEAR_S = 900.0
"""A signal earlier than this before the end is not about the time limit."""


@dataclass(frozen=True)
class Slurm:
    """One SLURM job.

    Attributes:
        job_id: for the notice's reason.
        end_unix_s: end of its time limit, None if it has none or it is unknown.
    """

    name = "slurm"
    job_id: str
    end_unix_s: float | None = None
    lead_s: float = LEAD_S

    async def watch(self, notify: Notify) -> None:
        """Call `notify` with a notice at each SIGUSR1, and with one `lead_s` before the end.

        The handler stays installed all the time: SIGUSR1 without a handler would end the agent.
        """
        with anyio.open_signal_receiver(signal.SIGUSR1) as signals:
            due_s = self.end_unix_s - self.lead_s if self.end_unix_s is not None else None
            while True:
                if due_s is not None and time.time() >= due_s:
                    due_s = None
                    reason = f"the time of SLURM job {self.job_id} is nearly over"
                    notify(Notice(reason, deadline_unix_s=self.end_unix_s))
                # Wall clocks jump: check the time again at least every SUSPEND_S.
                suspend_s = (
                    min(SUSPEND_S, max(0.0, due_s - time.time()))
                    if due_s is not None
                    else SUSPEND_S
                )
                with anyio.move_on_after(suspend_s):
                    await anext(signals)
                    notify(self._at_signal())

    def _at_signal(self) -> Notice:
        """Return the notice for SIGUSR1; the job's end is its deadline if that is near."""
        end_s = self.end_unix_s
        is_near = end_s is not None and 0 < end_s - time.time() <= NEAR_S
        return Notice(f"SIGUSR1 of SLURM job {self.job_id}", end_s if is_near else None)
