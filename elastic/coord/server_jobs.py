"""The gRPC services for users: jobs and the cluster.

Rule: a request becomes one event for the driver or one read of its view; nothing is decided
here.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import replace

import anyio

from elastic.client.jobs import new_job_id
from elastic.coord.log_fanout import MergedOutput
from elastic.coord.lookup import WorkerOrigin, find_job, origins_of
from elastic.coord.roles import CALLER
from elastic.coord.server_context import ServiceContext, answering, streaming
from elastic.coord.watchers import UNPUBLISHED
from elastic.core.config import DRAIN_TIMEOUT_S_MAX, NS_PER_S, check_name, check_text, ns
from elastic.core.events.coordinator import (
    CheckpointRequested,
    NodeCordonRequested,
    NodeDrainRequested,
    PauseRequested,
    ResumeRequested,
    ScaleRequested,
    StopRequested,
)
from elastic.core.facts import JobId, NodeId, WorkerId
from elastic.core.messages import DumpStacks, Profile
from elastic.core.view import ClusterView, JobView
from elastic.errors import NotFound, Refused, UsageError
from elastic.wire.codec_jobs import (
    LogChunk,
    job_event_to_proto,
    job_to_proto,
    log_chunk_to_proto,
    spec_of,
    status_to_proto,
    timed_note_to_proto,
)
from elastic.wire.generated.elastic.v1 import jobs_pb2

SNAPSHOT_INTERVAL_S = 0.05
"""Watchers get at most one snapshot in this time; it includes all changes in between."""
POLL_INTERVAL_S = 1.0
"""Telemetry (steps) changes a job without an event; watchers see it within this time."""
NEW_WORKERS_INTERVAL_S = 0.25
"""Readers that follow output get all the output of a new worker within this time."""

PROFILE_S_MAX = 600.0


class JobsService:
    """Serves `Jobs`; the methods' names are the protocol's."""

    def __init__(self, context: ServiceContext) -> None:
        """Serve from `context`: the driver, and the identity of this coordinator."""
        self._context = context

    @answering
    async def Submit(self, request: jobs_pb2.SubmitRequest) -> jobs_pb2.SubmitResponse:
        """Submit a job; it gets its id here unless the request names one."""
        spec = spec_of(request)
        del request  # It holds the function once more.
        if spec.job_id:
            check_name("job id", spec.job_id)
        else:
            spec = replace(spec, job_id=new_job_id())
        job_id = await self._context.submit(spec, CALLER.get().name)
        return jobs_pb2.SubmitResponse(job_id=job_id)

    @answering
    async def Stop(self, request: jobs_pb2.StopJobRequest) -> jobs_pb2.StopJobResponse:
        job_id = self._own(request.job)
        reason = check_text("reason", request.reason) or "stopped by a user"
        now = request.now
        await self._context.request(
            lambda request_id: StopRequested(request_id, job_id, reason, now)
        )
        return jobs_pb2.StopJobResponse()

    @answering
    async def Checkpoint(self, request: jobs_pb2.CheckpointRequest) -> jobs_pb2.CheckpointResponse:
        job_id = self._own(request.job)
        number = await self._context.request(
            lambda request_id: CheckpointRequested(request_id, job_id)
        )
        return jobs_pb2.CheckpointResponse(request=int(number))

    @answering
    async def Pause(self, request: jobs_pb2.PauseRequest) -> jobs_pb2.PauseResponse:
        job_id = self._own(request.job)
        await self._context.request(lambda request_id: PauseRequested(request_id, job_id))
        return jobs_pb2.PauseResponse()

    @answering
    async def Resume(self, request: jobs_pb2.ResumeRequest) -> jobs_pb2.ResumeResponse:
        job_id = self._own(request.job)
        await self._context.request(lambda request_id: ResumeRequested(request_id, job_id))
        return jobs_pb2.ResumeResponse()

    @answering
    async def Scale(self, request: jobs_pb2.ScaleRequest) -> jobs_pb2.ScaleResponse:
        job_id, low, high = self._own(request.job), request.min_workers, request.max_workers
        if low < 0 or high < 0 or not (low or high):
            raise UsageError(
                f"scale {request.job}: min={low}, max={high}: expected numbers of workers, at "
                f"least one of the two"
            )
        await self._context.request(
            lambda request_id: ScaleRequested(request_id, job_id, low, high)
        )
        return jobs_pb2.ScaleResponse()

    @answering
    async def Get(self, request: jobs_pb2.GetJobRequest) -> jobs_pb2.Job:
        view, _ = await self._context.read_view()
        return job_to_proto(find_job(view, request.job), view.now_ns)

    @answering
    async def List(self, request: jobs_pb2.ListJobsRequest) -> jobs_pb2.ListJobsResponse:
        view, _ = await self._context.read_view()
        shown = [job for job in view.jobs if request.include_ended or not job.has_ended()]
        return jobs_pb2.ListJobsResponse(jobs=[job_to_proto(job, view.now_ns) for job in shown])

    @streaming
    async def Watch(
        self, request: jobs_pb2.WatchRequest
    ) -> AsyncGenerator[jobs_pb2.JobEvent, None]:
        """Follow a job until it has ended and its workers are gone."""
        job_id = self._find(request.job)
        last: JobView | None = None
        driver = self._context.driver
        with driver.watchers.subscribe(job_id) as watcher:
            while True:
                self._context.stay_with(driver)
                view = self._context.view()
                for note in watcher.take():
                    yield job_event_to_proto(note, view.now_ns)
                job = job_of(view, job_id)
                if job is not None and job != last:
                    last = job
                    yield job_event_to_proto(job, view.now_ns)
                if job is None or (job.has_ended() and not job.workers):
                    return
                await anyio.sleep(SNAPSHOT_INTERVAL_S)
                await watcher.wait(POLL_INTERVAL_S)

    @streaming
    async def Events(
        self, request: jobs_pb2.EventsRequest
    ) -> AsyncGenerator[jobs_pb2.TimedNote, None]:
        job_id = self._find(request.job)
        driver = self._context.driver
        with driver.watchers.subscribe(job_id) as watcher:
            for note in driver.watchers.history(job_id):
                if note.unix_ns > request.after_unix_ns:
                    yield timed_note_to_proto(note)
            while request.follow:
                self._context.stay_with(driver)
                job = job_of(self._context.view(), job_id)
                for note in watcher.take():
                    if note.note.name not in UNPUBLISHED:
                        yield timed_note_to_proto(note)
                if job is None or (job.has_ended() and not job.workers):
                    return
                await watcher.wait(POLL_INTERVAL_S)

    @answering
    async def Stacks(self, request: jobs_pb2.StacksRequest) -> jobs_pb2.StacksResponse:
        job_id, requested = self._own(request.job), []
        job, sessions = job_of(self._context.view(), job_id), self._context.driver.sessions
        for worker in job.workers if job is not None else ():
            session = sessions.of_node(worker.node_id)
            if session is not None and (not request.ranks or worker.rank in request.ranks):
                session.send(DumpStacks(worker.report.worker_id, "a user asks"))
                requested.append(worker.report.worker_id)
        return jobs_pb2.StacksResponse(workers=requested)

    @answering
    async def Profile(self, request: jobs_pb2.ProfileRequest) -> jobs_pb2.ProfileResponse:
        seconds, rank = request.seconds, request.rank
        if not 0 < seconds <= PROFILE_S_MAX:
            raise UsageError(
                f"profile {request.job}: {seconds:g} s: expected more than 0 and at most "
                f"{PROFILE_S_MAX:g} seconds"
            )
        job = job_of(self._context.view(), self._own(request.job))
        if job is None or not job.record.spec.run_path:
            raise Refused(
                f"profile {request.job}: it has no run directory that a profile could be written to"
            )
        for worker in job.workers:
            session = self._context.driver.sessions.of_node(worker.node_id)
            if worker.rank == rank and session is not None:
                name = f"profiles/gen{job.record.generation}-rank{rank}-{secrets.token_hex(3)}.json"
                session.send(Profile(worker.report.worker_id, seconds, name))
                return jobs_pb2.ProfileResponse(name=name)
        raise NotFound(f"profile {request.job}: no worker has rank {rank} now")

    @streaming
    async def Logs(self, request: jobs_pb2.LogsRequest) -> AsyncGenerator[jobs_pb2.LogChunk, None]:
        job_id = self._find(request.job)
        driver = self._context.driver
        with (
            self._context.follows.merged() as merged,
            # A member may be gone before the next regular check, and is not listed then.
            driver.watchers.subscribe(job_id, on_note=merged.wake) as notes,
        ):
            reader = LogRequest(
                self._context,
                job_id,
                merged,
                follow=request.follow,
                tail_lines=request.tail_lines,
                ranks=request.ranks,
            )
            going_on = True
            while going_on:
                self._context.stay_with(driver)
                notes.take()
                going_on = reader.subscribe_new()
                for chunk in reader.chunks():
                    yield log_chunk_to_proto(chunk)
                self._context.follows.make_room(merged)
                if going_on:
                    await merged.wait(NEW_WORKERS_INTERVAL_S)

    def _find(self, wanted: str) -> JobId:
        return find_job(self._context.view(), wanted).record.spec.job_id

    def _own(self, wanted: str) -> JobId:
        """Return the id of a job that the caller may change.

        Raises:
            NotFound: there is none.
            NotPermitted: it is another user's.
        """
        record = find_job(self._context.view(), wanted).record
        CALLER.get().check_may_change(record.spec.name, record.submitter)
        return record.spec.job_id


def job_of(view: ClusterView, job_id: JobId) -> JobView | None:
    """Return the job of this id, None if the coordinator has forgotten it."""
    return next((job for job in view.jobs if job.record.spec.job_id == job_id), None)


class LogRequest:
    """One request for output: the workers asked for it, and the output received."""

    def __init__(
        self,
        context: ServiceContext,
        job_id: JobId,
        merged: MergedOutput,
        *,
        follow: bool,
        tail_lines: int,
        ranks: Iterable[int],
    ) -> None:
        """Select output.

        Args:
            context: the agents and the workers.
            job_id: whose output.
            merged: receives the output.
            follow: stream until the job has ended.
            tail_lines: how many lines of existing output to send, -1 for all.
            ranks: the ranks to include; empty for all.
        """
        self._context = context
        self._job_id = job_id
        self._merged = merged
        self._follow = follow
        self._tail_lines = tail_lines
        self._ranks = frozenset(ranks)
        self._origins: dict[WorkerId, WorkerOrigin] = {}
        self._wanted: dict[WorkerId, int] = {}
        self._subscribed: set[WorkerId] = set()
        self._first_check = True

    def subscribe_new(self) -> bool:
        """Ask agents for the output of new workers; return False when no more will come."""
        job = job_of(self._context.view(), self._job_id)
        ended = job is None or job.has_ended()
        if job is not None and (self._first_check or self._follow):
            # A worker's rank changes between generations: chunks() filters by each line's rank.
            for origin in origins_of(job, self._ranks if self._follow else frozenset()):
                self._subscribe(origin, ended=ended)
        self._first_check = False
        return bool(self._merged.follows) or (self._follow and not ended)

    def chunks(self) -> Iterator[LogChunk]:
        """Yield the output received since the last call, oldest first."""
        for lines in self._merged.take(is_exact=not self._follow):
            origin = self._origins[lines.worker_id]
            rank, generation = lines.rank, lines.generation
            if not lines.unix_ns:  # A remark of the coordinator or of an agent.
                rank, generation = origin.rank, origin.generation
            if not self._ranks or rank in self._ranks or (rank < 0 and origin.rank in self._ranks):
                yield LogChunk(
                    lines.worker_id, rank, generation, origin.node_id, lines.text, lines.unix_ns
                )

    def _subscribe(self, origin: WorkerOrigin, *, ended: bool) -> None:
        """Ask for a worker's output, again if its agent disconnected and came back."""
        worker_id = origin.worker_id
        known = worker_id in self._origins
        again = worker_id in self._merged.lost and not ended
        self._origins[worker_id] = origin
        if known and not again:
            return
        # All output of a worker that appeared after the first check is new. If its agent came
        # back, output written meanwhile cannot be distinguished from output already sent.
        wanted = self._wanted.setdefault(worker_id, self._tail_lines if self._first_check else -1)
        tail_lines = 0 if worker_id in self._subscribed else wanted
        is_started = self._context.follows.start(
            self._merged,
            worker_id,
            origin.node_id,
            tail_lines=tail_lines,
            follow=self._follow and not ended,
        )
        if is_started:
            self._subscribed.add(worker_id)
            self._merged.lost.discard(worker_id)
        elif not known:
            self._merged.lost.add(worker_id)
            self._merged.put(
                worker_id,
                f"[elastic] output of {worker_id} is not available: its node {origin.node_id} is "
                f"not connected\n",
            )


