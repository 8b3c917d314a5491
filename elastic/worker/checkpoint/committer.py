"""How a checkpoint comes to count: one order, for automatic and for reported ones.

    0. snapshot   an automatic one only: the state is in memory that outlives the worker, and its
                  slot is marked; the other slot has the one before it
    1. parts      every member's files, each under its name only once it is whole and on the disk
    2. votes      every member has reported its part complete: a note beside it for a snapshot,
                  which is written while groups change (`checkpoint_writer`), a vote in the
                  group's store for a report, whose members are all there (`report_votes`)
    3. prepared   rank 0's files for all, then `_PREPARED`: the marker's text, which names every
                  file with its checksum
    4. record     the coordinator has the path among its records, which are durable, for a
                  generation that is current
    5. marker     `_COMMITTED`: the same text; then `_PREPARED` is deleted
    6. pruning    what the policy drops; of each, the marker goes before its first file

The record makes a checkpoint count; the marker shows the same to readers that have only storage.
Each line is durable before the next one begins, so a process that is killed between two of them
loses nothing:

    before 4      No record names it. Earlier checkpoints are untouched, because 6 comes last. The
                  files have no marker, so they are no checkpoint, and 6 of a later one deletes
                  them. Where storage fails, rank 0 deletes them at once: on a full disk there is no
                  later one before that.
    4 and 5       The record names it, and 3 lists its files. The coordinator sends the name to
                  every later group (`Assignment.reported_checkpoint`, `.automatic_checkpoint`) and
                  to a client that resumes the run by name. They write the marker
                  (`RunDirectory.finish`) before they read it, write anything under its name, or
                  commit a newer one.
    within 6      One checkpoint too many remains until the next commit. The coordinator dropped it
                  in the write that recorded the newer one, so no record names a missing checkpoint.

A group that is over is refused in 4 and writes no marker. An answer that is lost is not a refusal:
so nothing is deleted on the strength of one. What was recorded after all is named to the next
group; an automatic checkpoint, which is a state of committed steps in whichever group, is offered
again there, and recorded once. By rank 0 alone, whose checkpoints come in their order, and only if
no newer one was recorded: a member that was away would have its old one recorded as the newest.

While the coordinator is away, 4 waits on this thread, with no memory of a snapshot held, and
training goes on: of automatic checkpoints the newest waits behind the one that is asked about;
every reported one waits its turn.

Rule: this thread alone asks and writes markers, one checkpoint after the other.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from elastic.core.config import JobSpec
from elastic.core.events.worker import CheckpointWritten, UserReported, WorkerEvent
from elastic.core.facts import Generation, RefusalCode, ReportKind
from elastic.core.messages import Progress
from elastic.core.policy.recovery import SavedPosition
from elastic.errors import StorageError
from elastic.storage.marker import CheckpointMarker
from elastic.storage.run_directory import RunDirectory
from elastic.worker.base.mailboxes import WAIT_SLICE_S, ReportAnswer
from elastic.worker.checkpoint.pruning import prune
from elastic.worker.checkpoint.snapshot import CheckpointAbandoned, polls, position_of

log = logging.getLogger(__name__)

CONSENT_S = 60.0
"""How long after a refusal a generation may form that can record an automatic checkpoint."""
SLOW_S = 60.0
FINISH_S = 600.0
"""How long the end of a train function waits for reported checkpoints to count."""


class CoordinatorLink(Protocol):
    """The way to the coordinator; nothing here waits."""

    def post(self, item: WorkerEvent | Progress) -> None: ...

    def expect_answer(self, generation: Generation, kind: ReportKind, index: int) -> ReportAnswer:
        """Register for the answer to a report; called before it is posted."""
        ...


@dataclass(eq=False)
class Commit:
    """A checkpoint whose parts are all there, and what becomes of it.

    Attributes:
        event: returns what the coordinator is sent in a generation. Automatic ones are sent to
            whichever generation is current, reported ones to their own.
        ended: called by the committer's thread once it counts or was given up.
        owns_files: we have written what is in its directory, and may delete it.
        is_posted: the coordinator was asked to record it.
        is_recorded: it counts, and its marker is written as soon as storage takes it.
        path: set once it counts.
        error: the storage error, if that is why it was given up.
        over: set when nothing more happens to it.
    """

    name: str
    marker: CheckpointMarker
    event: Callable[[Generation], UserReported | CheckpointWritten]
    ended: Callable[[Commit], None] = lambda commit: None
    owns_files: bool = True
    is_posted: bool = False
    is_recorded: bool = False
    path: str = ""
    error: str = ""
    over: threading.Event = field(default_factory=threading.Event)


class Committer:
    """Makes the checkpoints of one process count, over all its groups.

    Attributes:
        unfinished: returns the names of automatic checkpoints that are still being written.
    """

    def __init__(self, run: RunDirectory, spec: JobSpec, link: CoordinatorLink) -> None:
        self.generation = 0
        self._leads = True
        self._saved = SavedPosition()
        self.unfinished: Callable[[], Collection[str]] = tuple
        self._run, self._spec, self._link = run, spec, link
        self._changed = threading.Condition()
        # The first is being committed; None is the end.
        self._waiting: list[Commit | None] = []
        self._waiting_since = 0.0
        # Recorded, and perhaps without a marker.
        self._recorded: set[str] = set()
        self._checks = False
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------- any thread

    def enter(self, generation: Generation, recorded: Sequence[str], *, leads: bool) -> None:
        """Enter a group.

        `recorded` are paths of the newest checkpoints that the coordinator has recorded; those of
        other runs are not ours to touch. Who leads takes the group's automatic checkpoints, and
        sees to it now that recorded ones have markers, not only before the next commit.
        """
        # Before the generation, by which the thread asks.
        self._leads = leads
        self._saved = max(position_of(path, self._spec.job_id) for path in ("", *recorded))
        self.generation = generation
        names = {self._run.name_of(path) for path in recorded} - {""}
        with self._changed:
            self._recorded |= names
            if names and leads:
                self._checks = True
                self._wake()

    def put(self, commit: Commit) -> None:
        """Have a checkpoint committed; an automatic one overtakes those that wait to be asked."""
        overtaken: list[Commit] = []
        with self._changed:
            if commit.marker.kind is ReportKind.AUTOMATIC:
                behind = [one for one in self._waiting[1:] if one is not None]
                overtaken = [one for one in behind if one.marker.kind is ReportKind.AUTOMATIC]
                self._waiting = [one for one in self._waiting if one not in overtaken]
            self._waiting.append(commit)
            self._wake()
        for one in overtaken:
            self._run.discard(one.name)  # No other process knows its name.
            self._end(one)

    def _wake(self) -> None:
        self._changed.notify_all()
        if self._thread is None or not self._thread.is_alive():  # One may have failed to start.
            self._thread = threading.Thread(
                target=self._work, name="elastic-committer", daemon=True
            )
            self._thread.start()

    def wait(self, commit: Commit, patience_s: float) -> bool:
        """Wait until a commit is over, in slices that an interrupt can end; return whether it is.

        Storage has the time that it takes; the coordinator has `patience_s` to answer, for this one
        or for one before it.
        """
        while not commit.over.wait(WAIT_SLICE_S):
            since = self._waiting_since
            if since and time.monotonic() - since > patience_s:
                return False
        return True

    def finish(self, is_over: Callable[[], bool]) -> None:
        """Wait until reported checkpoints count or were given up; `is_over` also shows we run."""
        deadline = time.monotonic() + FINISH_S
        while commit := self._last_reported():
            if commit.over.wait(WAIT_SLICE_S) or is_over():
                return
            if time.monotonic() > deadline:
                log.warning(
                    "checkpoint_left name=%s: not recorded in %.0f s", commit.name, FINISH_S
                )
                return

    def _last_reported(self) -> Commit | None:
        with self._changed:
            waiting = [one for one in self._waiting if one is not None]
        return next(
            (one for one in reversed(waiting) if one.marker.kind is ReportKind.SCRIPT), None
        )

    def close(self) -> None:
        """End the thread once all that is queued is committed; nothing may be queued after this."""
        with self._changed:
            self._waiting.append(None)
            self._changed.notify_all()

    # ------------------------------------------------------------------- the thread

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._checks)
                self._checks, waiting = False, list(self._waiting)
            if not waiting:
                with contextlib.suppress(StorageError):  # The next commit reports it.
                    self._finish_recorded()
                continue
            commit = waiting[0]
            if commit is None:
                return
            try:
                self._commit(commit)
            except Exception as error:
                is_known = isinstance(
                    error, (CheckpointAbandoned, StorageError, ValueError, OSError)
                )
                commit.error = "" if isinstance(error, CheckpointAbandoned) else str(error)
                log.warning(
                    "checkpoint_failed name=%s reason=%r: training goes on",
                    commit.name,
                    str(error),
                    exc_info=not is_known,
                )
            finally:
                with self._changed:
                    self._waiting.pop(0)
                self._end(commit)

    def _discard(self, commit: Commit) -> None:
        """Delete one that the coordinator was not asked about: the next one needs the room."""
        if commit.owns_files and not commit.is_posted:
            self._run.discard(commit.name)

    def _end(self, commit: Commit) -> None:
        try:
            commit.ended(commit)
        finally:
            commit.over.set()

    def _commit(self, commit: Commit) -> None:
        began, run, name = time.monotonic(), self._run, commit.name
        self._finish_recorded()
        try:
            run.prepare(name, commit.marker)
            self._await_consent(commit)
        except Exception:
            self._discard(commit)
            raise
        commit.is_recorded = True
        with self._changed:
            self._recorded.add(name)
        is_there = run.finish(name, commit.marker)
        with self._changed:
            self._recorded.discard(name)
        if not is_there:
            commit.is_recorded = False
            raise CheckpointAbandoned("it was deleted meanwhile")
        commit.path = run.checkpoint_path(name)
        log.info("checkpoint_durable path=%s s=%.2f", commit.path, time.monotonic() - began)
        try:
            prune(run, self._spec, commit.marker, unfinished={name, *self.unfinished()})
        except StorageError as error:
            # The next one tries again; the room it takes up is no reason to stop training.
            log.warning("prune_failed path=%s error=%r", run.path, str(error))

    def _finish_recorded(self) -> None:
        """Write the markers that recorded checkpoints lack.

        Raises:
            StorageError: one cannot be written; it is tried again before the next commit.
        """
        with self._changed:
            names = sorted(self._recorded)
        for name in names:
            self._run.finish(name)
            with self._changed:
                self._recorded.discard(name)

    def _await_consent(self, commit: Commit) -> None:
        """Wait until the coordinator has recorded it; CheckpointAbandoned if it refuses."""
        marker, is_bound = commit.marker, commit.marker.kind is ReportKind.SCRIPT
        # The time counts from the first refusal: an answer may take as long as it likes.
        for _ in itertools.chain((None,), polls(CONSENT_S)):
            generation = marker.generation if is_bound else self.generation
            if generation != marker.generation and self._is_outdated(marker):
                raise CheckpointAbandoned("others have taken newer ones since")
            answer = self._link.expect_answer(generation, marker.kind, marker.index)
            commit.is_posted = True
            self._link.post(commit.event(generation))
            self._wait_answer(commit.name, answer)
            if answer.accepted:
                return
            if is_bound or answer.code in (RefusalCode.JOB_ENDED, RefusalCode.JOB_UNKNOWN):
                break
        raise CheckpointAbandoned(f"the coordinator refuses it: {answer.reason}")

    def _is_outdated(self, marker: CheckpointMarker) -> bool:
        """Return whether a newer one is recorded, or another member takes them by now."""
        own = SavedPosition(marker.generation, marker.about("steps", 0))
        return not self._leads or self._saved > own

    def _wait_answer(self, name: str, answer: ReportAnswer) -> None:
        began = warned = self._waiting_since = time.monotonic()
        try:
            while not answer.wait(1.0):
                now = time.monotonic()
                if now - warned > SLOW_S:
                    warned = now
                    log.warning(
                        "checkpoint_waits name=%s: the coordinator has not answered for %.0f s",
                        name,
                        now - began,
                    )
        finally:
            self._waiting_since = 0.0
