"""Endpoints of coordinators that an earlier run of this agent learned, in a small file.

Rule: the file is a hint. It is used only by an agent with the same configured endpoints; a failed
read or write costs no more than a line in the log, and no wait.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import anyio
import anyio.to_thread

from elastic.runtime.access import replace_file
from elastic.runtime.rpc import plain_addresses

log = logging.getLogger(__name__)

BYTES_MAX = 64 * 1024


class AddressBook:
    """The file of one node.

    Attributes:
        learned: the endpoints learned last, beside the configured ones.
    """

    def __init__(self, path: Path, named: Sequence[str]) -> None:
        self._path = path
        self._named = list(named)
        self.learned = self._read()
        self._written = self.learned
        self._news = anyio.Event()

    def keep(self, learned: tuple[str, ...]) -> None:
        """Queue these endpoints to be written; on the event loop, which does not wait for it."""
        self.learned = learned
        self._news.set()

    async def write_news(self) -> None:
        """Write the file whenever the endpoints change, until cancelled."""
        while True:
            await self._news.wait()
            self._news = anyio.Event()
            if self.learned != self._written:
                learned = self.learned
                if await anyio.to_thread.run_sync(self._write, learned, abandon_on_cancel=True):
                    self._written = learned

    def _read(self) -> tuple[str, ...]:
        try:
            with self._path.open("rb") as file:
                kept = json.loads(file.read(BYTES_MAX))
            if kept["named"] != self._named:
                return ()
            return plain_addresses(",".join(kept["learned"]))
        except FileNotFoundError:
            return ()
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            log.warning("coordinators_not_read path=%s error=%r", self._path, str(error))
            return ()

    def _write(self, learned: tuple[str, ...]) -> bool:
        text = json.dumps({"named": self._named, "learned": list(learned)})
        try:
            replace_file(self._path, text.encode(), 0o644)
        except OSError as error:
            log.warning("coordinators_not_kept path=%s error=%r", self._path, str(error))
            return False
        return True
