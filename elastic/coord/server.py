"""The coordinator's gRPC server: services, guard, health and reflection, on one address.

Rule: the port is bound before anything else is tried, so that a second coordinator on the same
address ends at once; while this process does not lead, the guard says who does. Health of the
service STANDBY is that of one that could take over.
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
from elastic.wire.generated.elastic.v1 import agent_pb2, jobs_pb2, jobs_pb2_grpc

log = logging.getLogger(__name__)

SERVICES = (
    agent_pb2.DESCRIPTOR.services_by_name["Agents"].full_name,
    jobs_pb2.DESCRIPTOR.services_by_name["Jobs"].full_name,
    jobs_pb2.DESCRIPTOR.services_by_name["Cluster"].full_name,
)
STANDBY = "elastic.v1.Standby"
"""Name under which health says whether this coordinator is a standby in order; no service."""
HEALTH_INTERVAL_S = 0.5
STOP_GRACE_S = 1.0


def add_services(
    server: grpc.aio.Server, desk: ServiceContext, probes: Any, silence_s: float = SILENCE_S
) -> None:
    """Register everything that a coordinator serves; each method has a row in `roles.RULES`."""
    server.add_generic_rpc_handlers((AgentsService(desk.office, silence_s).handler(),))
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
        office: whether this coordinator leads.
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
        """Bind.

        Args:
            listen: host and port; port 0 picks a free one.
            guard: lets callers in.
            tls: certificates, None to serve in the clear.
            connections: that may stand at once.
            silence_s: a client whose host is silent so long is lost.

        Raises:
            Unavailable: the address cannot be bound.
        """
        host, port = listen
        self._reported: dict[str, bool] = {}
        self._health = health.aio.HealthServicer()
        self._guard = guard
        self.office = guard.office
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

    async def start(self, desk: ServiceContext) -> None:
        """Accept connections; what is asked is answered or refused by what `office` says."""
        add_services(self._server, desk, self._health, self._silence_s)
        await self.report_health()
        await self._server.start()

    async def keep_health(self) -> None:
        """Say by health what this coordinator is, for ever."""
        while True:
            await self.office.wait_change(HEALTH_INTERVAL_S)
            await self.report_health()

    async def report_health(self) -> None:
        """Say by health what this coordinator is now."""
        leads = self.office.tenure is not None
        now = {**dict.fromkeys(("", *SERVICES), leads), STANDBY: self.office.is_standby()}
        for service, serves in now.items():
            if self._reported.get(service) is not serves:
                status = health_pb2.HealthCheckResponse
                await self._health.set(service, status.SERVING if serves else status.NOT_SERVING)
        self._reported = now

    async def stop(self, why: str) -> None:
        """Refuse new calls, and end those that are under way."""
        self.office.end(why)
        await self.report_health()
        await self._server.stop(STOP_GRACE_S)

    async def watch_locks(self) -> None:
        """End calls whose token or certificate is over; never returns."""
        await self._guard.watch_locks()
