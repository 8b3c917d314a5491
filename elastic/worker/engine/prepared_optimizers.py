"""What plain training loops hold in their hands: optimizers and the like that know of steps.

Rule: a prepared object is the user's own, of the same class, with the calls replaced that happen
once per step in a plain loop. Within a step that is not complete they do nothing.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from elastic.errors import UsageError
from elastic.worker.engine.still_weights import TWO_STEPS, StillWeights
from elastic.worker.state.dtensor import dtensor_class
from elastic.worker.state.pending_steps import parameters_of


class EngineSteps(Protocol):
    """The engine, as prepared objects see it."""

    def optimizer_step(self, optimizer: torch.optim.Optimizer, real: Callable[[], Any]) -> None:
        """Do the step, or note that it is due, or nothing."""
        ...

    def takes_closures(self) -> bool:
        """Return whether a step that is not computed yet is at hand, as a whole."""
        ...

    def is_due(self, optimizer: Any) -> bool:
        """Return whether the gradients of this optimizer are those that it steps with.

        That is outside of steps, and when all gradients of one are there.
        """
        ...

    def runs_after_step(self) -> bool:
        """Return whether what follows an optimizer step happens now.

        That is outside of steps, and once one is committed.
        """
        ...

    def once(self, call: Callable[[], Any], *, thing: object = None) -> Any:
        """Do for the step what a loop asks for in each iteration: now, with it, or not at all.

        Among calls for one `thing`, what is asked for last in an iteration counts, and is done
        after all steps of optimizers.
        """
        ...

    def optimizer_skipped(self, optimizer: Any) -> None:
        """Count a step that a scaler left out, because gradients overflowed."""
        ...

    def optimizer_zeroed(self, optimizer: Any) -> None:
        """Forget what was gathered for an optimizer that has not stepped in this iteration."""
        ...

    def is_prepared(self, optimizer: Any) -> bool: ...

    def add_scaler(self, scaler: Any) -> None:
        """Let a scaler's state be part of the run's."""
        ...


MARK = "_elastic_prepared"
SCHEDULED = "_wrapped_by_lr_sched"


def adopt_optimizer(optimizer: torch.optim.Optimizer, steps: EngineSteps) -> None:
    """Replace `step` and `zero_grad` of this very optimizer; schedulers may be made at any time.

    Raises:
        UsageError: it is none, or prepared already.
    """
    needed = ("param_groups", "state", "zero_grad", "state_dict", "load_state_dict")
    if not all(hasattr(optimizer, name) for name in needed):
        raise UsageError(
            f"prepare_optimizer: a {type(optimizer).__name__} is no torch.optim.Optimizer: prepare "
            f"the one that it steps, before it gets that"
        )
    if getattr(optimizer, MARK, False):
        raise UsageError("prepare_optimizer: this optimizer is prepared already")
    real = optimizer.step

    # With the marks of a scheduler that was made before, which warns where it misses them.
    @functools.wraps(getattr(real, "__func__", real))
    def step(self: torch.optim.Optimizer, closure: Any = None) -> Any:
        if closure is None:
            steps.optimizer_step(self, real)
            return None
        if not steps.takes_closures():
            raise UsageError(
                f"{type(self).__name__}.step(closure): a prepared optimizer takes no closure, "
                f"because the gradients of a step come from many workers; call loss.backward() "
                f"and then step(), or compute a whole step of train.steps() in the closure"
            )
        with torch.enable_grad():
            loss = closure()
        # Gradients are there now: what the optimizer asks for first is known.
        steps.optimizer_step(self, lambda: real(_ComputedClosure(self, loss)))
        return loss

    # Torch's schedulers leave this mark on it, and warn where it is gone.
    if hasattr(real, SCHEDULED):
        setattr(step, SCHEDULED, True)
    zero = optimizer.zero_grad

    @functools.wraps(type(optimizer).zero_grad)
    def zero_grad(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        steps.optimizer_zeroed(self)
        zero(set_to_none)

    # Bound, because torch's schedulers look for the function behind the method.
    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    optimizer.zero_grad = types.MethodType(zero_grad, optimizer)  # type: ignore[method-assign]
    setattr(optimizer, MARK, True)


class _ComputedClosure:
    """A closure that was called already, with the weights and gradients that there are now."""

    def __init__(self, optimizer: torch.optim.Optimizer, loss: Any) -> None:
        self._optimizer, self._loss, self._is_asked = optimizer, loss, False
        self._computed_at = self._versions()

    def __call__(self) -> Any:
        """Return the loss that it gave; UsageError if asked again, or with other weights."""
        name = type(self._optimizer).__name__
        if self._is_asked:
            raise UsageError(
                f"{name}.step(closure) evaluated its closure more than once, and a step of "
                f"train.steps() is computed once: use {name}(max_iter=1), without line_search_fn"
            )
        if self._versions() != self._computed_at:
            raise UsageError(
                f"{name}.step(closure) changed weights or gradients before it evaluated its "
                f"closure, and a step of train.steps() is computed once, before that: {TWO_STEPS}"
            )
        self._is_asked = True
        return self._loss

    def _versions(self) -> list[tuple[int, int]]:
        weights = parameters_of(self._optimizer)
        both = (one for p in weights for one in (p, p.grad) if one is not None)
        return [(id(one), one._version) for one in both]


def _bare(cls: Any) -> Any:
    """Return an object of this class without any attributes, as pickle makes it."""
    return cls.__new__(cls)


def adopt_scheduler(scheduler: Any, steps: EngineSteps) -> None:
    """Replace `step` of this very scheduler, by giving it a class of its own.

    Raises:
        UsageError: it is no scheduler, or prepared already.
    """
    if not all(hasattr(scheduler, name) for name in ("step", "state_dict", "load_state_dict")):
        raise UsageError(
            f"prepare_scheduler: a {type(scheduler).__name__} has no step, state_dict and "
            f"load_state_dict; pass one of torch.optim.lr_scheduler"
        )
    if getattr(scheduler, MARK, False):
        raise UsageError("prepare_scheduler: this scheduler is prepared already")
    cls = type(scheduler)

    @functools.wraps(cls.step)
    def step(self: Any, *args: Any, **named: Any) -> Any:
        return steps.once(lambda: cls.step(self, *args, **named))

    def reduce(self: Any, protocol: int) -> Any:
        del protocol
        return _bare, (cls,), vars(self)

    # A class of its own, because a scheduler's attributes are its state. Pickle could not find it:
    # copies, and what is saved as a whole, are of the user's.
    mine = {"step": step, "__reduce_ex__": reduce, MARK: True}
    scheduler.__class__ = type(cls.__name__, (cls,), mine)


@contextmanager
def scalers_noted(note: Callable[[Any], None]) -> Iterator[None]:
    """Call this with each `GradScaler` that is made, as soon as it is."""
    cls = torch.amp.GradScaler
    real = cls.__init__

    @functools.wraps(real)
    def init(self: Any, *args: Any, **named: Any) -> None:
        real(self, *args, **named)
        note(self)

    cls.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        cls.__init__ = real  # type: ignore[method-assign]


@contextmanager
def scalers_know(steps: EngineSteps) -> Iterator[None]:
    """Let every `GradScaler` leave prepared optimizers alone until their gradients are there.

    A plain loop calls `unscale_`, `step` and `update` in every iteration, and a scaler that finds
    no gradients raises. Scalers are never handed to the library, hence their class is changed,
    for as long as the train function trains.
    """
    cls = torch.amp.GradScaler
    scale, unscale, step, update = cls.scale, cls.unscale_, cls.step, cls.update
    # Scalers whose optimizers had no gradients in this step.
    with_nothing: weakref.WeakSet[Any] = weakref.WeakSet()

    @functools.wraps(scale)
    def scale_(self: Any, outputs: Any) -> Any:
        # One that was not there when the loop began: it continues with the scale of the run.
        steps.add_scaler(self)
        return scale(self, outputs)

    @functools.wraps(unscale)
    def unscale_(self: Any, optimizer: Any) -> None:
        is_ours = steps.is_prepared(optimizer)
        if is_ours and (not steps.is_due(optimizer) or _is_left_out(self, optimizer, steps)):
            return
        unscale(self, optimizer)

    @functools.wraps(step)
    def step_(self: Any, optimizer: Any, *args: Any, **named: Any) -> Any:
        if not steps.is_prepared(optimizer):
            return step(self, optimizer, *args, **named)
        # Whether gradients overflowed is found in those of the whole step, the same on all ranks.
        if not steps.is_due(optimizer):
            steps.optimizer_skipped(optimizer)  # Later gradients are not for this step of it.
            return None
        if _is_left_out(self, optimizer, steps):
            with_nothing.add(self)
            steps.optimizer_skipped(optimizer)
            return None
        result = step(self, optimizer, *args, **named)
        steps.optimizer_skipped(optimizer)
        return result

    @functools.wraps(update)
    def update_(self: Any, *args: Any, **named: Any) -> None:
        # One for all optimizers of the step, whose overflows it counts.
        def now() -> None:
            had_nothing = self in with_nothing
            with_nothing.discard(self)
            # It raises if it has seen no gradients at all.
            if args or named or not had_nothing or _has_checked(self):
                update(self, *args, **named)

        steps.once(now, thing=self)

    cls.scale, cls.unscale_ = scale_, unscale_  # type: ignore[method-assign]
    cls.step, cls.update = step_, update_  # type: ignore[method-assign]
    try:
        yield
    finally:
        cls.scale, cls.unscale_ = scale, unscale  # type: ignore[method-assign]
        cls.step, cls.update = step, update  # type: ignore[method-assign]


def _is_left_out(scaler: Any, optimizer: Any, steps: EngineSteps) -> bool:
    """Return whether all batches of the step were left out, here and everywhere."""
    if steps.runs_after_step() or not scaler.is_enabled():
        return False  # Not in a step.
    found = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    if found and scaler._scale is None:
        # Others have scaled in the very first step, and this rank has left out all of its own.
        steps.add_scaler(scaler)
        scaler._lazy_init_scale_growth_tracker(found[0].device)
    return not found


def _has_checked(scaler: Any) -> bool:
    """Return whether a scaler has looked for overflows since its last update."""
    return any(one["found_inf_per_device"] for one in scaler._per_optimizer_states.values())


@contextmanager
def modules_know(zeroed: Callable[[Iterable[torch.nn.Parameter]], None]) -> Iterator[None]:
    """Let `zero_grad` of any module drop gradients that are not in `p.grad` any more.

    GANs are trained with that of their networks as often as with that of optimizers, and each part
    of a prepared model has it.
    """
    cls = torch.nn.Module
    real = cls.zero_grad

    @functools.wraps(real)
    def zero_grad(self: torch.nn.Module, set_to_none: bool = True) -> None:
        zeroed(self.parameters())
        real(self, set_to_none)

    cls.zero_grad = zero_grad  # type: ignore[method-assign]
    try:
        yield
    finally:
        cls.zero_grad = real  # type: ignore[method-assign]


@contextmanager
def unprepared_refused(names: Mapping[int, str], is_stepping: Callable[[], bool]) -> Iterator[None]:
    """Let no optimizer step parameters of a prepared model that was not prepared itself.

    Each rank would step by gradients of its own.

    Args:
        names: of the parameters, by id.
        is_stepping: a prepared optimizer steps; one inside it may do its work.
    """

    def check(optimizer: torch.optim.Optimizer, args: Any, named: Any) -> None:
        del args, named
        if getattr(optimizer, MARK, False) or is_stepping():
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names.get(id(parameter))
                if name is not None and parameter.grad is not None:
                    raise UsageError(
                        f"{type(optimizer).__name__}.step() would change {name}, a parameter of a "
                        f"prepared model, by gradients of this rank alone, because this optimizer "
                        f"was not prepared: write optimizer = prepare_optimizer(optimizer) for it, "
                        f"too, before the loop over train.epochs()"
                    )

    hook = register_optimizer_step_pre_hook(check)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def data_waits(wait: Callable[[], None], still: StillWeights) -> Iterator[None]:
    """Call this before a parameter's `data` is read or set: torch counts no change made there."""
    real: Any = torch.Tensor.data

    def read(self: torch.Tensor) -> Any:
        wait()
        still.data_read(self)
        return real.__get__(self)

    def write(self: torch.Tensor, value: torch.Tensor) -> None:
        wait()
        still.data_set(self, value)
        real.__set__(self, value)

    kinds: list[Any] = [torch.nn.Parameter, *dtensor_class()]
    before = [vars(kind).get("data") for kind in kinds]
    for kind in kinds:
        kind.data = property(read, write)
    try:
        yield
    finally:
        for kind, known in zip(kinds, before, strict=True):
            if known is None:
                del kind.data
            else:
                kind.data = known


