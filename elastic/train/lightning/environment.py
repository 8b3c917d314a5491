"""Lightning's environment plugin: rank and world size from the group.

Lightning puts a barrier around `prepare_data`. Only members of a job's first group wait in it: in
any other, some may be in the middle of their loop, and would never come.
"""

from __future__ import annotations

from lightning.fabric.utilities import distributed
from lightning.pytorch.plugins import environments

from elastic.train.session import require_context, require_place
from elastic.worker.engine.train_call import current


def _has_group() -> bool:
    """Be Lightning's `_distributed_is_initialized`, which its barriers ask."""
    context = current()
    is_first = context is None or (context.join is None and context.cause == "start")
    return is_first and _has_stock_group()


_has_stock_group = distributed._distributed_is_initialized
distributed._distributed_is_initialized = _has_group


class RayLightningEnvironment(environments.LightningEnvironment):
    """Reports to Lightning that the processes exist already, and their number and ranks."""

    @property
    def creates_processes_externally(self) -> bool:
        """Return True: Lightning starts no processes."""
        return True

    def world_size(self) -> int:
        """Return the number of workers in the present group."""
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
