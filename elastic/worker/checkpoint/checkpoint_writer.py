"""The thread that writes snapshots to storage, and makes checkpoints of them.

    each rank     waits for its node's copies, writes its part and the note of it
    rank 0        waits for all notes, writes all else, and hands it to its `committer.Committer`

Members of a group that is over by then still finish: their parts are states of committed steps.
What a lost member has not written makes the checkpoint come to nothing.

Rule: a snapshot holds its memory until storage has taken it; storage that takes nothing for a while
loses that hold, and what it has not taken is overtaken by newer ones. While the coordinator is
waited for, no memory is held.
"""

from __future__ import annotations

import json
import logging
import math
import platform
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from elastic.core.events.worker import CheckpointWritten
from elastic.core.facts import NO_GENERATION, JobId, ReportKind
from elastic.errors import StorageError
from elastic.runtime.clock import Clock
from elastic.storage.marker import CheckpointMarker
from elastic.storage.run_directory import AUTOMATIC, RunDirectory
from elastic.version import __version__
from elastic.worker.base.mailboxes import WAIT_SLICE_S
from elastic.worker.checkpoint.checkpoint_files import (
    Manifest,
    read_parts,
    write_failure,
    write_note,
    write_part,
    write_shared_files,
)
from elastic.worker.checkpoint.committer import Commit, Committer
from elastic.worker.checkpoint.snapshot import CheckpointAbandoned, StateSnapshot, polls
from elastic.worker.state.arena import SnapshotSlot
from elastic.worker.state.packing import read_skeleton, unpack
from elastic.worker.state.replica_checksums import differing

log = logging.getLogger(__name__)

NODE_S = 60.0
"""How long the other workers of a node may take to copy their share."""
PARTS_S = 600.0
"""How long a part of a living member may take."""
ORPHANED_S = 30.0
"""The same once the group is over, since a member may be gone, and we cannot know which. Also once
the next snapshot waits, since a member may have failed to write, unless a user requested it."""
UNREPORTED_S = 5.0
"""How often a member retries to report a failed write, if storage refused the report too."""
UNLIKE = (
    "each rank writes some rows, so together they would mix states; let train.register() have "
    "what is the same on all ranks, and leave out, or reduce first, what belongs to one"
)
STALLED_S = 30.0
"""Storage that has taken nothing for so long is away, and loses its hold on memory."""
SLOWEST_BYTES_S = 10e6
"""Storage that takes less has stalled."""


@dataclass(frozen=True)
class PartFailure:
    """A part that will not come: storage has refused it, or it was given up for another reason."""

    rank: int
    name: str
    reason: str
    is_refused: bool = False


