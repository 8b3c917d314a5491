"""Configuration of a training run, under Ray Train's names; frozen, checked on creation.

Where Ray's behaviour is a known trap, the field's line states the difference.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from elastic.core.config import PRIORITY_MAX, check_name
from elastic.core.facts import Resources, Strategy
from elastic.errors import ConfigError
from elastic.storage.filesystems import url_in, without_query
from elastic.train.cluster_options import worker_env
from elastic.train.config_checks import (
    expect,
    expect_bool,
    expect_environment,
    expect_names,
    is_number,
    is_undrawn,
    is_whole,
    refuse,
    take_callbacks,
    take_default,
    take_int,
    take_seconds,
)

if TYPE_CHECKING:
    from typing_extensions import Self

    from elastic.train.checkpoint import Checkpoint
    from elastic.train.result import Result

RECOVERIES = ("auto", "in_place", "reenter", "restart")
NumWorkers = int | tuple[int, int]
STEPS_MAX = 2**31 - 1
AMOUNTS = "a dict of numbers, such as {'CPU': 2, 'GPU': 1}, or None"
STOPS = "a dict of numbers by metric, such as {'accuracy': 0.9}, a function, or None"
LABELS = "a dict of str, such as {'zone': 'a'}, or None"


def _expect_amounts(config: object, field: str) -> Mapping[str, Any]:
    """Return a field's amounts of resources by name, {} for None."""
    amounts = expect_names(config, field, AMOUNTS)
    if not all(is_number(amount) for amount in amounts.values()):
        refuse(config, field, AMOUNTS)
    return amounts


@dataclass(frozen=True)
class ScalingConfig:
    """Number of workers, their resources, and where they run.

    In a Tuner's `param_space["scaling_config"]` fields may be search spaces, such as
    `num_workers=tune.grid_search([1, 2])`; they are checked once they are drawn.

    Attributes:
        num_workers: a number, or (min, max) for an elastic run; 0 runs the train function in this
            process, with the same reports and checkpoints; what it raises ends the run.
        use_gpu: one GPU for each worker, unless `resources_per_worker` sets another number.
        resources_per_worker: such as {"CPU": 2, "GPU": 0.5}, GPUs with `use_gpu` only; by default
            only a slot.
        placement_strategy: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD.
        accelerator_type: only nodes with this one, such as "H100".
        label_selector: only nodes that carry all of these labels; the same for all workers.
        workers_per_replica: a group consists of whole replicas of this many workers.
        trainer_resources, elastic_resize_monitor_interval_s: of Ray, without effect: nothing runs
            beside the workers, and a node that joins is used at once.
    """

    num_workers: NumWorkers = 1
    use_gpu: bool = False
    resources_per_worker: Mapping[str, float] | None = None
    placement_strategy: str = "PACK"
    accelerator_type: str | None = None
    label_selector: Mapping[str, str] | Sequence[Mapping[str, str]] | None = None
    workers_per_replica: int = 1
    trainer_resources: Mapping[str, float] | None = None
    elastic_resize_monitor_interval_s: float = 60.0

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        if self.undrawn:
            return
        self._check_number()
        self._take_one_selector()
        expect_names(self, "trainer_resources", AMOUNTS)
        take_seconds(self, "elastic_resize_monitor_interval_s", "seconds, 0 or more", zero=True)
        expect_bool(self, "use_gpu")
        amounts = _expect_amounts(self, "resources_per_worker")
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
        asked = amounts.get("GPU")
        if asked is not None and bool(asked) != self.use_gpu:
            change = "leave GPU out or set its number" if self.use_gpu else "pass use_gpu=True"
            raise ConfigError(
                f"ScalingConfig: use_gpu={self.use_gpu}, but resources_per_worker="
                f"{dict(amounts)}: {change}"
            )
        self.resources()

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

    def _take_one_selector(self) -> None:
        """Reduce Ray's list of one selector per worker to one, if all are the same."""
        given = self.label_selector
        if not isinstance(given, (list, tuple)):
            return
        if len(given) != self.max_workers or any(each != given[0] for each in given):
            refuse(self, "label_selector", f"{LABELS}; or a list of {self.max_workers} equal ones")
        object.__setattr__(self, "label_selector", given[0])

    @property
    def undrawn(self) -> tuple[str, ...]:
        """Return the fields that a Tuner draws for each trial."""
        return tuple(name for name, value in vars(self).items() if is_undrawn(value))

    @property
    def labels(self) -> dict[str, str]:
        """Return the labels that a node must carry."""
        selector = self.label_selector
        return dict(selector) if isinstance(selector, Mapping) else {}

    @property
    def num_cpus_per_worker(self) -> float:
        """Return the CPUs of a worker; its slot counts as one."""
        return self.resources().amount("CPU") or 1.0

    @property
    def num_gpus_per_worker(self) -> float:
        """Return the GPUs of a worker."""
        return self.resources().amount("GPU")

    @property
    def total_resources(self) -> dict[str, float]:
        """Return the resources of the largest group, by name; a slot alone counts as a CPU."""
        each = self.resources().as_dict() or {"CPU": 1.0}
        return {name: amount * self.max_workers for name, amount in each.items()}

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
        """Return the resources of each worker, in addition to its slot."""
        default = {"GPU": 1.0} if self.use_gpu else {}
        asked = {name: float(amount) for name, amount in (self.resources_per_worker or {}).items()}
        return Resources.of({**default, **asked})


