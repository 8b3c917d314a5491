"""Gathers the results of an evaluation from all ranks, in the order of one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from elastic.errors import UsageError
from elastic.train.devices import get_device
from elastic.train.rank_split import Pass
from elastic.train.session import require_place


class EvaluatedLoader(Protocol):
    """A prepared loader, as far as it was read to evaluate.

    Attributes:
        evaluated: its newest pass, None if there was none.
    """

    evaluated: Pass | None


_newest: Pass | None = None


def begin_pass(generation: int) -> Pass:
    """Return the pass that begins now, in this process."""
    global _newest
    _newest = Pass(generation)
    return _newest


def forget_pass() -> None:
    """Forget the newest pass: one begins that may repeat samples and must not be gathered."""
    global _newest
    _newest = None


def gather_for_metrics(values: Any, *, loader: EvaluatedLoader | None = None) -> Any:
    """Return the results of all ranks in an evaluation, in the order of the data.

        found = []
        with torch.no_grad():
            for x, y in test_loader:
                found.append((model(x).argmax(1), y))
        guessed, right = train.gather_for_metrics(found)
        accuracy = (guessed == right).float().mean()

    The same on every rank and at every world size: each sample is in it once, as with one process.
    All ranks call it, once, after the loop: the number of batches differs by rank, and may be 0.

    Args:
        values: a list with one entry for each batch that this rank has read: tensors or arrays
            with a row for each sample, or numbers, lists, any objects, or tuples and dicts of
            these. Or such lists in a tuple or dict; or a value that has a row for each sample.
        loader: the prepared loader that was read; by default the one that was evaluated last.

    Returns:
        For tensors one tensor, for lists one list, for numbers and other objects a list with one
        for each batch; for tuples and dicts one tuple or dict of these.

    Raises:
        UsageError: outside a train function, within the loop over the loader, or the values are
            not those of its batches.
    """
    context = require_place("train.gather_for_metrics")
    read = loader.evaluated if loader is not None else _newest
    if read is None:
        raise UsageError(
            "train.gather_for_metrics: the last prepared loader was not read to evaluate: read "
            "it under torch.no_grad(), and let it deal its data out (add_dist_sampler=True, and "
            "no IterableDataset, of which each rank sees all)"
        )
    if read.is_open:
        raise UsageError(
            "train.gather_for_metrics was called inside the loop over a prepared loader, where "
            "some ranks have one batch more than others: collect what each batch gives in a list, "
            "and call train.gather_for_metrics(list) once, after the loop"
        )
    if read.generation != context.generation:
        raise UsageError(
            "train.gather_for_metrics: the group has changed since this loader was read: call it "
            "right after the loop over the loader"
        )
    sizes = list(read.sizes.values())
    entries = _by_batch(values, sizes) if sizes else []
    mine = dict(zip(read.sizes, (_on_cpu(one) for one in entries), strict=True))
    with context.activity.waiting():
        # Torch's, as it is the script's: it counts among the collectives that code calls again.
        received: list[dict[int, Any]] = [{} for _ in range(context.world_size)]
        dist.all_gather_object(received, mine)
    found = {number: entry for one in received for number, entry in one.items()}
    if not found:
        return values
    return _merged([found[number] for number in sorted(found)], get_device())


def _by_batch(values: Any, sizes: Sequence[int]) -> list[Any]:
    """Return values, as `gather_for_metrics` takes them, split by the sizes of our batches."""
    if isinstance(values, Mapping):
        parts = {name: _by_batch(one, sizes) for name, one in values.items()}
        return [{name: part[i] for name, part in parts.items()} for i in range(len(sizes))]
    if isinstance(values, tuple):
        return list(zip(*(_by_batch(one, sizes) for one in values), strict=True))
    is_array = isinstance(values, (torch.Tensor, np.ndarray)) and values.ndim > 0
    if not is_array and not isinstance(values, list):
        raise UsageError(
            f"train.gather_for_metrics: got a {type(values).__name__}: expected a list with one "
            f"entry for each batch of the loop, {len(sizes)} here"
        )
    if isinstance(values, list) and len(values) == len(sizes):
        return values
    if len(values) == sum(sizes):
        ends = np.cumsum(sizes).tolist()
        return [values[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    if len(values) == len(sizes):
        return [values[number] for number in range(len(sizes))]
    raise UsageError(
        f"train.gather_for_metrics: got {len(values)} values: expected one for each of the "
        f"{len(sizes)} batches that this rank has read, or one for each of their {sum(sizes)} "
        f"samples"
    )


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {name: _on_cpu(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_on_cpu(one) for one in value) if type(value) in (list, tuple) else value
    return value


def _merged(entries: list[Any], device: torch.device) -> Any:
    """Merge the values of all batches, which are in order, into one."""
    first = entries[0]
    if isinstance(first, torch.Tensor):
        whole = torch.stack(entries) if first.ndim == 0 else torch.cat(entries)
        return whole.to(device)
    if isinstance(first, np.ndarray):
        return np.stack(entries) if first.ndim == 0 else np.concatenate(entries)
    if isinstance(first, Mapping):
        return {name: _merged([one[name] for one in entries], device) for name in first}
    if isinstance(first, tuple):
        return tuple(_merged(list(parts), device) for parts in zip(*entries, strict=True))
    if isinstance(first, list):
        return [_to(one, device) for entry in entries for one in entry]
    return entries


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value
