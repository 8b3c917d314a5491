"""What the inner DataLoader reads of a dataset without numbers: micro-batches of streams.

One reader in each process that reads: the training process, or each worker process of the user's
loader. It keeps the sequences open that it was asked for, so that a stream is to be asked for in
one process only.

Rule: whatever is asked for is answered, in any order: at worst a sequence is begun anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import default_collate

from elastic.core.policy.cursor import Cursor
from elastic.core.policy.data_plan import LEAST
from elastic.core.policy.microbatch import Span
from elastic.core.policy.streams import StreamPlan
from elastic.errors import UsageError
from elastic.worker.data.copying_samples import copied
from elastic.worker.data.randomness import seed_everything
from elastic.worker.data.stream_book import StreamSnapshot
from elastic.worker.data.stream_source import END, SampleWindow, reset_locks


@dataclass(frozen=True)
class StreamRequest:
    """A micro-batch of a stream.

    Attributes:
        tag: comes back with the batch.
        stream: its number, which is that of the micro-batch.
        held: the streams of this rank; what this process holds of others is closed.
        low: no step of this epoch before this one will be asked for again.
        snapshot: where to begin, if the stream has to be begun.
    """

    tag: int
    cursor: Cursor
    stream: int
    held: Span
    low: int
    snapshot: StreamSnapshot | None = None


@dataclass(frozen=True)
class EmptyRequest:
    """A request for nothing: another process's turn has to come."""

    tag: int


@dataclass(frozen=True)
class StreamBatch:
    """What was read beside the samples.

    Attributes:
        count: samples of the micro-batch; 0 if it is a placeholder.
        more: the stream does not end the epoch here.
        snapshots: that were taken since the last answer.
    """

    count: int
    more: bool
    snapshots: tuple[StreamSnapshot, ...]


class StreamReader:
    """Replaces the dataset of an inner DataLoader."""

    def __init__(self, dataset: Any, streams: StreamPlan, *, every: int) -> None:
        """Describe it; nothing is opened yet.

        Args:
            dataset: the user's.
            streams: how it is cut.
            every: steps between two snapshots.
        """
        self.dataset = dataset
        self._streams, self._every = streams, every
        self._windows: dict[int, SampleWindow] = {}
        self._any: tuple[int, Any] | None = None
        self._is_ready = False

    def __getitems__(self, request: StreamRequest | EmptyRequest) -> Any:
        """Return (request, samples, what was found); samples of a micro-batch, at least one."""
        if isinstance(request, EmptyRequest):
            return request, None, None
        if not self._is_ready:
            reset_locks()
            self._is_ready = True
        streams, (epoch, step) = self._streams, (request.cursor.epoch, request.cursor.step)
        self._close_others(request.held)
        window = self._window(streams.sequence_of(request.stream))
        low, snapshot = streams.beginning(request.low), request.snapshot
        samples = []
        for place in streams.places(step, request.stream):
            sample = window.at(epoch, place, low=low, snapshot=snapshot)
            if sample is END:
                break
            samples.append(sample)
        reporting = streams.reporting_place(step, request.stream)
        more = window.at(epoch, reporting, low=low) is not END
        found = StreamBatch(len(samples), more, window.take_snapshots())
        if not samples:
            samples = [self._stand_in(window, epoch)] * min(LEAST, streams.micro_batch_size)
        return request, samples, found

    def _window(self, number: int) -> SampleWindow:
        if number not in self._windows:
            self._windows[number] = SampleWindow(
                self.dataset, self._streams, number, every=self._every
            )
        return self._windows[number]

    def _close_others(self, held: Span) -> None:
        mine = {self._streams.sequence_of(stream) for stream in range(*held)}
        for number in [number for number in self._windows if number not in mine]:
            del self._windows[number]

    def _stand_in(self, window: SampleWindow, epoch: int) -> Any:
        """Return any sample, to compute with where there is none; it does not count.

        UsageError if there is none at all.
        """
        if window.last is not END:
            return window.last
        if self._any is None or self._any[0] != epoch:
            for number in sorted({self._streams.sequence_of(v) for v in self._every_stream()}):
                other = SampleWindow(self.dataset, self._streams, number, every=self._every)
                sample = other.at(epoch, 0, low=0)
                if sample is not END:
                    self._any = (epoch, sample)
                    return sample
            raise UsageError(
                f"prepare_data_loader: the dataset ({type(self.dataset).__name__}) yields no "
                f"sample in epoch {epoch}, there is nothing to train on; expected at least 1"
            )
        return self._any[1]

    def _every_stream(self) -> range:
        return range(self._streams.num_micro_batches)


@dataclass(frozen=True)
class StreamCollate:
    """The user's collate_fn; one that draws does so from a state set for its micro-batch."""

    collate: Callable[[Any], Any]
    streams: StreamPlan

    def __call__(self, read: tuple[Any, Any, Any]) -> tuple[int, Any]:
        """Return the tag of the request, and (batch, what was found)."""
        request, samples, found = read
        if found is None:
            return request.tag, None
        if self.collate is not default_collate:
            # What it changes, such as a key that it takes out, is read again: as a stand-in, or
            # when the step is done once more.
            samples = [copied(sample) for sample in samples]
            cursor, streams = request.cursor, self.streams
            seed_everything(streams.collate_seed(cursor.epoch, cursor.step, request.stream))
        return request.tag, (self.collate(samples), found)
