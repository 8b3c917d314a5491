"""The log of a study: STUDY/study.jsonl, one JSON object a line, append-only.

    STUDY/study.jsonl           all kinds of lines: `core.study.Study.apply`; of losses of
                                workers, which are its job's, it has none
    STUDY/study/00000012.jsonl  the same in parts, on object stores, which have no append
    STUDY/stop.json             a request to stop the study
    STUDY/NAME/                 the run directory of a trial

Rule: an event is logged before it is carried out (write-ahead). One driver writes at a time.
"""

from __future__ import annotations

import json
import time
from typing import Any

from elastic.core.study import Study
from elastic.errors import StorageError
from elastic.storage.files import Files

LOG = "study.jsonl"
PARTS = "study"
STOP = "stop.json"


class StudyLog:
    """A study's log, and the state of the study.

    Attributes:
        files: the study's directory.
        study: the state after all logged events.
    """

    def __init__(self, path: str) -> None:
        """Read the log, if there is one."""
        self.files = Files(path)
        self.study = Study()
        self._num_parts = 0
        self._read()

    @property
    def is_there(self) -> bool:
        return bool(self.study.settings)

    def add(self, *events: dict[str, Any]) -> None:
        """Log events, and apply them to the study.

        Raises:
            StorageError: they cannot be written, or another driver has started to write.
        """
        if not events:
            return
        moment = round(time.time(), 3)
        text = "".join(json.dumps({"t": moment, **event}) + "\n" for event in events)
        if self.files.is_object_store:
            name = f"{PARTS}/{self._num_parts:08d}.jsonl"
            data = text.encode()
            if not self.files.create(name, data) and self.files.read(name) != data:
                raise StorageError(
                    f"{self.files.path}/{name} was written by another driver: a study has one; end "
                    f"it, then Tuner.restore"
                )
            self._num_parts += 1
        else:
            self.files.append(LOG, text.encode())
        for event in map(json.loads, text.splitlines()):
            self.study.apply(event)

    def ask_to_stop(self, reason: str) -> None:
        """Request that the study's driver stops all trials."""
        self.files.write(STOP, json.dumps({"reason": reason}).encode())

    def take_stop(self) -> str:
        """Remove the request to stop, and return its reason; "" if there is none."""
        data = self.files.read_if_there(STOP)
        if data is None:
            return ""
        reason = str(json.loads(data).get("reason", "")) or "by a user"
        self.files.delete(STOP)
        return reason

    def _read(self) -> None:
        names = self.files.list(f"{PARTS}/*.jsonl") if self.files.is_object_store else [LOG]
        self._num_parts = len(names)
        for name in names:
            data = self.files.read_if_there(name) or b""
            for line in data.decode(errors="replace").split("\n"):
                try:
                    event = json.loads(line)
                except ValueError:
                    continue  # Torn by a kill: the event was not carried out.
                if isinstance(event, dict):
                    self.study.apply(event)
