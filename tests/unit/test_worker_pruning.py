"""Which checkpoints are deleted once a newer one counts, and what of those that never did."""

from __future__ import annotations

from pathlib import Path

from elastic.core.config import JobSpec
from elastic.core.facts import JobId
from elastic.storage.marker import CheckpointMarker
from elastic.storage.run_directory import RunDirectory
from elastic.storage.run_record import RunRecord, write_run
from elastic.worker.checkpoint.pruning import prune
from tests.strategies import SCRIPT


def spec(num_to_keep: int) -> JobSpec:
    """Return a job that keeps so many checkpoints."""
    return JobSpec(
        job_id=JobId("j1"),
        name="a",
        entry=SCRIPT,
        min_workers=1,
        max_workers=1,
        num_to_keep=num_to_keep,
    )


class Run:
    """A run directory in which checkpoints are committed one after the other."""

    def __init__(self, path: Path) -> None:
        self.directory = RunDirectory(str(path))
        write_run(self.directory.files, RunRecord(name="a", jobs=("j0", "j1", "j2")))
        self.count = 0

    def begin(self, name: str) -> None:
        """Leave a file of a checkpoint that is not committed."""
        self.directory.checkpoint(name).write("model", b"x")

    def commit(self, name: str, job_id: str = "j1", generation: int = 1) -> CheckpointMarker:
        self.begin(name)
        marker = CheckpointMarker(job_id, generation, self.count, 1, self.count, "{}", ())
        self.directory.commit(name, marker)
        self.count += 1
        return marker

    def names(self) -> list[str]:
        """Return the checkpoints that are there."""
        return sorted(self.directory.names())


def test_those_of_earlier_attempts_count_and_nobody_elses(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for name, job in [("old", "j0"), ("older", "j0"), ("later", "j2"), ("strange", "x")]:
        run.commit(name, job)
    newest = run.commit("new")
    prune(run.directory, spec(2), newest)
    assert run.names() == ["later", "new", "older", "strange"]
    run.commit("one-more")
    prune(run.directory, spec(-1), newest)
    assert "older" in run.names()


def test_what_a_failure_left_behind_does_not_stay_beside_those_that_are_kept(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path)
    left, begun, aside = (f"checkpoint-j1-g00000{g}" for g in ("1-000000", "2-000007", "1-000003"))
    for name in (left, begun, aside, "named-by-the-script"):
        run.begin(name)
    run.directory.set_aside(aside, "a bit flipped")
    newest = run.commit("c", generation=2)
    prune(run.directory, spec(1), newest)
    assert run.names() == sorted([begun, aside, "c", "named-by-the-script"])
