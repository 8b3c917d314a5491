"""What happened to jobs on its way to their run directories, which the coordinator cannot reach.

The first rank of each group writes it. When another worker becomes the first rank it is told all
that is remembered, and leaves out what the file has.

Rule: nobody waits for it, and no decision rests on it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from elastic.coord.sessions import Sessions
from elastic.coord.watchers import Watchers
from elastic.core.events.coordinator import SendAgent
from elastic.core.messages import Announce, RunEvents
from elastic.core.world import JobId, SessionId, WorkerId
from elastic.runtime.eventlog import event_record

PROCESS = "coordinator"


@dataclass
class _Teller:
    """Who writes a job's events, and up to which it was told."""

    session: SessionId
    worker_id: WorkerId
    reported_ns: int = 0


class RunHistory:
    """Sends the events of each job to the first rank of its group."""

    def __init__(self, watchers: Watchers, sessions: Sessions) -> None:
        """Send what `watchers` remembers."""
        self._watchers, self._sessions = watchers, sessions
        self._tellers: dict[JobId, _Teller] = {}

    def sent(self, effect: SendAgent) -> None:
        """Learn from an announcement who is the first rank of a job's group."""
        message = effect.message
        if isinstance(message, Announce) and message.assignment.rank == 0:
            place = message.assignment
            known = self._tellers.get(place.job_id)
            if known is not None and known.worker_id == place.worker_id:
                known.session = effect.session
            else:
                self._tellers[place.job_id] = _Teller(effect.session, place.worker_id)
            self.tell(place.job_id)

    def tell(self, job_id: JobId) -> None:
        """Send what is new of a job."""
        teller = self._tellers.get(job_id)
        session = self._sessions.find(teller.session) if teller is not None else None
        if teller is None or session is None:
            return
        notes = [one for one in self._watchers.history(job_id) if one.unix_ns > teller.reported_ns]
        if notes:
            teller.reported_ns = notes[-1].unix_ns
            lines = (json.dumps(event_record(one.note, one.unix_ns, PROCESS)) for one in notes)
            session.send(RunEvents(teller.worker_id, tuple(lines)))

    def forget(self, job_ids: Iterable[JobId]) -> None:
        """Jobs that ended long ago are not known any more."""
        for job_id in job_ids:
            self._tellers.pop(job_id, None)
