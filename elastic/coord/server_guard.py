"""The guard at the door: token, protocol version, and whether this coordinator leads.

Rule: no service sees a call before the guard let it in. Health and reflection need neither a
version nor leadership, because general tools and load balancers ask them; a token they do need
for reflection only, so that a probe holds no secret.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from elastic.errors import ElasticError, Refused, Unavailable
from elastic.runtime.rpc import PROTOCOL, PROTOCOL_KEY, check_metadata, status_of

log = logging.getLogger(__name__)

HEALTH = "/grpc.health.v1.Health/"
REFLECTION = "/grpc.reflection."

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]


class Guard(grpc.aio.ServerInterceptor):
    """Lets calls in or refuses them with what to do.

    The one base class is gRPC's: it recognises interceptors by nothing else.
    """

    def __init__(self, token: str) -> None:
        """Refuse all calls of our own services until `open`.

        Args:
            token: what callers must bring, "" for nothing.
        """
        self._token = token
        self._closed = "this coordinator is starting; try again"

    def open(self) -> None:
        """From now on this coordinator leads and answers."""
        self._closed = ""

    def close(self, why: str) -> None:
        """From now on refuse with this text."""
        self._closed = why

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Return the method's own handler, or one that refuses."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = str(handler_call_details.method)
        refusal = self._refusal(method, handler_call_details.invocation_metadata or ())
        return handler if refusal is None else _refusing(handler, method, refusal)

    def _refusal(self, method: str, metadata: Any) -> ElasticError | None:
        if method.startswith(HEALTH):
            return None
        try:
            check_metadata(metadata, token=self._token, peer="the caller")
        except ElasticError as error:
            return error
        if method.startswith(REFLECTION):
            return None
        if not any(key.lower() == PROTOCOL_KEY for key, _ in metadata):
            return Refused(
                f"the call names no protocol version; use a client of elastic-torch, or send the "
                f"metadata {PROTOCOL_KEY}: {PROTOCOL}"
            )
        return Unavailable(self._closed) if self._closed else None


def _refusing(handler: Handler, method: str, error: ElasticError) -> Handler:
    """Return a handler of the same kind that ends every call with `error`."""

    async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        log.info(
            "call_refused method=%s peer=%s error=%s", method, context.peer(), type(error).__name__
        )
        await context.abort(*status_of(error))

    async def refuse_stream(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        await refuse(_, context)
        yield b""  # Not reached: abort raises. It makes this a stream, as gRPC expects one.

    kinds = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    make = kinds[(handler.request_streaming, handler.response_streaming)]
    return make(refuse_stream if handler.response_streaming else refuse)
