"""A Trainer's evaluation and prediction, which its workers share.

Batch k of those that one process would read is read and computed by rank k modulo W, and all ranks
get what came of it, in the order of the data. So each of them goes through the library's own loop
over the same losses, logits and labels, with the same bits, at every number of workers.

Rule: nobody depends on the others here. Where the group breaks in the middle, and where others have
run this evaluation before, a worker reads and computes all that it lacks by itself.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from accelerate.data_loader import DataLoaderStateMixin
from accelerate.state import GradientState
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader, IterableDataset

from elastic.core.policy.cursor import derive
from elastic.train.dealing import loader_like
from elastic.train.devices import get_device
from elastic.worker.drawn import Drawn, seeded

EVALUATION = 6
"""Purpose of these seeds, beside those in cursor.py and drawn.py."""

Share = Callable[[bytes], Sequence[bytes] | None]
Compute = Callable[[Any], Any]


class Turn(dict[str, Any]):
    """A batch that some rank reads: empty, but for what a Trainer is to keep of its inputs."""

    def __init__(self, of: DealtBatches, number: int) -> None:
        """Be this batch of them."""
        super().__init__()
        self._of, self._number = of, number

    def result(self, compute: Compute) -> Any:
        """Return what came of this batch, whoever has computed it.

        Args:
            compute: does, from a batch as the loader yields it.
        """
        kept, result = self._of.result_of(self._number, compute)
        self.update(kept)
        return result


class DealtBatches(DataLoaderStateMixin):  # type: ignore[misc]
    """A loader of `Turn`s; everything else is the loader's that it was made of."""

    def __init__(
        self, loader: Any, place: tuple[int, int], share: Share, *, seed: int, keeps_inputs: bool
    ) -> None:
        """Be dealt out for one pass.

        Args:
            loader: of one process; see `can_be_dealt`.
            place: our rank, and of how many that share the pass.
            share: gives everyone's bytes for ours, by rank; None if we are on our own from here.
            seed: of what is drawn while a batch is computed.
            keeps_inputs: all ranks are to have the inputs of all batches.
        """
        self._loader, self._share, self._seed, self._keeps = loader, share, seed, keeps_inputs
        self._rank, self._world = place
        self._batches = Drawn(loader.batch_sampler, seed).of(0)
        self._found: dict[int, tuple[Any, Any]] = {}
        self._numbers: Iterator[int] = iter(())
        self._reader: Iterator[Any] = iter(())
        self._read(range(self._rank, len(self._batches), self._world))
        self.gradient_state = GradientState()

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Turn]:
        """Begin the pass; accelerate knows of it if it knows of the loader."""
        is_known = isinstance(self._loader, DataLoaderStateMixin)
        if is_known:
            self.begin()
        try:
            for number in range(len(self)):
                self.end_of_dataloader = number == len(self) - 1
                yield Turn(self, number)
        finally:
            if is_known:
                self.end()

    def __getattr__(self, name: str) -> Any:
        """Pass everything else on to the loader."""
        if name.startswith("__") or name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def result_of(self, number: int, compute: Compute) -> tuple[Any, Any]:
        """Return what is kept of a batch's inputs, and what came of it; asked for in order."""
        if number not in self._found and self._world > 1:
            self._go_round(number, compute)
        if number not in self._found:
            self._found[number] = self._computed(number, compute)
        return self._found.pop(number)

    def _go_round(self, first: int, compute: Compute) -> None:
        """Have the batches from this one on computed, one by each rank."""
        mine, told = first + self._rank, None
        if mine < len(self):
            told = self._computed(mine, compute)
        parts = self._share(pickle.dumps(send_to_device(told, "cpu")))
        if parts is not None:
            for number, part in enumerate(parts, first):
                if number < len(self):
                    self._found[number] = send_to_device(pickle.loads(part), get_device())
            return
        if told is not None:
            self._found[mine] = told
        self._world = 1  # From here on we are on our own.
        self._read([k for k in range(first, len(self)) if k not in self._found])

    def _read(self, numbers: Sequence[int]) -> None:
        """Read these batches from here on."""
        batches = [self._batches[number] for number in numbers]
        self._numbers = iter(numbers)
        self._reader = iter(loader_like(self._loader, batch_sampler=batches))

    def _computed(self, number: int, compute: Compute) -> tuple[Any, Any]:
        while next(self._numbers) != number:
            next(self._reader)
        batch = next(self._reader)
        kept = dict(batch) if self._keeps else {}
        with seeded(derive(self._seed, EVALUATION, number)):
            return kept, compute(batch)


def can_be_dealt(loader: Any) -> bool:
    """Return whether a loader reads batches that can be named, and so be read by anyone."""
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
        and hasattr(loader.batch_sampler, "__len__")
    )
