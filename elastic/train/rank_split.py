"""How one pass is split by rank: to train in scripts like Ray Train's, and to evaluate.

Rule: a training pass by rank is padded to the same number of samples on every rank, because each
backward call there is a collective. An evaluation pass is split by whole batches, the same that
one process would read: batch k goes to rank k modulo W, each sample once. So the result of a
batch has the same bits at every world size, and ranks may have one batch more or less than
others, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from elastic.core.policy.seeds import derive
from elastic.errors import UsageError
from elastic.worker.data.loader import is_dealt, is_shuffle
from elastic.worker.data.reading import BatchDataset
from elastic.worker.data.sampler_order import OrderedSampler, SamplerOrders
from elastic.worker.data.seeding import EvaluationRequest

KEPT_ARGUMENTS = (
    "batch_size", "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout",
    "worker_init_fn", "multiprocessing_context", "generator", "prefetch_factor",
    "persistent_workers", "pin_memory_device", "in_order",
)  # fmt: skip
"""Arguments of the user's DataLoader that the prepared one keeps: all but dataset and sampler."""


class Order:
    """The order in which one process would read the samples of a pass."""

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        """Inspect the loader's sampler; UsageError if it has no length."""
        sampler: Any = loader.sampler
        self._seed = seed % 2**31
        self._shuffles = is_shuffle(sampler, loader.dataset)
        self._drawn: OrderedSampler | None = None
        if is_dealt(sampler):
            self._size, self._seed = len(loader.dataset), sampler.seed  # type: ignore[arg-type]
        elif self._shuffles or (type(sampler) is SequentialSampler):
            self._size = len(sampler)
        else:
            if not hasattr(sampler, "__len__"):
                raise UsageError(
                    f"prepare_data_loader: the loader's sampler ({type(sampler).__name__}) has no "
                    f"__len__, which the number of steps follows from: give it one, use "
                    f"shuffle=True or False, or deal out by rank and pass add_dist_sampler=False"
                )
            self._drawn = (
                sampler if isinstance(sampler, OrderedSampler) else SamplerOrders(sampler, seed)
            )
            self._size = len(sampler)
        self._reads_batches = isinstance(loader.dataset, BatchDataset)

    def __len__(self) -> int:
        return self._size

    def samples_at(self, epoch: int, first: int, last: int) -> int:
        """Return how many samples these places have: one each, or what the user's batches have."""
        if not self._reads_batches:
            return last - first
        return sum(map(len, self.of(epoch)[first:last]))

    def of(self, epoch: int) -> Sequence[Any]:
        if self._drawn is not None:
            return self._drawn.of(epoch)
        if not self._shuffles:
            return range(self._size)
        generator = torch.Generator().manual_seed(self._seed + epoch)
        order: list[int] = torch.randperm(self._size, generator=generator).tolist()
        return order


class RankSampler(DistributedSampler[Any]):
    """This rank's part of a training pass; `loader.sampler` of a prepared loader from the start.

    Attributes:
        rank, num_replicas: which part of how many; set before each pass.
        epoch: the pass.
    """

    def __init__(
        self, dataset: Any, order: Order, choose: Callable[[int], None], *, drop_last: bool
    ) -> None:
        """Start with the whole pass, as rank 0 of 1; `choose` gets the epoch that a script sets."""
        self.dataset, self.drop_last = dataset, drop_last
        self.rank, self.num_replicas, self.epoch = 0, 1, 0
        self._order, self._choose = order, choose

    def set_epoch(self, epoch: int) -> None:
        """Choose the shuffle of the next pass; see `PreparedLoader.set_epoch`."""
        self._choose(epoch)

    def __iter__(self) -> Iterator[Any]:
        order, each = self._order.of(self.epoch), len(self)
        size, world = len(order), self.num_replicas
        return (order[place % size] for place in range(self.rank, each * world, world))

    def __len__(self) -> int:
        size, world = len(self._order), self.num_replicas
        return size // world if self.drop_last else -(-size // world)


class RankBatches:
    """This rank's batches of an evaluation pass; a batch sampler, or a sampler of samples.

    Attributes:
        rank, world_size: which part of how many; set before each pass.
        epoch: the pass.
        seed: of what is random in the pass, None to let that be.
    """

    def __init__(self, order: Order, size: int | None, *, drop_last: bool) -> None:
        """Start with the whole pass, as rank 0 of 1; without a size samples are not batched."""
        self.rank, self.world_size, self.epoch = 0, 1, 0
        self.seed: int | None = None
        self._order, self._drop_last = order, drop_last
        self._size, self._is_batch = size or 1, size is not None

    def sizes(self) -> dict[int, int]:
        """Return the samples of each of our batches, by its number in the pass."""
        total, size = len(self._order), self._size
        return {
            one: self._order.samples_at(self.epoch, one * size, min(total, (one + 1) * size))
            for one in self._numbers()
        }

    def _numbers(self) -> range:
        total, size = len(self._order), self._size
        number = total // size if self._drop_last else -(-total // size)
        return range(self.rank, number, self.world_size)

    def __iter__(self) -> Iterator[EvaluationRequest]:
        order, size, seed = self._order.of(self.epoch), self._size, self.seed

        def request(one: int) -> EvaluationRequest:
            what = list(order[one * size : (one + 1) * size]) if self._is_batch else order[one]
            return EvaluationRequest(None if seed is None else derive(seed, one), what)

        return map(request, self._numbers())

    def __len__(self) -> int:
        return len(self._numbers())


@dataclass
class Pass:
    """One evaluation pass of this rank.

    Attributes:
        generation: of the group that it was split over.
        sizes: samples of each of our batches that were read, by its number in the pass.
        is_open: it is being read.
    """

    generation: int
    sizes: dict[int, int] = field(default_factory=dict)
    is_open: bool = True


def loader_like(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """Return a loader with the arguments of this one, but for these changes."""
    dataset = changes.pop("dataset", loader.dataset)
    kept = {name: getattr(loader, name) for name in KEPT_ARGUMENTS if hasattr(loader, name)}
    if loader.num_workers == 0:
        # DataLoader refuses these without worker processes, even at their defaults.
        kept.pop("prefetch_factor")
        kept.pop("multiprocessing_context")
    if not kept.get("pin_memory_device"):
        kept.pop("pin_memory_device", None)
    if "batch_sampler" in changes:
        kept.pop("batch_size")
    if "batch_sampler" in changes or {**kept, **changes}["batch_size"] is None:
        kept.pop("drop_last")
    return DataLoader(dataset, **{**kept, **changes})
