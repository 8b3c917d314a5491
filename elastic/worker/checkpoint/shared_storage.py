"""Whether all nodes of a group reach the same run directory: found by a test, not by a guess.

Rank 0 writes a file into it and sets a key in the group's store; a worker on another node waits for
that key and then reads the file. If the file is missing, the two write to different places: every
checkpoint would lack what the other node wrote, and the loss would show only at a restore.

Rule: tested once per process. A survivor of an earlier group of several nodes knows the answer, so
a recovery costs one key in the store, and a new worker one read.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from torch._C._distributed_c10d import Store

from elastic.core.facts import Assignment
from elastic.errors import StorageError, StorageNotShared
from elastic.storage.run_directory import RunDirectory

log = logging.getLogger(__name__)

KEY = "shared_storage"
WRITTEN, UNKNOWN = "written", "unknown"
WORD_S = 30.0
"""How long rank 0 may take to write a small file; later than that training begins unchecked."""
POLLS_S = 5.0
"""How long a file that was written on one node may take to be seen on another one."""
PAUSE_S, POLL_PAUSE_S = 0.005, 0.25


class SharedStorage:
    """One process's knowledge; used by its main thread."""

    def __init__(self, run: RunDirectory | None) -> None:
        """Know nothing yet.

        Args:
            run: the run directory, None if the job has none: then nothing is ever asked.
        """
        self._run = run
        self._is_known = False

    def check(self, assignment: Assignment, store: Store, *, is_over: Callable[[], bool]) -> None:
        """Raise StorageNotShared if this worker's node does not write to where rank 0's does.

        Nothing is found out once `is_over`.
        """
        if self._run is None or assignment.num_nodes == 1:
            return
        if assignment.rank == 0:
            self._write_marker(self._run, assignment, store)
        elif assignment.node_rank != 0 and not self._is_known:
            self._check(self._run, assignment, store, is_over)

    def _write_marker(self, run: RunDirectory, assignment: Assignment, store: Store) -> None:
        """Write the file, unless known to be there, and set the key; rank 0 does not wait."""
        if self._is_known:
            _set_answer(store, WRITTEN)
            return

        def write() -> None:
            try:
                run.files.write(_name(assignment), f"{assignment.worker_id}\n".encode())
            except StorageError as error:
                log.warning("shared_storage_unknown reason=%r", str(error))
                _set_answer(store, UNKNOWN)
            else:
                self._is_known = True
                _set_answer(store, WRITTEN)

        threading.Thread(target=write, name="elastic-shared", daemon=True).start()

    def _check(
        self,
        run: RunDirectory,
        assignment: Assignment,
        store: Store,
        is_over: Callable[[], bool],
    ) -> None:
        """Wait for rank 0's answer, then read the file."""
        answer = _wait_answer(store, is_over)
        if answer != WRITTEN:
            if not is_over():
                log.warning("shared_storage_unknown reason='rank 0 could not write in time'")
            return
        deadline = time.monotonic() + POLLS_S
        while not is_over():
            try:
                self._is_known = run.files.read_if_there(_name(assignment)) is not None
            except StorageError as error:
                log.warning("shared_storage_unknown reason=%r", str(error))
                return
            if self._is_known:
                return
            if time.monotonic() >= deadline:
                raise StorageNotShared(_refusal(run, assignment))
            time.sleep(POLL_PAUSE_S)


def _name(assignment: Assignment) -> str:
    return f".shared-{assignment.job_id}"


def _refusal(run: RunDirectory, assignment: Assignment) -> str:
    node = assignment.worker_id.rpartition("/")[0]
    return (
        f"node {node} (rank {assignment.rank}) does not see what rank 0 wrote to the run "
        f"directory {run.path}: {_name(assignment)} is missing there, so this is another place on "
        f"each node, and checkpoints would be torn apart; use storage that all "
        f"{assignment.num_nodes} nodes share, such as NFS or s3://bucket/path "
        f"(RunConfig(storage_path=...), or --storage-path)"
    )


def _set_answer(store: Store, answer: str) -> None:
    # A store that is gone belongs to a group that is over.
    with contextlib.suppress(Exception):
        store.set(KEY, answer)


def _wait_answer(store: Store, is_over: Callable[[], bool]) -> str:
    """Return what rank 0 answered, "" if nothing in time or the group is over."""
    deadline = time.monotonic() + WORD_S
    try:
        while not store.check([KEY]):
            if is_over() or time.monotonic() >= deadline:
                return ""
            time.sleep(PAUSE_S)
        return bytes(store.get(KEY)).decode()
    except RuntimeError:
        return ""  # The store is gone, and with it the group: the next one asks again.
