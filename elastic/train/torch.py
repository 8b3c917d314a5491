"""What PyTorch scripts call: the trainer, and the preparation of models and loaders.

Shaped like ray.train.torch. Rule: what a script gets back behaves the same at every world size,
one included, because the world size changes while the script runs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)
from torch.utils.data.distributed import DistributedSampler

from elastic.errors import UsageError
from elastic.train.config import TorchConfig
from elastic.train.session import require_context
from elastic.train.trainer import TorchTrainer

__all__ = [
    "PreparedLoader",
    "TorchConfig",
    "TorchTrainer",
    "enable_reproducibility",
    "get_device",
    "get_devices",
    "prepare_data_loader",
    "prepare_model",
]

KEPT_ARGUMENTS = (
    "batch_size", "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout",
    "worker_init_fn", "multiprocessing_context", "generator", "prefetch_factor",
    "persistent_workers", "pin_memory_device", "in_order",
)  # fmt: skip
"""Arguments of the user's DataLoader that the prepared one keeps: all but dataset and sampler."""


def get_device() -> torch.device:
    """Return this worker's device: its GPU, or the CPU if it has none.

    Raises:
        UsageError: called outside a train function.
    """
    return get_devices()[0]


def get_devices() -> list[torch.device]:
    """Return all devices of this worker; a worker with several GPUs sees them as cuda:0, ...

    Raises:
        UsageError: called outside a train function.
    """
    context = require_context("get_devices")
    device = torch.device(context.device)
    if device.type != "cuda":
        return [device]
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def enable_reproducibility(seed: int = 0) -> None:
    """Seed Python, NumPy and torch, and let torch choose deterministic kernels only.

    Args:
        seed: the same on all ranks; 0 <= seed < 2**32.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def prepare_model(
    model: nn.Module,
    move_to_device: bool = True,
    parallel_strategy: str | None = "ddp",
    parallel_strategy_kwargs: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Move a model to this worker's device and wrap it for the group.

    The model is wrapped at every world size, so that `model.module` and the keys of
    `state_dict()` are the same before and after the group changed its size.

    Args:
        model: the same on all ranks; rank 0's values are sent to the others.
        move_to_device: False if it is where it belongs.
        parallel_strategy: "ddp", "fsdp" (GPUs only) or None for no wrapper.
        parallel_strategy_kwargs: passed to the wrapper.

    Raises:
        UsageError: unknown strategy, or FSDP without a GPU.
    """
    require_context("prepare_model")
    device = get_device()
    if move_to_device:
        model = model.to(device)
    kwargs = dict(parallel_strategy_kwargs or {})
    if parallel_strategy is None:
        return model
    if parallel_strategy == "ddp":
        _ensure_group()
        if device.type == "cuda":
            kwargs.setdefault("device_ids", [device.index or 0])
        return nn.parallel.DistributedDataParallel(model, **kwargs)
    if parallel_strategy == "fsdp":
        if device.type != "cuda":
            raise UsageError(
                "prepare_model(parallel_strategy='fsdp') needs a GPU for each worker: pass "
                "ScalingConfig(use_gpu=True), or parallel_strategy='ddp'"
            )
        from torch.distributed.fsdp import FullyShardedDataParallel

        _ensure_group()
        return FullyShardedDataParallel(model, **kwargs)
    raise UsageError(
        f"prepare_model(parallel_strategy={parallel_strategy!r}): expected 'ddp', 'fsdp' or None"
    )


