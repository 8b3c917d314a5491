"""Micro-batches out of a DataLoader whose dataset can only be iterated over.

Each rank reads the streams of the micro-batches that it holds, in the training process or in the
loader's worker processes; stream v is read by process v modulo their number, whatever the group,
so that what is open there stays open when the streams are dealt out anew.

Rule: where an epoch ends is not known before; each rank sends with the gradients of a step whether
its streams continue, and all conclude the same.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from elastic.core.policy.cursor import Cursor
from elastic.core.policy.microbatch import Span
from elastic.core.policy.streams import StreamCut, StreamPlan, StreamPosition
from elastic.errors import UsageError, check
from elastic.worker.data.feed import Key, SampleFeed, check_prefetch
from elastic.worker.data.loader import MicroBatchLoader, Weigh, weight_of
from elastic.worker.data.stream_book import StreamBook
from elastic.worker.data.stream_reader import (
    EmptyRequest,
    StreamCollate,
    StreamReader,
    StreamRequest,
)
from elastic.worker.data.stream_source import SNAPSHOT_STEPS, is_of_hugging_face, keeps_state
from elastic.worker.reduce.step_share import MicroBatch, StreamShare

log = logging.getLogger(__name__)


class StreamLoader:
    """Yields the micro-batches of the streams that a rank holds, step after step."""

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        num_micro_batches: int,
        seed: int,
        cut: StreamCut | None = None,
        book: StreamBook | None = None,
        weigh: Weigh | None = None,
    ) -> None:
        """Take over what the user's loader does; nothing is started before the first `next`.

        Args:
            loader: the user's, over an iterable dataset; it is not read itself.
            num_micro_batches: V, of a step.
            seed: of everything random while samples are read; 0 <= seed < 2**63.
            cut: how the dataset becomes V streams, None to choose what is surely right.
            book: what is known of the streams; one of its own by default.
            weigh: returns what a micro-batch counts, None to count samples.

        Raises:
            UsageError: the loader has no batch_size, or its dataset cannot be cut so.
        """
        check_prefetch(loader)
        if loader.batch_size is None:
            raise UsageError(
                "prepare_data_loader: the loader has batch_size=None; give it the size of a "
                "micro-batch, the samples that one worker computes at a time"
            )
        self.plan = StreamPlan(
            micro_batch_size=loader.batch_size,
            num_micro_batches=num_micro_batches,
            cut=choose_cut(loader.dataset, num_micro_batches, cut),
            seed=seed,
            drop_last=loader.drop_last,
        )
        self._book = book if book is not None else StreamBook()
        self._book.has_states = keeps_state(loader.dataset)
        every = int(getattr(loader, "snapshot_every_n_steps", None) or SNAPSHOT_STEPS)
        self._order: _StreamOrder | None = None
        # Streams whose readers may have to begin, and do not know yet from where.
        self._begins: set[int] = set()
        self._share: StreamShare | None = None
        self._weigh = weigh
        self.dataset = StreamReader(loader.dataset, self.plan, every=every)
        self.collate = StreamCollate(loader.collate_fn, self.plan)
        self._feed = SampleFeed(loader, self, seed=seed)

    # ------------------------------------------------------------------- as the engine sees it

    def take_span(self, cursor: Cursor, held: Span) -> None:
        """Let `next` continue here: these streams from this step on.

        Args:
            cursor: any step of any epoch, also one before the present.
            held: the micro-batches of each step, which are those streams; at least one.
        """
        count = self.plan.num_micro_batches
        check(0 <= held[0] < held[1] <= count, f"streams {held} of {count}")
        order = self._order
        if order is None or (order.key, order.held) != ((*_at(cursor), held[0]), held):
            self._order = _StreamOrder(cursor, held)
            self._begins = set(range(*held))
            self._feed.follow(self._order)

    def refresh(self, epoch: int) -> None:
        """A pass over the data begins: see what the script has changed in the dataset."""
        del epoch
        if self._feed.refresh() and self._order is not None:
            self._begins = set(range(*self._order.held))

    def next(self) -> MicroBatch:
        """Return the next micro-batch; behind the end of its stream one with a count of 0.

        Raises:
            Exception: what the dataset or the collate_fn raised, as DataLoader raises it.
        """
        try:
            value, found = self._feed.take()
        except BaseException:
            # Readers that failed, or are gone, begin anew.
            self._begins = set(range(*self._the_order().held))
            raise
        epoch, step, number = self._the_order().key
        self._the_order().advance()
        self._book.read(found.snapshots)
        weight = weight_of(self._weigh, value, found.count)
        return MicroBatch(Cursor(epoch, step), number, found.count, value, weight, found.more)

    def close(self) -> None:
        self._feed.close()

    def has_step(self, cursor: Cursor) -> bool:
        steps = self._book.steps_of(cursor.epoch)
        return not steps or cursor.step < steps

    def steps_of(self, epoch: int) -> int:
        return self._book.steps_of(epoch)

    def order_print(self, epoch: int) -> int:
        """Return 0: no sampler orders streams."""
        del epoch
        return 0

    def share(self, batch: MicroBatch, rank: int, world_size: int) -> StreamShare:
        """Return what a rank has to do in the step of a micro-batch that it has taken."""
        first = self._the_order().held[0]
        if self._share is None or batch.number == first:
            self._share = StreamShare(
                self.plan, batch.cursor, self._book.end, rank=rank, world_size=world_size
            )
        self._share.note(batch.number, batch.count, batch.weight, batch.more)
        return self._share

    # ------------------------------------------------------------------- as the feed sees it

    def processes(self, allowed: int) -> int:
        """Return how many processes read: one for what is one sequence, one for each stream."""
        return min(allowed, 1 if self.plan.cut is StreamCut.COUNT else self.plan.num_micro_batches)

    def request(self, tag: int, piece: _StreamPiece | None) -> StreamRequest | EmptyRequest:
        """Return what is asked for; `None` stands for a turn that is passed."""
        if piece is None:
            return EmptyRequest(tag)
        epoch, step, stream = piece.key
        order, snapshot = self._the_order(), None
        # A step that turned void is done again: the one before what is wanted now.
        low = max(order.begins, order.key[1] - 1)
        if stream in self._begins:
            self._begins.discard(stream)
            where = StreamPosition(epoch, low, self.plan.sequence_of(stream))
            snapshot = self._book.nearest(where, self.plan.fingerprint)
        return StreamRequest(tag, Cursor(epoch, step), stream, order.held, low, snapshot)

    def turn_of(self, key: Key) -> int | None:
        return key[2]

    def _the_order(self) -> _StreamOrder:
        check(self._order is not None, "a loader was read before micro-batches were dealt")
        return self._order  # type: ignore[return-value]


MicroBatches = MicroBatchLoader | StreamLoader
"""What a training loop reads its micro-batches from."""


class _StreamPiece(NamedTuple):
    key: Key


def _at(cursor: Cursor) -> tuple[int, int]:
    return cursor.epoch, cursor.step


class _StreamOrder:
    """The order in which a rank with one span wants micro-batches, without ends of epochs."""

    def __init__(self, cursor: Cursor, held: Span) -> None:
        self.key: Key = (cursor.epoch, cursor.step, held[0])
        self.held = held
        self.begins = cursor.step

    def wants(self, key: Key) -> bool:
        is_ours = self.held[0] <= key[2] < self.held[1]
        return is_ours and key >= self.key and key[0] == self.key[0]

    def advance(self) -> None:
        self.key = self._after(self.key)

    def _after(self, key: Key) -> Key:
        epoch, step, number = key
        return (epoch, step, number + 1) if number + 1 < self.held[1] else (
            epoch, step + 1, self.held[0]
        )  # fmt: skip

    def pieces(self, key: Key) -> Iterator[_StreamPiece]:
        while True:
            yield _StreamPiece(key)
            key = self._after(key)


# --------------------------------------------------------------------------- how it is cut


def _can_shard(dataset: Any) -> bool:
    """Return whether it has `shard(num_shards=, index=)`, rather than another of that name."""
    try:
        inspect.signature(dataset.shard).bind(num_shards=1, index=0)
    except (AttributeError, TypeError, ValueError):
        return False
    return True


def choose_cut(dataset: Any, count: int, chosen: StreamCut | None) -> StreamCut:
    """Return how a dataset becomes so many streams, and log what that costs.

    By default nothing is guessed: a dataset with `shard` is cut by it, any other one is read
    whole by every rank, which is right whatever it does with `get_worker_info()`. UsageError if
    it cannot be cut as chosen, or is cut already.
    """
    name = type(dataset).__name__
    if getattr(dataset, "_distributed", None) is not None and is_of_hugging_face(dataset):
        raise UsageError(
            f"prepare_data_loader: the {name} was split by node already, which cannot change with "
            f"the group; pass the whole dataset, it is dealt out here"
        )
    can_shard = _can_shard(dataset)
    if chosen is StreamCut.SHARD and not can_shard:
        raise UsageError(
            f"prepare_data_loader(streams='shard'): the {name} has no shard(num_shards=, index=); "
            f"give it that, or leave `streams` out"
        )
    cut = chosen or (StreamCut.SHARD if can_shard else StreamCut.COUNT)
    if cut is StreamCut.SHARD and is_of_hugging_face(dataset) and dataset.num_shards % count:
        log.warning(
            "streams_counted: %d shards cannot be dealt out over %d streams evenly; every rank "
            "reads all of them and drops what is not its own; expected a multiple of %d shards",
            dataset.num_shards, count, count,
        )  # fmt: skip
        cut = StreamCut.COUNT
    elif cut is StreamCut.COUNT:
        log.warning(
            "streams_counted: every rank reads all of the %s and drops what is not its own; give "
            "it shard(num_shards=, index=), or pass streams='worker' to prepare_data_loader if it "
            "deals itself out by get_worker_info()", name,
        )  # fmt: skip
    if not keeps_state(dataset):
        log.warning(
            "streams_without_state: the %s cannot report its place (state_dict, load_state_dict, "
            "and no shuffle buffer): a stream's next reader reads all before its place", name,
        )  # fmt: skip
    return cut