class CheckpointWriter:
    """Writes one snapshot after the other.

    Attributes:
        is_awaited: the training loop waits for room for a snapshot.
    """

    def __init__(
        self, run: RunDirectory, job_id: JobId, *, committer: Committer, clock: Clock
    ) -> None:
        self.is_awaited = False
        self._run, self._job_id, self._clock = run, job_id, clock
        self._committer = committer
        committer.unfinished = self._unfinished
        self._thread: threading.Thread | None = None
        self._queue: queue.SimpleQueue[StateSnapshot | PartFailure | None] = queue.SimpleQueue()
        # Not durable yet. Of those: the one whose memory is still unread, and the one being read.
        self._outstanding: list[StateSnapshot] = []
        self._unread: list[StateSnapshot] = []
        self._current: StateSnapshot | None = None
        # Names of ours that came to nothing since the last one was begun.
        self._given_up: list[str] = []
        self._stalls_at = math.inf
        # Generation and number of the newest that storage has taken or refused, and why not.
        self._refused: tuple[tuple[int, int], str] = ((NO_GENERATION, 0), "")
        self._changed = threading.Condition()

    @property
    def generation(self) -> int:
        return self._committer.generation

    @generation.setter
    def generation(self, number: int) -> None:
        self._committer.generation = number

    @property
    def refused(self) -> str:
        """Return why storage has not taken this group's last checkpoint, "" if it has.

        Rank 0 knows it of all parts and the marker, others of theirs: a full disk may refuse their
        report to rank 0, too. Not if it was given up for other reasons.
        """
        (generation, _), reason = self._refused
        return reason if generation == self.generation else ""

    # ------------------------------------------------------------------- any thread

    def put(self, snapshot: StateSnapshot) -> None:
        """Queue a snapshot for writing; it replaces a queued one that was not read yet."""
        self._start()  # Which may fail: then nothing is outstanding.
        with self._changed:
            self._outstanding.append(snapshot)
            self._unread = [one for one in self._unread if one.slot is not snapshot.slot]
            self._unread.append(snapshot)
        self._queue.put(snapshot)

    def fail_part(self, failure: PartFailure) -> None:
        """Let rank 0 not wait for a part of ours."""
        self._start()
        self._queue.put(failure)

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():  # One may have failed to start.
            self._thread = threading.Thread(target=self._work, name="elastic-writer", daemon=True)
            self._thread.start()

    def reads(self, slot: SnapshotSlot) -> bool:
        """Return whether a snapshot in this slot is still to be read by storage that takes it."""
        return any(snapshot.slot is slot for snapshot in self._to_read())

    def is_requested_for(self) -> bool:
        """Return whether one that this group was asked to take is still to be read; likewise."""
        group = self.generation
        return any(one.request and one.generation == group for one in self._to_read())

    def _to_read(self) -> list[StateSnapshot]:
        with self._changed:
            if time.monotonic() > self._stalls_at:
                return []
            return [*self._unread, *([self._current] if self._current is not None else [])]

    def _moves(self, num_bytes: int = 0) -> None:
        """Storage has taken something, or is about to be given so many bytes."""
        self._stalls_at = time.monotonic() + STALLED_S + num_bytes / SLOWEST_BYTES_S

    def finish(self, timeout_s: float) -> bool:
        """Wait until nothing is outstanding, in slices that an interrupt can end; False if late."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._outstanding and time.monotonic() < deadline:
                self._changed.wait(WAIT_SLICE_S)
            return not self._outstanding

    def close(self) -> None:
        """End the thread, and the committer's, once all queued snapshots are written.

        Nothing may be queued after this.
        """
        self._queue.put(None)
        if self._thread is None or not self._thread.is_alive():
            self._committer.close()

    # ------------------------------------------------------------------- the thread

    def _work(self) -> None:
        unreported: PartFailure | None = None
        until = 0.0
        while True:
            try:
                item = self._queue.get(timeout=UNREPORTED_S if unreported is not None else None)
            except queue.Empty:
                pass  # Storage refused it before: retry.
            else:
                if item is None:
                    self._committer.close()
                    return
                unreported = item if isinstance(item, PartFailure) else self._try(item)
                until = time.monotonic() + PARTS_S
                del item  # Its memory may be needed.
            if unreported is not None and (
                self._report_failed(unreported) or time.monotonic() > until
            ):
                unreported = None

    def _try(self, snapshot: StateSnapshot) -> PartFailure | None:
        """Write a snapshot; return why that has come to nothing, if it has."""
        began, written = time.monotonic(), None
        with self._changed:
            is_overtaken = snapshot not in self._unread
            self._moves()
            if not is_overtaken:
                self._unread.remove(snapshot)
                self._current = snapshot
        try:
            if is_overtaken:
                raise CheckpointAbandoned(
                    "a newer one has taken its place, because storage took nothing"
                )
            written = self._write(snapshot)
        except (CheckpointAbandoned, StorageError, ValueError, OSError) as error:
            log.warning(
                "checkpoint_failed name=%s s=%.1f reason=%r: training goes on; the next one "
                "is tried when it is due",
                self._name(snapshot.name), time.monotonic() - began, str(error),
            )  # fmt: skip
            is_refused = isinstance(error, (StorageError, OSError))
            if is_refused:
                self._note_refused(snapshot, str(error))
            return PartFailure(snapshot.rank, snapshot.name, str(error), is_refused)
        except Exception as error:
            log.exception("checkpoint_failed name=%s", self._name(snapshot.name))
            return PartFailure(snapshot.rank, snapshot.name, str(error))
        else:
            self._note_refused(snapshot, "")
        finally:
            with self._changed:
                self._current, self._stalls_at = None, math.inf
            if written is None:
                self._discard(snapshot)
                self._end(snapshot)
            else:
                self._committer.put(written)
        return None

    def _note_refused(self, snapshot: StateSnapshot, reason: str) -> None:
        """Note why storage has refused a snapshot, "" if it has not; of the newest one counts."""
        of = (snapshot.generation, snapshot.mark.number)
        with self._changed:
            if of >= self._refused[0]:
                self._refused = (of, reason)

    def _discard(self, snapshot: StateSnapshot) -> None:
        """Delete what there is of a checkpoint that comes to nothing: the next one needs the room.

        Members that still write to it leave more, which is deleted when the next one begins.
        """
        if snapshot.rank == 0:
            self._given_up.append(self._name(snapshot.name))
            self._run.discard(self._given_up[-1])

    def _name(self, name: str) -> str:
        return f"{AUTOMATIC}{self._job_id}-{name}"

    def _unfinished(self) -> set[str]:
        with self._changed:
            return {self._name(snapshot.name) for snapshot in self._outstanding}

    def _end(self, snapshot: StateSnapshot) -> None:
        """It is durable, or given up."""
        with self._changed:
            self._outstanding.remove(snapshot)
            self._changed.notify_all()
        snapshot.done.set()

    def _write(self, snapshot: StateSnapshot) -> Commit | None:
        """Write our part; as rank 0 all that a checkpoint needs."""
        files = self._run.checkpoint(self._name(snapshot.name))
        while self._given_up:
            self._moves()
            self._run.discard(self._given_up.pop())
        self._wait_for_node(snapshot)
        part = write_part(
            files, snapshot.rank, snapshot.slot, snapshot.layout, snapshot.pieces, self._moves
        )
        _check_unchanged(snapshot)
        part = replace(part, tensors=snapshot.mark.tensors, prints=snapshot.prints)
        write_note(files, snapshot.rank, part)
        return self._complete(snapshot) if snapshot.rank == 0 else None

    def _wait_for_node(self, snapshot: StateSnapshot) -> None:
        """Wait until all workers of this node have copied their share."""
        for _ in polls(NODE_S):
            self._moves()
            is_over = self.generation != snapshot.generation
            if snapshot.mark.is_with(snapshot.slot.whole()):
                return
            if snapshot.slot.has_other_than(snapshot.mark):
                # Who writes finds out whose, and of what.
                raise CheckpointAbandoned(
                    f"a worker of this node has other tensors, or other values: {UNLIKE}"
                )
            if is_over:
                break  # A worker that has not copied by now is in the next group, or lost.
        raise CheckpointAbandoned("a worker of this node has not copied its share")

    def _report_failed(self, failure: PartFailure) -> bool:
        """Leave a note in place of our part; return whether storage has taken that much."""
        if failure.rank:
            try:
                files = self._run.checkpoint(self._name(failure.name))
                write_failure(files, failure.rank, failure.reason, is_refused=failure.is_refused)
            except StorageError:
                return False
        return True

    def _complete(self, snapshot: StateSnapshot) -> Commit:
        name = self._name(snapshot.name)
        files = self._run.checkpoint(name)
        written, doubtful_since = None, 0.0
        for _ in polls(PARTS_S):
            self._moves()
            written = read_parts(files, snapshot.world_size)
            if written is not None:
                break
            is_over = self.generation != snapshot.generation
            has_next = bool(self._unread) or self.is_awaited
            if is_over and has_next:
                break  # The next one is of our group.
            if is_over or (has_next and not snapshot.request):
                doubtful_since = doubtful_since or time.monotonic()
                if time.monotonic() - doubtful_since > ORPHANED_S:
                    break
        if written is None:
            raise CheckpointAbandoned(
                "a member has not written its part; its group is over, or it is stuck"
            )
        parts, notes = written
        for rank, part in enumerate(parts):
            unlike = differing(snapshot.prints, part.prints)
            if unlike:
                raise CheckpointAbandoned(
                    f"rank {rank} and rank 0 differ in {', '.join(unlike)}: {UNLIKE}"
                )
            if part.tensors != snapshot.mark.tensors:
                raise CheckpointAbandoned(
                    f"rank {rank} has saved other tensors than rank 0: what the train function "
                    f"has registered must return the same names and shapes everywhere, in the "
                    f"same order"
                )
        cursor = snapshot.cursor
        manifest = Manifest(
            epoch=cursor.epoch,
            step=cursor.step,
            steps=snapshot.mark.steps,
            world_size=snapshot.world_size,
            versions={
                "elastic": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            specs=snapshot.layout.specs,
            parts=tuple(parts),
        )
        self._moves(snapshot.mark.num_bytes)
        others = write_shared_files(
            files, manifest, snapshot.skeleton, _state_of(snapshot), snapshot.aliases
        )
        _check_unchanged(snapshot)  # Arrays outside of the parts were read from memory, too.
        about = {"epoch": cursor.epoch, "step": cursor.step, "steps": snapshot.mark.steps}
        metrics = json.dumps({**_in_json(snapshot.about), **about})
        index = snapshot.mark.number
        path = self._run.checkpoint_path(name)
        marker = CheckpointMarker(
            job_id=self._job_id,
            generation=snapshot.generation,
            index=index,
            world_size=snapshot.world_size,
            unix_ns=self._clock.unix_ns(),
            metrics=metrics,
            kind=ReportKind.AUTOMATIC,
            files=tuple(sorted([*(part.file for part in parts), *notes, *others])),
        )

        def saved_in(generation: int) -> CheckpointWritten:
            return CheckpointWritten(generation, index, metrics, path, snapshot.request)

        def ended(commit: Commit) -> None:
            self._note_refused(snapshot, commit.error)
            self._end(snapshot)

        return Commit(name, marker, saved_in, ended)


def _in_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as reports have them: JSON knows no infinite numbers."""
    return {name: v if math.isfinite(v) else str(v) for name, v in values.items()}


def _check_unchanged(snapshot: StateSnapshot) -> None:
    """Refuse what was read from memory in which a later snapshot has begun meanwhile."""
    if not snapshot.mark.is_with(snapshot.slot.whole()):
        raise CheckpointAbandoned(
            "its memory has changed while it was written: storage is too slow"
        )


def _state_of(snapshot: StateSnapshot) -> Any:
    """Return the objects of a snapshot; each tensor knows its number."""
    skeleton = read_skeleton(snapshot.skeleton)
    _, tensors = snapshot.slot.tensors(skeleton, snapshot.layout.held)
    for number, tensor in enumerate(tensors):
        tensor.elastic_number = number  # type: ignore[attr-defined]
    return unpack(skeleton, tensors, orders=False)["objects"]
