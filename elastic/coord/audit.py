"""The audit trail: requests for changes with caller, address and outcome; and refused calls.

Rule: every change writes a line to the log and, if there is one, to the audit file. A refused
caller causes one line at first and then at most one a minute with the number of the others, so
that no caller can fill a disk. Like the event log it never blocks, and it contains no secret.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from pathlib import Path

from elastic.core.config import NS_PER_S
from elastic.core.events.shared import Note
from elastic.runtime.clock import Clock
from elastic.runtime.eventlog import EventLog, note_text

log = logging.getLogger(__name__)

REFUSALS_PAUSE_NS = 60 * NS_PER_S
HOSTS_REMEMBERED = 1024
TEXT_CHARS_MAX = 500
OK = "ok"


class Audit:
    """Writes the audit trail of one coordinator."""

    def __init__(self, path: Path | None, *, process: str, clock: Clock) -> None:
        """Open the file, if one is given.

        Args:
            path: of the audit file, JSON lines in the schema of the event log; None for no file.
            process: names this coordinator in each line.
            clock: for the times.
        """
        self._clock = clock
        self._file = None
        if path is not None:
            self._file = EventLog(path, process=process, clock=clock)
        # Host and reason -> time of the last line, and number of refusals not written since.
        self._refusals: OrderedDict[tuple[str, str], tuple[int, int]] = OrderedDict()

    def changed(self, action: str, *, who: str, peer: str, what: str, outcome: str) -> None:
        """Record a call that changes something, whatever its outcome.

        Args:
            action: the method, such as "Submit", or the change of a token.
            who: the caller.
            peer: its address.
            what: the job, node or token.
            outcome: "ok", or the error.
        """
        fields = (("action", action), ("who", who), ("peer", peer), ("what", what))
        self._write("audit", (*fields, ("outcome", outcome)))

    def refused(self, action: str, *, peer: str, kind: str, reason: str) -> None:
        """Record a refusal, unless one of the same host and kind was recorded within a minute."""
        now_ns = self._clock.monotonic_ns()
        key = (host_of(peer), kind)
        reported_ns, unsaid = self._refusals.pop(key, (-REFUSALS_PAUSE_NS, 0))
        if now_ns - reported_ns < REFUSALS_PAUSE_NS:
            self._refusals[key] = (reported_ns, unsaid + 1)
            return
        self._refusals[key] = (now_ns, 0)
        if len(self._refusals) > HOSTS_REMEMBERED:
            self._refusals.popitem(last=False)
        more = (("more", str(unsaid)),) if unsaid else ()
        fields = (("method", action), ("peer", peer), ("kind", kind), ("reason", reason), *more)
        self._write("call_refused", fields)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, name: str, fields: tuple[tuple[str, str], ...]) -> None:
        cut = tuple((name, value[:TEXT_CHARS_MAX]) for name, value in fields)
        note = Note(name, fields=cut)
        log.info("%s", note_text(note))
        if self._file is not None:
            self._file.write(note)


def host_of(peer: str) -> str:
    """Return the host of an address as gRPC shows it: "ipv4:10.0.0.7" of "ipv4:10.0.0.7:4123"."""
    return peer.rpartition(":")[0] or peer
