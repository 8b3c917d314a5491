"""The coordinator's gRPC server: services, guard, health and reflection, on one address.

Rule: the port is bound before anything else is tried, so that a second coordinator on the same
address ends at once; until this process leads, the guard refuses and health says so.
"""

from __future__ import annotations

import logging
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from elastic.coord.driver import Driver
from elastic.coord.follows import Follows
from elastic.coord.server_agents import AgentsDoor
from elastic.coord.server_desk import Desk
from elastic.coord.server_guard import Guard
from elastic.coord.server_jobs import ClusterService, JobsService
from elastic.coord.server_tls import ServerTls
from elastic.errors import Unavailable
from elastic.runtime.rpc import format_endpoint, server_options
from elastic.wire.generated.elastic.v1 import agent_pb2, jobs_pb2, jobs_pb2_grpc

log = logging.getLogger(__name__)

SERVICES = (
    agent_pb2.DESCRIPTOR.services_by_name["Agents"].full_name,
    jobs_pb2.DESCRIPTOR.services_by_name["Jobs"].full_name,
    jobs_pb2.DESCRIPTOR.services_by_name["Cluster"].full_name,
)
STOP_GRACE_S = 1.0


def add_services(
    server: grpc.aio.Server, driver: Driver, desk: Desk, follows: Follows, probes: Any
) -> None:
    """Register everything that a coordinator serves; each method has a row in `roles.RULES`."""
    server.add_generic_rpc_handlers((AgentsDoor(driver, follows).handler(),))
    jobs_pb2_grpc.add_JobsServicer_to_server(JobsService(desk), server)
    jobs_pb2_grpc.add_ClusterServicer_to_server(ClusterService(desk), server)
    health_pb2_grpc.add_HealthServicer_to_server(probes, server)
    reflection.enable_server_reflection(
        (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server
    )


class Server:
    """The server of one coordinator.

    Attributes:
        address: "host:port" that it listens on, with the real port.
    """

    def __init__(
        self, listen: tuple[str, int], guard: Guard, *, tls: ServerTls | None, connections: int
    ) -> None:
        """Bind.

        Args:
            listen: host and port; port 0 picks a free one.
            guard: lets callers in.
            tls: certificates, None to serve in the clear.
            connections: that may stand at once.

        Raises:
            Unavailable: the address cannot be bound.
        """
        host, port = listen
        self._health = health.aio.HealthServicer()
        self._guard = guard
        self._server = grpc.aio.server(interceptors=(guard,), options=server_options(connections))
        self._driver: Driver | None = None
        address = format_endpoint(host, port)
        try:
            if tls is None:
                bound = self._server.add_insecure_port(address)
            else:
                bound = self._server.add_secure_port(address, tls.credentials())
        except RuntimeError as error:
            bound = 0
            log.debug("bind_failed error=%r", str(error))
        if not bound:
            raise Unavailable(
                f"cannot listen on {address}: the address is not of this "
                f"machine, or another process listens there; free it, or choose another --listen"
            )
        self.address = format_endpoint(host, bound)

    async def start(self, driver: Driver, desk: Desk, follows: Follows) -> None:
        """Accept connections; calls are refused until `open`."""
        self._driver = driver
        add_services(self._server, driver, desk, follows, self._health)
        await self._report(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._server.start()

    async def open(self) -> None:
        """Answer from now on: this coordinator leads."""
        self._guard.open()
        await self._report(health_pb2.HealthCheckResponse.SERVING)

    async def stop(self, why: str) -> None:
        """Refuse new calls, end the agents' streams in order, then the rest."""
        self._guard.close(why)
        await self._report(health_pb2.HealthCheckResponse.NOT_SERVING)
        if self._driver is not None:
            self._driver.sessions.close_all(why)
        await self._server.stop(STOP_GRACE_S)

    def wait_with(self, why: str) -> None:
        """Refuse calls with this text until `open`."""
        self._guard.close(why)

    async def watch_tokens(self) -> None:
        """End calls whose token is over; never returns."""
        await self._guard.watch_tokens()

    async def _report(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for service in ("", *SERVICES):
            await self._health.set(service, status)
