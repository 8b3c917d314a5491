"""The loop of a training run: epochs that resume, averaged values, state that joiners receive.

    for epoch in train.epochs(10):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            train.log(loss=loss)

Rule: such a loop, over prepared objects, is never left because the group changes. Workers join
and leave while it runs; what it computes does not depend on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from elastic.errors import UsageError
from elastic.train.session import require_engine
from elastic.worker.state.train_state import Stateful

if TYPE_CHECKING:
    from elastic.train.loaders import PreparedLoader
    from elastic.worker.engine.whole_step import WholeStep


def epochs(total: int, *, start: int = 0) -> Iterator[int]:
    """Yield epoch numbers from the run's current epoch up to `total`.

    A worker that joins later receives the state of the run here, and continues in the middle of
    the others' epoch. Models, optimizers and schedulers must be prepared before. A call of the
    train function has one such loop: phases of training are told by the epoch.

    Args:
        total: epochs of the whole run, from 0; not of this call.
        start: first epoch if no worker has the run's state: after those of a checkpoint that the
            train function has loaded.

    Raises:
        UsageError: outside a train function, no optimizer was prepared, or it is the second loop.
    """
    for name, value in (("total", total), ("start", start)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise UsageError(f"train.epochs: {name}={value!r}: expected an int, 0 or more")
    return require_engine("train.epochs").epochs(total, start, is_users=True)


def steps(loader: PreparedLoader) -> Iterator[WholeStep]:
    """Yield the optimizer steps of an epoch: one iteration for each, at every world size.

        for epoch in train.epochs(10):
            for step in train.steps(loader):
                for x, y in step:               # this rank's micro-batches
                    loss = F.cross_entropy(model(x), y)
                    loss.backward()
                    train.log(loss=loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    It computes what the loop over micro-batches computes, with the same bits. Use it where
    something counts iterations: code after the inner loop runs once per step. See `WholeStep` for
    what that code may do.

    Args:
        loader: prepared; read it either in steps or in micro-batches.

    Raises:
        UsageError: the loader is not prepared, or this is not inside a loop over `train.epochs()`.
    """
    if not hasattr(loader, "steps"):
        raise UsageError(
            f"train.steps: expected a loader that prepare_data_loader has returned, got a "
            f"{type(loader).__name__}"
        )
    return loader.steps()


def log(**values: Any) -> None:
    """Average values over the whole step, at any world size; does not block.

    `train.report` adds the averages since the last report to its metrics, except names that begin
    with "_".

    Args:
        values: numbers, or tensors of one element.

    Raises:
        UsageError: outside a train function.
    """
    require_engine("train.log").log(values)


def get_logged() -> dict[str, float]:
    """Return what was logged, averaged over the newest step that all workers have reported.

    Inside an epoch that is the previous step; after its last batch it is the last one. All workers
    get the same values, so they may base decisions on them, such as to stop early.

    Raises:
        UsageError: outside a train function.
    """
    engine = require_engine("train.get_logged")
    engine.note_asked()
    return dict(engine.run.logbook.latest)


def register(**objects: Stateful) -> None:
    """Add the user's own objects to the run's state, such as an EMA of the weights.

    A worker that joins receives their state with that of the model.

    Args:
        objects: with `state_dict` and `load_state_dict`; by names that are the same on all ranks.

    Raises:
        UsageError: outside a train function, inside the loop, or an object without these methods.
    """
    engine = require_engine("train.register")
    for name, thing in objects.items():
        engine.register(name, thing)


def stepped() -> bool:
    """Return whether the optimizer has stepped in this iteration; also True outside of steps.

    A rank that computes several micro-batches of a step runs the loop's body for each of them.
    Guard what should happen once per step (the update of an EMA) with this function. Call it after
    all optimizers: those that have not been called by then do not step in this iteration.

    Raises:
        UsageError: outside a train function.
    """
    engine = require_engine("train.stepped")
    engine.note_asked()
    return engine.step_is_done()
