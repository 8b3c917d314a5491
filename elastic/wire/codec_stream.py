"""The messages of the agent's stream and of the worker's pipe, as bytes and as protobuf.

Rule: one pair of functions for each direction of each wire. Those that end in `_proto` are for the
server, which gets messages that gRPC has parsed already; all others speak bytes.
"""

from __future__ import annotations

from typing import get_args

from elastic.core.messages import (
    AgentMessage,
    CoordinatorMessage,
    PipeToAgent,
    PipeToWorker,
)
from elastic.wire.codec import parse
from elastic.wire.envelope import Envelope
from elastic.wire.generated.elastic.v1 import agent_pb2, worker_pb2

ATTACH_METHOD = "/elastic.v1.Agents/Attach"
"""The stream's full name, for callers that use no service stubs."""

_FROM_AGENT: Envelope[AgentMessage, agent_pb2.AgentToCoordinator] = Envelope(
    agent_pb2.AgentToCoordinator, get_args(AgentMessage)
)
_TO_AGENT: Envelope[CoordinatorMessage, agent_pb2.CoordinatorToAgent] = Envelope(
    agent_pb2.CoordinatorToAgent, get_args(CoordinatorMessage)
)
_TO_WORKER: Envelope[PipeToWorker, worker_pb2.PipeToWorker] = Envelope(
    worker_pb2.PipeToWorker, get_args(PipeToWorker)
)
_FROM_WORKER: Envelope[PipeToAgent, worker_pb2.PipeToAgent] = Envelope(
    worker_pb2.PipeToAgent, get_args(PipeToAgent)
)


# ---------------------------------------------------------------- agent -> coordinator


def encode_agent_message(message: AgentMessage) -> bytes:
    """Return what an agent says as bytes of an AgentToCoordinator.

    Raises:
        ConfigError: a value cannot travel (a number out of range, a name that is not Unicode).
    """
    return _FROM_AGENT.encode(message)


def decode_agent_message(data: bytes) -> AgentMessage:
    """Return what an agent said.

    Raises:
        PeerError: the bytes are no such message, or state what cannot be.
    """
    return agent_message_from_proto(parse(agent_pb2.AgentToCoordinator, data))


def agent_message_from_proto(proto: agent_pb2.AgentToCoordinator) -> AgentMessage:
    """Return what an agent said, from a message that gRPC has parsed.

    Raises:
        PeerError: it states what cannot be.
    """
    return _FROM_AGENT.from_proto(proto)


# ---------------------------------------------------------------- coordinator -> agent


def encode_coordinator_message(message: CoordinatorMessage) -> bytes:
    """Return what the coordinator says as bytes of a CoordinatorToAgent.

    Raises:
        ConfigError: a value cannot travel.
    """
    return _TO_AGENT.encode(message)


def coordinator_message_to_proto(message: CoordinatorMessage) -> agent_pb2.CoordinatorToAgent:
    """Return what the coordinator says, for gRPC to serialize.

    Raises:
        ConfigError: a value cannot travel.
    """
    return _TO_AGENT.to_proto(message)


def decode_coordinator_message(data: bytes) -> CoordinatorMessage:
    """Return what the coordinator said.

    Raises:
        PeerError: the bytes are no such message, or state what cannot be.
    """
    return _TO_AGENT.decode(data)


# ---------------------------------------------------------------- agent <-> worker


def encode_to_worker(message: PipeToWorker) -> bytes:
    """Return what an agent tells a worker as bytes of a PipeToWorker.

    Raises:
        ConfigError: a value cannot travel.
    """
    return _TO_WORKER.encode(message)


def decode_to_worker(data: bytes) -> PipeToWorker:
    """Return what the agent told.

    Raises:
        PeerError: the bytes are no such message, or state what cannot be.
    """
    return _TO_WORKER.decode(data)


def encode_from_worker(message: PipeToAgent) -> bytes:
    """Return what a worker tells its agent as bytes of a PipeToAgent.

    Raises:
        ConfigError: a value cannot travel.
    """
    return _FROM_WORKER.encode(message)


def decode_from_worker(data: bytes) -> PipeToAgent:
    """Return what the worker told.

    Raises:
        PeerError: the bytes are no such message, or state what cannot be.
    """
    return _FROM_WORKER.decode(data)
