"""Training state sent from a member that has it to one that lacks it.

Rule: what a member receives is complete before any of it is used, so that a sender that dies in
the middle leaves the receiver as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from elastic.core.policy.recovery import TransferPlan
from elastic.worker.group import c10d
from elastic.worker.state.packing import bytes_of, pack, read_skeleton, tensors_of, unpack

SMALL_BYTES = 1 << 20
"""Tensors below this travel together, in one message."""
TAG = 9_000
"""Tags of transfers; those of the reduction are others."""


def transfer(group: Any, transfers: TransferPlan, state: Any) -> tuple[Any, int]:
    """Send our state, or receive it, as planned.

    Args:
        group: the process group that stands; of a CPU backend.
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
    if receivers:
        return None, _send(group, receivers, state())
    if sender is not None:
        return _receive(group, sender)
    return None, 0


def _send(group: Any, receivers: Sequence[int], state: Any) -> int:
    skeleton, tensors = pack(state)
    cpu = [tensor.to("cpu") for tensor in tensors]
    small, large = _sorted_by_size([bytes_of(tensor) for tensor in cpu])
    messages = [
        torch.tensor([len(skeleton)], dtype=torch.int64),
        torch.frombuffer(bytearray(skeleton), dtype=torch.uint8),
        torch.cat([part for _, part in small]) if small else torch.empty(0, dtype=torch.uint8),
        *(part for _, part in large),
    ]
    works = []
    for receiver in receivers:
        for number, message in enumerate(messages):
            if message.numel():
                works.append(group.send([message], receiver, TAG + number))
    c10d.wait_messages(works)
    return len(receivers) * sum(message.nbytes for message in messages)


def _receive(group: Any, sender: int) -> tuple[Any, int]:
    def receive(size: int, number: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        tensor = torch.empty(size, dtype=dtype)
        if size:
            c10d.wait_messages([group.recv([tensor], sender, TAG + number)])
        return tensor

    length = int(receive(1, 0, torch.int64))
    text = receive(length, 1).numpy().tobytes()
    skeleton = read_skeleton(text)
    wanted = tensors_of(skeleton)
    tensors = [torch.empty(t.shape, dtype=getattr(torch, t.dtype)) for t in wanted]
    parts = [bytes_of(tensor) for tensor in tensors]
    small, large = _sorted_by_size(parts)
    together = receive(sum(part.numel() for _, part in small), 2)
    start = 0
    for _, part in small:
        part.copy_(together[start : start + part.numel()])
        start += part.numel()
    for number, (_, part) in enumerate(large):
        c10d.wait_messages([group.recv([part], sender, TAG + 3 + number)])
    total = len(text) + sum(part.numel() for part in parts)
    return unpack(skeleton, tensors), total


Part = tuple[int, torch.Tensor]


def _sorted_by_size(parts: list[torch.Tensor]) -> tuple[list[Part], list[Part]]:
    """Return small ones and large ones, each in order."""
    numbered = list(enumerate(parts))
    small = [(n, part) for n, part in numbered if part.numel() < SMALL_BYTES]
    return small, [(n, part) for n, part in numbered if part.numel() >= SMALL_BYTES]
