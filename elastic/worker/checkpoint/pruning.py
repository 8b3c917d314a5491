"""Deleting checkpoints that are not to be kept, and what is left of those that came to nothing.

Rule: called once a newer one counts, for its kind alone. What has a marker is recorded; which of
those go is the retention policy's word.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Iterator, Sequence

from elastic.core.config import JobSpec
from elastic.core.facts import ReportKind
from elastic.core.policy import retention
from elastic.storage.marker import DAMAGED, CheckpointMarker
from elastic.storage.run_directory import AUTOMATIC, CHECKPOINTS, RunDirectory
from elastic.worker.checkpoint.snapshot import position_in

Found = Sequence[tuple[str, CheckpointMarker]]

_deleting = threading.Lock()
"""What a validation has found out is another thread's reason to delete."""


def prune(
    run: RunDirectory, spec: JobSpec, newest: CheckpointMarker, *, unfinished: Collection[str] = ()
) -> None:
    """Delete checkpoints of one kind, of this attempt and of those before it.

    Those of later attempts are left alone: if there are any, this process is outdated.

    Args:
        run: the run directory.
        spec: which job this is, and which checkpoints are kept.
        newest: the one that was just committed, or whose metrics were just updated.
        unfinished: names that are not touched.

    Raises:
        StorageError: storage cannot be read, or something cannot be deleted.
    """
    is_reported = newest.kind is ReportKind.SCRIPT
    if is_reported and spec.num_to_keep == -1:
        return
    with _deleting:
        jobs = run.jobs()
        at = jobs.index(spec.job_id) if spec.job_id in jobs else len(jobs)
        # Checkpoints of an unknown job have an unknown owner: they are not in `ours`.
        ours, later = {*jobs[:at], spec.job_id}, jobs[at + 1 :]
        found = [
            (name, marker)
            for name, marker in (run.reported() if is_reported else run.automatic())
            if (marker.job_id in ours if is_reported else marker.job_id not in later)
        ]
        kept = kept_names(found, spec)
        for name, _ in found:
            if name not in kept and name not in unfinished:
                run.remove(name)
        left = _left_reports(run, spec, found) if is_reported else _left_snapshots(run, newest)
        for name in left:
            is_theirs = name.startswith(tuple(f"{AUTOMATIC}{job_id}-s" for job_id in later))
            if name not in unfinished and not is_theirs:
                run.discard(name)


def kept_names(found: Found, spec: JobSpec) -> set[str]:
    """Return the names of those that the policy keeps, be the others still there or not."""
    kept = retention.keep(
        [marker.record(name) for name, marker in found],
        num_to_keep=spec.num_to_keep,
        score_attribute=spec.score_attribute,
        score_order=spec.score_order,
    )
    return {record.path for record in kept}


def _left_reports(run: RunDirectory, spec: JobSpec, found: Found) -> Iterator[str]:
    """Yield those without a marker that earlier generations have begun, under default names."""
    present = max((m.generation for _, m in found if m.job_id == spec.job_id), default=0)
    named = re.compile(rf"checkpoint-{re.escape(spec.job_id)}-g(\d+)-")
    for name in run.names(f"checkpoint-{spec.job_id}-g"):
        begun = named.match(name)
        if begun and int(begun[1]) < present and not _is_somebodys(run, name):
            yield name


def _left_snapshots(run: RunDirectory, newest: CheckpointMarker) -> Iterator[str]:
    """Yield automatic ones without a marker, of this run and earlier ones, that none writes to.

    One that another member still writes to is of more steps than we have committed now; the
    newest of all may be of more than that, if it is damaged and the run went back.
    """
    steps = newest.about("steps", 0)
    for name in run.names(AUTOMATIC):
        at = position_in(name)
        if at is not None and at.steps < steps and not _is_somebodys(run, name):
            yield name


def _is_somebodys(run: RunDirectory, name: str) -> bool:
    """Return whether it counts, whether we can read its marker or not, or was set aside."""
    return run.is_committed(name) or bool(run.files.list(f"{CHECKPOINTS}/{name}/{DAMAGED}"))
