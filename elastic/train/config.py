"""Configuration of a training run, under Ray Train's names; frozen and checked at once.

Where Ray's behaviour is a known trap, the difference is said in the field's line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic.core.config import check_name
from elastic.core.world import Resources, Strategy
from elastic.errors import ConfigError

NumWorkers = int | tuple[int, int]


@dataclass(frozen=True)
class ScalingConfig:
    """How many workers, with what, and where.

    Attributes:
        num_workers: a number, or (min, max) for an elastic run; 0 runs the train function in this
            process, with the same behaviour.
        use_gpu: one GPU for each worker, unless `resources_per_worker` says otherwise.
        resources_per_worker: such as {"CPU": 2, "GPU": 1}; by default one CPU or one GPU.
        placement_strategy: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD.
        accelerator_type: only nodes with this one, such as "H100".
        label_selector: only nodes that carry all of these labels.
        workers_per_replica: a group is made of whole replicas of this many workers.
    """

    num_workers: NumWorkers = 1
    use_gpu: bool = False
    resources_per_worker: Mapping[str, float] | None = None
    placement_strategy: str = "PACK"
    accelerator_type: str | None = None
    label_selector: Mapping[str, str] | None = None
    workers_per_replica: int = 1

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        low, high = self.min_workers, self.max_workers
        if not isinstance(low, int) or not isinstance(high, int):
            raise ConfigError(
                f"ScalingConfig: num_workers={self.num_workers!r}: expected an int, or (min, max)"
            )
        if low < 0 or high < low or (low == 0 and high != 0):
            raise ConfigError(
                f"ScalingConfig: num_workers={self.num_workers!r}: expected 1 <= min <= max, or 0 "
                f"to train in this process"
            )
        names = [strategy.value for strategy in Strategy]
        if self.placement_strategy not in names:
            raise ConfigError(
                f"ScalingConfig: placement_strategy={self.placement_strategy!r}: expected one of "
                f"{', '.join(names)}"
            )
        self.resources()

    @property
    def min_workers(self) -> int:
        """Return the smallest group that trains."""
        return self.num_workers[0] if isinstance(self.num_workers, tuple) else self.num_workers

    @property
    def max_workers(self) -> int:
        """Return the largest group."""
        return self.num_workers[-1] if isinstance(self.num_workers, tuple) else self.num_workers

    @property
    def elasticity_enabled(self) -> bool:
        """Return whether the group may change its size."""
        return self.min_workers != self.max_workers

    def resources(self) -> Resources:
        """Return what each worker takes from its node; a slot is taken in any case."""
        if self.resources_per_worker is not None:
            return Resources.of(self.resources_per_worker)
        return Resources.of({"GPU": 1}) if self.use_gpu else Resources()


@dataclass(frozen=True)
class FailureConfig:
    """What the run survives.

    Attributes:
        max_failures: how often user code may raise or crash before the run fails; -1 for ever.
            Lost machines, kills and drains are not charged to it (in Ray they are).
    """

    max_failures: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        if self.max_failures < -1:
            raise ConfigError(
                f"FailureConfig: max_failures={self.max_failures}: expected -1 (for ever) or more"
            )


@dataclass(frozen=True)
class CheckpointConfig:
    """Which reported checkpoints are kept; the newest always is.

    Attributes:
        num_to_keep: None for all.
        checkpoint_score_attribute: metric that ranks them; None ranks by age.
        checkpoint_score_order: "max" or "min" is best.
    """

    num_to_keep: int | None = None
    checkpoint_score_attribute: str | None = None
    checkpoint_score_order: str = "max"

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        if self.num_to_keep is not None and self.num_to_keep < 1:
            raise ConfigError(
                f"CheckpointConfig: num_to_keep={self.num_to_keep}: expected None (all) or >= 1"
            )
        if self.checkpoint_score_order not in ("max", "min"):
            raise ConfigError(
                f"CheckpointConfig: checkpoint_score_order={self.checkpoint_score_order!r}: "
                f"expected max or min"
            )


@dataclass(frozen=True)
class RunConfig:
    """Name, place and policies of a run.

    Attributes:
        name: names the job and its directory; by default made from the script and the time. A
            name that has a run directory already is refused (Ray resumes silently).
        storage_path: parent of the run directory, any fsspec URL; default "~/elastic_results".
        failure_config, checkpoint_config: see there.
        callbacks: called in the driver: objects with `after_report(metrics)` and
            `after_event(name, fields)`, either of them.
        worker_env: environment variables for the workers.
    """

    name: str | None = None
    storage_path: str | None = None
    failure_config: FailureConfig = field(default_factory=FailureConfig)
    checkpoint_config: CheckpointConfig = field(default_factory=CheckpointConfig)
    callbacks: tuple[Any, ...] = ()
    worker_env: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        if self.name is not None:
            check_name("run", self.name)


@dataclass(frozen=True)
class TorchConfig:
    """How torch.distributed is set up.

    Attributes:
        backend: "gloo", "nccl", or None: nccl with GPUs, else gloo.
        timeout_s: torch.distributed's own timeout in seconds; a backstop, not the detector.
    """

    backend: str | None = None
    timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        if self.backend not in (None, "gloo", "nccl"):
            raise ConfigError(f"TorchConfig: backend={self.backend!r}: expected gloo or nccl")
        if self.timeout_s <= 0:
            raise ConfigError(f"TorchConfig: timeout_s={self.timeout_s}: expected > 0")
