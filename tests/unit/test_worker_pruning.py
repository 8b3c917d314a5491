"""Checkpoints that are not to be kept are deleted, and never before a newer one is recorded."""

from __future__ import annotations

from pathlib import Path

from elastic.core.config import JobSpec
from elastic.core.world import JobId
from elastic.storage.marker import Marker
from elastic.storage.run_directory import RunDirectory
from elastic.storage.run_record import RunRecord, write_run
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


def test_the_newest_ones_are_kept(tmp_path: Path) -> None:
    run = Run(tmp_path, spec(2))
    for _ in range(5):
        run.commit()
    assert run.names() == ["c3", "c4"]


def test_the_best_one_is_kept_beside_the_newest(tmp_path: Path) -> None:
    run = Run(tmp_path, spec(2, "score"))
    for score in (0.1, 0.9, 0.3, 0.2):
        run.commit(score=score)
    assert run.names() == ["c1", "c3"]


def test_all_are_kept_without_a_limit(tmp_path: Path) -> None:
    run = Run(tmp_path, spec(-1))
    for _ in range(4):
        run.commit()
    assert run.names() == ["c0", "c1", "c2", "c3"]


def test_nothing_is_deleted_before_a_newer_one_is_recorded(tmp_path: Path) -> None:
    run = Run(tmp_path, spec(1))
    run.commit()
    late = run.commit(recorded=False)
    run.commit(recorded=False)
    assert run.names() == ["c0", "c1", "c2"]
    late.accepted = True
    late.ready.set()
    run.pruner.finish()
    assert run.names() == ["c1", "c2"]


def test_one_that_was_never_recorded_does_not_push_out_one_that_was(tmp_path: Path) -> None:
    job = spec(2)
    run = Run(tmp_path, job)
    run.commit()
    run.commit()
    run.commit(recorded=False)  # Its generation is over before the coordinator hears of it.
    run.pruner = Pruner(run.directory, job, run.directory.checkpoint_path("c1"))
    run.commit()
    assert run.names() == ["c1", "c2", "c3"]
    run.commit()
    assert run.names() == ["c2", "c3", "c4"]


def test_a_refused_checkpoint_lets_the_older_one_live(tmp_path: Path) -> None:
    run = Run(tmp_path, spec(1))
    run.commit()
    run.commit(recorded=False).ready.set()
    run.pruner.finish()
    assert run.names() == ["c0", "c1"]


def test_checkpoints_of_another_job_are_left_alone(tmp_path: Path) -> None:
    run = Run(tmp_path, spec(1))
    run.commit(job_id="j0")
    run.commit()
    run.commit()
    assert run.names() == ["c0", "c2"]


def test_a_folder_without_a_marker_is_left_alone(tmp_path: Path) -> None:
    run = Run(tmp_path, spec(1))
    (tmp_path / "checkpoints" / "torn").mkdir(parents=True)
    run.commit()
    run.commit()
    assert run.names() == ["c1", "torn"]


def test_what_earlier_attempts_left_goes_once_a_newer_one_is_recorded(tmp_path: Path) -> None:
    run = Run(tmp_path, spec(2))
    write_run(run.directory.files, RunRecord(name="a", jobs=("j0", "j1")))
    for _ in range(2):
        run.commit(job_id="j0")
    run.pruner = Pruner(run.directory, spec(2), run.directory.checkpoint_path("c1"))
    late = run.commit(recorded=False)
    assert run.names() == ["c0", "c1", "c2"]
    late.accepted = True
    late.ready.set()
    run.pruner.finish()
    assert run.names() == ["c1", "c2"]


def test_the_best_of_all_attempts_is_kept(tmp_path: Path) -> None:
    run = Run(tmp_path, spec(2, "score"))
    write_run(run.directory.files, RunRecord(name="a", jobs=("j0", "j1")))
    run.commit(job_id="j0", score=0.9)
    for score in (0.1, 0.2):
        run.commit(score=score)
    assert run.names() == ["c0", "c2"]


def test_a_checkpoint_of_another_run_is_not_ours_even_under_a_name_that_we_have(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, spec(1))
    run.commit(recorded=False)  # c0 was never recorded.
    run.pruner = Pruner(run.directory, spec(1), "/elsewhere/checkpoints/c0")
    run.commit()
    run.commit()
    assert run.names() == ["c0", "c2"]