@dataclass(frozen=True)
class FailureConfig:
    """Which failures the run survives, and how.

    Attributes:
        max_failures: how often user code may raise or crash before the run fails; -1 for no limit.
            Lost machines, kills and drains are not charged to it (in Ray they are). Without effect
            with num_workers=0, which prints a line about it.
        max_preemptions: how many nodes may be taken from the run by announced drains (notices of
            the cloud, SIGTERM, `elastic drain`) before it fails; -1 for no limit. A separate
            budget: failures on a draining node are charged to nothing else.
        recovery: how a surviving worker joins the next group. "auto": the least disruptive way
            that its code allows: a loop over `train.epochs()` continues, or is entered again where
            the model is sharded; other code restarts in a new process. "in_place": only such a
            loop; the run fails where that is impossible. "reenter": the train function is called
            again in the same process. "restart": a new process replaces it.
        hang_timeout_s: a worker without progress for so long, while all others wait for it, is
            killed and replaced, after the stacks of all were written to their logs; 0 for never.
        fail_fast: True or "raise": the first failure ends the run; not together with max_failures.
        max_preemption_failures: Ray's name for `max_preemptions`.
        controller_failure_limit, preemption_grace_s, relax_collectives_on_preemption: of Ray,
            without effect: a coordinator that fails ends nothing, and a drain has a deadline.
    """

    max_failures: int = 0
    recovery: str = "auto"
    hang_timeout_s: float = 30.0
    max_preemptions: int = -1
    fail_fast: bool | str = False
    max_preemption_failures: int | None = None
    controller_failure_limit: int = -1
    preemption_grace_s: float = 0.0
    relax_collectives_on_preemption: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        if self.max_preemption_failures is not None:
            if self.max_preemptions not in (-1, self.max_preemption_failures):
                refuse(self, "max_preemption_failures", "it, or max_preemptions, but not both")
            object.__setattr__(self, "max_preemptions", self.max_preemption_failures)
            object.__setattr__(self, "max_preemption_failures", None)
        for budget in ("max_failures", "max_preemptions", "controller_failure_limit"):
            take_int(self, budget, "an int, -1 (for ever) or more", low=-1)
        if self.fail_fast not in (True, False, "raise"):
            refuse(self, "fail_fast", "True, False or 'raise'")
        if self.fail_fast and self.max_failures:
            refuse(self, "fail_fast", f"False with max_failures={self.max_failures}")
        take_seconds(self, "preemption_grace_s", "seconds, 0 or more", zero=True)
        expect_bool(self, "relax_collectives_on_preemption")
        take_seconds(self, "hang_timeout_s", "seconds, or 0 for never", zero=True)
        if self.recovery not in RECOVERIES:
            refuse(self, "recovery", f"one of {', '.join(RECOVERIES)}")


