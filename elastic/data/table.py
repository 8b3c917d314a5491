"""A dataset as a table of blocks, with random access to rows by number.

Rows of a plan have random access if the sources do (`Source.listing`) and operations keep rows;
otherwise the rows of such a node are written out once, and the plan continues from there. So a
table is a list of parts: a source, its files, its blocks, and the operations to apply when rows are
read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from elastic.data.batches import num_rows
from elastic.data.files import File
from elastic.data.lanes import Lanes
from elastic.data.nodes import Apply, Node, Read, Shuffle, Slice, Union
from elastic.data.operations import MapBatches, Operation
from elastic.data.sources import Block, Memory, Source

SHUFFLE_BYTES = 512 * 1024**2
"""Default memory for the windows of all lanes; see `DataConfig`."""
WINDOW_MAX = 64
SMALL_BYTES, SMALL_ROWS = 32 * 1024**2, 2**17
"""A table within both limits is shuffled as a whole, and its readers keep all of it in memory."""


@dataclass(frozen=True)
class Part:
    """Blocks of one source.

    Attributes:
        source: reads the blocks.
        files: of the source.
        blocks: of the source; some may be sliced.
        operations: applied to the rows when they are read.
    """

    source: Source
    files: tuple[File, ...]
    blocks: tuple[Block, ...]
    operations: tuple[Operation, ...] = ()


@dataclass(frozen=True)
class Table:
    """Rows with random access.

    Attributes:
        parts: in order.
        shuffle: shuffle the rows in each epoch.
        seed: of the shuffle.
    """

    parts: tuple[Part, ...]
    shuffle: bool = False
    seed: int = 0

    @cached_property
    def blocks(self) -> list[tuple[Part, Block]]:
        """Return all blocks, each with its part."""
        return [(part, block) for part in self.parts for block in part.blocks]

    @cached_property
    def sizes(self) -> list[int]:
        """Return the number of rows of each block."""
        return [block.stop - block.start for _, block in self.blocks]

    @property
    def operations(self) -> list[tuple[Operation, ...]]:
        """Return the operations of each part."""
        return [part.operations for part in self.parts]

    @cached_property
    def rows(self) -> int:
        """Return the number of rows."""
        return sum(self.sizes)

    @cached_property
    def is_small(self) -> bool:
        """Return whether it is shuffled as a whole."""
        size = sum(block.size for _, block in self.blocks)
        return self.shuffle and size <= SMALL_BYTES and self.rows <= SMALL_ROWS

    def lanes(self, num_lanes: int, micro_batch: int, memory: int = SHUFFLE_BYTES) -> Lanes:
        """Return the order of its rows.

        Args:
            num_lanes: V, micro-batches of a step.
            micro_batch: rows of a micro-batch.
            memory: bytes for the windows of all lanes, two for each: the present and the next.
        """
        window = 1
        if self.shuffle and not self.is_small and self.blocks:
            mean = sum(block.size for _, block in self.blocks) / len(self.blocks)
            window = int(memory / (2 * num_lanes * max(mean, 1.0)))
        window = max(1, min(WINDOW_MAX, window))
        blocks = tuple(self.sizes)
        if self.is_small:  # Each row is a block, and each lane one window: a full shuffle.
            blocks, window = (1,) * self.rows, self.rows
        return Lanes(blocks, num_lanes, micro_batch, self.seed, window, self.shuffle)


Keep = Callable[[Node], Part]
"""Computes a node, and stores its rows with random access."""


def table_of(node: Node, keep: Keep, *, travels: bool = False) -> Table:
    """Return a dataset as a table.

    Args:
        node: the dataset.
        keep: for nodes without random access.
        travels: other processes will read it, so that rows in memory are stored, too.
    """
    operations: tuple[Operation, ...] = ()
    # Operations that keep rows can be applied after the shuffle.
    while isinstance(node, Apply) and node.operation.keeps_rows:
        operations, node = (node.operation, *operations), node.parents[0]
    shuffle, seed = isinstance(node, Shuffle), 0
    while isinstance(node, Shuffle):
        seed, node = node.seed, node.parents[0]
    parts = [
        replace(part, operations=(*part.operations, *operations))
        for part in _parts(node, keep, travels)
    ]
    return Table(tuple(part for part in parts if part.blocks), shuffle, seed)


def _parts(node: Node, keep: Keep, travels: bool) -> list[Part]:
    if isinstance(node, Read):
        listing = node.source.listing()
        if listing.blocks is None or (travels and isinstance(node.source, Memory)):
            return [keep(node)]
        return [Part(node.source, listing.files, listing.blocks)]
    if isinstance(node, Apply) and node.operation.keeps_rows:
        more = (node.operation,)
        return [
            replace(part, operations=(*part.operations, *more))
            for part in _parts(node.parents[0], keep, travels)
        ]
    if isinstance(node, Slice):
        return _cut(_parts(node.parents[0], keep, travels), node.start, node.stop)
    if isinstance(node, Union):
        return [part for parent in node.parents for part in _parts(parent, keep, travels)]
    return [keep(node)]


def _cut(parts: Sequence[Part], start: int, stop: int | None) -> list[Part]:
    found, seen = [], 0
    for part in parts:
        blocks = []
        for block in part.blocks:
            rows = block.stop - block.start
            low = max(0, start - seen)
            high = rows if stop is None else min(rows, stop - seen)
            if low < high:
                size = block.size * (high - low) // rows
                begin = block.start
                blocks.append(replace(block, start=begin + low, stop=begin + high, size=size))
            seen += rows
        found.append(replace(part, blocks=tuple(blocks)))
    return found


def in_memory(node: Node) -> Part:
    """Compute a node, and keep its rows in the memory of this process."""
    source = Memory("rows in memory", batches=list(node.stream()))
    listing = source.listing()
    return Part(source, (), listing.blocks or ())


def counted(node: Node, *, by_functions: bool) -> int:
    """Return the number of rows of a dataset, if possible without reading them.

    Args:
        node: the dataset.
        by_functions: call functions of batches, which may return another number of rows; else
            they are taken to keep it, as training has it.
    """

    class Unknown(Exception):
        pass

    def refuse(node: Node) -> Part:
        raise Unknown

    def calls(node: Node) -> bool:
        is_one = isinstance(node, Apply) and isinstance(node.operation, MapBatches)
        return is_one or any(calls(parent) for parent in node.parents)

    if not (by_functions and calls(node)):
        with contextlib.suppress(Unknown):
            return table_of(node, refuse).rows
    return sum(num_rows(batch) for batch in node.stream())
