"""Queries a running coordinator: for `elastic-coord status` and `health`.

Rule: reads only; every failure is one of our errors, never a gRPC status.
"""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from elastic.coord.server import STANDBY
from elastic.errors import ElasticError
from elastic.runtime.access import Access
from elastic.runtime.clock import Clock
from elastic.runtime.rpc import call_metadata, error_from_rpc, open_blocking_channel
from elastic.wire.codec_jobs import ClusterStatus, status_from_proto
from elastic.wire.generated.elastic.v1 import jobs_pb2, jobs_pb2_grpc


def fetch_status(endpoint: str, access: Access, *, timeout_s: float, clock: Clock) -> ClusterStatus:
    """Return the status of the coordinator at `endpoint`.

    Raises:
        ElasticError: it does not answer in time, or refuses.
    """
    metadata = call_metadata(access.current_token())
    try:
        with open_blocking_channel(endpoint, access) as channel:
            proto = jobs_pb2_grpc.ClusterStub(channel).Status(
                jobs_pb2.StatusRequest(), timeout=timeout_s, metadata=metadata
            )
    except grpc.RpcError as error:
        raise error_from_rpc(error, endpoint) from error
    return status_from_proto(proto, clock.monotonic_ns())


def fetch_health(endpoint: str, access: Access, *, timeout_s: float) -> str:
    """Return "SERVING" (it leads), "STANDBY" (it could take over), or "NOT_SERVING".

    The last means that it is starting or ending, or its store does not answer.

    Raises:
        ElasticError: there is no answer.
    """
    try:
        with open_blocking_channel(endpoint, access) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
            name = str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
            if name == "NOT_SERVING" and _is_standby(stub, timeout_s):
                return "STANDBY"
    except grpc.RpcError as error:
        raise error_from_rpc(error, endpoint) from error
    return name


def _is_standby(stub: health_pb2_grpc.HealthStub, timeout_s: float) -> bool:
    request = health_pb2.HealthCheckRequest(service=STANDBY)
    answer = stub.Check(request, timeout=timeout_s)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def first_answer(
    endpoints: tuple[str, ...], access: Access, timeout_s: float, clock: Clock
) -> ClusterStatus:
    """Return the first status from these endpoints, tried in order; raise the last error."""
    failure: ElasticError | None = None
    for endpoint in endpoints:
        try:
            return fetch_status(endpoint, access, timeout_s=timeout_s, clock=clock)
        except ElasticError as error:
            failure = error
    raise failure or ElasticError("no coordinator address was given")
