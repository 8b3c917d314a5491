"""Queries a running coordinator, for `elastic-coord health`.

Rule: reads only; every failure is one of our errors, never a gRPC status.
"""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from elastic.coord.server import STANDBY
from elastic.runtime.access import Access
from elastic.runtime.rpc import error_from_rpc, open_blocking_channel


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
