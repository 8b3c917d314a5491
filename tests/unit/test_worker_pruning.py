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

    def commit(self, *, recorded: bool = True, score: float = 0.0, job_id: str = "j1") -> Answer:
        """Commit a checkpoint; the coordinator answers at once if it is to be recorded."""
        name = f"c{self.count}"
        marker = Marker(job_id, 1, self.count, 1, self.count, f'{{"score": {score}}}', ())
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
