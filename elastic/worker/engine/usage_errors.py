"""What the step engine raises for code that uses it in a way that cannot work.

Rule: each text says what was found and what to write instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from elastic.core.events.step import Refusal
from elastic.core.policy.cursor import Cursor
from elastic.errors import UsageError
from elastic.worker.engine.prepared_optimizers import SCHEDULED, is_training
from elastic.worker.state.train_state import TrainState

OBSERVERS = {
    "torch.ao.quantization.observer.ObserverBase",
    "torch.ao.quantization.fake_quantize.FakeQuantizeBase",
}
"""Long to import, and not in every release of torch."""


def no_optimizer() -> UsageError:
    """A loop over epochs began, and nothing is there to be stepped."""
    return UsageError(
        "train.epochs: no optimizer was prepared; call prepare_optimizer(optimizer) before the "
        "loop, so that its steps are those of the whole group"
    )


def second_loop() -> UsageError:
    """A second loop over epochs began in one call of the train function."""
    return UsageError(
        "train.epochs: a loop over it came before in this call of the train function. There can be "
        "one: it continues at the run's epoch, so that another one finds its epochs done, and a "
        "worker that joins comes to the first one while the others are in the second. For phases, "
        "prepare everything before one loop, and choose by its epoch: part.requires_grad_(epoch >= "
        "3), learning rates in param_groups. Models of their own, as the folds of a "
        "cross-validation, are runs of their own: call TorchTrainer(train_func, "
        "train_loop_config={'fold': k}, run_config=RunConfig(name=f'fold-{k}')).fit() for each"
    )


def check_early(what: str, has_begun: bool) -> None:
    """Refuse what is prepared inside the loop; UsageError if it has begun."""
    if has_begun:
        raise UsageError(
            f"{what} was called inside the loop over train.epochs(): call it before, so that a "
            f"worker that joins later finds the same objects when it receives their state"
        )


def check_whole(optimizers: Sequence[object]) -> None:
    """Refuse an optimizer of which each rank has a part, as torch's ZeroRedundancyOptimizer."""
    for optimizer in optimizers:
        if hasattr(optimizer, "consolidate_state_dict"):
            raise UsageError(
                f"train.epochs: {type(optimizer).__name__} keeps a part of its state on each rank, "
                f"which would be lost with it: prepare the optimizer that it is made of, for all "
                f"parameters, or shard the model by prepare_model(model, parallel_strategy='fsdp')"
            )


def check_scheduled(state: TrainState) -> None:
    """Refuse an optimizer with a scheduler of torch's that is in no state of the run."""
    # A prepared scheduler that does not tell whose it is may be any optimizer's.
    of_any = any(_optimizer_of(one) is one for one in state.schedulers)
    registered = state.registered.values()
    inside = (value for thing in registered for value in getattr(thing, "__dict__", {}).values())
    known = [_optimizer_of(one) for one in (*state.schedulers, *registered, *inside)]
    for optimizer in state.optimizers:
        is_known = of_any or any(one is optimizer for one in known)
        if hasattr(optimizer.step, SCHEDULED) and not is_known:
            raise UsageError(
                f"train.epochs: the {type(optimizer).__name__} has a learning rate scheduler that "
                f"was not prepared, so that a worker which joins, or a run that is resumed, would "
                f"count its steps from 0: write scheduler = prepare_scheduler(scheduler) for it, "
                f"before the loop"
            )


def _optimizer_of(thing: Any) -> Any:
    """Return whose scheduler this is, itself if that is not known."""
    if isinstance(thing, nn.Module):
        return thing  # Asked for what it has not, a copy of a prepared one makes what reduces.
    found = getattr(thing, "optimizer", thing)
    return getattr(found, "optimizer", found)  # Libraries wrap optimizers.


