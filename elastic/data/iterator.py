"""The iterator of a training loop over a dataset: split by rank, resumable, each row once.

Rule: a pass is split into ranges of places in one order of all rows (`lanes.py`), which differ by
at most one row between ranks. The remaining ranges are the position of a pass, at any world size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from elastic.data.arguments import OF_PASSES, check_others
from elastic.data.batches import (
    Batch,
    check_format,
    check_size,
    num_rows,
    rows_of,
    taken,
    to_format,
    to_torch,
    writable,
)
from elastic.data.lanes import (
    Ranges,
    batch_sizes,
    left_after,
    left_after_rows,
    num_batches,
    places_of,
    share_of,
)
from elastic.data.nodes import Node, Read
from elastic.data.rows import Rows
from elastic.data.sources import Memory
from elastic.data.table import SHUFFLE_BYTES, Table
from elastic.errors import UsageError

if TYPE_CHECKING:
    from elastic.data.feeders import FeederSource

SHARES = 32
"""A window in a plain loop has at most 1/32 of a rank's blocks."""


class DataIterator:
    """Yields one rank's part of a dataset; each pass is an epoch, also after one left early.

    Within a pass no row is dropped or repeated: if the rows do not divide evenly, some ranks have
    one less. If `pads`, all ranks have the same number of batches: one without rows for its last
    gets a copy of another rank's row, unless gradients are disabled.
    """

    def __init__(
        self,
        table: Callable[[], Table],
        place: Callable[[], tuple[int, int]],
        over: Callable[[Node], Any],
        *,
        max_ranks: int = 1,
        feeders: Callable[[], FeederSource] | None = None,
        memory: int = SHUFFLE_BYTES,
        pads: bool = False,
    ) -> None:
        """Read nothing yet.

        Args:
            table: returns the rows.
            place: returns the rank, and the number of ranks; called when a pass starts.
            over: returns a dataset of the rows of a node.
            max_ranks: maximum number of ranks.
            feeders: makes a source of processes that compute batches ahead, for this rank.
            memory: bytes for rows that are read ahead to be shuffled.
            pads: have as many batches on each rank, where each is followed by a collective.
        """
        self._table_of = table
        self._place = place
        self._over = over
        self._max_ranks = max_ranks
        self._feeders = feeders
        self._memory = memory
        self._pads = pads
        self._table: Table | None = None
        self._rows: Rows | None = None
        self._shuffles: tuple[bool, int] | None = None
        self._epoch = 0
        self._left: Ranges | None = None
        # Of a pass that is gone on with: blocks that are shuffled together; None for our own.
        self._window: int | None = None
        # Of the running pass: batches done, ranks, rows of a batch, drop_last.
        self._pass: tuple[int, int, int, bool] | None = None
        # Of a pass that yields rows one by one: how many it has yielded; else None.
        self._rows_done: int | None = None

    @property
    def table(self) -> Table:
        """Return the rows, as a table."""
        if self._table is None:
            self._table = self._table_of()
        return self._table

    def world_size(self) -> int:
        """Return the present number of ranks."""
        return self._place()[1]

    def count(self) -> int:
        """Return the rows of all ranks."""
        return self.table.rows

    def schema(self) -> Any:
        """Return the pyarrow schema of the first rows."""
        from elastic.data.batches import to_table

        return to_table(self._reader().get(0, range(min(20, self.table.rows)))).schema

    def stats(self) -> str:
        """Return a text about rows, blocks and bytes read."""
        table, read = self.table, self.bytes_read()
        return f"{table.rows:,} rows in {len(table.blocks):,} blocks; {read:,} bytes read here"

    def bytes_read(self) -> int:
        """Return the bytes that this process has read from files."""
        return self._rows.bytes_read if self._rows is not None else 0

    # --------------------------------------------------------------------- position

    def state_dict(self) -> dict[str, Any]:
        """Return the position of all ranks: equal on each, if all have read as much.

        It is the position after the last yielded batch or row, and valid for any number of ranks.
        """
        left = self._left_now()
        if not left:
            return {"epoch": self._epoch + 1, "left": None}
        if left == [(0, self.table.rows)]:
            return {"epoch": self._epoch, "left": None}
        # The order of a pass follows from it; ours, from the number of ranks and their memory.
        window = self._window or self._reader().lanes.window
        return {"epoch": self._epoch, "left": [list(one) for one in left], "window": window}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next pass the rest of the one in which `state_dict` was called."""
        if set(state) - {"window"} != {"epoch", "left"}:
            raise UsageError(
                f"load_state_dict: got {sorted(state)}: expected what state_dict() of such an "
                f"iterator has returned"
            )
        left = state["left"]
        self._begin_at(int(state["epoch"]), state.get("window"))
        self._left = None if left is None else [(int(a), int(b)) for a, b in left]

    def _begin_at(self, epoch: int, window: int | None = None) -> None:
        """Make the next pass a whole one of this number."""
        self._epoch = epoch
        self._left = None
        self._pass = None
        if window != self._window:
            self._window = window
            self.close()

    def _left_now(self) -> Ranges:
        left = self._left if self._left is not None else [(0, self.table.rows)]
        if self._pass is None:
            return left
        if self._rows_done is not None:
            return left_after_rows(left, self._rows_done, self._pass[1])
        return left_after(left, *self._pass)

    # --------------------------------------------------------------------- reading

    def iter_batches(
        self,
        *,
        batch_size: int | None = 256,
        batch_format: str | None = "default",
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        **others: Any,
    ) -> Iterable[Any]:
        """Return an iterable over this rank's batches of a pass.

        Args:
            batch_size: rows of each.
            batch_format: "numpy" (the default), "pandas" or "pyarrow".
            drop_last: leave out what does not fill a batch on every rank.
            local_shuffle_buffer_size: shuffle, in windows of row groups, as after
                `random_shuffle`; the number itself has no effect.
            local_shuffle_seed: of the shuffle.
            others: Ray's, without effect here.
        """
        check_others("iter_batches", others, *OF_PASSES)
        name = check_format(batch_format, "iter_batches")
        self._shuffle(local_shuffle_buffer_size, local_shuffle_seed)
        size = check_size(batch_size, "iter_batches") or 256
        return Again(
            lambda: (to_format(one, name) for one in self._batches(size, drop_last=drop_last))
        )

    def iter_torch_batches(
        self,
        *,
        batch_size: int | None = 256,
        dtypes: Any = None,
        device: Any = "auto",
        collate_fn: Callable[[Any], Any] | None = None,
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        **others: Any,
    ) -> Any:
        """Return an iterable over this rank's batches of a pass, as dicts of tensors.

        Args:
            batch_size: rows of each.
            dtypes: a torch.dtype, or one for each column.
            device: of the tensors; "auto" is the CPU.
            collate_fn: takes a dict of arrays, returns the batch; its tensors go to the device.
            drop_last: see `iter_batches`.
            local_shuffle_buffer_size: see `iter_batches`.
            local_shuffle_seed: see `iter_batches`.
            others: Ray's, without effect here.
        """
        check_others("iter_torch_batches", others, *OF_PASSES)
        self._shuffle(local_shuffle_buffer_size, local_shuffle_seed)
        make = Collate(collate_fn, dtypes, None if device == "auto" else device)
        size = check_size(batch_size, "iter_torch_batches") or 256
        return Again(lambda: (make(one) for one in self._batches(size, drop_last=drop_last)))

    def iter_rows(self, **others: Any) -> Iterable[dict[str, Any]]:
        """Return an iterable over this rank's rows of a pass; functions get 256 of them at once."""
        check_others("iter_rows", others, *OF_PASSES)
        return Again(self._each_row)

    def _each_row(self) -> Iterator[dict[str, Any]]:
        done = 0
        for batch in self._batches(256):
            for row in rows_of(batch):
                done += 1
                self._rows_done = done
                yield row

    def to_torch(self, **options: Any) -> Any:
        """Return a torch IterableDataset of batches, with the arguments of `iter_torch_batches`."""
        return torch_dataset(lambda: iter(self.iter_torch_batches(**options)))

    def materialize(self) -> Any:
        """Return this rank's rows as a dataset in memory."""
        batches = list(self.iter_batches(batch_format="pyarrow"))
        return self._over(Read((), Memory("from_arrow", batches=batches)))

    def close(self) -> None:
        """Stop reading ahead."""
        if self._rows is not None:
            self._rows.close()
        self._rows = None

    def _shuffle(self, size: int | None, seed: int | None) -> None:
        wanted = (True, seed or 0) if size and not self.table.shuffle else None
        if wanted != self._shuffles:
            self._shuffles = wanted
            self.close()

    def shuffled_table(self) -> Table:
        """Return the table, marked to be shuffled if the loop requested that."""
        if self._shuffles is None:
            return self.table
        return replace(self.table, shuffle=True, seed=self._shuffles[1])

    def _reader(self) -> Rows:
        """Return a reader with one lane of all rows, independent of the number of ranks."""
        if self._rows is None:
            table = self.shuffled_table()
            lanes = table.lanes(1, 1, self._memory)
            # Limit the window: one that two ranks share is read by both.
            most = max(1, len(lanes.blocks) // (SHARES * self._max_ranks))
            if not table.is_small:
                lanes = replace(lanes, window=self._window or min(lanes.window, most))
            self._rows = Rows(table, lanes, feeders=self._feeders)
        return self._rows

    def _batches(
        self, size: int, *, drop_last: bool = False, whole: bool = False
    ) -> Iterator[Batch]:
        """Yield this rank's batches, from the position that was loaded, if one was.

        Args:
            size: rows of a batch.
            drop_last: leave out the last one, if it is not full.
            whole: yield those of all ranks, on each rank.
        """
        if self._pass is not None:  # The pass before was left early: this is the next one.
            self._begin_at(self._epoch + 1)
        left = self._left_now()
        if left and left[-1][1] > self.table.rows:
            raise UsageError(
                f"load_state_dict: a position behind row {left[-1][1] - 1:,} of a dataset of "
                f"{self.table.rows:,} rows: expected what state_dict() has returned for the same "
                f"dataset"
            )
        if not left:
            self._begin_at(self._epoch + 1)
            left = [(0, self.table.rows)]
        if not self.table.rows:
            return
        rank, world = (0, 1) if whole else self._place()
        reader, epoch = self._reader(), self._epoch
        mine = share_of(left, rank, world)
        rows = sum(stop - start for start, stop in mine)
        count = num_batches(left, world, size, drop_last)
        sizes = batch_sizes(rows, count, size)
        spans, first = [], 0
        for one in sizes:
            spans.append((first, first + one))
            first += one
        self._left, self._pass = left, (0, world, size, drop_last)
        self._rows_done = None
        for number, (start, stop) in enumerate(spans):
            places = places_of(mine, start, stop)
            if not len(places) and self._pads and _learns():
                places = [left[0][0]]  # A repeated row: other ranks wait for our backward.
            ahead = [(epoch, places_of(mine, *span)) for span in spans[number + 1 : number + 4]]
            batch = reader.get(epoch, places, ahead) if len(places) else None
            self._pass = (number + 1, world, size, drop_last)
            if batch is not None:
                yield batch
        self._begin_at(epoch + 1)


def _learns() -> bool:
    import torch

    return torch.is_grad_enabled()


class Collate:
    """Converts a batch to what the training loop receives."""

    def __init__(self, given: Callable[[Any], Any] | None, dtypes: Any, device: Any) -> None:
        """Store the arguments of `iter_torch_batches`.

        Raises:
            UsageError: both a function and the types of the tensors that it is to make.
        """
        if given is not None and dtypes is not None:
            raise UsageError(
                f"iter_torch_batches: dtypes={dtypes!r} is for batches without collate_fn, which "
                f"makes tensors of the types that it wants: expected one of the two"
            )
        self._given = given
        self._dtypes = dtypes
        self._device = device

    @property
    def needs_table(self) -> bool:
        """Return whether it makes no use of arrays, to which a table need not be converted."""
        return getattr(self._given, "batch_format", "numpy") != "numpy"

    def __call__(self, batch: Batch) -> Any:
        """Return tensors, or the result of the user's function for arrays."""
        if self._given is None:
            return to_torch(batch, self._dtypes, self._device)
        name = getattr(self._given, "batch_format", "numpy")
        found = to_format(batch, name)
        if name == "pyarrow":  # A slice has the buffers of all rows, which scripts read as its own.
            found = taken(found, range(num_rows(found)))
        elif name != "pandas":  # A tensor of an array that is read again may be written to.
            found = {column: writable(values) for column, values in found.items()}
        return self._on_device(self._given(found))

    def _on_device(self, made: Any) -> Any:
        import torch

        from elastic.worker.data.moving import moved

        # What it has made for the CPU stays as it is: a dict of its own kind, for one.
        device = torch.device("cpu" if self._device is None else self._device)
        return made if device.type == "cpu" else moved(made, device)


class Again:
    """An iterable that can be iterated over several times."""

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        """Store the function that returns a new iterator."""
        self._begin = begin

    def __iter__(self) -> Iterator[Any]:
        """Return a new iterator."""
        return self._begin()


def torch_dataset(begin: Callable[[], Iterator[Any]]) -> Any:
    """Return a torch IterableDataset over the iterators that `begin` returns."""
    from torch.utils.data import IterableDataset

    class Batches(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return begin()

    return Batches()
