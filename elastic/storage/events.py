"""Event log of a run: RUN/events.jsonl, one JSON object a line in the schema of the event log.

The first rank of each group writes the events that the coordinator sends it.

Rule: an event is in the file once. It is identified by its job and its `time_unix_ns`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from elastic.storage.files import Files

NAME = "events.jsonl"
BYTES_MAX = 1 << 30


class EventsFile:
    """Writes the file, from one thread of one process."""

    def __init__(self, files: Files) -> None:
        """Touch nothing yet; `files` is the run directory."""
        self._files = files
        self._known: set[tuple[str, int]] | None = None
        self._data = b""

    def add(self, lines: Iterable[str]) -> None:
        """Add the events that are not in the file yet.

        Args:
            lines: JSON objects, in the schema of the event log.

        Raises:
            StorageError: the file cannot be read or written; nothing was added then.
        """
        if self._known is None:
            self._data = self._files.read_if_there(NAME, BYTES_MAX) or b""
            self._known = {_key(event) for event in _events_in(self._data)}
        news = {_key(json.loads(line)): line for line in lines}
        data = "".join(f"{line}\n" for key, line in news.items() if key not in self._known).encode()
        if not data:
            return
        if self._data and not self._data.endswith(b"\n"):
            data = b"\n" + data  # An earlier writer was killed in the middle of a line.
        if self._files.is_object_store:
            self._files.write(NAME, self._data + data)
        else:
            self._files.append(NAME, data)
        self._known.update(news)
        self._data = self._data + data if self._files.is_object_store else b"\n"


def read_events(run_path: str) -> list[dict[str, Any]]:
    """Return the events of a run, oldest first; a torn line is left out."""
    return _events_in(Files(run_path).read_if_there(NAME, BYTES_MAX) or b"")


def _events_in(data: bytes) -> list[dict[str, Any]]:
    events = []
    for line in data.decode(errors="replace").split("\n"):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and {"time_unix_ns", "job", "event", "fields"} <= event.keys():
            events.append(event)
    return events


def _key(event: dict[str, Any]) -> tuple[str, int]:
    return str(event["job"]), int(event["time_unix_ns"])
