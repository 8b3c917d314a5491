"""The thread of rank 0 that makes checkpoints count once all of them is written.

It waits for consent without the snapshot's memory, so that snapshots go on while the coordinator is
away. Of what is written meanwhile the newest waits behind the one that is asked about.

Rule: a checkpoint is committed only with the coordinator's consent for a generation that is
current, so that a side that was cut off cannot commit; and a marker is the last file written.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from elastic.core.events.worker import StateSaved
from elastic.core.policy.retention import superfluous_automatic
from elastic.core.world import JobId, RefusalCode
from elastic.errors import StorageError
from elastic.storage.marker import Marker
from elastic.storage.run_directory import RunDirectory
from elastic.worker.exchange import Answer
from elastic.worker.snapshot import PREFIX, GivenUp, Snapshot, looks

log = logging.getLogger(__name__)

CONSENT_S = 60.0
"""How long a generation may take to form that can consent."""
SLOW_S = 60.0


class Line(Protocol):
    """The way to the coordinator."""

    def post(self, item: StateSaved) -> None:
        """Tell what happened."""
        ...

    def expect_answer(self, generation: int, index: int) -> Answer:
        """Ask to be told what becomes of a report; called before it is posted."""
        ...


@dataclass(frozen=True)
class Written:
    """A checkpoint that lacks the coordinator's consent only.

    Attributes:
        snapshot: that it is made of; its memory is not needed any more.
        saved_in: returns what the coordinator is to be told in a generation.
        marker: that commits it.
        began: when it was begun.
    """

    snapshot: Snapshot
    saved_in: Callable[[int], StateSaved]
    marker: Marker
    began: float


class Committer:
    """Commits one checkpoint after the other.

    Attributes:
        generation: of the group that this worker is in now.
    """

    def __init__(
        self,
        run: RunDirectory,
        job_id: JobId,
        *,
        line: Line,
        num_to_keep: int,
        unfinished: Callable[[], Sequence[Snapshot]],
        ended: Callable[[Snapshot], None],
    ) -> None:
        """Start nothing yet.

        Args:
            run: the run directory.
            job_id: of the job.
            line: to the coordinator.
            num_to_keep: automatic checkpoints that are kept; -1 for a default of two.
            unfinished: returns the snapshots of which something may be written still.
            ended: told of each one that is durable, or given up.
        """
        self.generation = 0
        self._run, self._job_id, self._line = run, job_id, line
        self._num_to_keep, self._unfinished, self._ended = num_to_keep, unfinished, ended
        # The first is asked about; None is the end.
        self._waiting: list[Written | None] = []
        self._changed = threading.Condition()

    def name(self, name: str) -> str:
        """Return the name of a snapshot's checkpoint."""
        return f"{PREFIX}{self._job_id}-{name}"

    def put(self, written: Written | None) -> None:
        """Have a checkpoint committed; what waits behind another for consent is overtaken."""
        left: list[Written | None] = []
        with self._changed:
            if written is not None:
                left, self._waiting = self._waiting[1:], self._waiting[:1]
            self._waiting.append(written)
            self._changed.notify_all()
        for one in left:
            if one is not None:
                self._run.discard(self.name(one.snapshot.name))
                self._ended(one.snapshot)

    def work(self) -> None:
        """Commit until the end."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                written = self._waiting[0]
            if written is None:
                return
            try:
                self._commit(written)
            except Exception as error:
                log.warning(
                    "checkpoint_failed name=%s s=%.1f reason=%r: training goes on; the next one "
                    "is tried when it is due",
                    self.name(written.snapshot.name), time.monotonic() - written.began, str(error),
                    exc_info=not isinstance(error, (GivenUp, StorageError, ValueError, OSError)),
                )  # fmt: skip
            finally:
                with self._changed:
                    self._waiting.pop(0)
                self._ended(written.snapshot)

    def _commit(self, written: Written) -> None:
        snapshot = written.snapshot
        self._get_consent(written.saved_in)
        path = self._run.commit(self.name(snapshot.name), written.marker)
        log.info(
            "checkpoint_durable path=%s epoch=%d step=%d s=%.2f",
            path, snapshot.cursor.epoch, snapshot.cursor.step, time.monotonic() - written.began,
        )  # fmt: skip
        self._prune(snapshot)

    def _get_consent(self, saved_in: Callable[[int], StateSaved]) -> None:
        """Wait until the coordinator has recorded the checkpoint, in whatever generation we are.

        Args:
            saved_in: returns what it is to be told in a generation.

        Raises:
            GivenUp: it refuses.
        """
        reason = "no generation has formed since"
        for _ in looks(CONSENT_S):
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
                if name != self.name(newest.name):
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
        being_written = {self.name(snapshot.name) for snapshot in self._unfinished()}
        for name in set(self._run.names(PREFIX)) - committed - being_written:
            is_theirs = name.startswith(tuple(f"{PREFIX}{job_id}-s" for job_id in later))
            # What a script or a newer version has marked is somebody's, whether we can read it.
            is_left = 0 <= _steps_in(name) < steps and not is_theirs
            if is_left and not self._run.is_committed(name):
                self._run.discard(name)


def _steps_in(name: str) -> int:
    """Return the steps that the name of an automatic checkpoint tells; -1 if it is none."""
    found = re.search(r"-s(\d+)-g\d+-\d+$", name)
    return int(found[1]) if found else -1
