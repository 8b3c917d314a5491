"""Deleting checkpoints that are not to be kept, never before a newer one is safe.

Rule: a checkpoint is deleted only when the coordinator has recorded a newer one, because until
then it is what a recovery would read. Which ones go is the retention policy's word, asked about
those that are known to be recorded: one that was committed and never recorded (its generation was
over) must not push out one that the coordinator counts on. That one is recorded is noted in
storage: of each generation at least the last, before the next one commits any.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from elastic.core.config import JobSpec
from elastic.core.policy import retention
from elastic.core.world import CheckpointRecord
from elastic.errors import StorageError
from elastic.storage.marker import Marker
from elastic.storage.run_directory import RunDirectory
from elastic.worker.exchange import Answer

log = logging.getLogger(__name__)

_deleting = threading.Lock()
LAST_ANSWER_S = 5.0
"""How long the end of a train function waits for the last checkpoint to be recorded."""


class Pruner:
    """Keeps a run directory within `num_to_keep`; used by the member that commits."""

    def __init__(self, run: RunDirectory, spec: JobSpec, newest: str = "") -> None:
        """Delete nothing yet.

        Args:
            run: the run directory.
            spec: how many are kept, and which are the best.
            newest: path of the checkpoint that this generation begins with; it is recorded, or
                it is one of another run, which is not ours to touch.
        """
        name = newest.rpartition("/")[2]
        self._baseline = name if newest == run.checkpoint_path(name) else ""
        self._run = run
        self._spec = spec
        self._unanswered: list[tuple[str, Answer]] = []

    def commits(self) -> None:
        """A checkpoint is about to be committed: note that the one before our time is recorded.

        Once there are newer ones, nobody else would know.

        Raises:
            StorageError: the note cannot be written.
        """
        if self._baseline and self._run.is_committed(self._baseline):
            self._run.mark_recorded(self._baseline)
        self._baseline = ""

    def committed(self, name: str, answer: Answer) -> None:
        """Take note of a new checkpoint, and delete what the ones before it made superfluous."""
        if self._spec.num_to_keep == -1:
            return
        self._unanswered.append((name, answer))
        self._prune()

    def kept(self, found: Sequence[tuple[str, Marker]]) -> set[str]:
        """Return the names of those that the policy keeps, be the others still there or not."""
        return {record.path for record in _kept(found, self._spec)}

    def finish(self) -> None:
        """The train function is over: wait a moment for the last answer, then tidy up."""
        if self._unanswered:
            self._unanswered[-1][1].wait(LAST_ANSWER_S)
            self._prune()

    def _prune(self) -> None:
        answered = [(n, a) for n, a in self._unanswered if a.ready.is_set()]
        self._unanswered = [(n, a) for n, a in self._unanswered if not a.ready.is_set()]
        recorded = [name for name, answer in answered if answer.accepted]
        if not recorded:
            return
        try:
            for name in recorded:
                if self._run.is_committed(name):
                    self._run.mark_recorded(name)
            delete_superfluous(self._run, self._spec)
        except StorageError as error:
            # The next one tries again; the room it takes up is no reason to stop training.
            log.warning("prune_failed path=%s error=%r", self._run.path, str(error))


def delete_superfluous(run: RunDirectory, spec: JobSpec) -> None:
    """Delete what the policy drops among the recorded ones, and what can never be recorded.

    Raises:
        StorageError: storage cannot be read, or something cannot be deleted.
    """
    with _deleting:  # What a validation has found out is another thread's reason to do this.
        recorded = run.recorded(spec.job_id)
        kept = {record.path for record in _kept(recorded, spec)}
        for name, _ in recorded:
            if name not in kept:
                run.remove(name)
        for name in run.lost(spec.job_id):
            run.remove(name)


def _kept(found: Sequence[tuple[str, Marker]], spec: JobSpec) -> tuple[CheckpointRecord, ...]:
    records = [
        CheckpointRecord(name, marker.generation, marker.index, marker.metrics, marker.status)
        for name, marker in found
    ]
    return retention.keep(
        records,
        num_to_keep=spec.num_to_keep,
        score_attribute=spec.score_attribute,
        score_order=spec.score_order,
    )
