"""The coordinator's gRPC server: services, guard, health and reflection, on one address.

Rule: the port is bound before anything else is tried, so that a second coordinator on the same
address exits at once. While this process does not lead, the guard's errors name the leader. The
health service STANDBY reports whether this process could take over.
"""

from __future__ import annotations

import logging
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from elastic.coord.server_agents import AgentsService
from elastic.coord.server_context import ServiceContext
from elastic.coord.server_guard import Guard
from elastic.coord.server_jobs import ClusterService, JobsService
from elastic.coord.server_tls import ServerTls
from elastic.errors import Unavailable
from elastic.runtime.rpc import SILENCE_S, format_endpoint, server_options
from elastic.runtime.services import handler_of
from elastic.wire.generated.elastic.v1 import agent_pb2, jobs_pb2

log = logging.getLogger(__name__)

JOBS = jobs_pb2.DESCRIPTOR.services_by_name["Jobs"]
CLUSTER = jobs_pb2.DESCRIPTOR.services_by_name["Cluster"]
AGENTS = agent_pb2.DESCRIPTOR.services_by_name["Agents"]
SERVICES = (AGENTS.full_name, JOBS.full_name, CLUSTER.full_name)
STANDBY = "elastic.v1.Standby"
"""Health name that reports whether this coordinator is a working standby; not a gRPC service."""
HEALTH_INTERVAL_S = 0.5
STOP_GRACE_S = 1.0


def add_services(
    server: grpc.aio.Server, context: ServiceContext, probes: Any, silence_s: float = SILENCE_S
) -> None:
    """Register everything that a coordinator serves; each method has a row in `roles.RULES`."""
    server.add_generic_rpc_handlers(
        (
            AgentsService(context.leader_state, silence_s).handler(),
            handler_of(JOBS, JobsService(context)),
            handler_of(CLUSTER, ClusterService(context)),
        )
    )
    health_pb2_grpc.add_HealthServicer_to_server(probes, server)
    reflection.enable_server_reflection(
        (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server
    )


class Server:
    """The server of one coordinator.

    Attributes:
        address: "host:port" that it listens on, with the real port.
        leader_state: the leadership state of this coordinator.
    """

    def __init__(
        self,
        listen: tuple[str, int],
        guard: Guard,
        *,
        tls: ServerTls | None,
        connections: int,
        silence_s: float = SILENCE_S,
    ) -> None:
        """Bind the address.

        Args:
            listen: host and port; port 0 picks a free one.
            guard: admits callers.
            tls: certificates, None to serve without TLS.
            connections: maximum number of open connections.
            silence_s: a client whose host is silent for so long is lost.

        Raises:
            Unavailable: the address cannot be bound.
        """
        host, port = listen
        self._reported: dict[str, bool] = {}
        self._health = health.aio.HealthServicer()
        self._guard = guard
        self.leader_state = guard.leader_state
        self._silence_s = silence_s
        options = server_options(connections, silence_s)
        self._server = grpc.aio.server(interceptors=(guard,), options=options)
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

    async def start(self, context: ServiceContext) -> None:
        """Accept connections; `leader_state` decides whether requests are answered or refused."""
        add_services(self._server, context, self._health, self._silence_s)
        await self.report_health()
        await self._server.start()

    async def keep_health(self) -> None:
        """Update the health statuses whenever leadership changes; never returns."""
        while True:
            await self.leader_state.wait_change(HEALTH_INTERVAL_S)
            await self.report_health()

    async def report_health(self) -> None:
        """Set the health statuses to whether this coordinator leads or is a standby now."""
        leads = self.leader_state.tenure is not None
        now = {**dict.fromkeys(("", *SERVICES), leads), STANDBY: self.leader_state.is_standby()}
        for service, serves in now.items():
            if self._reported.get(service) is not serves:
                status = health_pb2.HealthCheckResponse
                await self._health.set(service, status.SERVING if serves else status.NOT_SERVING)
        self._reported = now

    async def stop(self, why: str) -> None:
        """Refuse new calls, and end those in progress after a grace period."""
        self.leader_state.end(why)
        await self.report_health()
        await self._server.stop(STOP_GRACE_S)

    async def watch_locks(self) -> None:
        """End calls whose token or certificate is revoked or expired; never returns."""
        await self._guard.watch_locks()