def outside_epochs() -> UsageError:
    """A loader was read to train with, and no epoch runs."""
    return UsageError(
        "a prepared loader was read outside the loop over train.epochs(): write "
        "'for epoch in train.epochs(n): for batch in loader: ...'"
    )


def two_at_once() -> UsageError:
    """A loader was read to train with, while another one is."""
    return UsageError(
        "two prepared loaders are read at the same time: to train with both, prepare one loader "
        "of pairs, DataLoader(torch.utils.data.StackDataset(one, other)), so that every batch has "
        "its partner at any number of workers; read the other inside torch.no_grad() if it is not "
        "trained with"
    )


def read_again(epoch: int) -> UsageError:
    """A second pass of training in one epoch; its steps would have the numbers of the first."""
    return UsageError(
        f"a second pass over a prepared loader began in epoch {epoch}, whose steps are all done: "
        f"train in one pass per epoch (train.epochs(2 * n) for two), and evaluate inside "
        f"torch.no_grad() or after model.eval()"
    )


def weights_changed(cursor: Cursor) -> UsageError:
    """Code at the head of an epoch has changed weights of a state that had its changes already."""
    return UsageError(
        f"code between 'for epoch in train.epochs(n):' and the loop over batches changes weights "
        f"in epoch {cursor.epoch}, which this worker goes on with: the state that it has received "
        f"has that change, and is too large to be copied before it is made again; change weights "
        f"behind the loop over batches, at the end of the epoch before, which runs once, or before "
        f"the loop over epochs"
    )


def check_lazy(models: Sequence[nn.Module]) -> None:
    """Refuse tensors that get their shape in the first forward; the UsageError names one."""
    for number, model in enumerate(models):
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if is_lazy(tensor):
                raise UsageError(
                    f"model {number}, {name}: has no shape before the first forward, so that no "
                    f"state can be received for it: run the model once on a batch like those of "
                    f"the loader, under torch.no_grad(), before prepare_model and the optimizer"
                )


def check_forward(models: Sequence[nn.Module]) -> None:
    """Refuse layers that change their weights in forward, or ranges, each rank by what it has read.

    Raises:
        UsageError: naming one.
    """
    for number, model in enumerate(models):
        for name, part in model.named_modules():
            if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None:
                raise UsageError(
                    f"model {number}, {name}: {type(part).__name__}(max_norm={part.max_norm}) "
                    f"changes its weights in forward, on each rank those of its own samples, so "
                    f"that they differ between ranks: leave max_norm out, and limit all rows where "
                    f"train.stepped() is true, as by weight.data.renorm_(2, 0, max_norm)"
                )
            kinds = {f"{one.__module__}.{one.__name__}" for one in type(part).__mro__}
            if not OBSERVERS.isdisjoint(kinds):
                raise UsageError(
                    f"model {number}, {name}: {type(part).__name__} keeps ranges of what this rank "
                    f"has read, which it resizes and changes unnoticed, so that they differ "
                    f"between ranks: quantize after training, or train with "
                    f"torchao.quantization.qat, which keeps none"
                )


def sync_norms(models: Sequence[nn.Module]) -> dict[str, nn.SyncBatchNorm]:
    """Return the layers whose forward waits for that of other ranks while they train."""
    return {
        f"model {number}, {name}": part
        for number, model in enumerate(models)
        for name, part in model.named_modules()
        if isinstance(part, nn.SyncBatchNorm)
    }


def check_sync_norms(layers: Mapping[str, nn.SyncBatchNorm]) -> None:
    """Refuse those that train; the UsageError names one."""
    for name, layer in layers.items():
        if layer.training:
            raise UsageError(
                f"{name}: SyncBatchNorm waits in forward for all ranks, which have different "
                f"numbers of micro-batches, and normalizes by as many as there are workers: use "
                f"BatchNorm with a larger batch_size of the loader; its running statistics are "
                f"averaged over the whole step"
            )