class ClusterService:
    """Serves `Cluster`; the methods' names are the protocol's."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context

    @answering
    async def Status(self, _: jobs_pb2.StatusRequest) -> jobs_pb2.ClusterStatus:
        """Return the coordinator, the nodes and the jobs."""
        return status_to_proto(await self._context.status())

    @answering
    async def Drain(self, request: jobs_pb2.DrainRequest) -> jobs_pb2.DrainResponse:
        """Drain a node: its workers leave within a timeout."""
        timeout_s = request.timeout_s
        if not math.isfinite(timeout_s) or not 0 <= timeout_s <= DRAIN_TIMEOUT_S_MAX:
            raise UsageError(
                f"drain timeout {timeout_s} s: expected 0 to {DRAIN_TIMEOUT_S_MAX:g} seconds"
            )
        node_id = NodeId(request.node)
        reason = check_text("reason", request.reason) or "drained by an operator"
        left_ns = await self._context.request(
            lambda request_id: NodeDrainRequested(request_id, node_id, ns(timeout_s), reason)
        )
        return jobs_pb2.DrainResponse(timeout_s=int(left_ns) / NS_PER_S)

    @answering
    async def Cordon(self, request: jobs_pb2.CordonRequest) -> jobs_pb2.CordonResponse:
        """Cordon or uncordon a node: whether new workers may start on it."""
        node_id = NodeId(request.node)
        reason = check_text("reason", request.reason) or "by an operator"
        await self._context.request(
            lambda request_id: NodeCordonRequested(request_id, node_id, request.cordoned, reason)
        )
        return jobs_pb2.CordonResponse()
