"""Sends the events of jobs to their run directories, which the coordinator cannot access.

Rank 0 of each group writes them. When another worker becomes rank 0, it receives all remembered
events, and skips those that the file has.

Rule: nothing waits for this, and no decision depends on it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from elastic.coord.sessions import Sessions
from elastic.coord.watchers import Watchers
from elastic.core.events.coordinator import SendAgent
from elastic.core.facts import JobId, Member, NodeId, WorkerId
from elastic.core.messages import Announce, RunEvents
from elastic.runtime.eventlog import event_record

PROCESS = "coordinator"


@dataclass
class _Writer:
    """The worker that writes a job's events, and the time of the last event sent to it."""

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
        """Send the events that `watchers` keeps.

        Args:
            watchers: keeps the events of each job.
            sessions: the agents' sessions.
            first_member: returns rank 0 of a job's group, None without one. For a coordinator
                that has taken over, and so has not announced the group itself.
        """
        self._watchers, self._sessions = watchers, sessions
        self._first_member = first_member
        self._writers: dict[JobId, _Writer] = {}

    def sent(self, effect: SendAgent) -> None:
        """Take rank 0 of a job's group from an announcement that was sent."""
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
        """Send the events of a job that were not sent yet; later, if the node is disconnected."""
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
        """Drop the state of jobs that ended long ago."""
        for job_id in job_ids:
            self._writers.pop(job_id, None)