def registered_counters(state: TrainState) -> dict[str, torch.Tensor]:
    """Return what counts how often normalization layers of registered modules have trained.

    Their statistics change without a new version; those of prepared models are averaged.
    """
    prepared = {part for model in state.models for part in model.modules()}
    return {
        f"registered {name}, {path or type(part).__name__}": counter
        for name, thing in state.registered.items()
        if isinstance(thing, nn.Module) and name not in state.own
        for path, part in thing.named_modules()
        if isinstance(counter := part._buffers.get("num_batches_tracked"), torch.Tensor)
        and part not in prepared
        and not counter.is_inference()
    }


def counted_in_forward(name: str, *more: str) -> UsageError:
    """Forward has changed statistics of a registered module, on each rank by what it has read."""
    return UsageError(
        f"{name}{f' and {len(more)} more' if more else ''}: forward in training mode has changed "
        f"statistics of a registered module, on each rank by what it has read, and again in a step "
        f"that is done again: write thing = prepare_model(thing) in place of train.register, so "
        f"that they are averaged over the step, or call eval() on it"
    )


def not_stepped(cursor: Cursor) -> UsageError:
    """An iteration ended without a call of `optimizer.step()`."""
    return UsageError(
        f"optimizer.step() was not called in step {cursor.step} of epoch {cursor.epoch}: call it "
        f"in every iteration; to add up gradients of several batches, give prepare_data_loader a "
        f"larger global_batch_size; to leave a batch out, call zero_grad() and step() all the "
        f"same: it adds nothing then. Ask for the next batch only after that: batches are read "
        f"ahead here, without a prefetcher of the script's"
    )


def stepped_twice(optimizer: object) -> UsageError:
    """An optimizer was asked to step once more in the same iteration."""
    return UsageError(
        f"{type(optimizer).__name__}.step() was called twice in one iteration over a prepared "
        f"loader: an iteration belongs to one step of the whole group, and gradients after it are "
        f"of this rank alone; call it once for each batch, and let the data set repeat those that "
        f"are to be trained with several times"
    )


def stepped_late(optimizer: object) -> UsageError:
    """One of several optimizers was asked to step once the step had been asked for."""
    return UsageError(
        f"{type(optimizer).__name__}.step() was called after train.stepped() or train.report(), "
        f"which end the step with the optimizers that were called before: call them last"
    )


def stepped_outside(optimizer: object, models: Sequence[nn.Module]) -> UsageError:
    """An optimizer was asked to step with gradients that were not reduced."""
    evaluates = models and not any(is_training(model) for model in models)
    why = (
        "all models are in evaluation mode, so that prepared loaders are read to evaluate: call "
        "model.train() before the loop over batches, and eval() for the layers that need it"
        if evaluates
        else "train with the batches of a prepared loader, and leave it after the step"
    )
    return UsageError(
        f"{type(optimizer).__name__}.step() was called in an epoch, with gradients of this rank "
        f"alone, which belong to no step of the group: {why}"
    )


def collective_inside(cursor: Cursor, num_micro_batches: int, world_size: int) -> UsageError:
    """The script called a collective in a micro-batch, and other ranks have fewer of those."""
    return UsageError(
        f"a collective was called in a micro-batch of step {cursor.step} of epoch {cursor.epoch}: "
        f"a step has {num_micro_batches}, of which {world_size} workers have different numbers, so "
        f"that they would wait for each other for ever: call it once for each step, where "
        f"train.stepped() is true, or behind the micro-batches in a loop over train.steps(); "
        f"average values by train.log(); or choose global_batch_size= and num_workers= so that "
        f"every number of workers has equal shares"
    )


COUNTS = (
    "a rank has several iterations in a step, and how many depends on the number of workers: count "
    "by train.get_context().get_step(), or have one iteration for each step by train.steps(loader)"
)


