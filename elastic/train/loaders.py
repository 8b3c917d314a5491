"""Loaders that split the data over the group: by micro-batches of a step, or by rank.

Rule: inside a loop over `train.epochs()` a prepared loader yields micro-batches of steps, which
are the same at every world size. While nothing is trained (no gradients; in that loop also if the
model is in evaluation mode) it yields this rank's whole batches of one pass, each sample once.
Anywhere else it yields this rank's share of one pass, padded to equal size, as in Ray Train.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from elastic.core.policy.seeds import derive
from elastic.core.policy.streams import StreamCut
from elastic.core.telemetry import EVAL
from elastic.errors import UsageError
from elastic.train.config_checks import is_whole
from elastic.train.devices import get_device
from elastic.train.evaluating import begin_pass, forget_pass
from elastic.train.rank_split import Order, Pass, RankBatches, RankSampler, loader_like
from elastic.train.session import require_context, require_engine, require_place
from elastic.worker.data.loader import MicroBatchLoader, Weigh, is_plain, is_torchdatas
from elastic.worker.data.moving import moved
from elastic.worker.data.randomness import RandomStates, seed_everything, seeded
from elastic.worker.data.reading import BatchCollate, BatchDataset
from elastic.worker.data.seeding import EvaluationDataset, LoaderWorkerInit
from elastic.worker.data.streams import MicroBatches, StreamLoader
from elastic.worker.engine.context import WorkerContext
from elastic.worker.engine.prepared_optimizers import is_training
from elastic.worker.engine.step_engine import StepEngine
from elastic.worker.engine.train_call import current_engine, is_in_loop
from elastic.worker.engine.whole_step import WholeStep


def prepare_data_loader(
    data_loader: DataLoader[Any],
    add_dist_sampler: bool = True,
    move_to_device: bool = True,
    auto_transfer: bool = True,
    *,
    global_batch_size: int | None = None,
    batches_per_step: int | None = None,
    streams: str | None = None,
    weigh: Weigh | None = None,
) -> PreparedLoader:
    """Prepare a loader to yield each rank's part of the data, on its device.

    Inside the loop over `train.epochs()` a step takes `global_batch_size` samples, at any world
    size: V micro-batches of the loader's `batch_size`, which the ranks share. Every sample is
    seen once in an epoch; nothing is padded. All arguments of the loader are kept (Ray drops
    several). Shuffling is seeded by the loader's generator; each epoch shuffles anew.

    An iterable dataset is read as V streams: micro-batch v of every step is the next samples of
    stream v, on any rank. The epoch ends with the last step that has any sample (with `drop_last`
    before the first that is not full). How it becomes V streams:

    - it has `shard(num_shards=, index=)`, as Hugging Face's: stream v is its shard v of V;
    - `streams="worker"`: it shards itself by `torch.utils.data.get_worker_info()`, which returns
      worker v of V;
    - any other: it is read whole by every rank, as by one worker, and stream v is its samples
      v, v + V, v + 2 V, ... This is right for every dataset, and reads all data once for each
      rank, in one of its loader's processes.

    A rank that takes over a stream in the middle of an epoch continues from a snapshot of its
    `state_dict`, where there is one, and otherwise skips the samples before its position. So the
    dataset must yield the same samples whenever it is read, except for what it draws from torch's,
    NumPy's and Python's own generators, which are seeded for each sample; its
    `set_epoch(epoch)` is called if it has one.

    While nothing is trained, under `torch.no_grad()`, batch k of those that one process would read
    goes to rank k modulo W: each sample is seen once, and a rank may have one batch less than
    others, or none, so collectives must come after the loop; see `train.gather_for_metrics`.

    Outside of that loop training data is split by rank, as in Ray Train: if it does not divide
    evenly, some samples are seen twice. An iterable dataset is left as it is there: every rank
    sees all of it, unless it shards itself by rank.

    Any sampler that has a length is kept: it provides the order of each epoch, with all
    generators seeded for that, so that every rank gets the same. A DistributedSampler is replaced.
    A batch sampler is kept, too, as one that puts texts of like length together: each batch is a
    micro-batch, and weighs in its step by its samples. It knows nothing of ranks.

    Args:
        data_loader: as for one process; its `batch_size` is that of a micro-batch.
        add_dist_sampler: False if the loader splits the data itself.
        move_to_device: move tensors in a batch (also inside lists, tuples, dicts) to the device;
            anything else is left where it is.
        auto_transfer: copy while the step before still runs, if the memory is pinned.
        global_batch_size: samples of a step, a multiple of `batch_size`; by default one
            micro-batch for each worker of the largest group.
        batches_per_step: the same as a number of the loader's batches.
        streams: how an iterable dataset becomes streams: "shard", "worker" or "count"; by
            default "shard" if it has that method, "count" otherwise.
        weigh: called with a micro-batch, as the loader yields it, returns its weight in the mean
            over its step, 0 or more. For a loss that is a mean over tokens it is their number,
            `lambda batch: (batch["labels"] != -100).sum()`: then gradients and logged values of
            padded or packed text are those of one process that takes the mean over all tokens of
            the step. By default the weight is the number of samples.

    Raises:
        UsageError: the loader has a sampler without length; it is no DataLoader, or one that
            iterates otherwise; or the global batch does not fit.
    """
    context = require_context("prepare_data_loader")
    if not isinstance(data_loader, DataLoader):
        raise UsageError(
            f"prepare_data_loader: expected a torch.utils.data.DataLoader that is not prepared yet,"
            f" got a {type(data_loader).__name__}"
        )
    if add_dist_sampler:
        _check_plain(data_loader)
    is_iterable = isinstance(data_loader.dataset, IterableDataset)
    size = data_loader.batch_size
    if size is None and data_loader.batch_sampler is not None and add_dist_sampler:
        data_loader, size = _without_batch_sampler(data_loader)
    cut = _cut_of(streams, is_iterable)
    number = num_micro_batches(context, size, global_batch_size, batches_per_step)
    return PreparedLoader(
        data_loader,
        get_device() if move_to_device else None,
        non_blocking=auto_transfer,
        deals=add_dist_sampler and not is_iterable,
        num_micro_batches=number,
        streams=cut if is_iterable and add_dist_sampler else None,
        weigh=weigh,
    )


def _without_batch_sampler(loader: DataLoader[Any]) -> tuple[DataLoader[Any], int | None]:
    """Return an equivalent loader with a sampler, and the samples of a batch, None if they vary."""
    batches: Any = loader.batch_sampler
    kind = type(batches)
    methods = (getattr(kind, "__iter__", None), getattr(kind, "__len__", None))
    # Libraries add a `set_epoch` to torch's own, and change nothing else.
    if is_plain(batches, BatchSampler) or methods == (BatchSampler.__iter__, BatchSampler.__len__):
        size = batches.batch_size
        return loader_like(
            loader, sampler=batches.sampler, batch_size=size, drop_last=batches.drop_last
        ), size
    return loader_like(
        loader,
        dataset=BatchDataset(loader.dataset),
        collate_fn=BatchCollate(loader.collate_fn),
        sampler=batches,
        batch_size=1,
    ), None


def _check_plain(loader: DataLoader[Any]) -> None:
    """Refuse a loader that does more in its iteration than torch's, which is read in its place."""
    kind = type(loader)
    if is_torchdatas(kind):
        return
    for name in ("__iter__", "_get_iterator"):
        if getattr(kind, name) is not getattr(DataLoader, name):
            raise UsageError(
                f"prepare_data_loader: {kind.__name__} has its own {name}, which would not be "
                f"called, since its samples are read in another order and number: do in the "
                f"dataset or the collate_fn what it does there, and pass a DataLoader"
            )


