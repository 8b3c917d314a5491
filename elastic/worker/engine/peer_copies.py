"""Copies of the run's state in the memory of other nodes.

Rule: what cannot be reached is as if it were not there; what is read is what was taken, byte for
byte, or is refused.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from elastic.core.facts import JobId
from elastic.errors import ElasticError, check
from elastic.runtime.copy_wire import (
    FETCH,
    LIST,
    TEXT,
    CopyRequest,
    calling,
)
from elastic.runtime.snapshot_memory import SnapshotMark
from elastic.worker.state.arena import SnapshotSlot

if TYPE_CHECKING:
    from elastic.worker.engine.context import WorkerContext

log = logging.getLogger(__name__)

TEXT_BYTES_MAX = 1 << 28
"""Of what is no tensor in a state: who names more lies, or would be better off with tensors."""


@dataclass(frozen=True)
class ShardCopy:
    """A copy of a node's rows of a sharded model.

    Attributes:
        address: "host:port" of the agent that holds it.
        source: the node whose rows they are.
        text: all that is no tensor, and which rows they are.
    """

    address: str
    source: str
    mark: SnapshotMark
    text: bytes


class PeerCopies:
    """The copies that the coordinator knew of when it formed this group."""

    def __init__(
        self,
        addresses: Sequence[str],
        job_id: JobId,
        key: str,
        *,
        node_id: str = "",
    ) -> None:
        """Ask no agent yet.

        Args:
            addresses: "host:port" of the agents that hold one; of those that have rows of a
                sharded model, only our share.
            job_id: whose state it is.
            key: of the job.
            node_id: of this node.
        """
        self._node_id = node_id
        self._addresses = tuple(addresses)
        self._job_id = job_id
        self._key = key
        self._best: tuple[str, SnapshotMark] | None = None

    @staticmethod
    def of(context: WorkerContext) -> PeerCopies:
        """Return those that a member of a group was sent."""
        return PeerCopies(
            context.copies,
            context.job_id,
            context.copies_key,
            node_id=context.worker_id.rpartition("/")[0],
        )

    def list_shards(self, here: Collection[SnapshotMark]) -> list[ShardCopy]:
        """Return all copies of nodes' rows that lie with our share of the agents.

        Args:
            here: of the snapshots in this node's own memory, which no agent need give.
        """
        found = []
        for address, copies in self._listed():
            for source, mark in copies:
                is_wanted = source and not (source == self._node_id and mark in here)
                shard = self._shard(address, source, mark) if is_wanted else None
                found += [shard] if shard is not None else []
        return found

    def _listed(self) -> Iterator[tuple[str, tuple[tuple[str, SnapshotMark], ...]]]:
        """Yield each agent that can be reached, with source and mark of each of its copies."""
        for address in self._addresses:
            try:
                with calling(address) as line:
                    copies = line.request(CopyRequest(LIST, self._job_id), self._key).copies
            except (ElasticError, OSError) as error:
                log.warning("copy_unreachable address=%s error=%r", address, str(error))
                continue
            yield address, copies

    def _shard(self, address: str, source: str, mark: SnapshotMark) -> ShardCopy | None:
        """Return what describes a copy; None if it is not there any more, or no such copy."""
        try:
            return ShardCopy(address, source, mark, self._text(address, source, mark))
        except (ElasticError, OSError, ValueError) as error:
            log.warning("copy_refused address=%s source=%r error=%r", address, source, str(error))
            return None

    def _text(self, address: str, source: str, mark: SnapshotMark) -> bytes:
        """Return what is no tensor of a copy; ValueError if it is not what was taken."""
        if mark.skeleton_bytes > TEXT_BYTES_MAX:
            raise ValueError(f"{mark.skeleton_bytes} bytes that are no tensor")
        text = bytearray(mark.skeleton_bytes)
        with calling(address) as line:
            line.request(CopyRequest(TEXT, self._job_id, mark, source), self._key)
            if line.read_body(self._key, memoryview(text)) != mark.skeleton_crc:
                raise ValueError(f"the text of the copy of {source} is not what was taken")
        return bytes(text)

    def fetch_shard(self, shard: ShardCopy) -> SnapshotSlot:
        """Return a copy in memory of our own; raises as `read`."""
        return self._fetch(shard.address, shard.mark, shard.source)

    def newest(self) -> int:
        """Return the steps of the newest copy that can be reached, -1 if there is none."""
        for address, copies in self._listed():
            shared = [mark for source, mark in copies if not source]
            # Of a later generation with fewer steps: the group went on from an older state.
            mark = max(shared, key=lambda one: (one.generation, one.number), default=None)
            if mark is not None and (self._best is None or mark.steps > self._best[1].steps):
                self._best = address, mark
        return self._best[1].steps if self._best is not None else -1

    def read(self) -> tuple[str, Any]:
        """Return the state in the newest copy, and what identifies it among those of as many steps.

        Raises:
            ElasticError: the agent that has it refuses.
            ValueError: it is not what was taken.
            OSError: it cannot be reached, or there is no memory for it.
        """
        check(self._best is not None, "a copy is read that was not asked for")
        address, mark = self._best or ("", SnapshotMark(0, 0, 0, 0, 0, 0, 0, 0))
        state = self._fetch(address, mark).state(mark)
        return f"generation {mark.generation}, number {mark.number}", state

    def _fetch(self, address: str, mark: SnapshotMark, source: str = "") -> SnapshotSlot:
        began, slot = time.monotonic(), SnapshotSlot()
        with calling(address) as line:
            line.request(CopyRequest(FETCH, self._job_id, mark, source), self._key)
            slot.fill(mark, partial(line.read_body, self._key))
        log.info(
            "copy_fetched address=%s%s generation=%d steps=%d bytes=%d ms=%.0f",
            address, f" source={source!r}" if source else "", mark.generation, mark.steps,
            mark.num_bytes, (time.monotonic() - began) * 1e3,
        )  # fmt: skip
        return slot
