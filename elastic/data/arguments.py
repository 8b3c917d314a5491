"""Which arguments of Ray Data methods of a dataset accept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic.errors import UsageError

NO_EFFECT = frozenset(
    {
        "concurrency",
        "compute",
        "num_cpus",
        "num_gpus",
        "memory",
        "ray_remote_args",
        "zero_copy_batch",
        "ray_remote_args_fn",
        "max_retries",
        "locality_hints",
        "override_num_blocks",
        "parallelism",
        "udf_modifying_row_count",
        "resources",
        "label_selector",
        "fallback_strategy",
        "accelerator_type",
        "max_calls",
        "runtime_env",
    }
)
"""Ray's arguments for placement and resources: accepted without effect."""
OF_PASSES = ("prefetch_batches", "prefetch_blocks", "pin_memory", "global_batch_size", "weigh")
"""Further ones of `iter_...`: Ray's, and those that matter to the steps of a training loop."""


def check_others(what: str, others: Mapping[str, Any], *more: str) -> None:
    """Refuse arguments that are neither Ray's nor ours."""
    unknown = sorted(set(others) - NO_EFFECT - set(more))
    if unknown:
        raise UsageError(f"Dataset.{what}: unknown arguments: {', '.join(unknown)}")