@dataclass(frozen=True)
class PeerReplication:
    """A copy of the run's newest state in the memory of a node that does not train it.

    A run of one worker that loses its node then continues from there, on another node, instead of
    from the newest checkpoint in storage. Runs with members on several nodes have the state on
    each of them anyway, unless they lose all. For a sharded model each node's rows are also copied
    to another node, so that the loss of any node loses only the steps since the newest snapshot.
    Costs training one copy in memory per snapshot; the network transfer runs in the background.
    Without a spare node, or another one that trains shards, nothing is copied.

    Attributes:
        every_n_steps: after each n steps of the run.
    """

    every_n_steps: int

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        take_int(self, "every_n_steps", f"an int from 1 to {STEPS_MAX}", low=1, high=STEPS_MAX)


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are taken automatically, and which are kept; the newest always is.

    Automatic ones hold the whole state of a loop over `train.epochs()`; no code in the script
    takes or reads them. They are numbered separately from those that the script reports.

    Attributes:
        every_n_steps: after each n steps of the run; None for never.
        every_s: seconds between two of them; None for never.
        peer_replication: also keep the state in the memory of another node; None to disable.
        async_save: write while training continues; False waits until each one is durable.
        num_to_keep: None for all reported ones, and the newest two automatic ones.
        checkpoint_score_attribute: metric that ranks them; None ranks by age.
        checkpoint_score_order: "max" or "min" is best.
        checkpoint_frequency, checkpoint_at_end: for `tune.Trainable` only: steps between two
            checkpoints, by default 1, and whether one is wanted at the end.
    """

    num_to_keep: int | None = None
    checkpoint_score_attribute: str | None = None
    checkpoint_score_order: str = "max"
    every_n_steps: int | None = None
    every_s: float | None = 600.0
    async_save: bool = True
    peer_replication: PeerReplication | None = None
    checkpoint_frequency: int | None = None
    checkpoint_at_end: bool | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        take_int(self, "checkpoint_frequency", "None, or an int >= 0", low=0, none=True)
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
class SyncConfig:
    """Of Ray, and accepted without effect: workers write into the run directory themselves."""

    sync_period: float = 300.0
    sync_timeout: float = 1800.0
    sync_artifacts: bool = False
    sync_artifacts_on_checkpoint: bool = True
    upload_dir: str | None = None

    def __post_init__(self) -> None:
        """Refuse an upload directory apart from the run directory."""
        if self.upload_dir is not None:
            refuse(self, "upload_dir", "None, and the place as RunConfig(storage_path=...)")


@dataclass(frozen=True)
class LoggingConfig:
    """The log level of the runtime itself in workers and the driver.

    Attributes:
        log_level: "DEBUG", "INFO", "WARNING", "ERROR" or "CRITICAL".
    """

    log_level: str = "INFO"

    def __post_init__(self) -> None:
        """Refuse an unknown level."""
        levels = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
        level = self.log_level.upper() if isinstance(self.log_level, str) else ""
        if level not in levels:
            refuse(self, "log_level", f"one of {', '.join(levels)}")
        object.__setattr__(self, "log_level", level)


@dataclass(frozen=True)
class RunConfig:
    """Name, storage path and policies of a run.

    Attributes:
        name: names the job and its directory; by default derived from the script and the time. A
            name that exists resumes from its newest checkpoint, with a line on stderr (Ray:
            silently), after success too; without a checkpoint it trains again. A name that still
            runs is refused.
        storage_path: parent of the run directory, a path or any fsspec URL; default
            "~/elastic_results".
        storage_filesystem: of fsspec or pyarrow, in which `storage_path` is a path. Workers open
            its URL with the options that it was made with, such as keys; of pyarrow's, S3's.
        failure_config, checkpoint_config: see there; None for the default ones.
        callbacks: called in the driver: a list of `UserCallback`s, or of objects with
            `after_report(metrics)`, for what rank 0 reports, and `after_event(name, fields)`,
            either of them.
        stop: ends the run, as a success, soon after rank 0's report meets it: {"accuracy": 0.9}
            once a metric is that or more ("training_iteration": the number of reports), or a
            function of the metrics.
        log_to_file: True: writes the workers' output to RUN/stdout at the end; or another file
            name; of a pair the first, because a worker's two streams are merged here.
        logging_config: see there; None for warnings only.
        verbose, sync_config: of Ray, without effect.
        worker_env: environment variables for the workers; with num_workers=0 this process has
            them while the train function runs.
        worker_runtime_env: the same in Ray's format: {"env_vars": {...}}.
        priority: on a cluster with several jobs, higher ones are placed first; -1000 to 1000.
        preemptible: False: the job keeps its min even when one of higher priority waits.
        given: names of the fields that the caller has set, after `dataclasses.replace` of those
            that differ from the default; `Tuner` takes the others from its trainer's.
    """

    given: ClassVar[tuple[str, ...]] = ()
    name: str | None = None
    storage_path: str | Path | None = None
    storage_filesystem: Any = None
    failure_config: FailureConfig = field(default_factory=FailureConfig)
    checkpoint_config: CheckpointConfig = field(default_factory=CheckpointConfig)
    callbacks: Sequence[Any] = ()
    stop: Mapping[str, float] | Callable[..., bool] | None = None
    log_to_file: bool | str | tuple[str, str] = False
    logging_config: LoggingConfig | None = None
    verbose: int | None = None
    sync_config: SyncConfig = field(default_factory=SyncConfig)
    worker_env: Mapping[str, str] | None = None
    worker_runtime_env: Mapping[str, Any] | None = None
    priority: int = 0
    preemptible: bool = True

    def __new__(cls, *values: Any, **named: Any) -> Self:
        """Note what is given, also where it equals the default."""
        made = super().__new__(cls)
        names = [one.name for one in fields(cls)]
        passed = {**dict(zip(names, values, strict=False)), **named}
        if len(passed) == len(names):  # By dataclasses.replace, which passes those not set, too.
            default = cls()
            passed = {key: one for key, one in passed.items() if one != getattr(default, key)}
        object.__setattr__(made, "given", tuple(passed))
        return made

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        expect(self, "name", str, "a str, or None for one that is made from the script", none=True)
        if self.name is not None:
            check_name("run", self.name)
        expect(self, "storage_path", (str, os.PathLike), "a str, a Path or None", none=True)
        if isinstance(self.storage_path, str) and not self.storage_path.strip():
            raise ConfigError("RunConfig: storage_path='': expected a path or an URL, or None")
        for name, kind in (
            ("failure_config", FailureConfig),
            ("checkpoint_config", CheckpointConfig),
            ("sync_config", SyncConfig),
        ):
            take_default(self, name, kind)
        expect(self, "logging_config", LoggingConfig, "a LoggingConfig, or None", none=True)
        self._check_stop()
        take_int(self, "verbose", "an int, or None", low=0, none=True)
        log_names = self.log_names
        if not all(isinstance(name, str) and name and "/" not in name for name in log_names):
            refuse(self, "log_to_file", "True, the name of a file in the run directory, or a pair")
        take_callbacks(self, "callbacks", UserCallback)
        expect_environment(self, "worker_env")
        what = f"an int, -{PRIORITY_MAX} to {PRIORITY_MAX}"
        take_int(self, "priority", what, low=-PRIORITY_MAX, high=PRIORITY_MAX)
        expect_bool(self, "preemptible")
        if self.worker_runtime_env is not None:
            env = {**worker_env(self.worker_runtime_env), **(self.worker_env or {})}
            object.__setattr__(self, "worker_env", env)
            object.__setattr__(self, "worker_runtime_env", None)
        if self.storage_filesystem is not None:
            if not self.storage_path:
                refuse(self, "storage_path", "a path in storage_filesystem")
            url = url_in(self.storage_filesystem, str(self.storage_path or ""))
            object.__setattr__(self, "storage_path", url)
            object.__setattr__(self, "storage_filesystem", None)
        if isinstance(self.storage_path, str):
            object.__setattr__(self, "storage_path", without_query(self.storage_path))
        if isinstance(self.storage_path, Path) and re.match(r"\w+:/", str(self.storage_path)):
            raise ConfigError(
                f"RunConfig: storage_path={self.storage_path!r}: pathlib takes a slash out of a "
                f"URL; pass it as a str"
            )

    def _check_stop(self) -> None:
        if self.stop is None or callable(self.stop):
            return
        bounds = expect_names(self, "stop", STOPS)
        if not all(is_number(one) or isinstance(one, bool) for one in bounds.values()):
            refuse(self, "stop", STOPS)

    @property
    def log_names(self) -> tuple[str, ...]:
        """Return the names of the files for the workers' output, () for none."""
        given = self.log_to_file
        if isinstance(given, bool):
            return ("stdout",) if given else ()
        return tuple(given) if isinstance(given, (list, tuple)) else (given,)


