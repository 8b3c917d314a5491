"""What can be streamed from a coordinator: what happens to a job, and what its workers print.

Rule: a stream that is taken up again tells nothing twice. What it must leave out it says.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grpc

from elastic.client.streams import ReopenStream
from elastic.core.view import JobView
from elastic.core.world import ENDED, WorkerId
from elastic.wire.codec_jobs import (
    JobEvent,
    LogChunk,
    TimedNote,
    job_event_from_proto,
    log_chunk_from_proto,
    timed_note_from_proto,
)
from elastic.wire.generated.elastic.v1 import jobs_pb2, jobs_pb2_grpc

AGENTS_RETURN_S = 15.0
"""Agents are back this long after the coordinator, or their nodes are lost."""
REMARK = "[elastic] "
"""Begins what the coordinator says in place of a worker's output."""
NOT_AT_HAND = REMARK + "output of "


class JobSource:
    """What happens to a job; once the job is known, it is asked for by its id.

    Attributes:
        is_complete: whether the job's end was told.
    """

    def __init__(self, job: str) -> None:
        """Watch the job of this id or name."""
        self.is_complete = False
        self._job = job

    def opened(self) -> None:
        """Nothing to prepare: each call begins with a snapshot."""

    def start(self, channel: grpc.Channel, **options: Any) -> Any:
        """Begin the call."""
        request = jobs_pb2.WatchRequest(job=self._job)
        return jobs_pb2_grpc.JobsStub(channel).Watch(request, **options)

    def decode(self, message: jobs_pb2.JobEvent, now_ns: int) -> JobEvent:
        """Return the snapshot or the note."""
        event = job_event_from_proto(message, now_ns)
        if isinstance(event, JobView):
            self._job = event.record.spec.job_id  # Names are used again, ids are not.
            self.is_complete = event.record.phase in ENDED
        return event


class EventSource:
    """What happened to a job, each event once, also over several calls.

    Attributes:
        is_complete: True: the coordinator says when there is no more.
    """

    def __init__(self, job: str, *, follow: bool) -> None:
        """Ask for the events of the job of this id or name."""
        self.is_complete = True
        self._request = jobs_pb2.EventsRequest(job=job, follow=follow)

    def opened(self) -> None:
        """Nothing to prepare: a call says what was seen."""

    def start(self, channel: grpc.Channel, **options: Any) -> Any:
        """Begin the call."""
        return jobs_pb2_grpc.JobsStub(channel).Events(self._request, **options)

    def decode(self, message: jobs_pb2.TimedNote, now_ns: int) -> TimedNote:
        """Return the event."""
        del now_ns
        self._request.after_unix_ns = message.unix_ns
        return timed_note_from_proto(message)


class LogSource:
    """Output of workers, each character once, also over several calls.

    A call that takes up an earlier one asks for all output again and leaves out as much of each
    worker's as was seen. When only a tail was asked for, where it began is not known: then a
    remark says that output may be missing.

    Attributes:
        is_complete: True: the coordinator alone knows when no more output will come.
    """

    def __init__(self, job: str, *, ranks: tuple[int, ...], tail: int, follow: bool) -> None:
        """Ask for the output of these ranks, of all if none are named."""
        self.is_complete = True
        self._request = jobs_pb2.LogsRequest(job=job, ranks=ranks, tail_lines=tail, follow=follow)
        self._seen: dict[WorkerId, int] = {}
        self._unseen: dict[WorkerId, int] = {}
        self._agents_due_ns: int | None = None
        self._is_resumed = False
        self._owes_remark = False

    def opened(self) -> None:
        """Take up the earlier call, if that brought anything."""
        self._is_resumed = bool(self._seen)
        if not self._is_resumed:
            return
        if self._request.tail_lines < 0:
            self._unseen = dict(self._seen)
        else:
            self._request.tail_lines = 0
            self._owes_remark = True

    def start(self, channel: grpc.Channel, **options: Any) -> Any:
        """Begin the call."""
        return jobs_pb2_grpc.JobsStub(channel).Logs(self._request, **options)

    def decode(self, message: jobs_pb2.LogChunk, now_ns: int) -> LogChunk | None:
        """Return what was not seen before, None if all was.

        Raises:
            Again: an agent has not come back to the coordinator yet. Once it has, a new call
                brings what was missed; this one would bring only what comes from then on.
        """
        chunk = log_chunk_from_proto(message)
        if chunk.text.startswith(REMARK):
            self._judge_remark(chunk, now_ns)
            return chunk
        self._agents_due_ns = None
        known = min(self._unseen.get(chunk.worker_id, 0), len(chunk.text))
        if known:
            self._unseen[chunk.worker_id] -= known
        text = chunk.text[known:]
        self._seen[chunk.worker_id] = self._seen.get(chunk.worker_id, 0) + len(text)
        if text and self._owes_remark:
            self._owes_remark = False
            text = f"{REMARK}output may be missing here: the coordinator was away\n{text}"
        return replace(chunk, text=text) if text else None

    def _judge_remark(self, chunk: LogChunk, now_ns: int) -> None:
        if not (self._is_resumed and chunk.text.startswith(NOT_AT_HAND)):
            return
        if self._agents_due_ns is None:
            self._agents_due_ns = now_ns + round(AGENTS_RETURN_S * 1e9)
        if now_ns < self._agents_due_ns:
            raise ReopenStream(chunk.text.strip())
        self._unseen.pop(chunk.worker_id, None)
