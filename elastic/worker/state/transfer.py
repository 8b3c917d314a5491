"""Training state sent from a member that has it to one that lacks it.

Rule: what a member receives is complete before any of it is used, so that a sender that dies in
the middle leaves the receiver as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from elastic.core.policy.recovery import TransferPlan
from elastic.worker.group.member_links import links_of
from elastic.worker.group.peer_sockets import PeerSockets
from elastic.worker.state.packing import pack, read_skeleton, tensors_of, unpack, views_of

TAG = 5
"""Of what says which tensors are sent."""


def transfer(group: Any, transfers: TransferPlan, state: Any) -> tuple[Any, int]:
    """Send our state, or receive it, as planned.

    Args:
        group: the process group that is formed, whose members have met.
        transfers: the plan, the same on all members.
        state: ours; a function that returns it, called only if it is sent.

    Returns:
        What we received (None if we needed nothing), and the bytes that went through here.

    Raises:
        RuntimeError: the group broke; what was received in part is forgotten.
        UsageError: the state cannot be sent.
    """
    rank = group.rank()
    receivers, sender = transfers.receivers_from(rank), transfers.sender_to(rank)
    if not transfers.pairs:
        return None, 0
    with links_of(group).sockets_to(receivers if sender is None else (sender,)) as sockets:
        if receivers:
            return None, _send(sockets, receivers, state())
        return _receive(sockets, sender) if sender is not None else (None, 0)


def _send(sockets: PeerSockets, receivers: Sequence[int], state: Any) -> int:
    skeleton, tensors = pack(state)
    parts = views_of(tensor.to("cpu") for tensor in tensors)
    for receiver in receivers:
        sockets.send(receiver, TAG, [memoryview(skeleton)])
    sockets.exchange({receiver: parts for receiver in receivers if parts}, {})
    return len(receivers) * (len(skeleton) + sum(map(len, parts)))


def _receive(sockets: PeerSockets, sender: int) -> tuple[Any, int]:
    text = bytes(sockets.receive(sender, TAG))
    skeleton = read_skeleton(text)
    wanted = tensors_of(skeleton)
    tensors = [torch.empty(t.shape, dtype=getattr(torch, t.dtype)) for t in wanted]
    parts = views_of(tensors)
    sockets.exchange({}, {sender: parts} if parts else {})
    return unpack(skeleton, tensors), len(text) + sum(map(len, parts))