def _cut_of(streams: str | None, is_iterable: bool) -> StreamCut | str:
    """Return how streams are cut, "" to choose a way that is always right.

    Raises:
        UsageError: the way is unknown, or the dataset is not iterable.
    """
    names = [one.value for one in StreamCut]
    if streams is not None and (streams not in names or not is_iterable):
        what = "the dataset is none to be iterated over" if not is_iterable else "no such way"
        raise UsageError(
            f"prepare_data_loader(streams={streams!r}): {what}; expected None, or for an "
            f"IterableDataset one of {', '.join(names)}"
        )
    return StreamCut(streams) if streams is not None else ""


def num_micro_batches(
    context: WorkerContext,
    size: int | None,
    global_batch_size: int | None,
    batches_per_step: int | None = None,
) -> int:
    """Return V, the micro-batches of a step.

    Args:
        context: has the size of the largest group.
        size: samples of a micro-batch, None if the loader has no batch size.
        global_batch_size: samples of a step.
        batches_per_step: the same in micro-batches; both are None for the default.

    Raises:
        UsageError: the global batch size is no such multiple, or is too small; or both are given.
    """
    least = context.max_workers
    if batches_per_step is not None:
        if global_batch_size is not None or not is_whole(batches_per_step):
            raise UsageError(
                f"prepare_data_loader(batches_per_step={batches_per_step!r}): expected an int, "
                f"and no global_batch_size beside it"
            )
        if batches_per_step < least:
            raise UsageError(
                f"prepare_data_loader(batches_per_step={batches_per_step}): expected at least "
                f"{least}, one batch for each of at most {least} workers"
            )
        return batches_per_step
    if global_batch_size is None:
        return least
    if not is_whole(global_batch_size):
        raise UsageError(
            f"prepare_data_loader(global_batch_size={global_batch_size!r}): expected an int, the "
            f"samples of a step"
        )
    if size is None:
        raise UsageError(
            f"prepare_data_loader(global_batch_size={global_batch_size}): the loader has no "
            f"batch_size, which is that of a micro-batch: leave global_batch_size out, and a step "
            f"takes a batch for each of at most {least} workers"
        )
    number, rest = divmod(global_batch_size, size)
    if rest or number < least:
        raise UsageError(
            f"prepare_data_loader(global_batch_size={global_batch_size}): expected a multiple of "
            f"the loader's batch_size={size}, and at least {size * least}, one micro-batch for "
            f"each of at most {least} workers; use a smaller batch_size, or fewer workers"
        )
    return number


