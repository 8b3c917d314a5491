"""What a script trains with, and has neither prepared nor registered: it is in no state of the run.

A worker that joins, or a run that is resumed, has such an object as it was made: an average of
random weights, running statistics of nothing, a schedule at its beginning. Nothing fails then; what
is trained is something else.

So what there is when a loop begins is noted: modules, schedulers, and containers with tensors of
the shapes of the weights, in which scripts keep averages of them. What stays as it is, such as a
teacher, is the script's business, and so is what is made later, such as an evaluation's.

Rule: only what is certain is refused, and no code of the script's is called to find it. What can be
reached from objects of the run's state is part of it.
"""

from __future__ import annotations

import gc
import weakref
import zlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from elastic.errors import UsageError
from elastic.worker.engine.divergence import registered_values
from elastic.worker.state.checksums import flat_bytes
from elastic.worker.state.dtensor import is_flat_fsdp, local_part
from elastic.worker.state.pending_steps import parameters_of
from elastic.worker.state.train_state import TrainState

FIRST_LOOK = 2
"""Steps after which it is looked for what has changed; after that at the ends of epochs."""
FEW_BYTES = 4 << 10
"""Of a tensor: what trains it, or averages into it, changes its beginning, too."""
REACHED_MAX = 200_000
"""Objects that are followed from those of the state; if there are more, nothing is certain."""
NOT_FOLLOWED = (type, ModuleType, FunctionType, FrameType)

Print = tuple[int, ...]
"""Of an object; empty for one that has nothing of its own, or cannot be read."""


class UnregisteredObjects:
    """Looks for what changes beside the run's state."""

    def __init__(self, state: TrainState) -> None:
        """Note what there is; UsageError if what there is reduces gradients itself."""
        self._state = state
        self._steps = 0
        self._noted: list[tuple[weakref.ref[Any], str, Print]] = []
        # Held until the first look, because there are no weak references to them.
        self._containers: list[tuple[Any, str, Print]] = []
        # What registered objects were when the first steps began, and when their bodies went on
        # behind the commit.
        self._at_begin: Mapping[str, int] = {}
        self._registered: Mapping[str, int] = {}
        self._known = _reached_from(state)
        if len(self._known) < REACHED_MAX:
            self._note()

    def _note(self) -> None:
        shapes, places = _shapes_of_weights(self._state), self._places()
        objects, containers = _alive({len(one) for one in shapes}, self._known)
        modules = [one for one in objects if isinstance(one, nn.Module)]
        trained = {id(p) for one in self._state.optimizers for p in parameters_of(one)}
        _check_modules(modules, trained)
        owners = {id(part): one for one in modules for part in _parts(one)}
        for one in objects:
            root = one
            while id(root) in owners:
                root = owners[id(root)]
            name = type(root).__name__
            self._noted.append((weakref.ref(one), name, self._print(one, places)))
        inside = {id(vars(one).get("_parameters")) for one in modules}
        for one in containers:
            if id(one) not in inside and _shapes(_values(one)) in shapes:
                name = f"a {type(one).__name__} of {len(one)} tensors"
                self._containers.append((one, name, self._print(one, places)))

    def step_begins(self) -> None:
        """The loop's body is about to compute the first of our micro-batches of a step."""
        if self._steps < FIRST_LOOK:
            self._at_begin = registered_values(self._state)

    def step_computed(self) -> None:
        """All micro-batches of a step are computed, and it is not committed."""
        if name := self._changed(self._at_begin):
            raise UsageError(
                f"{name}: changed before the step was done: a rank may have several micro-batches "
                f"in a step, and a step that breaks is done again, so that it would be changed "
                f"more than once: write 'if train.stepped(): ...' around that, behind "
                f"optimizer.step()"
            )
        self._at_begin = {}

    def _changed(self, before: Mapping[str, int]) -> str | None:
        """Return the name of a registered object that has other values than before."""
        now = registered_values(self._state) if before else {}
        return next((name for name, was in before.items() if now.get(name) != was), None)

    def step_committed(self) -> None:
        """The loop's body goes on behind a step, and has not asked whether it is done."""
        if self._steps < FIRST_LOOK:
            self._registered = registered_values(self._state)

    def step_done(self, *, has_asked: bool) -> None:
        """Look after the first steps, in which the body has asked, or not, whether one is done."""
        if not has_asked and (name := self._changed(self._registered)):
            raise UsageError(
                f"{name}: changed in an iteration that did not ask whether the step is done: a "
                f"rank may have several iterations in a step, and would change it in each: write "
                f"'if train.stepped(): ...' around that"
            )
        self._registered = {}
        self._steps += 1
        if self._steps == FIRST_LOOK:
            self.check()
            self._containers = []

    def check(self) -> None:
        """Look for what has changed since the loop began; the UsageError names it."""
        places = self._places()
        things: list[tuple[Any, str, Print]] = [
            (one(), name, was) for one, name, was in self._noted
        ]
        changed = {
            name: thing
            for thing, name, before in (*things, *self._containers)
            if before and self._print(thing, places) not in (before, ())
        }
        if changed:
            raise _error(changed)

    def _print(self, thing: Any, places: set[int]) -> Print:
        """Return what differs where an object's own values do."""
        try:
            if isinstance(thing, LRScheduler):
                return _print_of_scheduler(thing) if id(thing.optimizer) in self._known else ()
            tensors = _own(thing) if isinstance(thing, nn.Module) else _values(thing)
            mine = [one for one in tensors if one is not None and id(one) not in self._known]
            return _print_of(one for one in mine if _place(one) not in places)
        except Exception:  # It may be anything, such as one that is gone, or has no values yet.
            return ()

    def _places(self) -> set[int]:
        """Return where the state's weights lie: what is there, too, is of a `state_dict`."""
        models = self._state.models
        return {_place(one) for model in models for one in (*model.parameters(), *model.buffers())}


