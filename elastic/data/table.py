"""A dataset as a table of blocks, with random access to rows by number.

It is a list of parts: a source, its files, its blocks, and the operations to apply when rows are
read. `nodes.table_of` makes one of a plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from elastic.data.files import File
from elastic.data.lanes import Files, Lanes
from elastic.data.operations import Operation
from elastic.data.sources import Block, Source

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
        files_seed: of another order of its files in each epoch, together with those of the parts
            beside it that have the same; None for always the same order.
    """

    source: Source
    files: tuple[File, ...]
    blocks: tuple[Block, ...]
    operations: tuple[Operation, ...] = ()
    files_seed: int | None = None


@dataclass(frozen=True)
class Table:
    """Rows with random access.

    Attributes:
        parts: in order.
        shuffle: shuffle the rows in each epoch.
        seed: of the shuffle.
        reseeds: each epoch is shuffled in another way.
    """

    parts: tuple[Part, ...]
    shuffle: bool = False
    seed: int = 0
    reseeds: bool = True

    @cached_property
    def blocks(self) -> list[tuple[Part, Block]]:
        return [(part, block) for part in self.parts for block in part.blocks]

    @cached_property
    def sizes(self) -> list[int]:
        return [block.stop - block.start for _, block in self.blocks]

    @property
    def operations(self) -> list[tuple[Operation, ...]]:
        return [part.operations for part in self.parts]

    @cached_property
    def rows(self) -> int:
        return sum(self.sizes)

    @cached_property
    def files(self) -> Files:
        """Return the blocks of each file, where each epoch has another order of files."""
        found = []
        for seed, parts in groupby(self.parts, key=lambda part: part.files_seed):
            blocks = [
                len(list(some))
                for part in parts
                for _, some in groupby(part.blocks, key=lambda block: block.file)
            ]
            found.append((seed, tuple(blocks)))
        return tuple(found) if any(seed is not None for seed, _ in found) else ()

    @cached_property
    def is_small(self) -> bool:
        """Return whether it is shuffled as a whole."""
        size = sum(block.size for _, block in self.blocks)
        return self.shuffle and size <= SMALL_BYTES and self.rows <= SMALL_ROWS

    def lanes(self, num_lanes: int, micro_batch_size: int, memory: int = SHUFFLE_BYTES) -> Lanes:
        """Return the order of its rows.

        Args:
            num_lanes: V, micro-batches of a step.
            micro_batch_size: rows of a micro-batch.
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
        return Lanes(
            blocks,
            num_lanes,
            micro_batch_size,
            self.seed,
            window,
            self.shuffle,
            reseeds=self.reseeds,
            files=() if self.shuffle else self.files,
        )
