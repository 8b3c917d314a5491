"""Copies of the run's state in the memory of nodes that do not train it.

Rule: what cannot be reached is as if it were not there; what is read is what was taken, byte for
byte, or is refused.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from elastic.core.world import JobId
from elastic.errors import ElasticError, check
from elastic.runtime.copy_wire import ASK, FETCH, Request, calling
from elastic.runtime.peer_tls import PeerTls
from elastic.runtime.snapshot_memory import Mark
from elastic.worker.arena import Slot

if TYPE_CHECKING:
    from elastic.worker.context import WorkerContext

log = logging.getLogger(__name__)


class PeerCopies:
    """The copies that the coordinator knew of when it formed this group."""

    def __init__(
        self, addresses: Sequence[str], job_id: JobId, key: str, *, tls: Sequence[str] = ()
    ) -> None:
        """Ask nobody yet.

        Args:
            addresses: "host:port" of the agents that hold one.
            job_id: whose state it is.
            key: of the job.
            tls: paths of this node's certificate, its key and the authority; empty if it has none.
        """
        self._tls = tuple(tls)
        self._addresses, self._job_id, self._key = tuple(addresses), job_id, key
        self._best: tuple[str, Mark] | None = None

    @staticmethod
    def of(place: WorkerContext) -> PeerCopies:
        """Return those that a member of a group was told of."""
        return PeerCopies(place.copies, place.job_id, place.copies_key, tls=place.tls)

    def newest(self) -> int:
        """Return the steps of the newest copy that can be reached, -1 if there is none."""
        for address in self._addresses:
            try:
                with calling(address, tls=PeerTls.at(self._tls)) as line:
                    mark = line.ask(Request(ASK, self._job_id), self._key)
            except (ElasticError, OSError) as error:
                log.warning("copy_unreachable address=%s error=%r", address, str(error))
                continue
            if mark is not None and (self._best is None or mark.steps > self._best[1].steps):
                self._best = address, mark
        return self._best[1].steps if self._best is not None else -1

    def read(self) -> tuple[str, Any]:
        """Return the state in the newest copy, and what tells it from others of as many steps.

        Raises:
            ElasticError: the agent that has it refuses.
            ValueError: it is not what was taken.
            OSError: it cannot be reached, or there is no memory for it.
        """
        check(self._best is not None, "a copy is read that was not asked for")
        address, mark = self._best or ("", Mark(0, 0, 0, 0, 0, 0, 0, 0))
        began, slot = time.monotonic(), Slot()
        with calling(address, tls=PeerTls.at(self._tls)) as line:
            line.ask(Request(FETCH, self._job_id, mark), self._key)
            slot.fill(mark, line.read_body)
        state = slot.state(mark)
        log.info(
            "copy_fetched address=%s generation=%d steps=%d bytes=%d ms=%.0f",
            address, mark.generation, mark.steps, mark.num_bytes, (time.monotonic() - began) * 1e3,
        )  # fmt: skip
        return f"generation {mark.generation}, number {mark.number}", state
