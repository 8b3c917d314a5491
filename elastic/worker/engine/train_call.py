"""The call of the train function that this process runs: its context, and its engine.

Rule: this is the only access to them from outside of the engine.
"""

from __future__ import annotations

from elastic.worker.engine.context import WorkerContext
from elastic.worker.engine.step_engine import StepEngine

_context: WorkerContext | None = None
_engine: StepEngine | None = None


def current() -> WorkerContext | None:
    """Return this process's context, None if it does not run a train function."""
    return _context


def current_engine() -> StepEngine | None:
    """Return the engine of the call's training loop, None if it has none."""
    return _engine


def is_in_loop() -> bool:
    """Return whether the train function is in a loop over epochs of ours."""
    return _engine is not None and _engine.has_begun


def set_current(context: WorkerContext | None, engine: StepEngine | None = None) -> None:
    """Begin, or end with None, the time in which `current()` gives this context."""
    global _context, _engine
    _context, _engine = context, engine
