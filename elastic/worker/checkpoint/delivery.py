"""Uploads of reported checkpoints that are not a plain synchronous copy.

The members with a part have already voted, so each knows how many they are. Each then uploads its
files (we do, or a function of the user), or finds them already in the run directory, and all agree
as in any other report. The reporting thread does that, or a background thread while training goes
on.

Rule: the background thread shares nothing with the main thread. It has its own connection to the
group's store, because a store client serves one caller at a time. An upload in progress when the
group changes is abandoned: its generation can commit nothing any more.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch.distributed as dist

from elastic.errors import GroupError, StorageError, UsageError
from elastic.storage.files import Files
from elastic.storage.run_directory import CHECKPOINTS, RunDirectory
from elastic.worker.base.mailboxes import WAIT_SLICE_S
from elastic.worker.checkpoint.report_votes import (
    ReportOutcome,
    ReportPart,
    ReportVote,
    ReportVotes,
)
from elastic.worker.checkpoint.reported_checkpoints import PendingReport, ReportedCheckpoints

log = logging.getLogger(__name__)

LINGER_S = 60.0
"""How long a checkpoint waits for an upload to the same directory that was given up."""


class CheckpointUploadMode(Enum):
    """How the files of a reported checkpoint come into the run directory."""

    SYNC = "SYNC"
    """`train.report` copies them, and returns when the checkpoint counts."""
    ASYNC = "ASYNC"
    """They are copied in the background, one checkpoint at a time, while training goes on."""
    NO_UPLOAD = "NO_UPLOAD"
    """They lie there already."""


@dataclass(frozen=True)
class DeliveredParts:
    """One member's part of a checkpoint.

    Attributes:
        path: of the local directory with its files; with NO_UPLOAD, of the checkpoint.
        upload: the user's own way: takes the checkpoint's name, and returns the path of its
            directory in the run directory, with the files in it.
        release: called once the files lie in the run directory, and are not needed here any more;
            what a script wrote is its own as long as they do not, or is the checkpoint itself.
        validation: how the checkpoint is to be validated, JSON, "" if it is not; that of the
            member that commits it counts.
    """

    path: str
    mode: CheckpointUploadMode = CheckpointUploadMode.SYNC
    upload: Callable[[str], str] | None = None
    release: Callable[[], None] = lambda: None
    validation: str = ""

    @property
    def way(self) -> str:
        """Return what all members must do alike, "" for the plain way."""
        if self.upload is not None:
            return f"{self.mode.value} with checkpoint_upload_fn"
        return "" if self.mode is CheckpointUploadMode.SYNC else self.mode.value


NO_PART = DeliveredParts("")
"""The part of a member without files that waits until the checkpoint of the others counts."""


@dataclass(frozen=True)
class Delivery:
    """A checkpoint whose parts are on their way.

    Attributes:
        members: how many members have a part.
        readers: how many wait for the outcome.
    """

    report: PendingReport
    name: str
    parts: DeliveredParts
    members: int
    readers: int

    def make(
        self, reported: ReportedCheckpoints, votes: ReportVotes, go_on: Callable[[], None]
    ) -> ReportOutcome:
        """Upload our part, and agree with the others on the outcome.

        Args:
            reported: of the generation.
            votes: used by this thread only.
            go_on: called between two files, and before the marker; raises to end this here.

        Raises:
            GroupError: the group changed.
            DistError: its store is gone.
        """
        key = self.report.key
        part = self._copy(reported, votes, go_on)
        votes.add_part(key, part)
        votes.vote(key, ReportVote(waits=True, has_checkpoint=True), voters=self.members)
        votes.wait_closed(key)
        go_on()
        outcome = reported.conclude(votes, self.report)
        if not self.report.leaves:
            votes.forget(key, self.readers)
        if outcome.path and _folder_of(self.parts.path) != _folder_of(outcome.path):
            self.parts.release()
        return outcome

    def _copy(
        self, reported: ReportedCheckpoints, votes: ReportVotes, go_on: Callable[[], None]
    ) -> ReportPart:
        """Upload our files into the run directory; a failure is sent to all, not raised here."""
        run, rank, parts = reported.run, reported.origin.rank, self.parts

        def claim(path: str) -> bool:
            go_on()
            return votes.claim(self.report.key, path)

        if run is None:
            return ReportPart(rank, self.name, error="the job has no run directory")
        name, problem = self.name, ""
        if parts.upload is not None:
            try:
                name = name_in(run, parts.upload(name), "checkpoint_upload_fn returned")
            except (GroupError, dist.DistError):
                raise
            except Exception as error:
                problem = f"checkpoint_upload_fn: {type(error).__name__}: {error}"
            # Uploads of others must be complete before any member reads them.
            gate = f"{self.report.key}-uploaded"
            votes.vote(gate, ReportVote(waits=True), voters=self.members)
            votes.wait_closed(gate)
            votes.forget(gate, self.members)
        if problem:
            return ReportPart(rank, name, error=problem)
        try:
            reported.check_free(name)
            if self.report.owns_files:
                wait_given_up(name)
                return ReportPart(rank, name, run.upload(Path(parts.path), name, claim=claim))
            return ReportPart(rank, name, run.weigh(name, claim=claim))
        except StorageError as error:
            return ReportPart(rank, name, error=str(error))


def name_in(run: RunDirectory, path: str, what: str) -> str:
    """Return the name of a checkpoint in the run directory; UsageError if it lies elsewhere."""
    folder = f"{run.path}/{CHECKPOINTS}"
    kind, root = _folder_of(path)
    parent, _, name = root.rpartition("/")
    if (kind, parent) != _folder_of(folder):
        raise UsageError(
            f"train.report: {what} {path}, expected a directory in {Files(folder).path}: write the "
            f"checkpoint there (train.get_context().get_storage() is the run directory)"
        )
    return name


def _folder_of(path: str) -> tuple[type, str]:
    """Return the kind of file system of a local path or an URL, and where it lies there."""
    files = Files(path)
    root = files.root.rstrip("/")
    return type(files.fs), os.path.realpath(root) if files.is_local else root


class BackgroundDelivery:
    """One delivery in a thread of its own.

    Attributes:
        outcome: what became of it, once it is over; None if an error ended it.
    """

    def __init__(
        self, delivery: Delivery, reported: ReportedCheckpoints, votes: ReportVotes
    ) -> None:
        self.delivery = delivery
        self._reported, self._votes = reported, votes
        self._given_up = False
        self.outcome: ReportOutcome | None = None
        self._error: BaseException | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elastic-upload", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def is_over(self) -> bool:
        return self._over.is_set()

    def wait(self, is_group_over: Callable[[], bool]) -> ReportOutcome:
        """Wait for the end, in slices, so that a change of the group can end it, by a GroupError.

        Raises whatever has ended the upload; `is_group_over` also shows that this thread runs.
        """
        while not self._over.wait(WAIT_SLICE_S):
            if is_group_over():
                raise GroupError("the group is over, and so is the upload of its checkpoint")
        if self.outcome is None:
            raise self._error or GroupError("the upload was given up")
        return self.outcome

    def give_up(self, why: str) -> None:
        """Abandon the upload; idempotent."""
        if self._given_up:
            return
        self._given_up = True
        if self.outcome is None:
            log.warning("checkpoint_given_up name=%s: %s", self.delivery.name, why)
        if not self._over.is_set():
            # The group need not wait: storage may take long, and the thread ends by itself.
            _given_up.append(self)

    def _go_on(self) -> None:
        if self._given_up:
            raise GroupError("the upload was given up")

    def _run(self) -> None:
        try:
            self._votes.watch_also(self._go_on)
            # The line that names this checkpoint, before our part of it.
            self._reported.flush_metrics("metrics_kept", lambda: self._given_up)
            self.outcome = self.delivery.make(self._reported, self._votes, self._go_on)
        except BaseException as error:  # Raised again by the thread that waits.
            self._error = error
        finally:
            self._over.set()


_given_up: list[BackgroundDelivery] = []


def wait_given_up(name: str) -> None:
    """Wait until no upload of this process that was given up writes to this checkpoint any more.

    Two of one name are rare: by default a name is never used twice. StorageError if one still
    does after `LINGER_S`.
    """
    _given_up[:] = [background for background in _given_up if not background.is_over()]
    until = time.monotonic() + LINGER_S
    while any(one.delivery.name == name and not one.is_over() for one in _given_up):
        if time.monotonic() > until:
            raise StorageError(
                f"an upload to checkpoint {name} that was given up has not ended for {LINGER_S:g} "
                f"s: storage hangs; use another checkpoint_dir_name"
            )
        time.sleep(WAIT_SLICE_S)
