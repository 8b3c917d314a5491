"""API of PyTorch scripts: the trainer, and the preparation of models and loaders.

Shaped like ray.train.torch. Rule: prepared objects behave the same at every world size, one
included, because the world size changes while the script runs.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from elastic.errors import UsageError
from elastic.lazy import check_missing
from elastic.train.config import TorchConfig
from elastic.train.devices import get_device, get_devices
from elastic.train.loaders import PreparedLoader, prepare_data_loader
from elastic.train.session import require_context, require_engine
from elastic.train.trainer import TorchTrainer
from elastic.worker.engine.prepared_optimizers import PreparedModel
from elastic.worker.engine.step_engine import StepEngine
from elastic.worker.engine.train_call import current_engine
from elastic.worker.state.dtensor import is_dtensor
from elastic.worker.state.sharded_state import (
    check_not_flat,
    has_shards,
    let_ranks_differ,
    shard,
)

__all__ = [
    "PreparedLoader",
    "TorchConfig",
    "TorchTrainer",
    "clip_grad_norm_",
    "enable_reproducibility",
    "get_device",
    "get_devices",
    "prepare_data_loader",
    "prepare_model",
    "prepare_optimizer",
    "prepare_scheduler",
]


def __getattr__(name: str) -> Any:
    """Say what to use instead of Ray's names that are not here."""
    check_missing(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def enable_reproducibility(seed: int = 0) -> None:
    """Seed Python, NumPy and torch, and restrict torch to deterministic kernels.

    Args:
        seed: the same on all ranks; 0 <= seed < 2**32. Also seeds shuffling, dropout and
            augmentation in a loop over `train.epochs()`.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    engine = current_engine()
    if engine is not None:
        engine.options = replace(engine.options, seed=seed)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def prepare_model(
    model: nn.Module,
    move_to_device: bool = True,
    parallel_strategy: str | None = "ddp",
    parallel_strategy_kwargs: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Move a model to this worker's device and prepare it for training by the group.

    With "ddp" it is wrapped at every world size (Ray: from two workers on), so that `model.module`
    and the keys of `state_dict()`, which begin with "module.", are the same before and after the
    group changed its size; save `model.module.state_dict()` to load it without a wrapper. The
    result is a DistributedDataParallel to `isinstance`, and behaves as one in a loop without
    `train.epochs()`; in one with it, the runtime reduces gradients, once, and
    `register_comm_hook` is refused. A model that is wrapped already, also in DataParallel, is
    unwrapped first.

    With "fsdp" each rank keeps its rows of each parameter (`torch.distributed.fsdp.fully_shard`),
    and the model itself is returned; so is one on which `fully_shard` was called already. Prepare
    its optimizer after that.

    Args:
        model: the same on all ranks; rank 0's values are sent to the others, except with "fsdp":
            there each rank keeps its rows of its own values.
        move_to_device: False if it is on its device already.
        parallel_strategy: "ddp", "fsdp" or None for no wrapper.
        parallel_strategy_kwargs: passed to DistributedDataParallel (without effect in a loop over
            `train.epochs()`), or to `fully_shard`; there
            `modules=(Block, ...)` names the classes of modules that are sharded one by one, so
            that only one of them at a time is gathered.

    Raises:
        UsageError: not a model, an unknown strategy or keyword, or a model that is sharded in a
            way that cannot be saved.
    """
    require_context("prepare_model")
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"prepare_model: expected a torch.nn.Module, got {model!r:.80} of class "
            f"{type(model).__name__}"
        )
    engine = current_engine()
    if parallel_strategy is not None:
        check_not_flat(model)
    is_sharded = has_shards([model])
    device = get_device()
    if move_to_device and not is_sharded:
        model = model.to(device)
    kwargs = dict(parallel_strategy_kwargs or {})
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        # The wrapper would reduce its gradients a second time, or take other workers' devices.
        model = model.module
    if parallel_strategy not in ("ddp", "fsdp", None):
        raise UsageError(
            f"prepare_model(parallel_strategy={parallel_strategy!r}): expected 'ddp', 'fsdp' or "
            f"None"
        )
    if parallel_strategy is None:
        return model
    if is_sharded or parallel_strategy == "fsdp":
        _ensure_group()
        if not is_sharded:
            shard(model, device.type, kwargs)
        let_ranks_differ(model)
        if engine is not None:
            # With the same parameter names as other strategies; fully_shard reduces.
            engine.add_model(PreparedModel(model, lambda module: module))
        return model
    _check_keywords(kwargs)
    if device.type == "cuda":
        kwargs.setdefault("device_ids", [device.index or 0])
    return _prepared(engine, model, kwargs)


def _check_keywords(kwargs: Mapping[str, Any]) -> None:
    """Refuse at once what DistributedDataParallel would refuse at the first forward.

    Raises:
        UsageError: a keyword is unknown; names it.
    """
    known = set(inspect.signature(nn.parallel.DistributedDataParallel).parameters) - {"module"}
    unknown = sorted(set(kwargs) - known)
    if unknown:
        raise UsageError(
            f"prepare_model: parallel_strategy_kwargs has {', '.join(unknown)}: expected arguments "
            f"of DistributedDataParallel, such as find_unused_parameters"
        )


def _prepared(engine: StepEngine | None, model: nn.Module, kwargs: dict[str, Any]) -> nn.Module:
    """Return the model as one that an engine, or DistributedDataParallel, can train."""

    def wrap(module: nn.Module) -> nn.Module:
        _ensure_group()
        return nn.parallel.DistributedDataParallel(module, **kwargs)

    prepared = PreparedModel(model, wrap)
    if engine is not None:
        engine.add_model(prepared)
        prepared.trains_in_steps(lambda: engine.has_begun)
    return prepared


def clip_grad_norm_(
    parameters: Any, max_norm: float, norm_type: float = 2.0, **named: Any
) -> torch.Tensor:
    """Clip gradients by their norm, as `torch.nn.utils.clip_grad_norm_`; at any world size.

    In a loop over `train.epochs()` only the last micro-batch of a step has gradients, those of the
    whole step: before that there is nothing to clip. For sharded parameters the norm is that of the
    whole.

    Args:
        parameters: of prepared models; or a model, for all of its parameters.
        max_norm: the largest norm after clipping.
        norm_type: of the norm; may be `inf`.
        named: `error_if_nonfinite`, `foreach`.

    Returns:
        The norm before clipping.
    """
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    norm = nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, **named)
    return norm.full_tensor() if is_dtensor(norm) else norm


def prepare_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Make an optimizer step once per global batch, at any world size.

    In a loop over `train.epochs()`, `step()` does nothing until the gradients of the whole step
    are complete; then all workers step or none does. Several optimizers (a GAN's) step together
    at the end of a step.

    Args:
        optimizer: of parameters of prepared models. It must step in every iteration.

    Returns:
        The same object.

    Raises:
        UsageError: outside a train function, prepared twice, or prepared inside the loop.
    """
    require_engine("prepare_optimizer").add_optimizer(optimizer)
    return optimizer


def prepare_scheduler(scheduler: Any) -> Any:
    """Make a learning rate scheduler step once per global batch, or once per epoch.

    In a loop over batches its `step()` does nothing unless the optimizer has stepped; between
    epochs every call steps.

    Returns:
        The same object.

    Raises:
        UsageError: outside a train function, not a scheduler, or prepared inside the loop.
    """
    require_engine("prepare_scheduler").add_scheduler(scheduler)
    return scheduler


def _ensure_group() -> None:
    """Create a group of one for a run in this process, so that it behaves like any other."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