class PreparedLoader:
    """A DataLoader that yields this rank's batches on its device.

    Everything else (`dataset`, `batch_size`, `collate_fn`, ...) is the loader's. `sampler` has
    `set_epoch`, as scripts for Ray Train and torchrun call it.

    Attributes:
        evaluated: the newest evaluation pass, None if there was none.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        device: torch.device | None,
        *,
        non_blocking: bool = True,
        deals: bool = True,
        num_micro_batches: int = 1,
        streams: StreamCut | str | None = None,
        weigh: Weigh | None = None,
    ) -> None:
        """Wrap a loader.

        Args:
            loader: the user's.
            device: where to move batches, None to leave them.
            non_blocking: do not wait for copies out of pinned memory.
            deals: split the samples over the ranks; otherwise the loader does so itself.
            num_micro_batches: V, of a step.
            streams: how an iterable dataset is cut into streams, "" to choose; None for others.
            weigh: returns the weight of a micro-batch in its step.
        """
        self._weigh = weigh
        self._streams = streams
        self._users = loader
        self._device = device
        self._non_blocking = non_blocking
        self._deals = deals
        self._num_micro_batches = num_micro_batches
        # Batches of this rank that a script was told of, while no optimizer was prepared.
        self._length: int | None = None
        # Our own shuffle is seeded from the first pass on; the user's once `set_epoch` is called.
        self._epoch = 0 if deals else None
        self._by_step: MicroBatches | None = None
        self._loader = loader
        # What scripts see of a loader with a batch sampler of their own.
        self._shown: dict[str, Any] = {}
        if isinstance(loader.dataset, BatchDataset):
            collate: Any = loader.collate_fn
            self._shown = {
                "dataset": loader.dataset.dataset,
                "collate_fn": collate.collate,
                "batch_sampler": loader.sampler,
                "batch_size": None,
                "worker_init_fn": loader.worker_init_fn,
            }
        self._whole: tuple[RankBatches, DataLoader[Any]] | None = None
        self._sampler: RankSampler | None = None
        self.evaluated: Pass | None = None
        if deals:  # A loader that cannot be split is refused at once.
            self._order = Order(loader, _seed_of(loader, 0))
            self._sampler = RankSampler(
                loader.dataset, self._order, self._chosen(), drop_last=loader.drop_last
            )
            # Of a loader with such a sampler processes are to know the user's dataset.
            init = LoaderWorkerInit(loader.worker_init_fn) if self._shown else loader.worker_init_fn
            self._loader = loader_like(loader, sampler=self._sampler, worker_init_fn=init)

    def _chosen(self) -> Callable[[int], None]:
        """Return what a sampler calls for `set_epoch`; it does not keep this loader alive."""
        mine = weakref.WeakMethod(self.set_epoch)

        def choose(epoch: int) -> None:
            if (set_epoch := mine()) is not None:
                set_epoch(epoch)

        return choose

    def set_epoch(self, epoch: int) -> None:
        """Choose the shuffle of the next pass; those after it count on from there.

        Without effect inside a loop over `train.epochs()`, which chooses it.
        """
        self._epoch = epoch
        if self._sampler is not None:
            self._sampler.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass: of micro-batches, of evaluation or by rank; see the module's rule."""
        require_context("a prepared loader")
        engine = current_engine()
        if engine is not None and engine.has_begun and is_trained_with(engine):
            return self._moved(engine.micro_batches(self._begin_pass(engine)))
        # Inside that loop a pass without training is an evaluation. Elsewhere only disabled
        # gradients show one: DistributedDataParallel still syncs all ranks in evaluation mode.
        evaluates = (engine is not None and engine.has_begun) or not torch.is_grad_enabled()
        place = require_place("a prepared loader")
        if evaluates and self._deals:
            return self._moved(self._evaluate(place))
        return self._moved(self._pass_by_rank(place))

    def steps(self) -> Iterator[WholeStep]:
        """Begin a pass in steps; see `train.steps`."""
        require_context("train.steps")
        engine = current_engine()
        if engine is None or not engine.has_begun:
            raise UsageError(
                "train.steps: outside the loop over train.epochs(): write "
                "'for epoch in train.epochs(n): for step in train.steps(loader): ...'"
            )
        return engine.steps(self._begin_pass(engine), self._on_device)

    def steps_per_epoch(self) -> int:
        """Return the optimizer steps of an epoch; 0 if that is not known before its end."""
        engine = require_engine("steps_per_epoch")
        return self._micro_batches(engine).steps_of(engine.cursor.epoch)

    def _moved(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            yield self._on_device(batch)

    def _on_device(self, batch: Any) -> Any:
        if self._device is None:
            return batch
        return moved(batch, self._device, non_blocking=self._non_blocking)

    def _begin_pass(self, engine: StepEngine) -> MicroBatches:
        loader = self._micro_batches(engine)
        loader.refresh(engine.cursor.epoch)
        steps = loader.steps_of(engine.cursor.epoch)
        if self._length not in (None, steps):
            raise UsageError(
                f"len(loader) was {self._length}, the batches of this rank, because it was asked "
                f"before an optimizer was prepared, and an epoch has {steps} steps: call "
                f"prepare_optimizer before len(loader), so that a schedule that is made of it does "
                f"not depend on the number of workers"
            )
        return loader

    def _micro_batches(self, engine: StepEngine) -> MicroBatches:
        if self._by_step is None:
            seed, number = _seed_of(self._users, engine.options.seed), self._num_micro_batches
            if self._streams is not None:
                self._by_step = StreamLoader(
                    self._users,
                    num_micro_batches=number,
                    seed=seed,
                    cut=self._streams if isinstance(self._streams, StreamCut) else None,
                    book=engine.run.streams,
                    weigh=self._weigh,
                )
            elif self._deals:
                self._by_step = MicroBatchLoader(
                    self._users, num_micro_batches=number, seed=seed, weigh=self._weigh
                )
            else:
                raise UsageError(
                    "a loader that deals its data out by itself (add_dist_sampler=False) cannot be "
                    "read in a loop over train.epochs(), which deals it out by steps: leave "
                    "add_dist_sampler out, or write 'for epoch in range(n)'"
                )
            # A loader of one epoch ends with it, and not only with the run.
            end = weakref.finalize(self, self._by_step.close)
            end.atexit = False
            engine.at_close.callback(end)
        return self._by_step

    def _pass_by_rank(self, context: WorkerContext) -> Iterator[Any]:
        """Yield this rank's share of one pass; each completed iteration counts for telemetry."""
        epoch, sampler = self._next_epoch(), self._loader.sampler
        self.evaluated = None
        forget_pass()
        if self._sampler is not None:
            self._deal_by_rank(context)
            self._sampler.epoch = epoch
        elif self._epoch is not None and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        for batch in self._loader:
            yield batch
            if not is_in_loop():
                context.note_step()

    def _evaluate(self, context: WorkerContext) -> Iterator[Any]:
        """Yield this rank's batches of one pass, each sample once."""
        batches, loader = self._by_whole_batches(context)
        engine, seed = current_engine(), None
        if engine is not None and engine.state_survives_here:
            # By the place in the run: a worker that has joined has counted other passes.
            batches.epoch = engine.cursor.epoch
            seed = engine.evaluation_seed(_seed_of(self._users, engine.options.seed))
        else:
            batches.epoch = self._next_epoch()
        batches.seed = seed
        sizes = batches.sizes()
        read = self.evaluated = begin_pass(context.generation)
        counts = engine is None or not engine.has_begun
        before = context.timing.switch(EVAL)
        try:
            for number, batch in self._read(loader, list(sizes), seed, engine):
                read.sizes[number] = sizes[number]
                yield batch
                if counts:
                    context.note_step()
        finally:
            read.is_open = False
            context.timing.switch(before)

    def _read(
        self,
        loader: DataLoader[Any],
        numbers: Sequence[int],
        seed: int | None,
        engine: StepEngine | None,
    ) -> Iterator[tuple[int, Any]]:
        """Yield batches with their numbers, by which what each of them draws is seeded.

        Between steps, what the loop's body draws for a batch is seeded, too, and all generators go
        on as before afterwards. Within a step the body's draws are training's own.
        """
        if seed is None or engine is None:
            yield from zip(numbers, loader, strict=True)
            return
        place, before = engine.iteration(), RandomStates()

        def is_between_steps() -> bool:
            return engine.runs_after_step() and engine.iteration() == place

        try:
            with seeded(seed):
                batches = iter(loader)
            for number in numbers:
                if is_between_steps():
                    seed_everything(derive(seed, number))
                    batch = next(batches)
                else:
                    with seeded(derive(seed, number)):
                        batch = next(batches)
                yield number, batch
        finally:
            if is_between_steps():
                before.restore()

    def _next_epoch(self) -> int:
        """Return the number of the pass that begins, and advance the count."""
        epoch = self._epoch or 0
        if self._epoch is not None:
            self._epoch += 1
        return epoch

    def _by_whole_batches(self, context: WorkerContext) -> tuple[RankBatches, DataLoader[Any]]:
        """Return our batches of an evaluation, and the loader that reads them."""
        if self._whole is None:
            size = self._users.batch_size
            batches = RankBatches(self._order, size, drop_last=self._users.drop_last)
            loader = loader_like(
                self._users,
                dataset=EvaluationDataset(self._users.dataset),
                worker_init_fn=LoaderWorkerInit(self._users.worker_init_fn),
                **{"sampler" if size is None else "batch_sampler": batches},
            )
            self._whole = batches, loader
        batches, loader = self._whole
        batches.rank, batches.world_size = context.world_rank, context.world_size
        return batches, loader

    def _deal_by_rank(self, context: WorkerContext) -> None:
        if self._sampler is not None:
            self._sampler.rank = context.world_rank
            self._sampler.num_replicas = context.world_size

    def __len__(self) -> int:
        """Return the steps of an epoch if an optimizer was prepared, else this rank's batches.

        Under `torch.no_grad()`, and for a loader that was used only to evaluate, this rank's
        batches of an evaluation.
        """
        require_context("len of a prepared loader")
        evaluates = self.evaluated is not None and self._by_step is None
        if self._deals and (evaluates or not torch.is_grad_enabled()):
            return len(self._by_whole_batches(require_place("len of a prepared loader"))[0])
        engine = current_engine()
        if engine is not None and engine.state.optimizers and self._deals:
            return self._micro_batches(engine).steps_of(engine.cursor.epoch)
        if engine is not None and engine.state.optimizers and self._streams is not None:
            raise TypeError(
                "the steps of an epoch over an iterable dataset are known once it is over, so that "
                "its prepared loader has no len(); count steps by train.get_context().get_step()"
            )
        if self._deals:
            self._deal_by_rank(require_place("len of a prepared loader"))
        batches = len(self._loader)
        self._length = batches if self._deals else None
        return batches

    def __getattr__(self, name: str) -> Any:
        """Pass everything else on to the loader."""
        if name.startswith("__"):
            raise AttributeError(name)
        return self._shown[name] if name in self._shown else getattr(self._loader, name)


def is_trained_with(engine: StepEngine) -> bool:
    """Return whether batches read now are for training, rather than for evaluation."""
    models = engine.state.models
    return torch.is_grad_enabled() and (not models or any(is_training(one) for one in models))


def _seed_of(loader: DataLoader[Any], default: int) -> int:
    return loader.generator.initial_seed() if loader.generator is not None else default
