"""`train.log`: values of a training loop, averaged over whole steps whatever the world size.

Rule: a rank's values of a step travel with the next step's gradients, and with the last ones at
the end of an epoch; nothing waits for them, and no value is counted twice. Where ranks may leave,
or the run may continue from, all ranks exchange them before (`share`), and count them when they
would have been counted anyway: what a script decides by them is the same. Those of `train.steps`
are averaged before the optimizer steps (`step_values.py`), because the loop asks for them then.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from elastic.core.policy.cursor import Cursor
from elastic.core.policy.program_points import ProgramPoint
from elastic.errors import UsageError

log = logging.getLogger(__name__)

VALUES_MAX = 28
"""Names that can be logged; they share a message of fixed size with what else travels there."""


SUM = "+"
"""Marks names whose values are added up."""


class Logbook:
    """Values of the step at hand, of the one before, and their averages over all ranks.

    Attributes:
        latest: averages of the newest step that all ranks have reported; the same on all of them.
        sums: what `add_up` was given in the last step of `train.steps`, over all micro-batches.
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Any, float]] = {}
        self._done: dict[str, tuple[float, float]] = {}
        # The same over all ranks, once it was shared.
        self._shared: dict[str, tuple[float, float]] = {}
        self._averages: dict[str, tuple[float, float]] = {}
        # Of one step of `train.steps`, by micro-batch.
        self._of_micro_batches: dict[int, dict[str, tuple[Any, float]]] = {}
        # What the others send with the next step, in the order in which they do.
        self._names: list[str] = []
        # Of the step of `train.steps` at hand, over all ranks.
        self._settled: dict[str, tuple[float, float]] = {}
        self._warned = False
        self.latest: dict[str, float] = {}
        self.sums: dict[str, float] = {}

    def add_up(self, values: Mapping[str, Any], *, counts: bool) -> None:
        """Note values of one micro-batch that are added up rather than averaged.

        Args:
            values: names to numbers, or tensors of one element.
            counts: the micro-batch has samples; names are sent without, too.
        """
        self.add({SUM + name: value for name, value in values.items()}, float(counts))

    def add(self, values: Mapping[str, Any], weight: float) -> None:
        """Note values of one micro-batch.

        Args:
            values: names to numbers, or tensors of one element; those are read a step later, so
                that nothing waits for a device.
            weight: what the micro-batch counts.

        Raises:
            UsageError: a value is neither; names it.
        """
        for name, value in values.items():
            value = _as_number(name, value)
            total, weights = self._sums.get(name, (0.0, 0.0))
            if weight:  # Never multiplied by zero, which leaves what is infinite.
                total, weights = total + value * weight, weights + weight
            self._sums[name] = (total, weights)

    def end_micro_batch(self, number: int) -> None:
        self._of_micro_batches[number], self._sums = self._sums, {}

    def take_micro_batches(self) -> dict[int, dict[str, tuple[float, float]]]:
        """Return (sum, weight) of each name, by micro-batch of the step at hand."""
        taken, self._of_micro_batches = self._of_micro_batches, {}
        return {
            number: {name: (float(total), weight) for name, (total, weight) in sums.items()}
            for number, sums in taken.items()
        }

    def take_totals(self, totals: Mapping[str, tuple[float, float]]) -> None:
        """Take (sum, weight) of each name over all micro-batches of a step, whole on all ranks."""
        self.sums = {}
        for name, (total, weight) in totals.items():
            if name.startswith(SUM):
                self.sums[name.removeprefix(SUM)] = total
            elif weight:
                self.latest[name] = total / weight
                self._settled[name] = (total, weight)

    def _count(self, name: str, total: float, weight: float) -> None:
        if weight:
            self.latest[name] = total / weight
            so_far, weights = self._averages.get(name, (0.0, 0.0))
            self._averages[name] = (so_far + total, weights + weight)

    def forget_step(self) -> None:
        """The step at hand is done again: drop its values."""
        self._sums, self._of_micro_batches, self._settled = {}, {}, {}

    def commit_step(self) -> None:
        """The step at hand counts: its values are to travel with the next message."""
        settled, self._settled = self._settled, {}
        for name, (total, weight) in settled.items():
            self._count(name, total, weight)
        self._shared = {}
        self._done = {name: (float(s), w) for name, (s, w) in self._sums.items()}
        self._sums = {}

    def row(self) -> list[float]:
        """Return what the others must know of our last committed step: names, sums, weights.

        The second number is negative if they are those of all ranks.
        """
        done = self._shared or self._done
        names = sorted(done)[:VALUES_MAX]
        if not names:
            return [0.0, 0.0]
        weight = max(w for _, w in done.values())
        sign = -1 if self._shared else 1
        return [fingerprint(names), sign * weight, *(n for name in names for n in done[name])]

    def share(self, rows: Sequence[Sequence[float]]) -> None:
        """Keep what all ranks sent of the last step, to be counted with the next message."""
        self._shared = self._totals(self._done_names(), rows)

    def take_rows(self, rows: Sequence[Sequence[float]]) -> None:
        """Average what all ranks sent of the last step; ranks that were not there send nothing."""
        for name, (total, weight) in self._totals(self._reported_names(), rows).items():
            self._count(name, total, weight)

    def _totals(
        self, names: Sequence[str], rows: Sequence[Sequence[float]]
    ) -> dict[str, tuple[float, float]]:
        """Return (sum, weight) of each name over all ranks."""
        mine = fingerprint(names)
        reported = [row for row in rows if len(row) > 1 and row[1]]
        # One that has all of it is enough, and others may have missed the exchange.
        reported = [row for row in reported if row[1] < 0][:1] or reported
        if not names or not reported:
            return {}
        if any(row[0] != mine for row in reported):
            if not self._warned:
                self._warned = True
                log.warning(
                    "log_ignored names=%s: the ranks log different names in the same step",
                    ",".join(names),
                )
            return {}
        found = {}
        for number, name in enumerate(names):
            # A name that only some micro-batches log counts as much as these.
            index = 2 + 2 * number
            total, weight = (sum(row[at] for row in reported) for at in (index, index + 1))
            found[name] = (total, weight)
        return found

    def _done_names(self) -> list[str]:
        """Return what rows are about; one that has just joined knows it from the others."""
        done = self._shared or self._done
        if done:
            self._names = sorted(done)[:VALUES_MAX]
        return list(self._names)

    def _reported_names(self) -> list[str]:
        """Return what rows are about that have come: what we have sent is done with."""
        names = self._done_names()
        self._done, self._shared = {}, {}
        return names

    def latest_row(self) -> list[float]:
        """Return the latest averages for members that have missed them."""
        names = [name for name in self._names if name in self.latest]
        return [fingerprint(names), 1.0, *(self.latest[name] for name in names)]

    def latest_json(self) -> str:
        """Return the latest averages as a JSON object; non-finite values become strings."""
        known = self.latest.items()
        return json.dumps({n: value if math.isfinite(value) else str(value) for n, value in known})

    def take_latest(self, row: Sequence[float]) -> None:
        """Take what a member sends that has received everyone's last step, as we have not."""
        names = self._reported_names()
        if row[0] == fingerprint(names):
            self.latest.update(zip(names, row[2:], strict=False))

    def receive(self, latest: Mapping[str, float], names: Sequence[str]) -> None:
        """Continue from another member's state: what we did not send yet counts no more."""
        self.forget_step()
        self._done, self._shared, self._names = {}, {}, list(names)
        self.latest = dict(latest)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps; the same on all ranks."""
        averages = {name: list(pair) for name, pair in self._averages.items()}
        shared = {name: list(pair) for name, pair in self._shared.items()}
        return {
            "latest": dict(self.latest),
            "names": list(self._names),
            "averages": averages,
            "shared": shared,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.receive(state["latest"], state["names"])
        self._averages = {name: (pair[0], pair[1]) for name, pair in state["averages"].items()}
        self._shared = {name: (pair[0], pair[1]) for name, pair in state["shared"].items()}

    def take_averages(self) -> dict[str, float]:
        """Return averages over all steps since the last call."""
        averages = {name: total / weight for name, (total, weight) in self._averages.items()}
        self._averages = {}
        return averages


class PointCounter:
    """Counts what members of one group do alike at a point of the run: the first, the second."""

    def __init__(self) -> None:
        self._at, self._count = ProgramPoint(Cursor()), 0

    def next(self, point: ProgramPoint) -> int:
        if self._at != point:
            self._at, self._count = point, 0
        self._count += 1
        return self._count


def _as_number(name: str, value: Any) -> Any:
    """Return a value in float64, a tensor on its device.

    Sums of what losses are (float32, times a count) do not round in it, so that their order, which
    depends on the number of workers, is no matter.
    """
    found = ""
    if hasattr(value, "detach"):
        if value.numel() == 1:
            return value.detach().double()
        found = f"of shape {tuple(value.shape)}"
    elif not isinstance(value, (str, bytes)):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            return float(value)
    raise UsageError(
        f"train.log: {name.removeprefix(SUM)} is {found or repr(value)[:80]}, a "
        f"{type(value).__name__}; expected a number, or a tensor of one element"
    )


def fingerprint(names: Sequence[str]) -> float:
    return float(zlib.crc32("\0".join(names).encode()))
