"""gRPC calls by the descriptor of a method: what generated stubs do, without generating them.

Rule: every request is one message; the stream of the agents has bytes, and is not called here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

if TYPE_CHECKING:
    import grpc
    import grpc.aio


def caller_of(channel: grpc.Channel | grpc.aio.Channel, method: MethodDescriptor) -> Any:
    """Return gRPC's callable for a method on this channel."""
    kind: Callable[..., Any] = (
        channel.unary_stream if method.server_streaming else channel.unary_unary
    )
    return kind(
        f"/{method.containing_service.full_name}/{method.name}",
        request_serializer=GetMessageClass(method.input_type).SerializeToString,
        response_deserializer=GetMessageClass(method.output_type).FromString,
    )


def handler_of(service: ServiceDescriptor, servicer: object) -> grpc.GenericRpcHandler:
    """Return the handler that serves a service by the methods of the same names."""
    import grpc

    def handle(method: MethodDescriptor) -> grpc.RpcMethodHandler[Any, Any]:
        kind: Callable[..., grpc.RpcMethodHandler[Any, Any]] = (
            grpc.unary_stream_rpc_method_handler
            if method.server_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        return kind(
            getattr(servicer, method.name),
            request_deserializer=GetMessageClass(method.input_type).FromString,
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )

    handlers = {method.name: handle(method) for method in service.methods}
    return grpc.method_handlers_generic_handler(service.full_name, handlers)