def rates_within_a_step(optimizer: object, cursor: Cursor) -> UsageError:
    """A learning rate was changed between two micro-batches of a step."""
    return UsageError(
        f"{type(optimizer).__name__}.step() was called with different learning rates (or "
        f"weight_decay, momentum, betas) in step {cursor.step} of epoch {cursor.epoch}, as by a "
        f"rate that follows from the number of the iteration, or a scheduler without "
        f"prepare_scheduler: {COUNTS}; let prepare_scheduler take what steps for each batch"
    )


def left_within_a_step(cursor: Cursor) -> UsageError:
    """A pass was left between two micro-batches of a step, and the script goes on."""
    return UsageError(
        f"the loop over batches was left in the middle of step {cursor.step} of epoch "
        f"{cursor.epoch}: {COUNTS}, and break only where train.stepped() is true"
    )


def left_by_count(cursor: Cursor) -> UsageError:
    """A pass was left behind a step, in an iteration that did not ask for steps."""
    return UsageError(
        f"the loop over batches was left where step {cursor.step} of epoch {cursor.epoch} begins, "
        f"in an iteration that called neither train.stepped() nor train.get_context().get_step() "
        f"nor train.get_logged(), so that it may have counted iterations: {COUNTS}, and break only "
        f"where train.stepped() is true"
    )


def collective_before(rank: int) -> UsageError:
    """The script called a collective before its first pass, and other ranks do not come there."""
    return UsageError(
        f"rank {rank} called a collective before its first pass over a prepared loader, and other "
        f"ranks are in the loop over train.epochs(): a worker that joins them, or whose train "
        f"function is called again, runs that code alone, and would wait for ever. Let every "
        f"worker do there what it needs by itself: download once for each node under a file lock, "
        f"give values in train_loop_config, keep others by train.register(...); collectives belong "
        f"behind a pass, or where train.stepped() is true"
    )


def step_not_stepped(cursor: Cursor) -> UsageError:
    """A step of `train.steps` was computed, and no optimizer asked to step."""
    return UsageError(
        f"optimizer.step() was not called in step {cursor.step} of epoch {cursor.epoch}: call it "
        f"once for each step of train.steps(), after its micro-batches; call step.skip() for one "
        f"that is to change nothing"
    )


def step_not_computed(cursor: Cursor) -> UsageError:
    """A loop over `train.steps` went on before a step's micro-batches were all computed."""
    return UsageError(
        f"step {cursor.step} of epoch {cursor.epoch} was left before all of its micro-batches were "
        f"computed: read it to its end ('for batch in step: ...'), or call step.run(compute)"
    )


def stepped_inside(optimizer: object) -> UsageError:
    """An optimizer was asked to step in the middle of a step of `train.steps`."""
    return UsageError(
        f"{type(optimizer).__name__}.step() was called while the micro-batches of a step are "
        f"computed: call it behind them, once, outside of 'for batch in step' and of what step.run "
        f"calls"
    )


def step_raised(cursor: Cursor) -> UsageError:
    """An optimizer's step has raised in a commit, and the loop has caught that and goes on."""
    return UsageError(
        f"an optimizer's step has raised in step {cursor.step} of epoch {cursor.epoch}, and the "
        f"loop has caught that and goes on: the weights may be half changed; let the error leave "
        f"the train function, which is called again with the state of the others, or of the newest "
        f"checkpoint"
    )


OF_STEPS: Mapping[Refusal, Callable[[Cursor], UsageError]] = {
    Refusal.NOT_STEPPED: not_stepped,
    Refusal.STEP_NOT_STEPPED: step_not_stepped,
    Refusal.STEP_NOT_COMPUTED: step_not_computed,
    Refusal.STEP_RAISED: step_raised,
}
OF_OPTIMIZERS: Mapping[Refusal, Callable[[object], UsageError]] = {
    Refusal.STEPPED_TWICE: stepped_twice,
    Refusal.STEPPED_INSIDE: stepped_inside,
    Refusal.STEPPED_LATE: stepped_late,
}
