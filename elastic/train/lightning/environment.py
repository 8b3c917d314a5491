"""Which of the group's processes Lightning is in."""

from __future__ import annotations

from lightning.pytorch.plugins import environments

from elastic.train.session import require_context, require_place
from elastic.worker.engine.context import current


class RayLightningEnvironment(environments.LightningEnvironment):
    """Says that the processes are there already, and how many they are."""

    @property
    def creates_processes_externally(self) -> bool:
        """Return that Lightning starts none."""
        return True

    def world_size(self) -> int:
        """Return the workers of the group that stands."""
        return require_place("RayLightningEnvironment").world_size

    def set_world_size(self, size: int) -> None:
        """The group knows better."""

    def global_rank(self) -> int:
        """Return this worker's rank."""
        return current_rank()

    def set_global_rank(self, rank: int) -> None:
        """The group knows better."""

    def local_rank(self) -> int:
        """Return this worker's rank on its node."""
        return require_context("RayLightningEnvironment").local_rank

    def node_rank(self) -> int:
        """Return the rank of this worker's node."""
        return require_context("RayLightningEnvironment").node_rank

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Whatever the Trainer was told of devices and nodes, the group decides."""

    def teardown(self) -> None:
        """Leave the environment variables alone."""


def current_rank() -> int:
    """Return this worker's rank; one that has no place yet is not the first."""
    context = current()
    return 0 if context is None else context.world_rank if context.join is None else 1
