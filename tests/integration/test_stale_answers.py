"""What a standby's answers look like to a user whom no leader answers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from click.testing import CliRunner

from elastic.client.cli import main
from elastic.core.messages import PROTOCOL
from elastic.core.view import ClusterView
from elastic.errors import NotLeading
from elastic.runtime.rpc import FRESH_KEY, status_of
from elastic.wire.codec_jobs import ClusterStatus, status_to_proto
from elastic.wire.generated.elastic.v1 import jobs_pb2

AGE = "as of 12.0 s ago, from the store"


class Standby:
    """One that knows of no job, and of no leader."""

    def List(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._refuse_if_fresh(context)
        return jobs_pb2.ListJobsResponse()

    def Status(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._refuse_if_fresh(context)
        view = ClusterView(1, (), ())
        return status_to_proto(ClusterStatus("b/2", "0", PROTOCOL, "etcd://x", 0, view, AGE))

    def _refuse_if_fresh(self, context: grpc.ServicerContext) -> None:
        if FRESH_KEY in dict(context.invocation_metadata()):
            code, text, trailing = status_of(NotLeading("nobody leads"))
            context.set_trailing_metadata(trailing)
            context.abort(code, text)


def serialized(reply: Any) -> bytes:
    return bytes(reply.SerializeToString())


@pytest.fixture
def address() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(2))
    standby = Standby()
    for service, name, method, request in (
        ("Jobs", "List", standby.List, jobs_pb2.ListJobsRequest),
        ("Cluster", "Status", standby.Status, jobs_pb2.StatusRequest),
    ):
        handler = grpc.unary_unary_rpc_method_handler(method, request.FromString, serialized)
        named = grpc.method_handlers_generic_handler(f"elastic.v1.{service}", {name: handler})
        server.add_generic_rpc_handlers((named,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_no_jobs_of_a_while_ago_are_not_told_as_no_jobs_now(address: str) -> None:
    shown = CliRunner().invoke(main, ["--coord", address, "ps"])
    assert shown.exit_code == 0
    assert AGE in shown.stderr
    assert AGE not in shown.stdout
    assert "no job runs or waits" in shown.stdout
