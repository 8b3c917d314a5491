"""What the state of a run consists of, and how it is taken and put back.

Rule: parameters and buffers are copied in place, so that user code, optimizers and the reducer
keep the very tensors that they know. Everything else goes through `state_dict`.
"""

from __future__ import annotations

import gc
import sys
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from elastic.errors import UsageError
from elastic.worker.state.pending_steps import parameters_of
from elastic.worker.state.sharded_state import has_shards, put_shards_back, shard_number

State = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]
"""Of the tensors of a model, by name."""


@dataclass
class OptimizerUnit:
    """The parameters whose gradients one optimizer's step waits for; buckets never mix units.

    Attributes:
        parameters: (name, parameter) of those that have required gradients where a pass began; with
            a single optimizer those too that it does not step.
        shared: more that the optimizer steps, which are another unit's already.
    """

    name: str
    parameters: list[tuple[str, nn.Parameter]]
    shared: list[nn.Parameter] = field(default_factory=list)


class Stateful(Protocol):
    """What can be registered: an EMA, a sampler, a counter of the user's own."""

    def state_dict(self) -> Any:
        """Return the state: tensors, arrays and plain Python values."""
        ...

    def load_state_dict(self, state: Any) -> Any: ...


class TrainState:
    """The objects that a train function has prepared and registered, in order.

    Every member prepares the same objects in the same order, which is how they know each other's.
    """

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedulers: list[Stateful] = []
        self.scalers: list[Stateful] = []
        # Scalers that were made before the loop; those that are gone when it begins do not count.
        self._made_scalers: list[weakref.ref[Stateful]] = []
        self.registered: dict[str, Stateful] = {}
        # Names of registered objects that each rank may have otherwise.
        self.own: set[str] = set()
        # The optimizers' parameters when the loop began, and behind these what none of them steps;
        # and the numbers of those whose gradients are reduced: that have wanted some when the loop,
        # or a pass since, began.
        self._every: list[nn.Parameter] = []
        self._num_stepped = 0
        self._first_frozen: list[int] = []
        # Names of the models' parameters then, by their ids.
        self._names: dict[int, str] = {}
        self._reduced: list[int] = []
        self._unreduced: list[nn.Parameter] = []
        # What the models had when the loop began.
        self._shapes: list[Shapes] = []
        # A state that is put once more when the iteration is over, and whether there is to be one.
        self._late: State | None = None
        self._is_late = False
        # States of scalers that the run has used already, and this member not yet.
        self._unused_scalers: list[Any] = []

    def register(self, name: str, thing: Stateful, *, is_own: bool = False) -> None:
        """Add an object of the user's own; UsageError if it has no state, or the name is taken.

        If it `is_own`, ranks may have other values, such as who writes files and shows progress.
        Who joins gets the leader's.
        """
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise UsageError(
                f"train.register({name}=...): a {type(thing).__name__} has no state_dict and "
                f"load_state_dict; give it both, or register an object that has"
            )
        if self.registered.get(name, thing) is not thing:
            raise UsageError(f"train.register({name}=...): another object has this name already")
        for metric in _forgetful_metrics(thing):
            # What wraps others does not pass it on to them.
            where = ".".join(filter(None, (name, metric)))
            raise UsageError(
                f"train.register({name}=...): torchmetrics leaves what {where} counts out of its "
                f"state_dict(), so that a worker that joins, or a run that is resumed, would begin "
                f"with nothing: call {where}.persistent(True) before"
            )
        self.registered[name] = thing
        if is_own:
            self.own.add(name)

    def note_scaler(self, scaler: Stateful) -> None:
        """Note a scaler that was made; who joins may be asked for its scale before it is used."""
        self._made_scalers.append(weakref.ref(scaler))

    def add_scaler(self, scaler: Stateful) -> None:
        """Add a scaler, once: those of before the loop as they were made, others at first use.

        That is the same order on all members.
        """
        if not any(scaler is known for known in self.scalers):
            self.scalers.append(scaler)
            if self._unused_scalers and (theirs := self._unused_scalers.pop(0)):
                scaler.load_state_dict(theirs)

    def begin(self) -> dict[int, OptimizerUnit]:
        """The loop begins: return what each optimizer steps, and remember what trains."""
        if len(self._made_scalers) > 1:
            gc.collect()  # One that was replaced may be held by a cycle, on some ranks only.
        for made in self._made_scalers:
            if (scaler := made()) is not None:
                self.add_scaler(scaler)
        stepped = self._parameters()
        self._every, self._num_stepped = [*stepped, *self._unstepped()], len(stepped)
        self._reduced, self._first_frozen = [], self.frozen()
        self._names = self._names_now()
        self.reduce(self.wanted())
        self._shapes = self._saved_shapes()
        return self.units()

    def _parameters(self) -> list[nn.Parameter]:
        return [p for one in self.optimizers for p in parameters_of(one)]

    def frozen(self) -> list[int]:
        """Return the numbers of parameters that want no gradients."""
        return [number for number, one in enumerate(self._every) if not one.requires_grad]

    def _saved_shapes(self) -> list[Shapes]:
        """Return the shapes of what each model saves; modules replace what is sharded."""
        models = [] if self.is_sharded else self.models
        return [
            {name: tuple(one.shape) for name, one in _tensors(model) if name not in caches}
            for model, caches in zip(models, self.caches(), strict=False)
        ]

    def check_known(self) -> None:
        """Refuse what the loop has added to models and optimizers."""
        for number, pair in enumerate(zip(self._shapes, self._saved_shapes(), strict=False)):
            if name := _first_differing(*pair):
                raise _changed_model(f"model {number}, {name}", *(one.get(name) for one in pair))
        known = {id(parameter) for parameter in self._every[: self._num_stepped]}
        if added := [one for one in self._parameters() if id(one) not in known]:
            raise added_parameters(self._names_of(added))
        if self.is_sharded:
            self._check_reduced()

    def check_still_known(self) -> None:
        """Refuse, within a pass and at little cost, what wants gradients that are not reduced."""
        groups = (group for one in self.optimizers for group in one.param_groups)
        if sum(len(group["params"]) for group in groups) != self._num_stepped:
            self.check_known()
        self._check_reduced()

    def _check_reduced(self) -> None:
        if unfrozen := [one for one in self._unreduced if one.requires_grad]:
            raise unfrozen_parameters(self._names_of(unfrozen), is_sharded=self.is_sharded)

    def wanted(self) -> list[int]:
        """Return the numbers of those whose gradients a pass that begins now reduces.

        Loops freeze parameters for a part of each iteration: what was reduced once stays so.
        """
        now = (number for number, one in enumerate(self._every) if one.requires_grad)
        return sorted({*self._reduced, *now})

    def reduced_print(self) -> int:
        """Return a number of 32 bits that differs where gradients of others are reduced."""
        return zlib.crc32(repr(self._reduced).encode())

    def reduce(self, numbers: Sequence[int]) -> None:
        """From here on reduce the gradients of these."""
        self._reduced, known = list(numbers), set(numbers)
        stepped = enumerate(self._every[: self._num_stepped])
        self._unreduced = [one for number, one in stepped if number not in known]

    def _names_of(self, parameters: Sequence[nn.Parameter]) -> list[str]:
        names = self._names_now()
        return [names.get(id(one), "a parameter of no prepared model") for one in parameters]

    def _names_now(self) -> dict[int, str]:
        return {id(p): name for model in self.models for name, p in model.named_parameters()}

    def changed_units(self, units: Mapping[int, OptimizerUnit]) -> dict[int, OptimizerUnit] | None:
        """Return what each optimizer steps now, None if that is what it did."""
        now = self.units()
        is_same = all(
            [id(p) for _, p in unit.parameters] == [id(p) for _, p in units[number].parameters]
            for number, unit in now.items()
        )
        return None if is_same else now

    def units(self, *, every: bool = False) -> dict[int, OptimizerUnit]:
        """Return the parameters that each optimizer steps, by its id; a shared one goes once.

        With `every`, those too whose gradients are not reduced.
        """
        reduced = {id(self._every[number]) for number in self._reduced}
        names = self._names_now()
        taken: set[int] = set()
        units = {}
        for number, optimizer in enumerate(self.optimizers):
            unit = units[id(optimizer)] = OptimizerUnit(f"optimizer {number}", [])
            for options in optimizer.param_groups:
                for parameter in options["params"]:
                    if not every and id(parameter) not in reduced:
                        continue
                    if id(parameter) in taken:
                        unit.shared.append(parameter)
                    else:
                        taken.add(id(parameter))
                        name = names.get(id(parameter), f"parameter {len(taken)}")
                        unit.parameters.append((name, parameter))
        if len(units) == 1:
            more = self._every[self._num_stepped :]
            unit.parameters += [
                (self._names[id(one)], one) for one in more if every or id(one) in reduced
            ]
        return units

    def _unstepped(self) -> list[nn.Parameter]:
        """Return the models' parameters that no optimizer steps: they are clipped with the others.

        Where there are several optimizers, it is unknown with whose.
        """
        if self.is_sharded or len(self.optimizers) != 1:
            return []
        stepped = {id(parameter) for parameter in self._parameters()}
        every = dict.fromkeys(p for model in self.models for p in model.parameters())
        return [one for one in every if id(one) not in stepped]

    @property
    def is_sharded(self) -> bool:
        """Return whether every member has rows of the models' parameters, and none all of them."""
        return has_shards(self.models)

    @property
    def shard_number(self) -> int:
        """The same on all members that have the same part of the weights; 0 if all have all."""
        # Of optimizers: modules show whole parameters while they are gathered.
        return shard_number(p for one in self.optimizers for p in parameters_of(one))

    def aliases(self) -> list[dict[str, str]]:
        """Return for each model the other names of shared parameters, each with its first one."""
        found = []
        for model in self.models:
            first = {id(parameter): name for name, parameter in model.named_parameters()}
            every = model.named_parameters(remove_duplicate=False)
            found.append({name: first[id(p)] for name, p in every if first[id(p)] != name})
        return found

    def caches(self) -> list[set[str]]:
        """List for each model the buffers that `state_dict` leaves out; ranks may differ there."""
        return [
            {
                f"{path}.{own} (buffer)" if path else f"{own} (buffer)"
                for path, part in model.named_modules()
                for own in part._non_persistent_buffers_set
            }
            for model in self.models
        ]

    def forget_step(self) -> None:
        """A step is done again: scalers have not seen its gradients. Their scale stays."""
        for scaler in self.scalers:
            getattr(scaler, "_per_optimizer_states", {}).clear()

    def take(self) -> State:
        """Return the state as nested containers; tensors are the live ones, not copies.

        Where one is put once more later, it is that one.
        """
        return self._live() if self._late is None else self._late

    def _live(self) -> State:
        put_shards_back(self.models)
        return {
            "models": [dict(_tensors(model)) for model in self.models],
            "extra": [
                {path: part.get_extra_state() for path, part in _parts_with_extra(model)}
                for model in self.models
            ],
            "loose": self.loose(),
            "frozen": self.frozen(),
            "first_frozen": self._first_frozen,
            "reduced": self._reduced,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "scalers": [
                *(scaler.state_dict() for scaler in self.scalers),
                *self._unused_scalers,
            ],
            "registered": {name: thing.state_dict() for name, thing in self.registered.items()},
        }

    def weights_bytes(self) -> int:
        """Return the size of the models' parameters."""
        parameters = (one for model in self.models for one in model.parameters())
        return sum(one.nbytes for one in (*parameters, *self.loose()))

    def copied(self, *, weights: bool) -> State:
        """Return the state in containers and tensors of its own.

        Without `weights`, parameters, what optimizers know of them, and registered modules are live
        ones.
        """
        state, live = self.take(), []
        if not weights:
            live = [one for model in self.models for one in model.parameters()]
            live += [state["loose"], *(one.get("state") for one in state["optimizers"])]
            modules = (n for n, thing in self.registered.items() if isinstance(thing, nn.Module))
            live += [state["registered"][name] for name in modules]
        return deepcopy(state, {id(one): one for one in live})

    def put(self, state: State, *, own: bool = True) -> None:
        """Make this state ours, of `own` objects too.

        UsageError if it is of other objects; nothing was changed then.
        """
        mine, given = self._live(), state
        if len(state["models"]) == len(self.models):
            pairs = zip(self.models, mine["models"], state["models"], strict=True)
            theirs = [_without_caches(*one) for one in pairs]
            state = {**state, "models": theirs}
        _check_same(mine, state)
        with torch.no_grad():
            for ours, theirs in zip(mine["models"], state["models"], strict=True):
                for name, tensor in ours.items():
                    tensor.copy_(theirs[name])
            for tensor, other in zip(mine["loose"], state["loose"], strict=True):
                tensor.copy_(other)
        for model, extra in zip(self.models, state["extra"], strict=True):
            for path, part in _parts_with_extra(model):
                part.set_extra_state(extra[path])
        # What the script freezes otherwise than when the run began was edited since, and counts.
        edited = {*state["first_frozen"]} ^ {*self._first_frozen}
        frozen = set(state["frozen"])
        for number, parameter in enumerate(self._every):
            if number not in edited:
                parameter.requires_grad_(number not in frozen)
        wanted = {number for number in edited if self._every[number].requires_grad}
        self.reduce(sorted({*state["reduced"]} | wanted))
        for optimizer, theirs in zip(self.optimizers, state["optimizers"], strict=True):
            # Loaded tensors may be these themselves, which are loaded once more by `put_late`.
            _load(optimizer, deepcopy(theirs) if self._is_late else theirs)
        for kind in ("schedulers", "scalers"):
            # Of scalers there may be more than we have met: some are known from their first use on.
            for thing, theirs in zip(getattr(self, kind), state[kind], strict=False):
                # Scalers that are enabled refuse that of a disabled one, such as a CPU's.
                if theirs:
                    thing.load_state_dict(_with_kinds_of(thing.state_dict(), theirs))
        self._unused_scalers = state["scalers"][len(self.scalers) :]
        self._late = given if self._is_late else None
        for name, one in state["registered"].items() if self._late is None else ():
            if own or name not in self.own:
                kept = mine["registered"][name]
                self.registered[name].load_state_dict(_with_kinds_of(kept, one))

    @contextmanager
    def registered_later(self) -> Iterator[None]:
        """Let `put` leave registered objects alone until `put_late`, which repeats all the rest.

        A loop counts in them what the step at hand has done, and may lower rates or scale weights
        and buffers; the sender of the state has done that in this step.
        """
        self._is_late = True
        try:
            yield
        finally:
            self._is_late = False

    def late(self, name: str) -> Any:
        """Return what is held back for a registered object; None if nothing is."""
        return self._late["registered"].get(name) if self._late is not None else None

    def put_late(self) -> None:
        """Put the state once more that was received within the iteration, and all of it."""
        late, self._late = self._late, None
        if late is not None:
            self.put(late)

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield what only steps of optimizers change, with names for people.

        Modules of each rank's own are not among them, which optimizers may step that are not
        prepared.
        """
        for model in self.models:
            yield from model.named_parameters()
        for name, thing in self.registered.items():
            if isinstance(thing, nn.Module) and name not in self.own:
                yield from ((f"registered {name}: {n}", p) for n, p in thing.named_parameters())
        for number, optimizer in enumerate(self.optimizers):
            every = enumerate(parameters_of(optimizer))
            yield from ((f"optimizer {number}, parameter {index}", one) for index, one in every)

    def still_between_steps(self) -> Iterator[torch.Tensor]:
        """Yield tensors that only steps of optimizers change, or code that torch can detect.

        Buffers are not among them: torch's normalization layers change theirs unnoticed.
        """
        yield from (parameter for _, parameter in self.named_weights())
        for optimizer in self.optimizers:
            for kept in optimizer.state.values():
                if isinstance(kept, Mapping):
                    yield from (one for one in kept.values() if isinstance(one, torch.Tensor))

    def loose(self) -> list[torch.Tensor]:
        """Return the parameters that an optimizer has and no prepared model."""
        known = {id(tensor) for model in self.models for _, tensor in _tensors(model)}
        return [
            parameter
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) not in known
        ]


def _forgetful_metrics(thing: Stateful) -> Iterator[str]:
    """Yield where in it metrics of torchmetrics are that are not asked to save themselves.

    Those of a model do not count, such as of an average of its weights: nothing is asked of them.
    """
    library = sys.modules.get("torchmetrics")
    if library is None or not isinstance(thing, nn.Module):
        return
    if isinstance(thing, library.Metric) or not any(True for _ in thing.parameters()):
        for path, part in thing.named_modules():
            is_metric = isinstance(part, library.Metric)
            if is_metric and part.metric_state.keys() - part.state_dict().keys():
                yield path


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and all buffers, also those that `state_dict` leaves out."""
    yield from model.named_parameters()
    for name, buffer in model.named_buffers():
        yield f"{name} (buffer)", buffer