# --------------------------------------------------------------------------- what there is


def _alive(lengths: set[int], known: set[int]) -> tuple[list[Any], list[Any]]:
    """Return modules, schedulers, and containers of these lengths, whose ids are not known."""
    # There may be millions of objects, but not of classes.
    kinds: dict[type, int] = {dict: 2, OrderedDict: 2, list: 2}
    objects, containers = [], []
    for one in gc.get_objects():
        cls = type(one)
        kind = kinds.get(cls)
        if kind is None:
            kind = kinds[cls] = int(issubclass(cls, (nn.Module, LRScheduler)))
        if kind == 2 and len(one) in lengths and id(one) not in known:
            containers.append(one)
        elif kind == 1 and id(one) not in known:
            objects.append(one)
    return objects, containers


def _reached_from(state: TrainState) -> set[int]:
    """Return the ids of what can be reached from objects of the run's state."""
    closed_over = [_closed_over(one.state_dict) for one in state.registered.values()]
    things = (
        state.models,
        state.optimizers,
        state.schedulers,
        state.scalers,
        state.registered,
        closed_over,
    )
    ahead = deque[Any](things)
    known = {id(one) for one in things}
    while ahead and len(known) < REACHED_MAX:
        for one in gc.get_referents(ahead.popleft()):
            # Numbers and texts, of which there may be millions, refer to nothing.
            is_end = not gc.is_tracked(one) or issubclass(type(one), NOT_FOLLOWED)
            if not is_end and id(one) not in known:
                known.add(id(one))
                ahead.append(one)
    return known


def _closed_over(method: Any) -> list[Any]:
    """Return what a method of a class within the train function has from around it."""
    return list(getattr(getattr(method, "__func__", method), "__closure__", None) or ())


def _shapes_of_weights(state: TrainState) -> set[tuple[Any, ...]]:
    """Return the shapes of what an average of weights is made of."""
    trained = [p for one in state.optimizers for p in parameters_of(one)]
    found: list[list[Any]] = [trained, [one for one in trained if one.requires_grad]]
    for model in state.models:
        weights = list(model.parameters())
        found += [weights, [one for one in weights if one.requires_grad]]
        found.append([one for part in model.modules() for one in _own(part) if one is not None])
    return {_shapes(one) for one in found if len(one) > 1}


def _shapes(tensors: Iterable[Any]) -> tuple[Any, ...]:
    """Return the shapes of tensors in any order; of what is none something else."""
    every = list(tensors)
    if not all(isinstance(one, torch.Tensor) for one in every):
        return ()
    return tuple(sorted(tuple(one.shape) for one in every))


def _parts(module: nn.Module) -> Iterable[Any]:
    """Return a module's children; one that is only half made has none."""
    return (one for one in (vars(module).get("_modules") or {}).values() if one is not None)


def _own(module: nn.Module) -> list[Any]:
    """Return a module's own parameters and the buffers that are saved."""
    hidden = module._non_persistent_buffers_set
    buffers = [one for name, one in module._buffers.items() if name not in hidden]
    return [*module._parameters.values(), *buffers]


def _values(container: Any) -> list[Any]:
    return list(container.values() if isinstance(container, dict) else container)


def _place(tensor: torch.Tensor) -> int:
    """Return where a tensor lies; of a kind that does not tell, a number of its own."""
    try:
        return local_part(tensor).untyped_storage().data_ptr()
    except Exception:
        return id(tensor)


# --------------------------------------------------------------------------- how it is seen


def _print_of(tensors: Iterable[torch.Tensor]) -> Print:
    few = (flat_bytes(local_part(one))[:FEW_BYTES] for one in tensors)
    return tuple(zlib.crc32(one.cpu().numpy().data) for one in few)


def _print_of_scheduler(scheduler: LRScheduler) -> Print:
    numbers = {key: one for key, one in vars(scheduler).items() if isinstance(one, (int, float))}
    return (zlib.crc32(repr(sorted(numbers.items())).encode()),)


# --------------------------------------------------------------------------- what is refused


def _check_modules(modules: Sequence[nn.Module], trained: set[int]) -> None:
    """Refuse a wrapper that reduces gradients which are reduced here, by its name."""
    for one in modules:
        reduces = type(one) is DistributedDataParallel or is_flat_fsdp(one)
        if reduces and any(id(p) in trained for part in _parts(one) for p in part.parameters()):
            raise UsageError(
                f"train.epochs: a prepared optimizer steps parameters of a model in "
                f"{type(one).__name__}, which reduces their gradients as well, as often as this "
                f"rank has micro-batches: write model = prepare_model(model) before the loop, and "
                f"use what that returns"
            )


def _error(changed: Mapping[str, Any]) -> UsageError:
    first = next(iter(changed.values()))
    how = (
        "scheduler = prepare_scheduler(scheduler)"
        if isinstance(first, LRScheduler)
        else "train.register(name=...), or model = prepare_model(model) for a model that is trained"
    )
    return UsageError(
        f"train.epochs: {', '.join(list(changed)[:3])}: what changes while the loop trains is "
        f"neither prepared nor registered, so that a worker that joins, or a run that is resumed, "
        f"would go on with what it was at the beginning: write {how}, before the loop"
    )
