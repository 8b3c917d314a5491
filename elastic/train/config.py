"""Configuration of a training run, under Ray Train's names; frozen and checked at once.

Where Ray's behaviour is a known trap, the difference is said in the field's line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic.core.config import PRIORITY_MAX, check_name
from elastic.core.world import Resources, Strategy
from elastic.errors import ConfigError
from elastic.train.expecting import (
    expect,
    expect_bool,
    expect_environment,
    expect_names,
    is_number,
    is_whole,
    refuse,
    take_callbacks,
    take_default,
    take_int,
    take_seconds,
)

RECOVERIES = ("auto", "in_place", "reenter", "restart")
NumWorkers = int | tuple[int, int]
STEPS_MAX = 2**31 - 1
AMOUNTS = "a dict of numbers, such as {'CPU': 2, 'GPU': 1}, or None"
LABELS = "a dict of str, such as {'zone': 'a'}, or None"


@dataclass(frozen=True)
class ScalingConfig:
    """How many workers, with what, and where.

    Attributes:
        num_workers: a number, or (min, max) for an elastic run; 0 runs the train function in this
            process, with the same reports and checkpoints; what it raises ends the run.
        use_gpu: one GPU for each worker, unless `resources_per_worker` says otherwise.
        resources_per_worker: such as {"CPU": 2, "GPU": 1}; by default one GPU with `use_gpu`,
            otherwise nothing but a slot.
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
        self._check_number()
        expect_bool(self, "use_gpu")
        amounts = expect_names(self, "resources_per_worker", AMOUNTS)
        if not all(is_number(amount) for amount in amounts.values()):
            refuse(self, "resources_per_worker", AMOUNTS)
        names = [strategy.value for strategy in Strategy]
        if self.placement_strategy not in names:
            refuse(self, "placement_strategy", f"one of {', '.join(names)}")
        expect(self, "accelerator_type", str, "a str such as 'H100', or None", none=True)
        labels = expect_names(self, "label_selector", LABELS)
        if not all(isinstance(label, str) for label in labels.values()):
            refuse(self, "label_selector", LABELS)
        what = f"a number that divides num_workers={self.num_workers!r}"
        take_int(self, "workers_per_replica", what, low=1)
        if self.min_workers % self.workers_per_replica or (
            self.max_workers % self.workers_per_replica
        ):
            refuse(self, "workers_per_replica", what)
        if not self.resources().amount("GPU") and self.use_gpu:
            raise ConfigError(
                f"ScalingConfig: use_gpu=True, but resources_per_worker="
                f"{dict(self.resources_per_worker or {})} has no GPU: add 'GPU': 1"
            )

    def _check_number(self) -> None:
        number = self.num_workers
        bounds = number if isinstance(number, tuple) else (number, number)
        if len(bounds) != 2 or not all(is_whole(bound) for bound in bounds):
            refuse(self, "num_workers", "an int, or (min, max)")
        low, high = int(bounds[0]), int(bounds[1])
        if low < 0 or high < low or (low == 0 and high != 0):
            refuse(self, "num_workers", "1 <= min <= max, or 0 to train in this process")
        plain = (low, high) if isinstance(number, tuple) else low
        object.__setattr__(self, "num_workers", plain)

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
            return Resources.of({k: float(v) for k, v in self.resources_per_worker.items()})
        return Resources.of({"GPU": 1}) if self.use_gpu else Resources()


