"""Codec of the messages on the agent's stream and on the worker's pipe.

Rule: one pair of functions for each direction of each channel. Functions with `_proto` in their
names are for the server, where gRPC has already parsed the messages; all others handle bytes.
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
"""The stream's full gRPC method name, for callers without service stubs."""

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
    """Return an agent's message as bytes of an AgentToCoordinator.

    Raises:
        ConfigError: a value cannot be encoded (a number out of range, a name that is not
            Unicode).
    """
    return _FROM_AGENT.encode(message)


def decode_agent_message(data: bytes) -> AgentMessage:
    """Decode a message of an agent.

    Raises:
        PeerError: the bytes are not such a message, or it has invalid values.
    """
    return agent_message_from_proto(parse(agent_pb2.AgentToCoordinator, data))


def agent_message_from_proto(proto: agent_pb2.AgentToCoordinator) -> AgentMessage:
    """Convert a message of an agent that gRPC has parsed.

    Raises:
        PeerError: it has invalid values.
    """
    return _FROM_AGENT.from_proto(proto)


# ---------------------------------------------------------------- coordinator -> agent


def encode_coordinator_message(message: CoordinatorMessage) -> bytes:
    """Return the coordinator's message as bytes of a CoordinatorToAgent.

    Raises:
        ConfigError: a value cannot be encoded.
    """
    return _TO_AGENT.encode(message)


def decode_coordinator_message(data: bytes) -> CoordinatorMessage:
    """Decode a message of the coordinator.

    Raises:
        PeerError: the bytes are not such a message, or it has invalid values.
    """
    return _TO_AGENT.decode(data)


# ---------------------------------------------------------------- agent <-> worker


def encode_to_worker(message: PipeToWorker) -> bytes:
    """Return an agent's message to a worker as bytes of a PipeToWorker.

    Raises:
        ConfigError: a value cannot be encoded.
    """
    return _TO_WORKER.encode(message)


def decode_to_worker(data: bytes) -> PipeToWorker:
    """Decode a message of the agent.

    Raises:
        PeerError: the bytes are not such a message, or it has invalid values.
    """
    return _TO_WORKER.decode(data)


def encode_from_worker(message: PipeToAgent) -> bytes:
    """Return a worker's message to its agent as bytes of a PipeToAgent.

    Raises:
        ConfigError: a value cannot be encoded.
    """
    return _FROM_WORKER.encode(message)


def decode_from_worker(data: bytes) -> PipeToAgent:
    """Decode a message of the worker.

    Raises:
        PeerError: the bytes are not such a message, or it has invalid values.
    """
    return _FROM_WORKER.decode(data)
