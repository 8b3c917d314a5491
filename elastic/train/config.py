"""Configuration of a training run, under Ray Train's names; frozen and checked at once.

Where Ray's behaviour is a known trap, the difference is said in the field's line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic.core.config import PRIORITY_MAX, check_name
from elastic.core.world import Resources, Strategy
from elastic.errors import ConfigError

RECOVERIES = ("auto", "in_place", "reenter", "restart")
NumWorkers = int | tuple[int, int]
STEPS_MAX = 2**31 - 1


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
        bounds = self.num_workers if isinstance(self.num_workers, tuple) else (self.num_workers,)
        are_ints = all(isinstance(b, int) and not isinstance(b, bool) for b in bounds)
        if not are_ints or len(bounds) != (2 if isinstance(self.num_workers, tuple) else 1):
            raise ConfigError(
                f"ScalingConfig: num_workers={self.num_workers!r}: expected an int, or (min, max)"
            )
        low, high = self.min_workers, self.max_workers
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
        replica = self.workers_per_replica
        if replica < 1 or low % replica or high % replica:
            raise ConfigError(
                f"ScalingConfig: workers_per_replica={replica}: expected a number that divides "
                f"num_workers={self.num_workers!r}"
            )
        if not self.resources().amount("GPU") and self.use_gpu:
            raise ConfigError(
                f"ScalingConfig: use_gpu=True, but resources_per_worker="
                f"{dict(self.resources_per_worker or {})} has no GPU: add 'GPU': 1"
            )

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
        max_preemptions: how many nodes may be taken from the run by announced drains (notices of
            the cloud, SIGTERM, `elastic drain`) before it fails; -1 for ever. A budget of its own:
            what happens on a node that was to leave is charged to nothing else.
        recovery: how a worker that lives comes into the next group. "auto": the gentlest way
            that its code allows. "in_place": only under a loop over `train.epochs()`, which goes
            on; the run fails where that cannot be. "reenter": the train function is called again
            in the same process. "restart": a new process takes its place.
        hang_timeout_s: a worker that has not moved for so long, while all others wait for it, is
            killed and replaced, after the stacks of all were written to their logs; 0 for never.
    """

    max_failures: int = 0
    recovery: str = "auto"
    hang_timeout_s: float = 30.0
    max_preemptions: int = -1

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        if not isinstance(self.max_failures, int) or self.max_failures < -1:
            raise ConfigError(
                f"FailureConfig: max_failures={self.max_failures!r}: expected an int, "
                f"-1 (for ever) or more"
            )
        if not isinstance(self.max_preemptions, int) or self.max_preemptions < -1:
            raise ConfigError(
                f"FailureConfig: max_preemptions={self.max_preemptions!r}: expected an int, "
                f"-1 (for ever) or more"
            )
        if not 0 <= self.hang_timeout_s < float("inf"):
            raise ConfigError(
                f"FailureConfig: hang_timeout_s={self.hang_timeout_s!r}: expected seconds, or 0 "
                f"for never"
            )
        if self.recovery not in RECOVERIES:
            raise ConfigError(
                f"FailureConfig: recovery={self.recovery!r}: expected one of "
                f"{', '.join(RECOVERIES)}"
            )