@dataclass(frozen=True)
class FailureConfig:
    """What the run survives.

    Attributes:
        max_failures: how often user code may raise or crash before the run fails; -1 for ever.
            Lost machines, kills and drains are not charged to it (in Ray they are). Of no effect
            with num_workers=0, which says so.
        max_preemptions: how many nodes may be taken from the run by announced drains (notices of
            the cloud, SIGTERM, `elastic drain`) before it fails; -1 for ever. A budget of its own:
            what happens on a node that was to leave is charged to nothing else.
        recovery: how a worker that lives comes into the next group. "auto": the gentlest way
            that its code allows: a loop over `train.epochs()` goes on, or is entered again where
            the model is sharded; other code begins again in a new process. "in_place": only such a
            loop; the run fails where that cannot be. "reenter": the train function is called again
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
        for budget in ("max_failures", "max_preemptions"):
            take_int(self, budget, "an int, -1 (for ever) or more", low=-1)
        take_seconds(self, "hang_timeout_s", "seconds, or 0 for never", zero=True)
        if self.recovery not in RECOVERIES:
            refuse(self, "recovery", f"one of {', '.join(RECOVERIES)}")


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
        take_int(self, "every_n_steps", f"an int from 1 to {STEPS_MAX}", low=1, high=STEPS_MAX)


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
        take_int(self, "num_to_keep", "None (all) or an int >= 1", low=1, none=True)
        take_int(self, "every_n_steps", "None (never) or an int >= 1", low=1, none=True)
        take_seconds(self, "every_s", "None (never) or seconds > 0", none=True)
        expect_bool(self, "async_save")
        peers = "None, or PeerReplication(every_n_steps=...)"
        expect(self, "peer_replication", PeerReplication, peers, none=True)
        metric = "the name of a metric, or None"
        expect(self, "checkpoint_score_attribute", str, metric, none=True)
        if self.checkpoint_score_order not in ("max", "min"):
            refuse(self, "checkpoint_score_order", "max or min")


@dataclass(frozen=True)
class RunConfig:
    """Name, place and policies of a run.

    Attributes:
        name: names the job and its directory; by default made from the script and the time. A
            name whose run did not succeed resumes it, with a line that says so (Ray: silently);
            one whose run succeeded, or still runs, is refused.
        storage_path: parent of the run directory, a path or any fsspec URL; default
            "~/elastic_results".
        failure_config, checkpoint_config: see there; None for the default ones.
        callbacks: called in the driver: a list of objects with `after_report(metrics)` and
            `after_event(name, fields)`, either of them.
        worker_env: environment variables for the workers; with num_workers=0 this process has
            them while the train function runs.
        priority: on a cluster with several jobs, those with a greater one go first; -1000 to 1000.
        project: label that the cluster divides by, and may have limits for.
        preemptible: False: the job keeps its min also when one of higher priority waits.
    """

    name: str | None = None
    storage_path: str | Path | None = None
    failure_config: FailureConfig = field(default_factory=FailureConfig)
    checkpoint_config: CheckpointConfig = field(default_factory=CheckpointConfig)
    callbacks: Sequence[Any] = ()
    worker_env: Mapping[str, str] | None = None
    priority: int = 0
    project: str = ""
    preemptible: bool = True

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        expect(self, "name", str, "a str, or None for one that is made from the script", none=True)
        if self.name is not None:
            check_name("run", self.name)
        expect(self, "storage_path", (str, os.PathLike), "a str, a Path or None", none=True)
        if isinstance(self.storage_path, str) and not self.storage_path.strip():
            raise ConfigError("RunConfig: storage_path='': expected a path or an URL, or None")
        take_default(self, "failure_config", FailureConfig)
        take_default(self, "checkpoint_config", CheckpointConfig)
        take_callbacks(self, "callbacks")
        expect_environment(self, "worker_env")
        what = f"an int, -{PRIORITY_MAX} to {PRIORITY_MAX}"
        take_int(self, "priority", what, low=-PRIORITY_MAX, high=PRIORITY_MAX)
        expect(self, "project", str, "a str")
        expect_bool(self, "preemptible")
        if isinstance(self.storage_path, Path) and re.match(r"\w+:/", str(self.storage_path)):
            raise ConfigError(
                f"RunConfig: storage_path={self.storage_path!r}: pathlib takes a slash out of a "
                f"URL; pass it as a str"
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
            refuse(self, "backend", "gloo or nccl")
        if self.consistency not in ("bitwise", "samples"):
            refuse(self, "consistency", "bitwise or samples")
        take_seconds(self, "timeout_s", "seconds, a finite number > 0")
