"""One optimizer step as a whole: what a loop over `train.steps` holds in its hands.

Rule: once a step's micro-batches are through, nothing of it needs another rank. `p.grad` is the
gradient of the whole step, buffers are those after it, and `optimizer.step()` cannot turn void.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from elastic.errors import UsageError
from elastic.worker.data.streams import MicroBatches
from elastic.worker.engine.run_state import RunState
from elastic.worker.engine.still_weights import TWO_STEPS


class StepComputer(Protocol):
    """The engine, as a whole step sees it."""

    run: RunState

    def compute(self, loader: MicroBatches) -> Iterator[Any]:
        """Yield our micro-batches of the step, until all of it that needs others is done."""
        ...

    def has_computed(self) -> bool:
        """Return whether we have done that."""
        ...

    def is_computed(self) -> bool:
        """Return whether that is done, by us or by others."""
        ...

    def log(self, values: Mapping[str, Any]) -> None:
        """Average these over the step."""
        ...

    def add_up(self, values: Mapping[str, Any]) -> None:
        """Add these up over the micro-batches of the step."""
        ...

    def num_samples(self) -> int:
        """Return the samples of the step that was computed last."""
        ...

    def end_epoch(self) -> None:
        """Let the step be the epoch's last one."""
        ...

    def skip(self) -> None:
        """Let the step count without any optimizer's."""
        ...


class WholeStep:
    """A step: its micro-batches are computed first, then each optimizer steps once.

        for batch in step:              # this rank's micro-batches
            loss = model(batch)
            loss.backward()
            train.log(loss=loss)
        optimizer.step()                # once, on every rank
        scheduler.step()
        optimizer.zero_grad()
        print(step.averages["loss"])    # of the whole step

    If a worker is lost on the way, the step is dealt out anew and its micro-batches are computed
    again, inside the same `for`. If others have done the step already, this rank has their state
    afterwards: then `optimizer.step()` and all that follows it does nothing, gradients are zeros,
    and the iteration counts like any other. So a loop has one iteration for each optimizer step,
    at every world size and whatever happens; only a worker that comes later begins at the step
    where the others are, with their state of all registered objects.

    What the script does to prepared and registered objects before the micro-batches counts once,
    though a worker that comes within a step runs it for that step; let all else there follow from
    the number of the step. What micro-batches need of a registered object is computed among them:
    such a worker finds the object as it is behind that code.

    Between the micro-batches and `optimizer.step()` do what is the same on all ranks: clip, read
    gradients, add noise to them, set rates. Random numbers drawn there, and before the
    micro-batches, are the same on all ranks, whenever they have come. A step that is to change
    nothing, as after an overflow, is reported by `skip()`; a `torch.amp.GradScaler` that leaves a
    step out is understood.
    """

    def __init__(
        self, engine: StepComputer, loader: MicroBatches, moved: Callable[[Any], Any]
    ) -> None:
        self._engine, self._loader, self._moved = engine, loader, moved
        self._is_begun = False

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's micro-batches of the step; once."""
        if self._is_begun:
            raise UsageError(
                f"the micro-batches of a step were read already; read them once: {TWO_STEPS}"
            )
        self._is_begun = True
        for value in self._engine.compute(self._loader):
            yield self._moved(value)

    def run(self, compute: Callable[[Any], Mapping[str, Any] | None]) -> dict[str, float]:
        """Have every micro-batch of the step computed, and return the step's averages.

        Args:
            compute: does forward and backward of one micro-batch; it may be called again with
                others if the group changes. What it returns, names to numbers or tensors of one
                element, is averaged as by `train.log`.

        Raises:
            UsageError: it returned something else.
        """
        for batch in self:
            values = compute(batch)
            if values is None:
                continue
            if not isinstance(values, Mapping):
                raise UsageError(
                    f"step.run: compute returned a {type(values).__name__}, expected a dict of "
                    f"names to numbers or tensors of one element, such as {{'loss': loss}}, or None"
                )
            self._engine.log(values)
        return self.averages

    @property
    def averages(self) -> dict[str, float]:
        """Return what was logged in the micro-batches, averaged over the whole step.

        The same bits on all ranks, at every world size. UsageError if the micro-batches are
        not through.
        """
        if not (self._is_begun and self._engine.is_computed()):
            raise UsageError(
                "step.averages: this step is not computed: read its micro-batches first, or it "
                "is over, and another one has begun"
            )
        return dict(self._engine.run.logbook.latest)

    def add(self, **values: Any) -> None:
        """Add values up over all micro-batches of the step, such as counts of tokens.

        Args:
            values: of the micro-batch that is computed now: numbers, or tensors of one element.
        """
        self._engine.add_up(values)

    @property
    def sums(self) -> dict[str, float]:
        """Return what `add` was given, over the whole step; nothing of a step that others did."""
        return dict(self._engine.run.logbook.sums) if self._engine.has_computed() else {}

    @property
    def samples(self) -> int:
        return self._engine.num_samples()

    def end_epoch(self) -> None:
        """Let this be the last step of its epoch; on all ranks or on none.

        The loop over `train.steps` ends when it is asked for the next one. Who leaves it by
        `break` instead may leave behind a worker that has not committed this step yet.
        """
        self._engine.end_epoch()

    def skip(self) -> None:
        """Let the step count without a change of weights; on all ranks or on none."""
        self._engine.skip()
