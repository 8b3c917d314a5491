"""A sequence of samples that an iterable dataset yields, by place: a window that moves.

Rule: the sample at a place is the same for every reader, from wherever it began: the random
state is set for each, and a snapshot that does not lead to the same next sample is not used.
"""

from __future__ import annotations

import copy
import importlib
import logging
import sys
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker as torchs_worker

from elastic.core.policy.seeds import derive
from elastic.core.policy.streams import StreamCut, StreamPlan, StreamPosition, nearest
from elastic.errors import UsageError, check
from elastic.worker.data.randomness import seed_everything
from elastic.worker.data.stream_book import StreamSnapshot

log = logging.getLogger(__name__)

SNAPSHOT_STEPS = 8
"""Steps between two snapshots of a sequence, unless the loader has `snapshot_every_n_steps`."""
END: Any = object()
"""The placeholder for a sample behind the last one."""


@dataclass
class _Pass:
    """A pass over the samples of one sequence, as far as it was read.

    Attributes:
        seed: from which the random state of each place follows.
        dataset, iterator: what is read; without an iterator once that has raised.
        first: place of the first of `samples`.
        low: the samples before this place are wanted no more.
        snapshot: step and state before the sample that is read now, if one is taken there.
    """

    epoch: int
    seed: int
    dataset: Any
    first: int
    low: int
    iterator: Iterator[Any] | None = None
    samples: deque[Any] = field(default_factory=deque)
    has_ended: bool = False
    snapshot: tuple[int, Any] | None = None

    def has(self, epoch: int, place: int) -> bool:
        """Return whether the sample at a place is cached, or comes later."""
        is_open = self.iterator is not None or self.has_ended
        return is_open and epoch == self.epoch and place >= self.first

    @property
    def end(self) -> int:
        """Return the place of the sample that is read next."""
        return self.first + len(self.samples)