@dataclass(frozen=True)
class BackendConfig:
    """What a trainer sets up on its workers before the train function runs; here: nothing."""


@dataclass(frozen=True)
class TorchConfig(BackendConfig):
    """How torch.distributed is set up.

    Attributes:
        backend: "gloo", "nccl", or None, the same as "cpu:gloo,cuda:nccl": gloo for tensors on the
            CPU, nccl for those on GPUs, if there are any.
        init_method: "env" or "tcp", of Ray, without effect: the runtime forms groups itself.
        timeout_s: torch.distributed's own timeout in seconds; a backstop, not the detector. Also
            the time in which a worker must have started, at least ten minutes; four hours once the
            job trains, because a worker that joins then prepares in its train function first.
        consistency: of a loop over `train.epochs()`. "bitwise": gradients are added in an order
            that does not depend on the number of workers, so that the weights have the same
            bits whatever happened to the group. "samples": every step has the same samples.
        virtual_local_rank: each worker sees its own GPU only, as cuda:0, and LOCAL_RANK is 0. By
            default it sees all GPUs of the run on its node, and its own is cuda:LOCAL_RANK.
    """

    backend: str | None = None
    init_method: str = "env"
    timeout_s: float = 1800.0
    consistency: str = "bitwise"
    virtual_local_rank: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        if self.init_method not in ("env", "tcp"):
            refuse(self, "init_method", "env or tcp")
        if self.backend == "cpu:gloo,cuda:nccl":
            object.__setattr__(self, "backend", None)
        if self.backend not in (None, "gloo", "nccl"):
            refuse(self, "backend", "gloo or nccl, or cpu:gloo,cuda:nccl")
        if self.consistency not in ("bitwise", "samples"):
            refuse(self, "consistency", "bitwise or samples")
        take_seconds(self, "timeout_s", "seconds, a finite number > 0")


