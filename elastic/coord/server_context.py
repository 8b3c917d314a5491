"""What the users' services share: the driver behind them, and how errors leave.

Rule: every error leaves as a status that a client turns back into the same class; a refusal of
the machine carries the status that the protocol names for it.
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
from elastic.coord.lookup import has_ended
from elastic.coord.payload_upload import PayloadBudget
from elastic.coord.standby_view import StandbyView
from elastic.core.config import JobSpec
from elastic.core.events.coordinator import CoordinatorEvent, Reply
from elastic.core.view import ClusterView
from elastic.errors import ElasticError, NameTaken, NotFound, Refused, Unavailable, UsageError
from elastic.runtime.clock import Clock
from elastic.runtime.rpc import status_of

REQUEST_TIMEOUT_S = 20.0
"""A request that changes something answers by then, or says why not; below clients' deadlines."""

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
    """The machine said no; `code` is the status that the protocol names for it."""

    def __init__(self, error: ElasticError, code: grpc.StatusCode) -> None:
        self.error = error
        self.code = code
        super().__init__(str(error))


def answering(
    method: Callable[[Service, Request], Awaitable[Response]],
) -> Callable[[Service, Request, Context], Awaitable[Response]]:
    """Make a method of one request a gRPC call whose errors leave as statuses."""

    @functools.wraps(method)
    async def call(self: Service, request: Request, context: Context) -> Response:
        answer = method(self, request)
        # The frames of a refusal stay for a while, see the guard; its request must not.
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
    """Make a method that yields answers a gRPC call whose errors leave as statuses."""

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
    """What a service needs: the driver, and who this coordinator is.

    Attributes:
        office: whether this coordinator leads, and with which driver.
        follower: what it shows when it does not.
        store: the membership store, without credentials.
        clock: for ages.
        room: for what is being submitted.
    """

    office: LeaderState
    follower: StandbyView
    store: str
    clock: Clock
    room: PayloadBudget = field(default_factory=PayloadBudget)

    @property
    def driver(self) -> Driver:
        """Return the driver of the term that holds; raises NotLeading."""
        return self.office.require().driver

    @property
    def follows(self) -> LogFanout:
        """Return the follows of the term that holds; raises NotLeading."""
        return self.office.require().follows

    @property
    def name(self) -> str:
        """Return the coordinator's name."""
        return self.office.name

    def uptime_ns(self) -> int:
        """Return how long the coordinator has been in office."""
        tenure = self.office.tenure
        return self.clock.monotonic_ns() - tenure.since_ns if tenure is not None else 0

    async def look(self) -> tuple[ClusterView, str]:
        """Return what is shown, and how old it is if this coordinator does not lead, else "".

        Raises:
            NotLeading: it does not lead, and has nothing to show either.
        """
        return await self.follower.look() if self.office.tenure is None else (self.view(), "")

    def stay_with(self, driver: Driver) -> None:
        """Return if `driver` is still the one that answers.

        Raises:
            NotLeading: its term is over; what it told of before is not continued by another.
        """
        if not self.office.leads(driver):
            raise self.office.refusal()

    def view(self) -> ClusterView:
        """Return what is shown; a store that is away is every active job's reason to wait."""
        driver = self.driver
        view = driver.view()
        away = driver.waits_for_store()
        if not away:
            return view
        jobs = tuple(
            job if has_ended(job) else replace(job, reason=f"{away}; then: {job.reason}")
            for job in view.jobs
        )
        return replace(view, jobs=jobs)

    async def ask(self, make: Callable[[str], CoordinatorEvent]) -> str:
        """Let the machine answer a request; returns the text of its answer.

        Args:
            make: builds the event from the request's id.

        Raises:
            Declined: it said no.
            Unavailable: it did not answer in time; the outcome is not known.
        """
        return await self._answer(lambda driver: driver.request(make))

    async def submit(self, spec: JobSpec, submitter: str) -> str:
        """Let the machine take a job; as `ask`.

        Args:
            spec: with an id.
            submitter: who asks, by name.
        """
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
            f"({why}); it may still take effect: look with 'elastic ps' before trying again"
        )