class SampleWindow:
    """One sequence: samples near the present step are cached, others are read again."""

    def __init__(self, dataset: Any, streams: StreamPlan, number: int, *, every: int) -> None:
        """Describe it; nothing is read yet.

        Args:
            dataset: the user's, as it was given.
            streams: how it is cut.
            number: of the sequence.
            every: steps between two snapshots.
        """
        self._given, self._streams, self._number = dataset, streams, number
        self._every = every
        self._pass: _Pass | None = None
        self._trusts = keeps_state(dataset)
        self._snapshots: list[StreamSnapshot] = []
        # The newest two of our own, for what fails: a step may be done again.
        self._kept: deque[StreamSnapshot] = deque(maxlen=2)
        self.last: Any = END

    def at(
        self, epoch: int, place: int, *, low: int, snapshot: StreamSnapshot | None = None
    ) -> Any:
        """Return a sample, or `END`.

        Args:
            epoch: the pass over the data.
            place: in the sequence.
            low: what lies before this place will not be asked for again; at most `place`.
            snapshot: to continue from, if the sequence has to be begun anew.
        """
        if self._pass is None or not self._pass.has(epoch, place):
            self._pass = None  # Its samples and its dataset make room first.
            self._pass = self._open(epoch, low, snapshot)
        now = self._pass
        now.low = low
        while place >= now.end:
            if now.has_ended:
                return END
            self._pull(now)
        return now.samples[place - now.first]

    def take_snapshots(self) -> tuple[StreamSnapshot, ...]:
        taken, self._snapshots = tuple(self._snapshots), []
        return taken

    # ------------------------------------------------------------------- reading

    def _open(self, epoch: int, place: int, snapshot: StreamSnapshot | None) -> _Pass:
        known = [one for one in (snapshot, *self._kept) if one is not None]
        index = nearest(
            [one.position for one in known],
            StreamPosition(epoch, place // self._streams.beginning(1), self._number),
        )
        if index is not None and self._trusts:
            continued = self._continued_from(known[index], place)
            if continued is not None:
                return continued
        if place:
            log.info("stream_counted sequence=%d epoch=%d samples=%d", self._number, epoch, place)
        return self._begun(epoch, 0, None)

    def _continued_from(self, snapshot: StreamSnapshot, place: int) -> _Pass | None:
        """Begin at a snapshot; None if that does not lead where it should."""
        where = snapshot.position
        start = self._streams.beginning(where.step)
        now = self._begun(where.epoch, start, copy.deepcopy(snapshot.state))
        self._pull(now)
        if not now.has_ended and snapshot.mark == mark_of(self.last):
            log.info(
                "stream_continued sequence=%d epoch=%d step=%d counted=%d", self._number,
                where.epoch, where.step, place - start,
            )  # fmt: skip
            return now
        self._trusts = False
        log.warning(
            "stream_state_refused sequence=%d epoch=%d step=%d: %s.load_state_dict does not "
            "continue with the sample that came next; its samples are counted instead, which reads "
            "all before them", self._number, where.epoch, where.step, type(now.dataset).__name__,
        )  # fmt: skip
        return None

    def _begun(self, epoch: int, place: int, state: Any) -> _Pass:
        dataset = fresh(self._given, self._streams, self._number)
        seed = self._streams.pass_seed(epoch, self._number)
        now = _Pass(epoch, seed, dataset, first=place, low=place)
        with self._seen(now):
            seed_everything(derive(seed, place))
            if callable(getattr(dataset, "set_epoch", None)):
                dataset.set_epoch(epoch)
            if state is not None:
                dataset.load_state_dict(state)
            now.iterator = iter(dataset)
        if now.iterator is dataset:
            raise UsageError(
                f"{type(dataset).__name__}.__iter__ returns the dataset itself, so that it can be "
                f"read only once: let it return a new iterator (write it with `yield`)"
            )
        return now

    def _pull(self, now: _Pass) -> None:
        place = now.end
        self._snap(now, place)
        # Until all of this is done: whatever is interrupted, or raises, is begun again.
        iterator, now.iterator = now.iterator, None
        check(iterator is not None, f"sequence {self._number} is read while it is not open")
        seed_everything(derive(now.seed, place))
        with self._seen(now):
            sample = next(iterator, END)  # type: ignore[arg-type]
        if sample is END:
            now.has_ended, now.snapshot = True, None
            return
        now.samples.append(sample)
        self.last = sample
        self._end_snap(now, sample)
        while now.samples and now.first < now.low:
            now.samples.popleft()
            now.first += 1
        now.iterator = iterator

    def _snap(self, now: _Pass, place: int) -> None:
        if not self._trusts or not place:
            return
        step, offset = divmod(place, self._streams.beginning(1))
        if not offset and step % self._every == 0:
            with self._seen(now):
                now.snapshot = (step, copy.deepcopy(now.dataset.state_dict()))

    def _end_snap(self, now: _Pass, sample: Any) -> None:
        if now.snapshot is None:
            return
        (step, state), now.snapshot = now.snapshot, None
        position = StreamPosition(now.epoch, step, self._number)
        cut, mark = self._streams.fingerprint, mark_of(sample)
        snapshot = StreamSnapshot(position, cut, state, mark)
        self._snapshots.append(snapshot)
        self._kept.append(snapshot)

    @contextmanager
    def _seen(self, now: _Pass) -> Iterator[None]:
        """Make get_worker_info() return what the dataset is to see in this partition."""
        before = torchs_worker._worker_info
        torchs_worker._worker_info = self._place_of_stream(now) if self._is_by_worker else None
        try:
            yield
        finally:
            torchs_worker._worker_info = before

    @property
    def _is_by_worker(self) -> bool:
        return self._streams.cut is StreamCut.WORKER

    def _place_of_stream(self, now: _Pass) -> Any:
        return torchs_worker.WorkerInfo(
            id=self._number,
            num_workers=self._streams.num_micro_batches,
            seed=now.seed,
            dataset=now.dataset,
        )


# --------------------------------------------------------------------------- datasets


def keeps_state(dataset: Any) -> bool:
    """Return whether a dataset can report its position, and resume from it exactly.

    Hugging Face's lose what is in a shuffle buffer, and report it.
    """
    if not all(
        callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict")
    ):
        return False
    return not (is_of_hugging_face(dataset) and _has_buffer(getattr(dataset, "_ex_iterable", None)))


def _has_buffer(part: Any) -> bool:
    if part is None:
        return False
    if type(part).__name__.startswith("BufferShuffled"):
        return True
    inner = [getattr(part, "ex_iterable", None), *(getattr(part, "ex_iterables", None) or ())]
    return any(_has_buffer(one) for one in inner)


def is_of_hugging_face(dataset: Any) -> bool:
    """Return whether it is an iterable dataset of the `datasets` package, which we never import."""
    kind = getattr(sys.modules.get("datasets"), "IterableDataset", None)
    return kind is not None and isinstance(dataset, kind)


def fresh(dataset: Any, streams: StreamPlan, number: int) -> Any:
    """Return what a sequence is iterated from, as if for the first time, or raise UsageError."""
    if streams.cut is StreamCut.SHARD:
        return _shard(dataset, streams.num_micro_batches, number)
    if is_of_hugging_face(dataset):
        return copy.copy(dataset)  # The data are shared, its place is not.
    if not keeps_state(dataset):
        return dataset
    try:
        return copy.deepcopy(dataset)
    except Exception as error:
        raise UsageError(
            f"{type(dataset).__name__} has state_dict, and cannot be copied ({error!r}), so that "
            f"its place cannot be set for each pass: give it __deepcopy__, or leave state_dict out"
        ) from error


def _shard(dataset: Any, count: int, index: int) -> Any:
    if is_of_hugging_face(dataset):
        split: Any = importlib.import_module("datasets.distributed").split_dataset_by_node
        # Unlike `shard` it deals shuffled shards out anew in each epoch.
        return split(dataset, rank=index, world_size=count)
    return dataset.shard(num_shards=count, index=index)


def reset_locks() -> None:
    """Let fsspec work in a forked process, as Hugging Face's datasets do where they see one."""
    module = sys.modules.get("fsspec.asyn")
    if module is not None and get_worker_info() is not None:
        module.reset_lock()


def mark_of(sample: Any) -> int:
    """Return a checksum of a sample; of what has no plain content, its type alone counts."""
    if isinstance(sample, torch.Tensor):
        plain = sample.detach().cpu().contiguous().reshape(-1)
        return zlib.crc32(plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
    if isinstance(sample, np.ndarray) and not sample.dtype.hasobject:
        return zlib.crc32(sample.tobytes())
    if isinstance(sample, (list, tuple)):
        parts = [str(mark_of(one)) for one in sample]
    elif isinstance(sample, Mapping):
        parts = [f"{key}={mark_of(one)}" for key, one in sample.items()]
    elif sample is None or isinstance(sample, (bool, int, float, complex, str, bytes, np.generic)):
        parts = [repr(sample)]
    else:
        parts = []
    return zlib.crc32("\0".join([type(sample).__name__, *parts]).encode())
