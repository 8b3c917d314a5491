"""What happened to jobs on its way to their run directories, which the coordinator cannot reach.

The first rank of each group writes it. When another worker becomes the first rank it is told all
that is remembered, and leaves out what the file has.

Rule: nobody waits for it, and no decision rests on it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from elastic.coord.sessions import Sessions
from elastic.coord.watchers import Watchers
from elastic.core.events.coordinator import SendAgent
from elastic.core.messages import Announce, RunEvents
from elastic.core.world import JobId, Member, NodeId, WorkerId
from elastic.runtime.eventlog import event_record

PROCESS = "coordinator"


@dataclass
class _Writer:
    """Who writes a job's events, and up to which they were sent to it."""

    node_id: NodeId
    worker_id: WorkerId
    sent_ns: int = 0


class RunHistory:
    """Sends the events of each job to the first rank of its group."""

    def __init__(
        self,
        watchers: Watchers,
        sessions: Sessions,
        first_member: Callable[[JobId], Member | None],
    ) -> None:
        """Send what `watchers` remembers.

        Args:
            watchers: remember the events of each job.
            sessions: lead to the agents.
            first_member: returns rank 0 of a job's group, None without one. A coordinator that
                has taken over has announced no group, and so asks.
        """
        self._watchers, self._sessions = watchers, sessions
        self._first_member = first_member
        self._writers: dict[JobId, _Writer] = {}

    def sent(self, effect: SendAgent) -> None:
        """Learn from an announcement who is the first rank of a job's group."""
        message, session = effect.message, self._sessions.find(effect.session)
        if not isinstance(message, Announce) or message.assignment.rank != 0:
            return
        if session is not None and session.node_id is not None:
            place = message.assignment
            known = self._writers.get(place.job_id)
            if known is None or known.worker_id != place.worker_id:
                self._writers[place.job_id] = _Writer(session.node_id, place.worker_id)
            self.send_new(place.job_id)

    def send_new(self, job_id: JobId) -> None:
        """Send the events of a job that have not been sent; later, if its node is away."""
        writer = self._writers.get(job_id)
        if writer is None:
            first = self._first_member(job_id)
            if first is None:
                return
            writer = self._writers[job_id] = _Writer(first.node_id, first.worker_id)
        session = self._sessions.of_node(writer.node_id)
        if session is None:
            return
        notes = [one for one in self._watchers.history(job_id) if one.unix_ns > writer.sent_ns]
        if notes:
            writer.sent_ns = notes[-1].unix_ns
            lines = (json.dumps(event_record(one.note, one.unix_ns, PROCESS)) for one in notes)
            session.send(RunEvents(writer.worker_id, tuple(lines)))

    def forget(self, job_ids: Iterable[JobId]) -> None:
        """Jobs that ended long ago are not known any more."""
        for job_id in job_ids:
            self._writers.pop(job_id, None)
