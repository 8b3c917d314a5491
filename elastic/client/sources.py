"""Sources of streams from a coordinator: snapshots and events of a job, output of its workers.

Rule: a resumed stream repeats nothing. If output may be missing, it contains a remark.
"""

from __future__ import annotations

from dataclasses import replace

from elastic.client.streams import ReopenStream
from elastic.core.facts import ENDED, WorkerId
from elastic.core.view import JobView
from elastic.wire.codec_jobs import (
    JobEvent,
    LogChunk,
    TimedNote,
    job_event_from_proto,
    log_chunk_from_proto,
    timed_note_from_proto,
)
from elastic.wire.generated.elastic.v1 import jobs_pb2

JOBS = jobs_pb2.DESCRIPTOR.services_by_name["Jobs"].methods_by_name
AGENTS_RETURN_S = 15.0
"""Agents reconnect within this time after the coordinator, or their nodes are lost."""
REMARK = "[elastic] "
"""Prefix of the coordinator's remarks in place of a worker's output."""
NOT_AT_HAND = REMARK + "output of "


class JobSource:
    """Snapshots and events of a job; once the job is known, requests use its id.

    Attributes:
        is_complete: whether the job's end was received.
    """

    method = JOBS["Watch"]

    def __init__(self, job: str) -> None:
        self.is_complete = False
        self.request = jobs_pb2.WatchRequest(job=job)

    def opened(self) -> None:
        """Do nothing: each call begins with a snapshot."""

    def decode(self, message: jobs_pb2.JobEvent, now_ns: int) -> JobEvent:
        event = job_event_from_proto(message, now_ns)
        if isinstance(event, JobView):
            self.request.job = event.record.spec.job_id  # Names are reused, ids are not.
            self.is_complete = event.record.phase in ENDED
        return event


class EventSource:
    """Events of a job, each one once, also over several calls.

    Attributes:
        is_complete: True: the coordinator ends the stream when there are no more.
    """

    method = JOBS["Events"]

    def __init__(self, job: str, *, follow: bool) -> None:
        self.is_complete = True
        self.request = jobs_pb2.EventsRequest(job=job, follow=follow)

    def opened(self) -> None:
        """Do nothing: a call includes the time of the last event."""

    def decode(self, message: jobs_pb2.TimedNote, now_ns: int) -> TimedNote:
        del now_ns
        self.request.after_unix_ns = message.unix_ns
        return timed_note_from_proto(message)


class LogSource:
    """Output of workers, each character once, also over several calls.

    A call that resumes an earlier one requests all output again and skips as much of each worker's
    as was seen. If only a tail was requested, its start is unknown: then a remark states that
    output may be missing.

    Attributes:
        is_complete: True: the coordinator alone knows when no more output will come.
    """

    method = JOBS["Logs"]

    def __init__(self, job: str, *, ranks: tuple[int, ...], tail: int, follow: bool) -> None:
        """Request the output of these ranks, of all if empty."""
        self.is_complete = True
        self.request = jobs_pb2.LogsRequest(job=job, ranks=ranks, tail_lines=tail, follow=follow)
        self._seen: dict[WorkerId, int] = {}
        self._unseen: dict[WorkerId, int] = {}
        self._agents_due_ns: int | None = None
        self._is_resumed = False
        self._owes_remark = False

    def opened(self) -> None:
        """Resume the earlier call, if that delivered anything."""
        self._is_resumed = bool(self._seen)
        if not self._is_resumed:
            return
        if self.request.tail_lines < 0:
            self._unseen = dict(self._seen)
        else:
            self.request.tail_lines = 0
            self._owes_remark = True

    def decode(self, message: jobs_pb2.LogChunk, now_ns: int) -> LogChunk | None:
        """Return the part that was not seen before, None if all was.

        Raises:
            ReopenStream: an agent has not reconnected to the coordinator yet. Once it has, a new
                call delivers what was missed; this one would deliver only later output.
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
