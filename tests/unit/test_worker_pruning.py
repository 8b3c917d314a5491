"""Checkpoints that are not to be kept are deleted, and never before a newer one is recorded."""

from __future__ import annotations

from pathlib import Path

from elastic.core.config import JobSpec
from elastic.core.world import JobId
from elastic.storage.marker import Marker
from elastic.storage.run_directory import RunDirectory
from elastic.worker.exchange import Answer
from elastic.worker.pruning import Pruner
from tests.strategies import SCRIPT


def spec(num_to_keep: int, attribute: str = "") -> JobSpec:
    """Return a job that keeps so many checkpoints."""
    return JobSpec(
        job_id=JobId("j1"),
        name="a",
        entry=SCRIPT,
        min_workers=1,
        max_workers=1,
        num_to_keep=num_to_keep,
        score_attribute=attribute,
    )


class Run:
    """A run directory in which checkpoints are committed one after the other."""

    def __init__(self, path: Path, job: JobSpec) -> None:
        self.directory = RunDirectory(str(path))
        self.pruner = Pruner(self.directory, job)
        self.count = 0
        self.generation = 1

    def commit(self, *, recorded: bool = True, score: float = 0.0, job_id: str = "j1") -> Answer:
        """Commit a checkpoint; the coordinator answers at once if it is to be recorded."""
        name = f"c{self.count}"
        marker = Marker(
            job_id, self.generation, self.count, 1, self.count, f'{{"score": {score}}}', ()
        )
        Path(self.directory.checkpoint_path(name)).mkdir(parents=True)
        self.directory.commit(name, marker)
        answer = Answer()
        if recorded:
            answer.accepted = True
            answer.ready.set()
        self.count += 1
        if job_id == "j1":
            self.pruner.committed(name, answer)
        return answer

    def names(self) -> list[str]:
        """Return the checkpoints that are there."""
        folder = Path(self.directory.path) / "checkpoints"
        return sorted(path.name for path in folder.iterdir())


def test_a_refused_checkpoint_lets_the_older_one_live(tmp_path: Path) -> None:
    run = Run(tmp_path, spec(1))
    run.commit()
    run.commit(recorded=False).ready.set()
    run.pruner.finish()
    assert run.names() == ["c0", "c1"]


def test_what_a_failure_left_behind_does_not_stay_beside_those_that_are_kept(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, spec(2))
    run.commit()
    # Recorded; the group broke before the answers came.
    answers = [run.commit(recorded=False) for _ in range(2)]
    run.commit(recorded=False)  # Its generation was over.
    for answer in answers:
        answer.accepted = True
    newest = run.directory.checkpoint_path("c2")
    run.pruner, run.generation = Pruner(run.directory, spec(2), newest), 2
    run.pruner.commits()
    run.commit()
    run.pruner.finish()
    assert run.names() == ["c2", "c4"]
    assert [Path(record.path).name for record in run.directory.records()] == ["c2", "c4"]
