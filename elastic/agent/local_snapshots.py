"""This node's own part of a sharded run, served to ranks elsewhere after the workers here are gone.

The agent keeps the snapshots of dead workers for a while. They are equal to the copy on another
node, and serve when that copy is lost.

Rule: a snapshot is served complete and unchanged, or not at all: the mark is checked again after
the last byte.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from elastic.agent.arenas import Arenas
from elastic.core.facts import JobId, NodeId
from elastic.errors import Refused
from elastic.runtime.snapshot_memory import HEADER, SnapshotMark, whole

log = logging.getLogger(__name__)


class LocalSnapshots:
    """The snapshots in the memory of this node's jobs; every method may be called by any thread.

    Attributes:
        node_id: this node, the source of all of them.
    """

    def __init__(self, node_id: NodeId, arenas: Arenas) -> None:
        """Read this memory; the caller keeps ownership."""
        self.node_id = node_id
        self._arenas = arenas

    def list(self, job_id: str) -> tuple[tuple[str, SnapshotMark], ...]:
        """Return source and mark of every complete snapshot of a job."""
        try:
            with self._arenas.opened(JobId(job_id)) as descriptors:
                marks = [whole(os.pread(one, HEADER, 0)) for one in descriptors]
        except OSError as error:  # The caller can still list the copies of other nodes.
            log.warning("own_rows_not_read job=%s error=%r", job_id, str(error))
            return ()
        return tuple((self.node_id, mark) for mark in marks if mark is not None)

    @contextmanager
    def reading(
        self, job_id: str, mark: SnapshotMark
    ) -> Iterator[tuple[memoryview, Callable[[], bool]]]:
        """Yield a snapshot's bytes, and a check, for after the last byte, that they are unchanged.

        Raises:
            Refused: the snapshot was replaced or freed.
            OSError: its memory cannot be read.
        """
        with self._arenas.opened(JobId(job_id)) as descriptors:
            for one in descriptors:
                if whole(os.pread(one, HEADER, 0)) == mark:
                    break
            else:
                raise Refused("this node has another snapshot of its own by now: ask again")
            size = HEADER + mark.num_bytes
            if os.fstat(one).st_size < size:
                raise Refused("the snapshot's memory is smaller than its marks state")
            with (
                mmap.mmap(one, size, prot=mmap.PROT_READ) as memory,
                memoryview(memory) as everything,
                everything[HEADER:] as body,
            ):
                yield body, lambda: whole(os.pread(one, HEADER, 0)) == mark
