"""Datasets in a train function: `train.get_dataset_shard`.

Rule: in a loop over `train.epochs()` a shard yields micro-batches of steps, as a prepared loader
does, the same at every world size. Anywhere else it yields this rank's part of a pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from elastic.data.arguments import OF_PASSES, check_others
from elastic.data.batches import check_format, check_size, to_format
from elastic.data.dataset import Dataset
from elastic.data.iterator import Again, Collate, DataIterator
from elastic.data.kept import table_of_run
from elastic.data.nodes import in_memory, table_of
from elastic.data.rows import LaneOrder, Rows
from elastic.data.table import Table
from elastic.errors import UsageError
from elastic.storage.files import Files
from elastic.train.config import DataConfig
from elastic.train.feeding import FeederSecret, feeders_factory
from elastic.train.session import require_context, require_place, wait_a_moment
from elastic.worker.engine.context import WorkerContext
from elastic.worker.engine.train_call import current_engine, is_in_loop

if TYPE_CHECKING:
    from elastic.train.loaders import PreparedLoader
    from elastic.worker.engine.whole_step import WholeStep

Make = Callable[[Any], Any]
"""Makes of rows what the loop receives."""
TRAIN_DATASET_KEY = "train"
"""Name of the dataset that `get_dataset_shard` returns by default."""
OPTION = "datasets"
"""Name of the option that sends datasets to the workers."""


class NoSuchDataset(UsageError, KeyError):
    """The trainer was given no dataset of this name."""

    __str__ = Exception.__str__  # That of KeyError quotes the message.


@dataclass(frozen=True)
class Given:
    """The datasets of a trainer.

    Attributes:
        config: how they are split.
        datasets: as created by the script, where it runs in each worker.
        tables: by name, where a driver has listed the datasets' contents already.
        secret: of the feeders, where a driver has submitted them as a job of their own.
    """

    config: DataConfig
    datasets: Mapping[str, Dataset] = field(default_factory=dict)
    tables: Mapping[str, Table] = field(default_factory=dict)
    secret: FeederSecret | None = None


def tables_for(
    datasets: Mapping[str, Dataset],
    config: DataConfig,
    run_path: str,
    secret: FeederSecret | None = None,
) -> Given:
    """List the contents of all datasets, and record them with the run.

    DataError if a file cannot be read, or the run was started with other contents.
    """
    run = Files(run_path)
    tables = {
        name: table_of_run(dataset.node, name, run, writes=True)
        for name, dataset in datasets.items()
    }
    given = {name: table for name, table in tables.items() if table}
    return Given(config, tables=given, secret=secret)


_offered: Given | None = None
_shards: dict[str, DatasetShard] = {}
_shards_of: Any = None


@contextlib.contextmanager
def offering(datasets: Mapping[str, Dataset], config: DataConfig) -> Iterator[None]:
    """Make `get_dataset_shard` return these, in this process."""
    global _offered
    _offered = Given(config, datasets=datasets) if datasets else None
    try:
        yield
    finally:
        _offered = None
        for shard in _shards.values():
            shard.close()
        _shards.clear()


def get_dataset_shard(
    dataset_name: str | None = None, state_dict: Mapping[str, Any] | None = None
) -> DatasetShard:
    """Return this worker's shard of a dataset of the trainer.

        shard = train.get_dataset_shard("train")
        for epoch in train.epochs(10):
            for batch in shard.iter_torch_batches(batch_size=32):
                ...

    Args:
        dataset_name: as in `TorchTrainer(datasets={name: ...})`; by default "train".
        state_dict: of `state_dict()`, in a plain loop: the first pass continues that one.

    Raises:
        UsageError: outside a train function.
        NoSuchDataset: the trainer has none of this name; a KeyError, as in Ray.
    """
    global _shards_of
    context = require_context("train.get_dataset_shard")
    given: Given | None = _offered or context.options.get(OPTION)
    name = TRAIN_DATASET_KEY if dataset_name is None else dataset_name
    known = sorted({*given.datasets, *given.tables}) if given is not None else []
    if given is None or name not in known:
        raise NoSuchDataset(
            f"train.get_dataset_shard({name!r}): the trainer has no such dataset: expected one of "
            f"TorchTrainer(datasets={{...}}), which are {', '.join(known) or 'none'}"
        )
    engine = current_engine()
    if _shards_of is not (engine or context.job_id):
        _shards.clear()
        _shards_of = engine or context.job_id
    if name not in _shards:
        _shards[name] = DatasetShard(name, given)
        if engine is not None:
            engine.at_close.callback(_shards[name].close)
    if state_dict is not None:
        _shards[name].load_state_dict(state_dict)
    return _shards[name]


def _table_of(given: Given, name: str) -> Table:
    if name in given.tables:
        return given.tables[name]
    node, context = given.datasets[name].node, require_context("train.get_dataset_shard")
    if not context.run_path:
        return table_of(node, in_memory)
    run = Files(context.run_path)
    while (table := table_of_run(node, name, run, writes=False)) is None:
        place = require_place("train.get_dataset_shard")
        if place.world_rank == 0:
            table = table_of_run(node, name, run, writes=True)
            break
        wait_a_moment(place)
    if table is None:
        raise UsageError(f"dataset {name!r} has no rows")
    return table


class DatasetShard(DataIterator):
    """One dataset of the trainer, as this worker sees it."""

    def __init__(self, name: str, given: Given) -> None:
        self._name, self._config = name, given.config
        self._is_split = given.config.splits(name)
        context = require_context("train.get_dataset_shard")
        super().__init__(
            lambda: _table_of(given, name),
            self._where,
            Dataset,
            max_ranks=context.max_workers,
            feeders=feeders_factory(given.config, given.secret),
            memory=given.config.shuffle_memory,
            pads=True,
        )
        self._prepared: dict[Any, tuple[PreparedLoader, _Latest, Rows]] = {}

    def _where(self) -> tuple[int, int]:
        if not self._is_split:
            return 0, 1
        place = require_place("a dataset shard")
        return place.world_rank, place.world_size

    def iter_torch_batches(
        self,
        *,
        batch_size: int | None = 256,
        dtypes: Any = None,
        device: Any = "auto",
        collate_fn: Callable[[Any], Any] | None = None,
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        global_batch_size: int | None = None,
        weigh: Callable[[Any], Any] | None = None,
        **others: Any,
    ) -> ShardBatches:
        """Return an iterable over batches: dicts of tensors on this worker's device.

        In a loop over `train.epochs()` a batch is a micro-batch: a step takes V of them, which the
        ranks share, so that it has the same rows at any world size. See `prepare_data_loader`.

        Args:
            batch_size: rows of a batch.
            dtypes: a torch.dtype, or one for each column.
            device: the target; "auto" is this worker's own.
            collate_fn: takes a dict of arrays, returns the batch; its tensors go to the device.
            drop_last: leave out the last step, or batch, that is not full.
            local_shuffle_buffer_size: shuffle, in windows of row groups, as after
                `random_shuffle`; the number itself has no effect.
            local_shuffle_seed: seed of that shuffle.
            global_batch_size: rows of a step; by default `batch_size` for each worker of the
                largest group.
            weigh: returns the weight of a micro-batch in its step, such as its tokens.
            others: Ray's, without effect here.
        """
        check_others("iter_torch_batches", others, *OF_PASSES)
        self._shuffle(local_shuffle_buffer_size, local_shuffle_seed)
        size = check_size(batch_size, "iter_torch_batches") or 256
        make = Collate(collate_fn, dtypes, _device_of(device))
        return self._made(make, size, drop_last, global_batch_size, weigh)

    def iter_batches(
        self,
        *,
        batch_size: int | None = 256,
        batch_format: str | None = "default",
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        global_batch_size: int | None = None,
        weigh: Callable[[Any], Any] | None = None,
        **others: Any,
    ) -> ShardBatches:
        """Return an iterable over batches of arrays, a DataFrame or a table.

        The format is "numpy" (the default), "pandas" or "pyarrow"; for all else see
        `iter_torch_batches`.
        """
        check_others("iter_batches", others, *OF_PASSES)
        self._shuffle(local_shuffle_buffer_size, local_shuffle_seed)
        size = check_size(batch_size, "iter_batches") or 256
        make = partial(to_format, name=check_format(batch_format, "iter_batches"))
        return self._made(make, size, drop_last, global_batch_size, weigh)

    def _made(
        self, make: Make, size: int, drop_last: bool, global_batch_size: int | None, weigh: Any
    ) -> ShardBatches:
        return ShardBatches(
            self,
            make,
            size,
            global_batch_size,
            lambda total, weight: self._loader(size, make, drop_last, total, weigh or weight),
            lambda whole: self._batches(size, drop_last=drop_last, whole=whole),
        )

    def _loader(
        self, size: int, make: Make, drop_last: bool, global_size: int | None, weigh: Any
    ) -> PreparedLoader:
        """Return the loader of micro-batches: one for all epochs."""
        from torch.utils.data import DataLoader

        from elastic.train.loaders import num_micro_batches, prepare_data_loader

        key = (size, drop_last, global_size, self._shuffles)
        if key not in self._prepared:
            context = require_context("a dataset shard")
            number = num_micro_batches(context, size, global_size)
            table = self.shuffled_table()
            lanes = table.lanes(number, size, self._memory)
            rows = Rows(table, lanes, feeders=self._feeders)
            collate = _Latest(make)
            loader: Any = DataLoader(
                rows,  # type: ignore[arg-type]
                batch_size=size,
                sampler=LaneOrder(rows),  # type: ignore[arg-type]
                collate_fn=collate,
                drop_last=drop_last,
            )
            prepared = prepare_data_loader(
                loader, move_to_device=False, global_batch_size=number * size, weigh=weigh
            )
            self._prepared[key] = prepared, collate, rows
        found, latest, _ = self._prepared[key]
        latest.make = make
        return found

    def close(self) -> None:
        """Stop the read-ahead."""
        super().close()
        for _, _, rows in self._prepared.values():
            rows.close()
        self._prepared = {}

    def bytes_read(self) -> int:
        """Return the bytes that this process has read from files."""
        return super().bytes_read() + sum(rows.bytes_read for *_, rows in self._prepared.values())


class _Latest:
    """Collates as the newest call of `iter_torch_batches` or `iter_batches` requested."""

    def __init__(self, make: Make) -> None:
        self.make = make

    def __call__(self, batch: Any) -> Any:
        return self.make(batch)


class ShardBatches:
    """The batches of a shard: of steps or by rank, which is decided when a pass begins.

    Attributes:
        batch_size: rows of a batch.
        global_batch_size: rows of a step; None for `batch_size` for each worker.
    """

    def __init__(
        self,
        shard: DatasetShard,
        make: Make,
        batch_size: int,
        global_batch_size: int | None,
        loader: Callable[[int | None, Any], PreparedLoader],
        plain: Callable[[bool], Iterator[Any]],
    ) -> None:
        """Take two sources: a loader for steps of so many rows, and a pass, by rank or of all."""
        self._shard, self._make = shard, make
        self.batch_size, self.global_batch_size = batch_size, global_batch_size
        self._loader, self._plain = loader, plain

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass."""
        context = require_context("a dataset shard")
        if self._is_in_steps():
            return iter(self.loader())
        return self._by_rank(context)

    def _is_in_steps(self) -> bool:
        from elastic.train.loaders import is_trained_with

        engine = current_engine()
        if engine is None or not engine.has_begun:
            return False
        return self._shard._is_split or is_trained_with(engine)

    def _by_rank(self, context: WorkerContext) -> Iterator[Any]:
        for batch in self._plain(False):
            yield self._make(batch)
            if not is_in_loop():
                context.note_step()

    def loader(self, global_batch_size: int | None = None, weigh: Any = None) -> PreparedLoader:
        """Return the loader of the micro-batches of steps; arguments override our own."""
        return self._loader(global_batch_size or self.global_batch_size, weigh)

    def whole(self) -> Again:
        """Return the batches of all rows, on each rank: where every worker evaluates alike."""
        return Again(lambda: map(self._make, self._plain(True)))

    def steps(self) -> Iterator[WholeStep]:
        """Begin a pass in steps; see `train.steps`."""
        return self.loader().steps()

    def steps_per_epoch(self) -> int:
        """Return the optimizer steps of an epoch."""
        return self.loader().steps_per_epoch()


def _device_of(device: Any) -> Any:
    from elastic.train.devices import get_device

    return get_device() if device == "auto" else device
