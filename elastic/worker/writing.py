"""The thread that brings snapshots to storage, and makes checkpoints of them.

    each rank     waits for its node's copies, writes its part and the note of it
    rank 0        waits for all notes, writes the rest, asks for consent, commits, prunes

Members of a group that is over by then still finish: their parts are states of committed steps.
What a lost member has not written makes the checkpoint come to nothing.

Rule: a checkpoint is committed only with the coordinator's consent for a generation that is
current, so that a side that was cut off cannot commit; and a marker is the last file written.
"""

from __future__ import annotations

import json
import logging
import math
import platform
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from elastic import __version__
from elastic.core.events.worker import StateSaved
from elastic.core.policy.cursor import Cursor
from elastic.core.policy.retention import superfluous_automatic
from elastic.core.policy.shares import Piece
from elastic.core.world import FIRST_AUTOMATIC, JobId, RefusalCode
from elastic.errors import StorageError
from elastic.runtime.clock import Clock
from elastic.runtime.snapshot_memory import Mark
from elastic.storage.marker import Marker
from elastic.storage.run_directory import RunDirectory
from elastic.worker.arena import Layout, Slot
from elastic.worker.checkpoint_files import (
    Manifest,
    read_parts,
    write_failure,
    write_note,
    write_part,
    write_rest,
)
from elastic.worker.exchange import WAIT_SLICE_S, Answer
from elastic.worker.likeness import differing
from elastic.worker.transfer import read_skeleton, unpack

log = logging.getLogger(__name__)

NODE_S = 60.0
"""How long the other workers of a node may take to copy their share."""
PARTS_S = 600.0
"""How long a part of a living member may take."""
ORPHANED_S = 30.0
"""The same once the group is over, for a member may be gone, and nobody tells us which; and once
the next snapshot waits, for a member may have failed to write, unless this one was wished for."""
UNTOLD_S = 5.0
"""How often a member says again that it failed to write, if storage did not take that either."""
CONSENT_S = 60.0
"""How long a generation may take to form that can consent."""
UNLIKE = (
    "different values in what train.register() was given, of which each rank writes some rows: "
    "register what is the same on all ranks, and leave out, or reduce first, what belongs to one"
)
LOOK_S_MIN, LOOK_S_MAX = 0.01, 0.5
SLOW_S = 60.0
PREFIX = "auto-"


class Line(Protocol):
    """The way to the coordinator."""

    def post(self, item: StateSaved) -> None:
        """Tell what happened."""
        ...

    def expect_answer(self, generation: int, index: int) -> Answer:
        """Ask to be told what becomes of a report; called before it is posted."""
        ...


