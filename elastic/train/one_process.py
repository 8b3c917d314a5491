"""Libraries over accelerate see one process: the engine is what knows of the others.

Accelerate asks once how many processes there are, and answers to everything from then on: what a
loader deals out, how often a scheduler steps, what is gathered. In a group whose size changes in
place all of that would be wrong. So it is told of one process, for which it has nothing to do, and
which of several this one is: that decides who writes files and shows progress.
"""

from __future__ import annotations

from typing import Any

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from elastic.errors import UsageError
from elastic.train.session import require_context

SHARDED = {"FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA"}


def see_one_process(accelerator: Any, what: str) -> None:
    """Tell an Accelerator, and all that asks its shared state, of this process alone.

    Args:
        accelerator: just made.
        what: the call that needs it, for the error.

    Raises:
        UsageError: it shards the model, or accumulates gradients by itself.
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
            f"say how many samples a step has, global_batch_size=...: then they are the same at "
            f"every number of workers"
        )
    for state in (PartialState._shared_state, AcceleratorState._shared_state):
        state.update(distributed_type=DistributedType.NO, num_processes=1, backend=None)


def take_place() -> bool:
    """Tell accelerate which of the group's processes this one is now.

    Returns:
        Whether it has become the first one.
    """
    context = require_context("accelerate")
    before = PartialState._shared_state.get("process_index")
    for state in (PartialState._shared_state, AcceleratorState._shared_state):
        state.update(process_index=context.world_rank, local_process_index=context.local_rank)
    return context.world_rank == 0 and before != 0
