"""Makes libraries over accelerate see one process; only the engine handles the others.

Accelerate reads the number of processes once and derives everything from it: how a loader is
split, how often a scheduler steps, what is gathered. In a group whose size changes in place all of
that would be wrong. So its state is set to one process, for which it has nothing to do, and to this
process's rank, which decides which process writes files and shows progress.

A worker that joins others in their loop has no rank yet while it builds model and data, and is not
to join for the sake of a state that is of one process in the end: until it has joined, accelerate
sees one process that is not the first one. So no `main_process_first` waits for others there; nor
does that of a worker that has a place among others who are in their loop already. It is one of a
distributed kind, as with those: a library may set `drop_last` by that.
"""

from __future__ import annotations

from typing import Any

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from elastic.errors import UsageError
from elastic.train.devices import get_device
from elastic.train.session import require_context
from elastic.worker.engine.context import WorkerContext
from elastic.worker.engine.group_sync import others_have_begun
from elastic.worker.engine.train_call import current

SHARDED = {"FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA"}


NO_PLACE = 1
"""Process index of a worker that has no rank yet, so that it does not act as the first one."""


def _begin_state(self: PartialState, cpu: bool = False, **named: Any) -> None:
    """Be accelerate's `PartialState.__init__`; with one process while others are in their loop."""
    context = current()
    if context is not None and not PartialState._shared_state and _is_alone(context):
        device = get_device()
        is_gpu = device.type == "cuda" and not cpu
        PartialState._shared_state.update(
            _cpu=cpu,
            backend=None,
            debug=False,
            device=device,
            # As on those who have begun the run: what scripts derive from it is to be the same.
            distributed_type=DistributedType.MULTI_GPU if is_gpu else DistributedType.MULTI_CPU,
            num_processes=1,
            process_index=NO_PLACE,
            local_process_index=NO_PLACE,
        )
    _begin_stock_state(self, cpu, **named)


def _is_alone(context: WorkerContext) -> bool:
    """Return whether no other worker runs the script's beginning with this one."""
    return context.join is not None or others_have_begun(is_inside=False)


def _wait_for_everyone(self: PartialState) -> None:
    """Be accelerate's `PartialState.wait_for_everyone`; one process has nobody to wait for."""
    if self.num_processes > 1:
        _wait_stock(self)


_begin_stock_state = PartialState.__init__
PartialState.__init__ = _begin_state  # type: ignore[method-assign]
_wait_stock = PartialState.wait_for_everyone
PartialState.wait_for_everyone = _wait_for_everyone  # type: ignore[method-assign]


def see_one_process(accelerator: Any, what: str) -> None:
    """Set accelerate's shared state, of a new Accelerator, to a single process.

    UsageError if it shards the model, accumulates gradients itself, or splits batches.
    """
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if kind in SHARDED:
        raise UsageError(
            f"{what}: the Accelerator uses {kind}, whose groups and shards the library holds by "
            f"itself, so that they cannot change in place: leave it out and pass the model to "
            f"prepare_model(parallel_strategy='fsdp') in a loop over train.epochs(), or train "
            f"without this call, from checkpoint to checkpoint"
        )
    if accelerator.gradient_accumulation_steps != 1:
        steps = accelerator.gradient_accumulation_steps
        raise UsageError(
            f"{what}: the Accelerator has gradient_accumulation_steps={steps}: leave it out and "
            f"set how many samples a step has, global_batch_size=...: then they are the same at "
            f"every number of workers"
        )
    if accelerator.split_batches:
        raise UsageError(
            f"{what}: the Accelerator has split_batches=True, by which a batch of the loader would "
            f"be a step's: leave it out, and set how many samples a step has, "
            f"global_batch_size=...; a loader's batch_size is that of a micro-batch"
        )
    # Each worker reads all of an iterable dataset to evaluate; none sends its batches to others.
    accelerator.dataloader_config.dispatch_batches = False
    for state in (PartialState._shared_state, AcceleratorState._shared_state):
        state.update(distributed_type=DistributedType.NO, num_processes=1, backend=None)
    take_place()  # It may be known from an earlier call of the train function, with another rank.


def take_place() -> bool:
    """Set accelerate's process index to our present rank; return whether it is the first now."""
    context = require_context("accelerate")
    if context.join is not None:
        return False  # It has none yet.
    before = PartialState._shared_state.get("process_index")
    for state in (PartialState._shared_state, AcceleratorState._shared_state):
        state.update(process_index=context.world_rank, local_process_index=context.local_rank)
    return context.world_rank == 0 and before != 0
