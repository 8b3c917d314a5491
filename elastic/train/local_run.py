"""A run in the user's own process: its environment, its failure, and what has no effect there.

Rule: the environment is restored, whatever the train function raises.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from elastic.errors import WorkerGroupError
from elastic.train.config import FailureConfig
from elastic.train.result import committed_in, result_of
from elastic.train.run_claim import print_stderr

if TYPE_CHECKING:
    from elastic.worker.process.local import LocalRun

PLACE = frozenset(
    f"{of}{what}" for of in ("", "LOCAL_", "GROUP_", "ROLE_") for what in ("RANK", "WORLD_SIZE")
) | {"NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"}
"""A process's place in its group, which users cannot set, here or in a worker."""


@contextlib.contextmanager
def environment(variables: Mapping[str, str] | None) -> Iterator[None]:
    """Set environment variables for the duration of the `with` block, as in a worker.

    Without effect on libraries that read them only once, at import.
    """
    wanted = {name: value for name, value in (variables or {}).items() if name not in PLACE}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def warn_unused(failures: FailureConfig) -> None:
    """Print which failure setting has no effect in the user's own process."""
    from elastic.worker.process.local import torchrun_rank

    if failures.max_failures and torchrun_rank() in (None, 0):
        print_stderr(
            f"max_failures={failures.max_failures} has no effect with num_workers=0: what the "
            f"train function raises ends the run (under torchrun --max-restarts counts)"
        )


def as_raised(error: BaseException) -> Exception:
    """Return what a train function raised; an exit as a RuntimeError."""
    return error if isinstance(error, Exception) else RuntimeError(f"exit code {error}")


def failed_here(run: LocalRun, error: BaseException) -> WorkerGroupError:
    from elastic.worker.engine.outcome import failure_of
    from elastic.worker.process.local import torchrun_rank

    failure = failure_of(error)
    failed = WorkerGroupError(
        f"run {run.job_name} failed: {failure.error_type}: {failure.message}",
        {torchrun_rank() or 0: as_raised(error)},
        traceback=failure.traceback,
    )
    failed.result = result_of(
        run.run_path,
        committed_in(run.run_path),
        "",
        failed,
        score_attribute=run.score_attribute,
        score_order=run.score_order,
    )
    return failed
