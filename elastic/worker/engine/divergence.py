"""Whether all ranks have the same weights: a checksum of them rides with each step's gradients.

Weights that a script changes on one rank, an optimizer that was not prepared, or a bit that
flipped would otherwise be trained with in silence until the end. Before each step every rank takes
a 64-bit checksum of a slice of what must be alike: parameters, buffers that are saved, registered
objects. The slice follows from the number of steps of the run, so that it is the same on all ranks,
and `SLICES` steps see everything; of a small model every step does. At the end of an epoch all of
it is checked. Sharded tensors, which differ, are left out.

Rule: a step whose rows show that ranks differ is not committed. If most ranks have the same, the
others receive it and the step is done again; if not, it is unknown which are right, and all raise.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Container, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn

from elastic.core.policy.cursor import Cursor
from elastic.errors import UsageError
from elastic.worker.group.accelerators import accelerator_of, record, wait_done
from elastic.worker.group.member_links import share_bytes
from elastic.worker.state.checksums import (
    MASK,
    checksum_of,
    checksum_there,
    checksums,
    combined,
    factor,
    flat_bytes,
    values_print,
)
from elastic.worker.state.dtensor import is_dtensor
from elastic.worker.state.pending_steps import parameters_of
from elastic.worker.state.train_state import TrainState

log = logging.getLogger(__name__)

SLICES = 8
"""Steps that see all of a large state."""
SLICE_BYTES = 2 << 20
"""Of a smaller one more is seen at once: so much, which takes about 0.1 ms."""
CALL_BYTES = 64 << 10
"""What could be read in the time that it takes to begin with a tensor."""
HEALED_MAX, HEALED_STEPS = 3, 1000
"""How often in how many steps ranks get the others' state before that is an error: something goes
on changing it."""
ORDER = "the order of the loader's samples"
BUFFER = " (buffer)"
"""What names of buffers end with."""
Prints = dict[str, int]
"""Checksums by the names of what they are of."""


@dataclass
class _WatchedTensor:
    """A tensor that a module has under a name; or one that is never replaced, with no owner."""

    name: str
    tensor: torch.Tensor
    owner: MutableMapping[str, Any] | None = None
    key: str = ""
    known: NDArray[Any] | None = None
    known_at: tuple[int, int] = (0, 0)

    def now(self) -> torch.Tensor:
        """Return what stands in its place now."""
        there = self.owner.get(self.key) if self.owner is not None else None
        return there if isinstance(there, torch.Tensor) else self.tensor

    def checksum(self, first: int, last: int) -> Any:
        """Return the checksum of some of its bytes.

        A number, or on a device a tensor of one that is computed there.
        """
        tensor = self.now()
        if accelerator_of(tensor.device) is not None:
            return checksum_there(flat_bytes(tensor)[first:last])
        at = (tensor.data_ptr(), tensor.numel())
        if self.known is None or self.known_at != at:
            flat = flat_bytes(tensor)
            # What was copied to be flat would not show a later change.
            is_view = flat.data_ptr() == tensor.data_ptr()
            self.known, self.known_at = flat.numpy(), at if is_view else (0, 0)
        return checksum_of(self.known[first:last])


_Part = tuple[_WatchedTensor, int, int]
"""Bytes of a tensor: first, and behind the last."""


class Divergence:
    """Watches the objects of one call of the train function."""

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self._watched: list[_WatchedTensor] = []
        self._slices: list[list[_Part]] = []
        self._order = self._steps = 0
        self._healed_at: list[int] = []
        # Of a device: what was asked for a step ago, and is there by now.
        self._before: tuple[Any, Any, int] | None = None

    def begin(self) -> dict[int, str]:
        """Find out what is watched, as a group has just met; return names by the tensor's id."""
        self._watched, self._before = list(_watched_in(self._state)), None
        total = sum(one.tensor.nbytes + CALL_BYTES for one in self._watched)
        most = max(SLICE_BYTES, -(-total // SLICES) // 64 * 64)
        self._slices, room = [], 0
        for one in self._watched:
            for first in range(0, one.tensor.nbytes, most):
                if room <= 0:
                    self._slices.append([])
                    room = most
                last = min(first + most, one.tensor.nbytes)
                self._slices[-1].append((one, first, last))
                room -= last - first + CALL_BYTES
        return self.names()

    def step_checksum(self, steps: int, world_size: int, order: int = 0) -> int:
        """Return the checksum that rides with a step, 0 for none: one rank alone cannot differ.

        On a device it is not waited for: it is that of the step before. `steps` chooses the slice;
        `order` is a checksum of the order of the data, 0 if that follows from the seed.
        """
        self._order, self._steps = order, steps
        if world_size < 2:
            return 0
        some = self._slices[steps % len(self._slices)] if self._slices else []
        if some and accelerator_of(some[0][0].now().device) is not None:
            return self._reported_later(some)
        total = order
        for place, (one, first, last) in enumerate(some):
            total += one.checksum(first, last) * factor(place)
        if steps % SLICES == 0:
            total += combined([*registered_values(self._state).values()])
        return total & MASK

    def _reported_later(self, some: Sequence[_Part]) -> int:
        before, device = self._before, some[0][0].now().device
        parts = [one.checksum(first, last) for one, first, last in some]
        parts = [p if isinstance(p, torch.Tensor) else torch.tensor(_signed(p)) for p in parts]
        factors = torch.tensor([_signed(factor(place)) for place in range(len(parts))])
        sums = torch.stack([one.to(device, non_blocking=True) for one in parts])
        total = (sums * factors.to(device, non_blocking=True)).sum()
        host = torch.empty((), dtype=torch.int64, pin_memory=device.type == "cuda")
        host.copy_(total, non_blocking=True)
        self._before = (host, record([device]), self._order)
        if before is None:
            return 0
        wait_done(before[1])
        return (int(before[0]) + before[2]) & MASK

    def of_all(self, world_size: int) -> int:
        """Return one checksum of everything, 0 for a rank alone."""
        return combined([*self.prints().values()]) if world_size > 1 else 0

    def prints(self) -> Prints:
        """Return the checksum of everything that is watched, by name."""
        return {**_prints(self._watched), **registered_values(self._state)}

    def weights(self) -> Prints:
        """Return those of parameters and of registered modules."""
        return _prints([one for one in self._watched if not one.name.endswith(BUFFER)])

    # ------------------------------------------------------------------- once ranks differ

    def settle(self, group: Any, cursor: Cursor) -> tuple[int, ...]:
        """Return which ranks are to receive what most have; called on all ranks at once.

        Args:
            group: the process group that is formed.
            cursor: the step before which ranks differ.

        Raises:
            RuntimeError: the group broke.
            UsageError: it is unknown whose state is right, or to receive it has not helped.
        """
        verdict = self._resolve(share_bytes(group, self._details()))
        if not verdict.can_heal:
            names = self.names()
            steps = [p for one in self._state.optimizers for p in parameters_of(one)]
            raise _usage_error(verdict, cursor, {names.get(id(p), "") for p in steps})
        logging_rank = min({*range(group.size())} - {*verdict.differing})
        log.log(
            logging.WARNING if group.rank() == logging_rank else logging.INFO,
            "state_differed ranks=%s tensors=%d first=%s epoch=%d step=%d: they receive the "
            "others' state, and the step is done again; is the memory of their nodes in order?",
            ",".join(map(str, verdict.differing)), len(verdict.names), "".join(verdict.names[:1]),
            cursor.epoch, cursor.step,
        )  # fmt: skip
        return verdict.differing

    def _details(self) -> bytes:
        """Return what the others must know to find out what differs."""
        prints = {ORDER: self._order, **self.prints()}
        self._healed_at = [at for at in self._healed_at if at > self._steps - HEALED_STEPS]
        return json.dumps({"prints": prints, "healed": len(self._healed_at)}).encode()

    def _resolve(self, details: Sequence[bytes]) -> DivergenceResult:
        """Find out what differs, and whether it can be healed; all ranks conclude the same."""
        received = [json.loads(one) for one in details]
        verdict = compare([one["prints"] for one in received])
        healed = max(one["healed"] for one in received)
        is_state = ORDER not in verdict.names and not self._state.is_sharded
        can_heal = verdict.is_majority and healed < HEALED_MAX and is_state
        self._healed_at.append(self._steps)
        return replace(verdict, healed=healed, can_heal=can_heal)

    def names(self) -> dict[int, str]:
        """Return the names of what is watched, by the id of the tensor."""
        return {id(one.tensor): one.name for one in self._watched}


@dataclass(frozen=True)
class DivergenceResult:
    """What came of a comparison.

    Attributes:
        differing: ranks that differ from what most have, or from rank 0 if there is none.
        can_heal: the odd ones are to receive it.
        healed: how often that has happened before.
    """

    names: tuple[str, ...]
    differing: tuple[int, ...]
    is_majority: bool
    can_heal: bool = False
    healed: int = 0


def differ(checksums: Sequence[int]) -> bool:
    """Return whether checksums that ranks sent differ; 0 stands for none."""
    return len({one for one in checksums if one}) > 1


def compare(prints: Sequence[Mapping[str, int]]) -> DivergenceResult:
    """Find out which ranks differ, and in what."""
    keys = [tuple(sorted(one.items())) for one in prints]
    most_have, number = Counter(keys).most_common(1)[0]
    is_majority = 2 * number > len(keys)
    right = dict(most_have if is_majority else keys[0])
    differing = tuple(rank for rank, one in enumerate(prints) if dict(one) != right)
    names = {name for one in prints for name in {*one, *right} if one.get(name) != right.get(name)}
    # In the order in which they were prepared.
    order = dict.fromkeys(name for one in prints for name in one)
    return DivergenceResult(tuple(name for name in order if name in names), differing, is_majority)


def _usage_error(verdict: DivergenceResult, cursor: Cursor, stepped: Container[str]) -> UsageError:
    names, differing = verdict.names, ", ".join(map(str, verdict.differing))
    first = names[0] if names else "the state"
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    who = (
        f"rank {differing} and the other ranks"
        if verdict.is_majority
        else f"rank 0 and rank {differing}"
    )
    if first.startswith("the order"):
        what = (
            "the sampler must give every rank the same: let it draw from its generator attribute, "
            "or from torch's, NumPy's or Python's own generators, which are seeded for each epoch, "
            "and keep nothing from the epochs before; draw a subset (random_split) with the same "
            "seed on all ranks"
        )
    elif first.startswith("registered "):
        what = (
            "register what is the same on all ranks, and change it once for each step, where "
            "train.stepped() is true"
        )
    elif "(buffer)" in first:
        what = (
            "forward in training mode, or code of this script, has changed it outside of a step on "
            "each rank by itself: call model.eval() for what is not trained with, and change it "
            "only by values that are the same on all ranks"
        )
    elif first not in stepped:
        what = (
            "no prepared optimizer steps it, so that something else has changed it on each rank by "
            "itself: write optimizer = prepare_optimizer(optimizer) for what trains it, before the "
            "loop over train.epochs()"
        )
    else:
        what = (
            "something has changed it on each rank by itself: prepare every optimizer that steps "
            "it by prepare_optimizer(optimizer), let its step follow from gradients and from what "
            "its state_dict has, and change weights otherwise only by values that are the same on "
            "all ranks, where train.stepped() is true"
        )
    again = (
        f"; that was so {verdict.healed} times before, and the others' state has not helped"
        if verdict.is_majority and verdict.healed
        else ""
    )
    return UsageError(
        f"{first}{more}: {who} have different values before step {cursor.step} of epoch "
        f"{cursor.epoch}{again}: {what}"
    )


# --------------------------------------------------------------------------- what is watched


def _prints(watched: Sequence[_WatchedTensor]) -> Prints:
    found = checksums([one.now() for one in watched])
    return {one.name: value for one, value in zip(watched, found, strict=True)}


def _watched_in(state: TrainState) -> Iterator[_WatchedTensor]:
    """Yield every tensor that must be alike on all ranks, once."""
    seen: set[int] = set()

    def new(found: Iterator[_WatchedTensor]) -> Iterator[_WatchedTensor]:
        for one in found:
            tensor = one.tensor
            is_dense = tensor.layout is torch.strided and not tensor.is_meta
            if id(tensor) in seen or is_dtensor(tensor) or not is_dense:
                continue
            seen.add(id(tensor))
            yield one

    # What is sharded differs, and modules show whole parameters only while they are gathered.
    models = [] if state.is_sharded else state.models
    for number, model in enumerate(models):
        yield from new(_tensors_of(model, f"model {number}, " if len(models) > 1 else ""))
    yield from new(
        _WatchedTensor(f"parameter {place} of no prepared model", tensor)
        for place, tensor in enumerate([] if state.is_sharded else state.loose())
    )
    for name, thing in state.registered.items():
        if isinstance(thing, nn.Module) and name not in state.own:
            yield from new(_tensors_of(thing, f"registered {name}: "))


def _tensors_of(module: nn.Module, prefix: str) -> Iterator[_WatchedTensor]:
    """Yield parameters and the buffers that are saved; others are caches of each rank's own."""
    for path, part in module.named_modules():
        for own, parameter in part._parameters.items():
            if parameter is not None:
                name = f"{path}.{own}" if path else own
                yield _WatchedTensor(prefix + name, parameter, part._parameters, own)
        for own, buffer in part._buffers.items():
            if buffer is not None and own not in part._non_persistent_buffers_set:
                name = f"{path}.{own}" if path else own
                yield _WatchedTensor(prefix + name + BUFFER, buffer, part._buffers, own)


def registered_values(state: TrainState) -> Prints:
    """Return checksums of registered objects that are no modules, by their names."""
    found = {}
    for name, thing in state.registered.items():
        if not isinstance(thing, nn.Module) and name not in state.own:
            # It is the user's own, and may raise anything: reported where it is saved.
            with suppress(Exception):
                found[f"registered {name}"] = values_print(thing.state_dict())
    return found


def _signed(number: int) -> int:
    """Return the number of the same 64 bits that an int64 can hold."""
    return number - (1 << 64) if number >> 63 else number