@dataclass(frozen=True)
class Snapshot:
    """A state of the run in this node's memory, and what is to be done with it.

    Attributes:
        generation, rank, world_size: of the group that took it.
        mark: of it.
        slot, layout: where it lies.
        pieces: what this rank writes of it.
        skeleton: what is no tensor.
        cursor: where in the run it was taken.
        about: values for people.
        aliases: other names of shared parameters, by model.
        done: set once it is durable, or given up.
        request: number of the newest wish for a checkpoint that it was taken after.
        registered: samples of what the script has registered; see `likeness`.
    """

    generation: int
    rank: int
    world_size: int
    mark: Mark
    slot: Slot
    layout: Layout
    pieces: tuple[Piece, ...]
    skeleton: bytes
    cursor: Cursor
    about: Mapping[str, Any]
    aliases: tuple[Mapping[str, str], ...]
    done: threading.Event
    request: int = 0
    registered: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return its name, the same on all members and never used twice in a job."""
        return name_of(self.mark.steps, self.generation, self.mark.number)


@dataclass(frozen=True)
class Failure:
    """A part that will not come.

    Attributes:
        rank: whose.
        name: of the snapshot.
        reason: why.
    """

    rank: int
    name: str
    reason: str


def name_of(steps: int, generation: int, number: int) -> str:
    """Return the name of a snapshot."""
    return f"s{steps:09d}-g{generation:06d}-{number:06d}"


class GivenUp(Exception):
    """A checkpoint comes to nothing, and training goes on."""


class Writer:
    """Writes one snapshot after the other.

    Attributes:
        generation: of the group that this worker is in now.
        is_awaited: the training loop waits for room for a snapshot.
    """

    def __init__(
        self, run: RunDirectory, job_id: JobId, *, line: Line, clock: Clock, num_to_keep: int = -1
    ) -> None:
        """Start nothing yet.

        Args:
            run: the run directory.
            job_id: of the job.
            line: to the coordinator.
            clock: for the time of day in files.
            num_to_keep: automatic checkpoints that are kept; -1 for a default of two.
        """
        self.generation, self.is_awaited = 0, False
        self._run, self._job_id = run, job_id
        self._line, self._clock = line, clock
        self._num_to_keep = num_to_keep
        self._queue: queue.SimpleQueue[Snapshot | Failure | None] = queue.SimpleQueue()
        self._outstanding: list[Snapshot] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------- any thread

    def put(self, snapshot: Snapshot) -> None:
        """Have a snapshot written."""
        self._start()  # Which may fail: then nothing is outstanding.
        with self._changed:
            self._outstanding.append(snapshot)
        self._queue.put(snapshot)

    def tell(self, failure: Failure) -> None:
        """Let rank 0 not wait for a part of ours."""
        self._start()
        self._queue.put(failure)

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="elastic-writer", daemon=True)
            thread.start()
            self._thread = thread

    def reads(self, slot: Slot) -> bool:
        """Return whether a snapshot in this slot is not durable yet, nor given up."""
        return any(snapshot.slot is slot for snapshot in list(self._outstanding))

    def is_wished_for(self) -> bool:
        """Return whether one that this group was told to take is not durable yet, nor given up."""
        group = self.generation
        return any(one.request and one.generation == group for one in list(self._outstanding))

    def finish(self, timeout_s: float) -> bool:
        """Wait until nothing is outstanding, in slices that an interrupt can end.

        Returns:
            Whether that is so now.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._outstanding and time.monotonic() < deadline:
                self._changed.wait(WAIT_SLICE_S)
            return not self._outstanding

    def close(self) -> None:
        """Let the thread end once it has written what it was given; nothing is given after this."""
        self._queue.put(None)

    # ------------------------------------------------------------------- the thread

    def _work(self) -> None:
        untold: Failure | None = None
        until = 0.0
        while True:
            try:
                item = self._queue.get(timeout=UNTOLD_S if untold is not None else None)
            except queue.Empty:
                pass  # Storage has not taken it before: it is said again.
            else:
                if item is None:
                    return
                untold = item if isinstance(item, Failure) else self._try(item)
                until = time.monotonic() + PARTS_S
                del item  # Its memory may be needed.
            if untold is not None and (self._tell_failed(untold) or time.monotonic() > until):
                untold = None

    def _try(self, snapshot: Snapshot) -> Failure | None:
        """Write a snapshot; return why that has come to nothing, if it has."""
        began = time.monotonic()
        try:
            self._write(snapshot)
        except (GivenUp, StorageError, ValueError, OSError) as error:
            log.warning(
                "checkpoint_failed name=%s s=%.1f reason=%r: training goes on; the next one "
                "is tried when it is due",
                self._name(snapshot.name), time.monotonic() - began, str(error),
            )  # fmt: skip
            return Failure(snapshot.rank, snapshot.name, str(error))
        except Exception as error:
            log.exception("checkpoint_failed name=%s", self._name(snapshot.name))
            return Failure(snapshot.rank, snapshot.name, str(error))
        finally:
            with self._changed:
                self._outstanding.remove(snapshot)
                self._changed.notify_all()
            snapshot.done.set()
        return None

    def _write(self, snapshot: Snapshot) -> None:
        began = time.monotonic()
        files = self._run.checkpoint(self._name(snapshot.name))
        self._wait_for_node(snapshot)
        part = write_part(files, snapshot.rank, snapshot.slot, snapshot.layout, snapshot.pieces)
        _check_unchanged(snapshot)
        part = replace(part, tensors=snapshot.mark.tensors, registered=snapshot.registered)
        write_note(files, snapshot.rank, part)
        if snapshot.rank == 0:
            path = self._complete(snapshot)
            log.info(
                "checkpoint_durable path=%s epoch=%d step=%d s=%.2f",
                path, snapshot.cursor.epoch, snapshot.cursor.step, time.monotonic() - began,
            )  # fmt: skip
            self._prune(snapshot)

    def _name(self, name: str) -> str:
        """Return the name of a snapshot's checkpoint."""
        return f"{PREFIX}{self._job_id}-{name}"

    def _wait_for_node(self, snapshot: Snapshot) -> None:
        """Wait until all workers of this node have copied their share."""
        for _ in _looks(NODE_S):
            is_over = self.generation != snapshot.generation
            if snapshot.mark.is_with(snapshot.slot.whole()):
                return
            if snapshot.slot.has_other_than(snapshot.mark):
                # Who writes finds out whose, and of what.
                raise GivenUp(f"a worker of this node has other tensors, or {UNLIKE}")
            if is_over:
                break  # Whoever has not copied by now is in the next group, or lost.
        raise GivenUp("a worker of this node has not copied its share")

    def _tell_failed(self, failure: Failure) -> bool:
        """Leave a note in place of our part; return whether storage has taken that much."""
        if failure.rank:
            try:
                files = self._run.checkpoint(self._name(failure.name))
                write_failure(files, failure.rank, failure.reason)
            except StorageError:
                return False
        return True

    def _complete(self, snapshot: Snapshot) -> str:
        """Make a checkpoint of everyone's parts; returns its path."""
        name = self._name(snapshot.name)
        files = self._run.checkpoint(name)
        written, doubtful_since = None, 0.0
        for _ in _looks(PARTS_S):
            written = read_parts(files, snapshot.world_size)
            if written is not None:
                break
            is_over = self.generation != snapshot.generation
            has_next = len(self._outstanding) > 1 or self.is_awaited
            if is_over and has_next:
                break  # The next one is of a group that lives.
            if is_over or (has_next and not snapshot.request):
                doubtful_since = doubtful_since or time.monotonic()
                if time.monotonic() - doubtful_since > ORPHANED_S:
                    break
        if written is None:
            self._run.discard(name)
            raise GivenUp("a member has not written its part; its group is over, or it is stuck")
        parts, notes = written
        for rank, part in enumerate(parts):
            unlike = differing(snapshot.registered, part.registered)
            if unlike:
                raise GivenUp(f"rank {rank} and rank 0 have {UNLIKE}: {', '.join(unlike)}")
            if part.tensors != snapshot.mark.tensors:
                raise GivenUp(
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
        rest = write_rest(files, manifest, snapshot.skeleton, _state_of(snapshot), snapshot.aliases)
        _check_unchanged(snapshot)  # Arrays outside of the parts were read from memory, too.
        about = {"epoch": cursor.epoch, "step": cursor.step, "steps": snapshot.mark.steps}
        metrics = json.dumps({**_in_json(snapshot.about), **about})
        index = FIRST_AUTOMATIC + snapshot.mark.number
        path = self._run.checkpoint_path(name)
        self._get_consent(
            lambda generation: StateSaved(generation, index, metrics, path, snapshot.request)
        )
        marker = Marker(
            job_id=self._job_id,
            generation=snapshot.generation,
            index=index,
            world_size=snapshot.world_size,
            unix_ns=self._clock.unix_ns(),
            metrics=metrics,
            files=tuple(sorted([*(part.file for part in parts), *notes, *rest])),
        )
        return self._run.commit(name, marker)

    def _get_consent(self, saved_in: Callable[[int], StateSaved]) -> None:
        """Wait until the coordinator has recorded the checkpoint, in whatever generation we are.

        Args:
            saved_in: returns what it is to be told in a generation.

        Raises:
            GivenUp: it refuses.
        """
        reason = "no generation has formed since"
        for _ in _looks(CONSENT_S):
            saved = saved_in(self.generation)
            answer = self._line.expect_answer(saved.generation, saved.index)
            self._line.post(saved)
            began = time.monotonic()
            while not answer.wait(1.0):
                if time.monotonic() - began > SLOW_S:
                    began = time.monotonic()
                    log.warning(
                        "checkpoint_waits path=%s: the coordinator has not answered for %.0f s",
                        saved.checkpoint, SLOW_S,
                    )  # fmt: skip
            if answer.accepted:
                return
            reason = answer.reason
            if answer.code in (RefusalCode.JOB_ENDED, RefusalCode.JOB_UNKNOWN):
                break
        raise GivenUp(f"the coordinator refuses it: {reason}")

    def _prune(self, newest: Snapshot) -> None:
        """Delete automatic checkpoints that newer ones have made superfluous."""
        try:
            later = self._later_attempts()
            names = [name for name, m in self._run.automatic() if m.job_id not in later]
            for name in superfluous_automatic(names, self._num_to_keep):
                # Whatever the order: it is what we have, and is whole.
                if name != self._name(newest.name):
                    self._run.remove(name)
            self._sweep(set(names), newest.mark.steps, later)
        except StorageError as error:
            # The next one tries again; the room it takes up is no reason to stop training.
            log.warning("prune_failed path=%s error=%r", self._run.path, str(error))

    def _later_attempts(self) -> tuple[str, ...]:
        """Return the jobs that go on with the run after us, who then are somebody left behind."""
        jobs = self._run.jobs()
        return jobs[jobs.index(self._job_id) + 1 :] if self._job_id in jobs else ()

    def _sweep(self, committed: set[str], steps: int, later: Sequence[str]) -> None:
        """Delete what is left of checkpoints that came to nothing, of this run and earlier ones.

        One that another member still writes to is of more steps than we have committed now; the
        newest of all may be of more than that, if it is damaged and the run went back.
        """
        being_written = {self._name(snapshot.name) for snapshot in list(self._outstanding)}
        for name in set(self._run.names(PREFIX)) - committed - being_written:
            is_theirs = name.startswith(tuple(f"{PREFIX}{job_id}-s" for job_id in later))
            # What a script or a newer version has marked is somebody's, whether we can read it.
            is_left = 0 <= _steps_in(name) < steps and not is_theirs
            if is_left and not self._run.is_committed(name):
                self._run.discard(name)


def _in_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as reports have them: JSON knows no infinite numbers."""
    return {name: v if math.isfinite(v) else str(v) for name, v in values.items()}


def _check_unchanged(snapshot: Snapshot) -> None:
    """Refuse what was read from memory in which a later snapshot has begun meanwhile."""
    if not snapshot.mark.is_with(snapshot.slot.whole()):
        raise GivenUp("its memory has changed while it was written: storage is too slow")


def _steps_in(name: str) -> int:
    """Return the steps that the name of an automatic checkpoint tells; -1 if it is none."""
    found = re.search(r"-s(\d+)-g\d+-\d+$", name)
    return int(found[1]) if found else -1


def _state_of(snapshot: Snapshot) -> Any:
    """Return the objects of a snapshot; each tensor knows its number."""
    skeleton = read_skeleton(snapshot.skeleton)
    _, tensors = snapshot.slot.tensors(skeleton, snapshot.layout.held)
    for number, tensor in enumerate(tensors):
        tensor.elastic_number = number  # type: ignore[attr-defined]
    return unpack(skeleton, tensors)["objects"]


def _looks(timeout_s: float) -> Any:
    """Yield until the time is over, less and less often."""
    deadline, pause_s = time.monotonic() + timeout_s, LOOK_S_MIN
    while True:
        yield
        if time.monotonic() >= deadline:
            return
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LOOK_S_MAX)
