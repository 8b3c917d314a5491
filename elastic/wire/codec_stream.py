"""Codec of the messages on the agent's stream and on the worker's pipe.

Rule: one envelope for each direction of each channel.
"""

from __future__ import annotations

from typing import get_args

from elastic.core.messages import (
    AgentMessage,
    CoordinatorMessage,
    PipeToAgent,
    PipeToWorker,
)
from elastic.wire.envelope import Envelope
from elastic.wire.generated.elastic.v1 import agent_pb2, worker_pb2

ATTACH_METHOD = "/elastic.v1.Agents/Attach"
"""The stream's full gRPC method name, for callers without service stubs."""

FROM_AGENT: Envelope[AgentMessage, agent_pb2.AgentToCoordinator] = Envelope(
    agent_pb2.AgentToCoordinator, get_args(AgentMessage)
)
TO_AGENT: Envelope[CoordinatorMessage, agent_pb2.CoordinatorToAgent] = Envelope(
    agent_pb2.CoordinatorToAgent, get_args(CoordinatorMessage)
)
TO_WORKER: Envelope[PipeToWorker, worker_pb2.PipeToWorker] = Envelope(
    worker_pb2.PipeToWorker, get_args(PipeToWorker)
)
FROM_WORKER: Envelope[PipeToAgent, worker_pb2.PipeToAgent] = Envelope(
    worker_pb2.PipeToAgent, get_args(PipeToAgent)
)