@dataclass(frozen=True)
class DataConfig:
    """How the trainer's datasets reach the workers.

    Attributes:
        datasets_to_split: "all", or the names of those that are split over the workers; every
            worker sees all rows of the others, unless it trains with them in a loop over
            `train.epochs()`.
        execution_options, enable_shard_locality: of Ray, without effect: there is no object store.
            So is `DataConfig.default_ingest_options()`.
        num_feeders: processes that run the datasets' functions ahead of time: a number, or (min,
            max) to begin with min, and have more while training waits for data. They run beside
            each worker, or with `feeder_resources` anywhere in the cluster, for all workers. 0 runs
            the functions in the worker, when it requests a batch.
        feeder_resources: resources of a feeder, such as {"CPU": 1}: then the feeders are placed on
            any nodes as a job of their own, which ends with the run. None: beside each worker.
        shuffle_memory: bytes per worker for rows that are read ahead for shuffling.
    """

    datasets_to_split: str | Sequence[str] = "all"
    execution_options: Any = None
    enable_shard_locality: bool = True
    num_feeders: int | tuple[int, int] = 0
    feeder_resources: Mapping[str, float] | None = None
    shuffle_memory: int = 512 * 1024**2

    def __init_subclass__(cls) -> None:
        """Refuse Ray's way to make the shards: nothing here would call it."""
        if "configure" in vars(cls):
            raise ConfigError(
                f"DataConfig: {cls.__name__}.configure would not be called: each worker reads its "
                f"own rows; expected datasets_to_split, or datasets that are prepared before the "
                f"trainer takes them"
            )

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        names = self.datasets_to_split
        is_list = isinstance(names, (Sequence, Set)) and not isinstance(names, str)
        if names != "all" and not (is_list and all(isinstance(one, str) for one in names)):
            refuse(self, "datasets_to_split", "'all', or a list of names of datasets")
        take_int(self, "shuffle_memory", "bytes, 1 or more", low=1)
        number = self.num_feeders
        bounds = number if isinstance(number, tuple) else (number, number)
        if len(bounds) != 2 or not all(is_whole(bound) for bound in bounds):
            refuse(self, "num_feeders", "an int, or (min, max)")
        low, high = int(bounds[0]), int(bounds[1])
        if not (number == 0 or 1 <= low <= high):
            refuse(self, "num_feeders", "1 <= min <= max, or 0 for none")
        plain = (low, high) if isinstance(number, tuple) else low
        object.__setattr__(self, "num_feeders", plain)
        Resources.of(_expect_amounts(self, "feeder_resources"))

    @staticmethod
    def default_ingest_options() -> Any:
        """Return Ray's options for `execution_options`."""
        from elastic.data.context import ExecutionOptions

        return ExecutionOptions()

    @property
    def feeder_bounds(self) -> tuple[int, int]:
        """Return how many feeders there are at first, and at most."""
        number = self.num_feeders
        return number if isinstance(number, tuple) else (number, number)

    @property
    def has_feeder_job(self) -> bool:
        """Return whether the feeders are a job of their own."""
        return self.feeder_resources is not None and self.num_feeders != 0

    def check_names(self, datasets: Collection[str]) -> None:
        """Raise ConfigError if a name in `datasets_to_split` is none of these."""
        if self.datasets_to_split == "all":
            return
        for name in self.datasets_to_split:
            if name not in datasets:
                known = ", ".join(sorted(datasets)) or "none: datasets={} is empty"
                raise ConfigError(
                    f"DataConfig.datasets_to_split: {name!r} is no dataset of the trainer: "
                    f"expected some of {known}"
                )

    def splits(self, name: str) -> bool:
        """Return whether a dataset is split over the workers."""
        return self.datasets_to_split == "all" or name in self.datasets_to_split


