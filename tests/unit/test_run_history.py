"""Events on their way to a run's directory, also after another coordinator has taken over."""

from __future__ import annotations

import json

from elastic.coord.run_history import RunHistory
from elastic.coord.sessions import Sessions
from elastic.coord.watchers import Watchers
from elastic.core.events.shared import Note
from elastic.core.facts import JobId, Member, NodeId, WorkerId
from elastic.core.messages import RunEvents
from elastic.runtime.clock import SystemClock

JOB = JobId("j1")
FIRST = Member(WorkerId("n1/1"), NodeId("n1"), 0, "n1:1")


def test_a_coordinator_that_took_over_sends_events_before_it_forms_a_group() -> None:
    watchers, sessions = Watchers(SystemClock()), Sessions()
    history = RunHistory(watchers, sessions, lambda job_id: FIRST if job_id == JOB else None)
    watchers.publish(Note("first", JOB))
    history.send_new(JOB)  # Its node is away.

    session = sessions.open("peer")
    session.node_id = FIRST.node_id
    sessions.register(session)
    watchers.publish(Note("second", JOB))
    history.send_new(JOB)
    history.send_new(JOB)

    sent = session.next_message()
    assert isinstance(sent, RunEvents)
    assert session.next_message() is None
    assert sent.worker_id == FIRST.worker_id
    assert [json.loads(line)["event"] for line in sent.lines] == ["first", "second"]