@dataclass(frozen=True)
class PeerReplication:
    """A copy of the run's newest state in the memory of a node that does not train it.

    A run of one worker that loses its node then goes on from there, on another node, instead of
    from the newest checkpoint in storage. Runs whose members are on several nodes have the state
    on each of them anyway, unless they lose all. Of a sharded model each node's rows lie on another
    node as well, so that the death of any node loses no more than the steps since the newest
    snapshot. Costs training one copy in memory for each snapshot; the network carries it meanwhile.
    Without a node to spare, or another one that trains shards, nothing is copied.

    Attributes:
        every_n_steps: after each n steps of the run.
    """

    every_n_steps: int

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        n = self.every_n_steps
        if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= STEPS_MAX:
            raise ConfigError(
                f"PeerReplication: every_n_steps={n!r}: expected an int from 1 to {STEPS_MAX}"
            )


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are taken by themselves, and which are kept; the newest always is.

    Automatic ones hold the whole state of a loop over `train.epochs()`; no code in the script
    takes or reads them. They are numbered apart from those that the script reports.

    Attributes:
        every_n_steps: after each n steps of the run; None for never.
        every_s: when so many seconds have passed since the last one; None for never.
        peer_replication: also keep the state in the memory of another node; None for not.
        async_save: write while training goes on; False waits until each one is durable.
        num_to_keep: None for all reported ones, and the newest two automatic ones.
        checkpoint_score_attribute: metric that ranks them; None ranks by age.
        checkpoint_score_order: "max" or "min" is best.
    """

    num_to_keep: int | None = None
    checkpoint_score_attribute: str | None = None
    checkpoint_score_order: str = "max"
    every_n_steps: int | None = None
    every_s: float | None = 600.0
    async_save: bool = True
    peer_replication: PeerReplication | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        kept = self.num_to_keep
        if kept is not None and (not isinstance(kept, int) or kept < 1):
            raise ConfigError(
                f"CheckpointConfig: num_to_keep={kept!r}: expected None (all) or an int >= 1"
            )
        n = self.every_n_steps
        if n is not None and (not isinstance(n, int) or isinstance(n, bool) or n < 1):
            raise ConfigError(
                f"CheckpointConfig: every_n_steps={n!r}: expected None (never) or an int >= 1"
            )
        s = self.every_s
        is_number = isinstance(s, (int, float)) and not isinstance(s, bool)
        if s is not None and not (is_number and 0 < s < float("inf")):
            raise ConfigError(
                f"CheckpointConfig: every_s={self.every_s!r}: expected None (never) or seconds > 0"
            )
        peers = self.peer_replication
        if peers is not None and not isinstance(peers, PeerReplication):
            raise ConfigError(
                f"CheckpointConfig: peer_replication={peers!r}: expected None, or "
                f"PeerReplication(every_n_steps=...)"
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
            name whose run did not succeed resumes it, with a line that says so (Ray: silently);
            one whose run succeeded, or still runs, is refused.
        storage_path: parent of the run directory, a path or any fsspec URL; default
            "~/elastic_results".
        failure_config, checkpoint_config: see there.
        callbacks: called in the driver: objects with `after_report(metrics)` and
            `after_event(name, fields)`, either of them.
        worker_env: environment variables for the workers.
        priority: on a cluster with several jobs, those with a greater one go first; -1000 to 1000.
        project: label that the cluster divides by, and may have limits for.
        preemptible: False: the job keeps its min also when one of higher priority waits.
    """

    name: str | None = None
    storage_path: str | Path | None = None
    failure_config: FailureConfig = field(default_factory=FailureConfig)
    checkpoint_config: CheckpointConfig = field(default_factory=CheckpointConfig)
    callbacks: tuple[Any, ...] = ()
    worker_env: Mapping[str, str] | None = None
    priority: int = 0
    project: str = ""
    preemptible: bool = True

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        if self.name is not None:
            check_name("run", self.name)
        is_int = isinstance(self.priority, int) and not isinstance(self.priority, bool)
        if not is_int or abs(self.priority) > PRIORITY_MAX:
            raise ConfigError(
                f"RunConfig: priority={self.priority!r}: expected an int, -{PRIORITY_MAX} to "
                f"{PRIORITY_MAX}"
            )
        if not isinstance(self.project, str):
            raise ConfigError(f"RunConfig: project={self.project!r}: expected a str")
        if isinstance(self.storage_path, Path) and re.match(r"\w+:/", str(self.storage_path)):
            raise ConfigError(
                f"RunConfig: storage_path={self.storage_path!r}: pathlib takes a slash out of a "
                f"URL; pass it as a str"
            )
        for key, value in (self.worker_env or {}).items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise ConfigError(
                    f"RunConfig: worker_env[{key!r}]={value!r}: expected a str for a str"
                )


@dataclass(frozen=True)
class TorchConfig:
    """How torch.distributed is set up.

    Attributes:
        backend: "gloo", "nccl", or None: nccl with GPUs, else gloo.
        timeout_s: torch.distributed's own timeout in seconds; a backstop, not the detector.
        consistency: of a loop over `train.epochs()`. "bitwise": gradients are added in an order
            that does not depend on the number of workers, so that the weights have the same
            bits whatever happened to the group. "samples": every step has the same samples.
    """

    backend: str | None = None
    timeout_s: float = 1800.0
    consistency: str = "bitwise"

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        if self.backend not in (None, "gloo", "nccl"):
            raise ConfigError(f"TorchConfig: backend={self.backend!r}: expected gloo or nccl")
        if self.consistency not in ("bitwise", "samples"):
            raise ConfigError(
                f"TorchConfig: consistency={self.consistency!r}: expected bitwise or samples"
            )
        if not 0 < self.timeout_s < float("inf"):
            raise ConfigError(
                f"TorchConfig: timeout_s={self.timeout_s}: expected a finite number > 0"
            )