@dataclass(frozen=True)
class TrainRunContext:
    """The run that a callback is called for.

    Attributes:
        run_name: its name.
        run_id: of this attempt: the job's id.
        path: the run directory.
        run_config: the trainer's, as are the next two.
        scaling_config: how many workers, with what.
        train_loop_config: the argument of the train function.
    """

    run_name: str
    run_id: str
    path: str
    run_config: RunConfig
    scaling_config: ScalingConfig
    train_loop_config: Any = None

    def get_run_config(self) -> RunConfig:
        """Return the run's configuration."""
        return self.run_config


class UserCallback:
    """Base class of callbacks in the driver; override the methods that you need."""

    def before_run(self, run_context: TrainRunContext) -> None:
        """Prepare for the reports of a run: it is submitted, or about to begin in this process."""

    def after_run(self, run_context: TrainRunContext, result: Result) -> None:
        """Handle the end of a run; `result.error` is None if it has succeeded.

        Not called where `fit` ends without a result, as after Ctrl-C.
        """

    def after_report(
        self,
        run_context: TrainRunContext,
        metrics: list[dict[str, Any]],
        checkpoint: Checkpoint | None,
    ) -> None:
        """Handle a report that all ranks have made.

        Args:
            run_context: of the run.
            metrics: by rank; {} for a rank that left before it made this report.
            checkpoint: that came with it, once it is committed.
        """

    def after_exception(
        self, run_context: TrainRunContext, worker_exceptions: dict[int, Exception]
    ) -> None:
        """Handle a failure of user code, whether the run survives it or not.

        Args:
            run_context: of the run.
            worker_exceptions: what the worker that failed first raised, by rank.
        """
