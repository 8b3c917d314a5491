"""What prepare_data_loader keeps, deals out and refuses; models and batches on their device."""

from __future__ import annotations

import random
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)
from torch.utils.data.distributed import DistributedSampler

from elastic import train
from elastic.errors import UsageError
from elastic.train.rank_split import KEPT_ARGUMENTS
from elastic.train.session import require_place
from elastic.train.torch import (
    PreparedLoader,
    get_device,
    get_devices,
    prepare_data_loader,
    prepare_model,
    prepare_optimizer,
)
from elastic.worker.data.moving import moved
from elastic.worker.process.local import LocalRun, local_context

DATA = TensorDataset(torch.arange(10))


@pytest.fixture
def _inside() -> Iterator[None]:
    with local_context(LocalRun(job_name="here")):
        yield


def seen(loader: PreparedLoader) -> list[int]:
    return [int(value) for (batch,) in loader for value in batch]


def collate(samples: list[Any]) -> Any:
    return torch.utils.data.default_collate(samples)


def begin(_: int) -> None:
    torch.manual_seed(0)


class Counting(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class MySequence(SequentialSampler):
    pass


@pytest.mark.usefixtures("_inside")
@pytest.mark.parametrize(
    "kept",
    [
        {"batch_size": 3, "drop_last": True, "collate_fn": collate},
        {"batch_size": None},
        {"generator": torch.Generator().manual_seed(3), "shuffle": True},
        {
            "num_workers": 1, "worker_init_fn": begin, "timeout": 5.0, "prefetch_factor": 4,
            "persistent_workers": True, "multiprocessing_context": "spawn", "in_order": False,
        },
        {"num_workers": 2},
    ],
)  # fmt: skip
def test_every_argument_of_the_loader_is_kept(kept: dict[str, Any]) -> None:
    plain = DataLoader(DATA, **kept)
    prepared = prepare_data_loader(plain)
    for name in KEPT_ARGUMENTS:
        assert getattr(prepared, name, None) == getattr(plain, name, None), name
    assert prepared.dataset is DATA


def test_the_kept_arguments_are_all_that_a_loader_of_this_torch_has() -> None:
    arguments = set(DataLoader.__init__.__code__.co_varnames)
    arguments &= set(vars(DataLoader(DATA))) | {"multiprocessing_context"}
    assert arguments - {"dataset", "sampler", "batch_sampler", "self", "loop"} <= set(
        KEPT_ARGUMENTS
    )


@pytest.mark.usefixtures("_inside")
def test_passes_are_shuffled_anew_and_set_epoch_chooses_one() -> None:
    loader = prepare_data_loader(DataLoader(DATA, shuffle=True, batch_size=2))
    assert len(loader) == 5
    first, second = seen(loader), seen(loader)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    loader.set_epoch(0)
    assert seen(loader) == first
    assert seen(loader) == second
    loader.set_epoch(1)
    assert seen(loader) == second
    other = DataLoader(DATA, shuffle=True, generator=torch.Generator().manual_seed(5))
    assert seen(prepare_data_loader(other)) != first


class Weighted(DistributedSampler[Any]):
    """As libraries make of a sampler for one process one for each rank."""

    def __iter__(self) -> Iterator[Any]:
        return iter([3, 3, 3, 3, 3])


class Told(BatchSampler):
    """As libraries have one that learns of the epoch, and batches as torch's."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Filtering(DataLoader[Any]):
    """As libraries of graphs do more with a batch than collate it."""

    def __iter__(self) -> Any:
        return (batch for batch in super().__iter__() if len(batch))


@pytest.mark.usefixtures("_inside")
@pytest.mark.parametrize(
    ("loader", "says"),
    [
        (DataLoader(DATA, sampler=iter([1, 2])), "sampler .list_iterator. has no __len__"),
        (DataLoader(DATA, batch_sampler=iter([[1, 2]])), "sampler .list_iterator. has no __len__"),
        ([1, 2], "a list"),
        (
            DataLoader(DATA, sampler=Weighted(DATA, 2, 0)),
            "sampler .Weighted. is a DistributedSampler with an order of its own",
        ),
        (Filtering(DATA), "Filtering has its own __iter__, which would not be called"),
    ],
)
def test_what_cannot_be_dealt_out_by_guess_is_refused(loader: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        prepare_data_loader(loader)


@pytest.mark.usefixtures("_inside")
def test_the_sampler_of_a_prepared_loader_is_told_of_epochs_from_the_start() -> None:
    loader = prepare_data_loader(DataLoader(DATA, shuffle=True, batch_size=2))
    loader.sampler.set_epoch(5)  # As in Ray Train's guides, before the first pass too.
    fifth = seen(loader)
    assert isinstance(loader.sampler, DistributedSampler)
    loader.sampler.set_epoch(0)
    assert seen(loader) != fifth
    loader.sampler.set_epoch(5)
    assert seen(loader) == fifth


@pytest.mark.usefixtures("_inside")
@pytest.mark.parametrize(
    ("sampler", "ids"),
    [
        (SubsetRandomSampler([1, 2]), [1, 2]),
        (RandomSampler(DATA, num_samples=3), None),
        (MySequence(DATA), list(range(10))),
        ([4, 2, 2], [2, 2, 4]),
        (DistributedSampler(DATA, 4, 3), list(range(10))),
    ],
)
@pytest.mark.parametrize("evaluates", [False, True])
def test_samplers_of_scripts_own_are_dealt_out(sampler: Any, ids: Any, evaluates: bool) -> None:
    loader = prepare_data_loader(DataLoader(DATA, sampler=sampler, batch_size=4))
    with torch.set_grad_enabled(not evaluates):
        found = seen(loader)
    assert sorted(found) == ids or (ids is None and len(found) == 3)


def drawn(samples: list[Any]) -> list[Any]:
    """Collate as what masks words does: by random numbers."""
    return [*samples, torch.rand(()).item(), random.random(), float(np.random.rand())]


@pytest.mark.usefixtures("_inside")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_of_an_evaluation_draws_the_same_at_every_number_of_ranks(num_workers: int) -> None:
    """A process of the loader reads those of one rank."""
    plain = DataLoader(range(10), batch_size=2, num_workers=num_workers, collate_fn=drawn)  # type: ignore[arg-type]
    loader, here = prepare_data_loader(plain), require_place("the test")

    def of(rank: int, size: int) -> list[Any]:
        batches, whole = loader._by_whole_batches(replace(here, world_rank=rank, world_size=size))
        batches.seed = 5
        return list(whole)

    alone = of(0, 1)
    assert len({batch[2] for batch in alone}) == len(alone)
    assert of(0, 2) == alone[::2]
    assert of(1, 2) == alone[1::2]


@pytest.mark.usefixtures("_inside")
@pytest.mark.parametrize("kind", [BatchSampler, Told])
def test_torchs_batch_sampler_is_taken_as_the_sizes_that_it_has(kind: type[BatchSampler]) -> None:
    batches = kind(SequentialSampler(DATA), 4, drop_last=True)
    loader = prepare_data_loader(DataLoader(DATA, batch_sampler=batches))
    assert (loader.batch_size, loader.drop_last) == (4, True)
    assert seen(loader) == list(range(8))


@pytest.mark.usefixtures("_inside")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_of_a_scripts_own_are_dealt_out_whole(num_workers: int) -> None:
    batches = [[3, 1], [0], [9, 8, 7], [5]]
    loader = DataLoader(DATA, batch_sampler=batches, num_workers=num_workers, collate_fn=collate)
    prepared, here = prepare_data_loader(loader), require_place("the test")
    assert (prepared.dataset, prepared.batch_size) == (DATA, None)
    assert (prepared.batch_sampler, prepared.collate_fn) == (batches, collate)
    assert [value.tolist() for (value,) in prepared] == batches
    sizes = []
    for rank in range(3):
        mine, whole = prepared._by_whole_batches(replace(here, world_rank=rank, world_size=3))
        assert [value.tolist() for (value,) in whole] == batches[rank::3]
        sizes.append(mine.sizes())
    assert sizes == [{0: 2, 3: 1}, {1: 1}, {2: 3}]


@pytest.mark.usefixtures("_inside")
def test_a_loader_that_deals_out_itself_is_left_as_it_is() -> None:
    own = DataLoader(DATA, sampler=SubsetRandomSampler([3]))
    assert prepare_data_loader(own, add_dist_sampler=False).sampler is own.sampler
    sampler = DistributedSampler(DATA, 1, 0)
    prepared = prepare_data_loader(DataLoader(DATA, sampler=sampler), add_dist_sampler=False)
    sampler.set_epoch(7)
    seen(prepared)
    assert sampler.epoch == 7
    prepared.set_epoch(3)
    seen(prepared)
    assert sampler.epoch == 3
    assert list(prepare_data_loader(DataLoader(Counting(), batch_size=None))) == [0, 1, 2, 3]


def test_outside_a_train_function_nothing_is_prepared() -> None:
    for call in (lambda: prepare_data_loader(DataLoader(DATA)), get_device, get_devices):
        with pytest.raises(UsageError, match="outside a train function"):
            call()
    with pytest.raises(UsageError, match="outside a train function"):
        prepare_model(nn.Linear(1, 1))


def test_every_tensor_of_a_batch_is_moved_and_nothing_else() -> None:
    pair = namedtuple("pair", ["x", "name"])
    packed = nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    batch = {"a": [torch.ones(1), (torch.ones(1), 5)], "b": pair(torch.ones(1), "n"), "c": packed}
    found = moved(batch, torch.device("meta"), non_blocking=True)
    assert found["a"][0].is_meta
    assert found["a"][1][0].is_meta
    assert found["a"][1][1] == 5
    assert isinstance(found["b"], pair)
    assert found["b"].x.is_meta
    assert found["b"].name == "n"
    assert found["c"].data.is_meta
    assert not found["c"].batch_sizes.is_meta


@pytest.mark.usefixtures("_inside")
def test_a_model_is_wrapped_at_world_size_one_too() -> None:
    assert dist.get_world_size() == 1
    inner = nn.Linear(2, 2)
    model = prepare_model(inner)
    assert model.module is inner
    assert list(model.state_dict()) == ["module.weight", "module.bias"]
    model(torch.ones(1, 2)).sum().backward()
    assert inner.weight.grad is not None
    assert prepare_model(inner, parallel_strategy=None) is inner
    assert prepare_model(nn.DataParallel(inner)).module is inner


@pytest.mark.usefixtures("_inside")
def test_a_model_in_fsdps_first_version_is_refused() -> None:
    model = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(model)  # All of it needs an accelerator.
    with pytest.raises(UsageError, match=r"FullyShardedDataParallel.*parallel_strategy='fsdp'"):
        prepare_model(model)


@pytest.mark.usefixtures("_inside")
def test_an_unknown_strategy_and_options_of_another_fsdp_are_refused() -> None:
    with pytest.raises(UsageError, match=r"'zero'.*expected 'ddp', 'fsdp' or None"):
        prepare_model(nn.Linear(1, 1), parallel_strategy="zero")
    options = {"auto_wrap_policy": None}
    with pytest.raises(UsageError, match=r"auto_wrap_policy: expected those of .*fully_shard"):
        prepare_model(nn.Linear(1, 1), parallel_strategy="fsdp", parallel_strategy_kwargs=options)


@pytest.mark.usefixtures("_inside")
def test_a_sharded_model_is_the_same_object_with_its_own_names() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = prepare_model(
        inner, parallel_strategy="fsdp", parallel_strategy_kwargs={"modules": [nn.Linear]}
    )
    assert model is inner
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert list(model.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert prepare_model(model) is inner


@pytest.mark.usefixtures("_inside")
def test_a_loop_over_a_sharded_model_begins_beside_one_that_is_not() -> None:
    model, teacher = prepare_model(nn.Linear(2, 2), parallel_strategy="fsdp"), nn.Linear(2, 2)
    prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert next(train.epochs(1)) == 0
    assert teacher.weight.shape == model.weight.shape