def _ensure_group() -> None:
    """Give a run in this very process a group of one, so that it behaves like any other."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def prepare_data_loader(
    data_loader: DataLoader[Any],
    add_dist_sampler: bool = True,
    move_to_device: bool = True,
    auto_transfer: bool = True,
) -> PreparedLoader:
    """Let each rank see its part of the data, on its device.

    All arguments of the loader are kept (Ray drops several). Shuffling follows the loader's own
    sampler and is seeded by its generator; each pass shuffles anew.

    Args:
        data_loader: as for one process.
        add_dist_sampler: False if the loader deals the data out by itself.
        move_to_device: move tensors in a batch (also inside lists, tuples, dicts) to the device.
        auto_transfer: copy while the step before still runs, if the memory is pinned.

    Raises:
        UsageError: the loader has a sampler of its own, which cannot be dealt out by guess.
    """
    context = require_context("prepare_data_loader")
    is_iterable = isinstance(data_loader.dataset, IterableDataset)
    if add_dist_sampler and not is_iterable:
        data_loader = _with_sampler(data_loader, context.world_rank, context.world_size)
    device = get_device() if move_to_device else None
    return PreparedLoader(data_loader, device, non_blocking=auto_transfer)


def _with_sampler(loader: DataLoader[Any], rank: int, world_size: int) -> DataLoader[Any]:
    """Return the same loader over this rank's part of the indices."""
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        raise UsageError(
            f"prepare_data_loader: the loader has its own batch_sampler "
            f"({type(loader.batch_sampler).__name__}); let it deal out by rank itself and pass "
            f"add_dist_sampler=False"
        )
    sampler = loader.sampler
    shuffles = isinstance(sampler, RandomSampler) and not sampler.replacement
    if not shuffles and not isinstance(sampler, SequentialSampler):
        raise UsageError(
            f"prepare_data_loader: the loader has its own sampler ({type(sampler).__name__}); "
            f"use shuffle=True or False, or deal out by rank and pass add_dist_sampler=False"
        )
    seed = loader.generator.initial_seed() if loader.generator is not None else 0
    kept = {name: getattr(loader, name) for name in KEPT_ARGUMENTS if hasattr(loader, name)}
    if loader.num_workers == 0:
        # DataLoader refuses these without worker processes, even at their defaults.
        kept.pop("prefetch_factor")
        kept.pop("multiprocessing_context")
    if loader.batch_size is None:
        kept.pop("drop_last")
    if not kept.get("pin_memory_device"):
        kept.pop("pin_memory_device", None)
    dealt: DistributedSampler[Any] = DistributedSampler(
        loader.dataset,
        num_replicas=world_size,
        rank=rank,
        shuffle=shuffles,
        seed=seed % 2**31,
        drop_last=loader.drop_last,
    )
    return DataLoader(loader.dataset, sampler=dealt, **kept)


class PreparedLoader:
    """A DataLoader that yields this rank's batches on its device.

    Everything else (`dataset`, `batch_size`, `sampler`, ...) is the loader's.
    """

    def __init__(
        self, loader: DataLoader[Any], device: torch.device | None, *, non_blocking: bool = True
    ) -> None:
        """Wrap a loader.

        Args:
            loader: yields this rank's batches.
            device: where to move them, None to leave them.
            non_blocking: do not wait for copies out of pinned memory.
        """
        self._loader = loader
        self._device = device
        self._non_blocking = non_blocking
        self._epoch = 0
        self._epoch_is_set = False

    def set_epoch(self, epoch: int) -> None:
        """Choose the shuffle of the next pass; without it passes count from 0 by themselves."""
        self._epoch = epoch
        self._epoch_is_set = True

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass; each completed iteration counts as a step for telemetry."""
        context = require_context("a prepared loader")
        sampler = self._loader.sampler
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(self._epoch)
        if not self._epoch_is_set:
            self._epoch += 1
        self._epoch_is_set = False
        for batch in self._loader:
            yield batch if self._device is None else self._move(batch)
            context.note_step()

    def __len__(self) -> int:
        """Return this rank's batches per pass."""
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        """Pass everything else on to the loader."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def _move(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(self._device, non_blocking=self._non_blocking)
        if isinstance(value, Mapping):
            return {key: self._move(part) for key, part in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self._move(part) for part in value))
        if isinstance(value, (list, tuple)):
            return type(value)(self._move(part) for part in value)
        return value
