"""Which accelerators a worker sees, and under which numbers: `cuda:LOCAL_RANK` is its own.

A worker sees all that its job has on this node, as under torchrun, so that peers can share memory
of their devices. CUDA reads the list once in a process, when it starts; until then its own device
is put where scripts look for it, at LOCAL_RANK, and after that both keep their numbers.

Rule: pure. What is to be set goes out as a dict; only `choose` touches CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from elastic.core.config import VIRTUAL_LOCAL_RANK
from elastic.core.facts import MILLI, Assignment, EntryKind
from elastic.core.messages import Assign

VISIBLE = "CUDA_VISIBLE_DEVICES"


class VisibleDevices:
    """The accelerators of one worker's process."""

    def __init__(self, assign: Assign) -> None:
        self._own = assign.devices
        self._request = dict(assign.spec.entry.env).get(VISIBLE)
        self._is_function = assign.spec.entry.kind is EntryKind.FUNCTION
        self.is_masked = is_masked(assign)
        self._has_started = False
        ours = assign.node_devices or self._own
        # In the order of the workers: the place that a group will most likely give.
        at = ours.index(self._own[0]) // len(self._own) if self._own else 0
        self._seen = self._own if self.is_masked else placed(ours, self._own, at)

    def env(self) -> dict[str, str]:
        """Return what to set before CUDA starts.

        Also for a worker without a device: it must not see those of others. A list that the job's
        own environment names is left alone.
        """
        return {VISIBLE: ",".join(self._seen) if self._request is None else self._request}

    def enter(self, assignment: Assignment) -> dict[str, str]:
        """Take a place in a group, before it is formed; return what to set, as `env` does."""
        is_free = not (self._has_started or torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
        if is_free and self._own and not self.is_masked:
            ours = assignment.node_devices or self._own
            self._seen = placed(ours, self._own, assignment.local_rank)
        return self.env()

    def started(self) -> None:
        """CUDA has read the list: a group was formed that speaks NCCL."""
        self._has_started = True

    def place(self, assignment: Assignment) -> dict[str, str]:
        """Return LOCAL_RANK: the number of the own device, which is the place among the workers.

        In a process that continues while others leave this node for good, the place may change and
        the device cannot: then it stays the number of the device.
        """
        if self.is_masked:
            return {"LOCAL_RANK": "0"}
        if self._own and self._request is None:
            return {"LOCAL_RANK": str(self._seen.index(self._own[0]))}
        return {"LOCAL_RANK": str(assignment.local_rank)}

    def names(self) -> tuple[str, ...]:
        """Return the own devices as torch calls them, "cuda:1"; () on CPU."""
        if self._request is not None:
            return tuple(f"cuda:{at}" for at in range(len(self._own)))
        return tuple(f"cuda:{self._seen.index(device)}" for device in self._own)

    def choose(self) -> None:
        """Make the first device torch's current one, for a train function that uses "cuda".

        A script chooses itself, as under torchrun: before, it may fork processes that use CUDA.
        """
        if self._own and self._is_function and torch.cuda.is_available():
            torch.cuda.set_device(self.names()[0])


def is_masked(assign: Assign) -> bool:
    """Return whether a worker is to see its own devices only.

    Because its job asks for that; because workers share a device, which has one number then; or
    because CUDA shows one part of a GPU (MIG) at most.
    """
    if not assign.devices:
        return False
    requested = dict(assign.spec.entry.env).get(VIRTUAL_LOCAL_RANK) == "1"
    milli = dict(assign.spec.resources_per_worker.milli).get("GPU", 0)
    has_parts = any(device.startswith("MIG-") for device in assign.devices)
    return requested or milli < MILLI or has_parts


def placed(all_of_job: Sequence[str], own: Sequence[str], local_rank: int) -> tuple[str, ...]:
    """Return the job's devices with the worker's first one at `local_rank`, by one exchange.

    Where devices lie in the order of the workers, all of them see one list.
    """
    seen = list(dict.fromkeys((*all_of_job, *own)))
    if own and local_rank < len(seen):
        at = seen.index(own[0])
        seen[at], seen[local_rank] = seen[local_rank], seen[at]
    return tuple(seen)
