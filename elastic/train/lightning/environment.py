"""Lightning's environment plugin: rank and world size from the group.

Lightning puts a barrier around `prepare_data`, for as long as that takes. Ours lets a member pass
once another one of its group is at its loop, or in it: that one would never come.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from lightning.fabric.utilities import distributed
from lightning.pytorch.plugins import environments

from elastic.train.session import require_context, require_place
from elastic.worker.engine.context import WorkerContext
from elastic.worker.engine.group_sync import loop_store, others_have_begun
from elastic.worker.engine.train_call import current

POLL_S = 0.02
AT_LOOP = "at-loop"


def _enter(barrier: Any) -> Any:
    """Be `_InfiniteBarrier.__enter__`, which sets what is called at its end."""
    context = current()
    if context is None:
        return _enter_stock(barrier)
    if context.join is None:  # One that joins has no place yet.
        barrier.barrier = partial(_wait, context)
    return barrier


def _wait(context: WorkerContext) -> None:
    """Wait until all members have come as often as this one, or one of them is at its loop."""
    store = loop_store()
    if store is None:
        return
    own = f"{context.generation}-{context.world_rank}"
    number = store.add(f"prepared-by-{own}", 1)
    come = store.add(f"prepared-{number}", 1)
    while come < context.world_size:
        if others_have_begun(is_inside=False) or store.check([AT_LOOP]):
            return
        time.sleep(POLL_S)
        come = store.add(f"prepared-{number}", 0)


def note_at_loop() -> None:
    """Join, and let members that wait behind `prepare_data` know that this one does not."""
    require_place("RayDDPStrategy")
    store = loop_store()
    if store is not None:
        store.set(AT_LOOP, b"1")


_enter_stock = distributed._InfiniteBarrier.__enter__
distributed._InfiniteBarrier.__enter__ = _enter  # type: ignore[method-assign]


class RayLightningEnvironment(environments.LightningEnvironment):
    """Reports to Lightning that the processes exist already, and their number and ranks."""

    @property
    def creates_processes_externally(self) -> bool:
        """Return True: Lightning starts no processes."""
        return True

    def world_size(self) -> int:
        """Return the number of workers in its group."""
        return require_place("RayLightningEnvironment").world_size

    def set_world_size(self, size: int) -> None:
        """Do nothing: the group determines it."""

    def global_rank(self) -> int:
        """Return this worker's rank."""
        return current_rank()

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the group determines it."""

    def local_rank(self) -> int:
        """Return this worker's rank on its node."""
        return require_context("RayLightningEnvironment").local_rank

    def node_rank(self) -> int:
        """Return the rank of this worker's node."""
        return require_context("RayLightningEnvironment").node_rank

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Accept any: the group determines devices and nodes, not the Trainer's settings."""

    def teardown(self) -> None:
        """Do nothing: the environment variables must be kept."""


def current_rank() -> int:
    """Return this worker's rank; 1 while it has none yet, so that it does not act as the first."""
    context = current()
    return 0 if context is None else context.world_rank if context.join is None else 1