def _parts_with_extra(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the parts whose state is more than their tensors, as `state_dict` has it."""
    for path, part in model.named_modules():
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            yield path, part


def _with_kinds_of(ours: Any, theirs: Any) -> Any:
    """Return a state that was received, in which dicts are of the kinds that they are here.

    Schedulers and scripts keep a Counter, say, which travels as a plain dict.
    """
    if isinstance(ours, dict) and isinstance(theirs, dict):
        plain = {name: _with_kinds_of(ours.get(name), one) for name, one in theirs.items()}
        try:
            kind = copy(ours)
            kind.clear()
            kind.update(plain)
        except Exception:  # A class of the script's that cannot be copied, or not changed.
            return plain
        return kind
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [_with_kinds_of(*pair) for pair in zip(ours, theirs, strict=True)]
    return theirs


def _without_caches(model: nn.Module, ours: State, theirs: State) -> State:
    """Take out what only one of two states has, or of another size; return what is left of theirs.

    Only buffers that `state_dict` leaves out: tables that grow with what forward meets, such as
    those of rotary embeddings. A model that needs a larger one makes it.
    """
    left = dict(theirs)
    for path, part in model.named_modules():
        for own_name in part._non_persistent_buffers_set:
            name = f"{path}.{own_name} (buffer)" if path else f"{own_name} (buffer)"
            mine, other = ours.get(name), theirs.get(name)
            if mine is None or other is None or mine.shape != other.shape:
                ours.pop(name, None)
                left.pop(name, None)
    return left


def _load(optimizer: torch.optim.Optimizer, state: State) -> None:
    """Give an optimizer this state as its sender has it.

    torch gives each tensor its parameter's type, which would round what is kept in a wider one, and
    keeps the strides of what was received, which fused optimizers take to be the parameter's.
    """
    optimizer.load_state_dict(state)
    if not _has_groups(state):
        return
    groups = zip(optimizer.param_groups, state["param_groups"], strict=True)
    for parameter, number in (
        pair
        for ours, others in groups
        for pair in zip(ours["params"], others["params"], strict=True)
    ):
        kept = optimizer.state.get(parameter, {})
        theirs = state["state"].get(number, {})
        if not (isinstance(kept, dict) and isinstance(theirs, dict)):
            continue
        for name, sent in theirs.items():
            value = kept.get(name)
            if type(value) is not torch.Tensor or not isinstance(sent, torch.Tensor):
                continue
            like = parameter if value.shape == parameter.shape else value
            own = torch.empty_like(like, dtype=sent.dtype, device=value.device, requires_grad=False)
            if (value.dtype, value.stride()) != (own.dtype, own.stride()):
                kept[name] = own.copy_(sent)


def _has_groups(state: State) -> bool:
    """Return whether an optimizer's state has torch's form, and not one of its own."""
    return "state" in state and "param_groups" in state


def _check_same(ours: State, theirs: State) -> None:
    """Raise UsageError unless both are states of the same objects."""
    for kind in ("models", "loose", "optimizers", "schedulers"):
        if len(ours[kind]) != len(theirs[kind]):
            raise UsageError(_differs(f"{kind} prepared", len(ours[kind]), len(theirs[kind])))
    if set(ours["registered"]) != set(theirs["registered"]):
        names = (sorted(ours["registered"]), sorted(theirs["registered"]))
        raise UsageError(_differs("registered objects", *names))
    for number, (mine, other) in enumerate(zip(ours["extra"], theirs["extra"], strict=True)):
        if set(mine) != set(other):
            what = f"model {number}, parts with get_extra_state"
            raise UsageError(_differs(what, sorted(mine), sorted(other)))
    for number, (mine, other) in enumerate(zip(ours["models"], theirs["models"], strict=True)):
        shapes = {name: tuple(tensor.shape) for name, tensor in mine.items()}
        others = {name: tuple(tensor.shape) for name, tensor in other.items()}
        if name := _first_differing(shapes, others):
            what = f"model {number}, {name}"
            raise UsageError(_differs(what, shapes.get(name), others.get(name)))


def _first_differing(ours: Shapes, theirs: Shapes) -> str | None:
    """Return the name of a tensor that only one of two models has, or with another shape."""
    names = sorted(set(ours) | set(theirs))
    return next((name for name in names if ours.get(name) != theirs.get(name)), None)


def _changed_model(what: str, before: object, now: object) -> UsageError:
    return UsageError(
        f"{what}: {before} when the loop over train.epochs() began, {now} now: a worker that "
        f"joins, or a run that is resumed, begins with what the models had before the loop, and "
        f"could not take this state: add, replace, resize and prune parts of a model before it "
        f"(a buffer with persistent=False may come and grow later)"
    )


def _differs(what: str, ours: object, theirs: object) -> str:
    return (
        f"{what}: {ours} in this worker, {theirs} in the state that it has from another worker or "
        f"a checkpoint: every worker must prepare the same objects in the same order, whenever its "
        f"train function is called. If they were changed since the checkpoint was saved: prepare "
        f"those of that time, or begin anew under another run name, without the checkpoint"
    )


def added_parameters(names: Sequence[str]) -> UsageError:
    """Parameters that an optimizer did not have when the loop began."""
    return UsageError(
        f"{_some(names)}: added to a prepared optimizer since the loop over train.epochs() began, "
        f"so that a worker that joins, or a run that is resumed, would have an optimizer without: "
        f"add them before it, and set requires_grad to False until they are to be trained"
    )


def unfrozen_parameters(names: Sequence[str], *, is_sharded: bool) -> UsageError:
    """Parameters that were frozen when the pass over the data began."""
    where = "between two epochs, before the loop over the loader"
    if is_sharded:
        where = "before the loop over train.epochs(): those of a sharded model stay as they are"
    return UsageError(
        f"{_some(names)}: required no gradient before, so that what backward gives them here is "
        f"not reduced: set requires_grad {where}"
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"
