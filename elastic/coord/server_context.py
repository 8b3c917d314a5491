"""What the users' services share: access to the driver, and the mapping of errors to statuses.

Rule: every error is sent as a status that a client turns back into the same class; a refusal by
the machine has the status that the protocol names for it.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import anyio
import grpc
import grpc.aio

from elastic.coord.driver import Driver
from elastic.coord.leader_state import LeaderState
from elastic.coord.log_fanout import LogFanout
from elastic.coord.payload_upload import PayloadBudget
from elastic.coord.standby_view import StandbyView
from elastic.core.config import JobSpec
from elastic.core.events.coordinator import CoordinatorEvent, Reply
from elastic.core.messages import PROTOCOL
from elastic.core.view import ClusterView
from elastic.errors import ElasticError, NameTaken, NotFound, Refused, Unavailable, UsageError
from elastic.runtime.clock import Clock
from elastic.runtime.rpc import status_of
from elastic.version import __version__
from elastic.wire.codec_jobs import ClusterStatus

REQUEST_TIMEOUT_S = 20.0
"""A request that changes something is answered or fails by then; below clients' deadlines."""

REPLY_ERRORS: dict[str, tuple[type[ElasticError], grpc.StatusCode]] = {
    "already_exists": (NameTaken, grpc.StatusCode.ALREADY_EXISTS),
    "not_found": (NotFound, grpc.StatusCode.NOT_FOUND),
    "invalid": (UsageError, grpc.StatusCode.INVALID_ARGUMENT),
    "failed_precondition": (Refused, grpc.StatusCode.FAILED_PRECONDITION),
    "exhausted": (Refused, grpc.StatusCode.RESOURCE_EXHAUSTED),
}

Service = TypeVar("Service")
Request = TypeVar("Request")
Response = TypeVar("Response")
Context = grpc.aio.ServicerContext[Any, Any]


class RequestDeclined(Exception):
    """The machine refused a request; `code` is the status that the protocol names for it."""

    def __init__(self, error: ElasticError, code: grpc.StatusCode) -> None:
        self.error = error
        self.code = code
        super().__init__(str(error))


def answering(
    method: Callable[[Service, Request], Awaitable[Response]],
) -> Callable[[Service, Request, Context], Awaitable[Response]]:
    """Make a unary method a gRPC call whose errors are sent as statuses."""

    @functools.wraps(method)
    async def call(self: Service, request: Request, context: Context) -> Response:
        answer = method(self, request)
        # A refusal's frames stay in memory for a while, see the guard; its request must not.
        del request
        try:
            return await answer
        except (ElasticError, RequestDeclined) as error:
            await _abort(context, error.with_traceback(None))
            raise  # Not reached: abort raises.

    return call


def streaming(
    method: Callable[[Service, Request], AsyncGenerator[Response, None]],
) -> Callable[[Service, Request, Context], AsyncIterator[Response]]:
    """Make a method that yields responses a gRPC call whose errors are sent as statuses."""

    @functools.wraps(method)
    async def call(self: Service, request: Request, context: Context) -> AsyncIterator[Response]:
        try:
            async with aclosing(method(self, request)) as responses:
                async for response in responses:
                    yield response
        except (ElasticError, RequestDeclined) as error:
            await _abort(context, error)

    return call


async def _abort(context: Context, error: ElasticError | RequestDeclined) -> None:
    if isinstance(error, RequestDeclined):
        _, details, trailing = status_of(error.error)
        await context.abort(error.code, details, trailing)
    else:
        await context.abort(*status_of(error))


@dataclass(frozen=True)
class ServiceContext:
    """What a service needs: the driver, and the identity of this coordinator.

    Attributes:
        leader_state: whether this coordinator leads, and with which driver.
        follower: the view that it serves while it does not lead.
        store: the membership store, without credentials.
        clock: for ages.
        room: memory budget for the payloads being submitted.
    """

    leader_state: LeaderState
    follower: StandbyView
    store: str
    clock: Clock
    room: PayloadBudget = field(default_factory=PayloadBudget)

    @property
    def driver(self) -> Driver:
        """Return the driver of the current term; raises NotLeading."""
        return self.leader_state.require().driver

    @property
    def follows(self) -> LogFanout:
        """Return the log fan-out of the current term; raises NotLeading."""
        return self.leader_state.require().follows

    @property
    def name(self) -> str:
        return self.leader_state.name

    def uptime_ns(self) -> int:
        tenure = self.leader_state.tenure
        return self.clock.monotonic_ns() - tenure.since_ns if tenure is not None else 0

    async def read_view(self) -> tuple[ClusterView, str]:
        """Return the view, and its age as text if this coordinator does not lead, else "".

        Raises:
            NotLeading: it does not lead, and has no view either.
        """
        return (
            await self.follower.read_view()
            if self.leader_state.tenure is None
            else (self.view(), "")
        )

    async def status(self) -> ClusterStatus:
        """Return the coordinator, its nodes and its jobs; raises as `read_view` does."""
        view, standby = await self.read_view()
        return ClusterStatus(
            self.name,
            __version__,
            PROTOCOL,
            self.store,
            self.uptime_ns(),
            view,
            standby,
            self.leader_state.coordinators,
        )

    def stay_with(self, driver: Driver) -> None:
        """Check that `driver` is still that of the current term.

        Raises:
            NotLeading: its term is over; another driver cannot continue its stream.
        """
        if not self.leader_state.leads(driver):
            raise self.leader_state.refusal()

    def view(self) -> ClusterView:
        """Return the view; if the store does not answer, each active job's reason states it."""
        driver = self.driver
        view = driver.view()
        away = driver.waits_for_store()
        if not away:
            return view
        jobs = tuple(
            job if job.has_ended() else replace(job, reason=f"{away}; then: {job.reason}")
            for job in view.jobs
        )
        return replace(view, jobs=jobs)

    async def request(self, make: Callable[[str], CoordinatorEvent]) -> str:
        """Pass a request to the machine; return the text of its reply.

        Args:
            make: builds the event from the request's id.

        Raises:
            RequestDeclined: it refused.
            Unavailable: it did not reply in time; the outcome is not known.
        """
        return await self._answer(lambda driver: driver.request(make))

    async def submit(self, spec: JobSpec, submitter: str) -> str:
        """Pass a job to the machine; replies and errors as in `request`."""
        with self.room.taken(self.driver.view(), spec):
            return await self._answer(lambda driver: driver.submit(spec, submitter))

    async def _answer(self, request: Callable[[Driver], Awaitable[Reply]]) -> str:
        driver = self.driver
        with anyio.move_on_after(REQUEST_TIMEOUT_S):
            reply = await request(driver)
            if reply.error:
                kind, code = REPLY_ERRORS[reply.error]
                raise RequestDeclined(kind(reply.text), code)
            return reply.text
        why = driver.waits_for_store() or "busy"
        raise Unavailable(
            f"coordinator {self.name} did not finish the request within {REQUEST_TIMEOUT_S:g} s "
            f"({why}); it may still take effect: check with 'elastic ps' before trying again"
        )