@contextmanager
def captures_wait(wait: Callable[[], None]) -> Iterator[None]:
    """Call this before a CUDA graph is captured: meanwhile no thread may ask for an event."""
    cls: Any = torch.cuda.CUDAGraph
    real = cls.capture_begin

    def capture_begin(self: Any, *args: Any, **named: Any) -> None:
        wait()
        real(self, *args, **named)

    cls.capture_begin = capture_begin
    try:
        yield
    finally:
        cls.capture_begin = real


def _leave(module: torch.nn.Module) -> torch.nn.Module:
    return module


@dataclass
class _Ties:
    """What ties a prepared model to its run; one that is saved as a whole leaves it behind."""

    wrap: Callable[[torch.nn.Module], torch.nn.Module] = _leave
    is_ours: Callable[[], bool] = bool
    plain: torch.nn.Module | None = None

    def __reduce__(self) -> Any:
        return _Ties, ()

    def __deepcopy__(self, memo: Any) -> _Ties:
        return _Ties(self.wrap, self.is_ours)


class PreparedModel(DistributedDataParallel):
    """The user's model as `module`; gradients are the engine's business while it trains.

    Without `train.epochs`, as in scripts written for Ray Train, forward goes through a
    DistributedDataParallel of torch's inside instead; to the checks and hooks of scripts this is
    it. Either way the keys of `state_dict` begin with "module.", at every world size, and each
    gradient is reduced once.
    """

    def __init__(
        self, module: torch.nn.Module, wrap: Callable[[torch.nn.Module], torch.nn.Module]
    ) -> None:
        """Wrap a module; `wrap` makes the DistributedDataParallel, when it is first needed."""
        torch.nn.Module.__init__(self)  # It is a shell: the one inside has reducer and hooks.
        self.module = module
        # Not as attributes of a module, which would make them part of its state.
        self.__dict__["_ties"] = _Ties(wrap)

    def trains_in_steps(self, is_ours: Callable[[], bool]) -> None:
        """Ask this, at each forward, whether the engine takes the gradients."""
        self.__dict__["_ties"].is_ours = is_ours

    def forward(self, *args: Any, **named: Any) -> Any:
        ties: _Ties = self.__dict__["_ties"]
        if ties.is_ours() or not torch.is_grad_enabled():
            return self.module(*args, **named)
        return self._inside()(*args, **named)

    def no_sync(self) -> Any:
        """Do as DistributedDataParallel's; in steps nothing is sent before the last backward."""
        ties: _Ties = self.__dict__["_ties"]
        if ties.is_ours():
            return nullcontext()
        if ties.plain is None:
            ties.plain = ties.wrap(self.module)
        plain: Any = ties.plain
        return plain.no_sync()

    def train(self, mode: bool = True) -> PreparedModel:
        torch.nn.Module.train(self, mode)
        return self

    def _inside(self) -> Any:
        """Return the DistributedDataParallel; made when it is first needed."""
        ties: _Ties = self.__dict__["_ties"]
        if ties.plain is None:
            ties.plain = ties.wrap(self.module)
        return ties.plain

    def __getattr__(self, name: str) -> Any:
        """Return what only the one inside has, such as `reducer` and `process_group`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in _NOT_INSIDE or name.startswith("__"):
                raise
        ties: _Ties = self.__dict__["_ties"]
        if ties.is_ours():
            raise AttributeError(
                f"{name}: in a loop over train.epochs() gradients are not reduced by "
                f"DistributedDataParallel, and the model has nothing of it"
            )
        return getattr(self._inside(), name)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Come back as any module; the one inside is made anew."""
        torch.nn.Module.__setstate__(self, state)


_NOT_INSIDE = frozenset({"module", "_ties"})
"""What a shell that is only half made asks for itself."""


def _passed_on(name: str) -> Callable[..., Any]:
    """Return a method that is the one inside's, except where the engine reduces."""

    @functools.wraps(getattr(DistributedDataParallel, name))
    def call(self: PreparedModel, *args: Any, **named: Any) -> Any:
        if self.__dict__["_ties"].is_ours():
            raise UsageError(
                f"{name}: in a loop over train.epochs() gradients are added in a fixed order, not "
                f"by DistributedDataParallel; leave it out, or loop over range()"
            )
        return getattr(self._inside(), name)(*args, **named)

    return call


for _name in (
    "join", "join_hook", "register_comm_hook", "_register_builtin_comm_hook",
    "_register_fused_optim", "_get_ddp_logging_data", "_set_static_graph",
):  # fmt: skip
    setattr(PreparedModel, _name, _passed_on(_name))


def is_training(model: torch.nn.Module) -> bool:
    """Return whether a prepared model is in training mode.

    Of the user's own it is asked, which scripts may hold as well, and the wrapper follows.
    """
    return model.module.training if isinstance(model, PreparedModel) else model.training
