"""What a run directory tells of its run, also after it was resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic.core.config import JobSpec
from elastic.core.facts import CheckpointRecord, JobId, JobPhase, ReportKind
from elastic.core.records import JobRecord
from elastic.errors import UsageError
from elastic.storage.marker import CheckpointMarker
from elastic.storage.run_directory import RunDirectory
from elastic.storage.run_record import RunPhase, RunRecord, write_run
from elastic.train import Result
from elastic.train.result import kept_of
from tests.strategies import SCRIPT


class Run:
    """A run directory, written as two attempts of a run would do."""

    def __init__(self, path: Path) -> None:
        self.directory = RunDirectory(str(path))
        self.record = RunRecord(name="r", jobs=("j1", "j2"))
        write_run(self.directory.files, self.record)

    def commit(
        self,
        name: str,
        job_id: str,
        index: int,
        *,
        unix_ns: int = 0,
        kind: ReportKind = ReportKind.SCRIPT,
    ) -> CheckpointRecord:
        metrics = json.dumps({"name": name})
        marker = CheckpointMarker(job_id, 1, index, 1, unix_ns, metrics, (), kind=kind)
        Path(self.directory.checkpoint_path(name)).mkdir(parents=True)
        self.directory.commit(name, marker)
        return self.directory.record(name, marker)


def names(result: Result) -> list[str]:
    return [metrics["name"] for _, metrics in result.best_checkpoints]


def test_automatic_checkpoints_count_only_where_nothing_was_reported(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.commit("auto-0", "j1", 0, kind=ReportKind.AUTOMATIC)
    run.commit("auto-1", "j1", 1, kind=ReportKind.AUTOMATIC)
    result = Result.from_path(tmp_path)
    assert (result.best_checkpoints, result.metrics) == ([], None)
    assert str(result.checkpoint).count("auto-1")
    run.commit("mine", "j1", 0)
    assert str(Result.from_path(tmp_path).checkpoint).count("mine")
    assert names(Result.from_path(tmp_path)) == ["mine"]


def test_how_a_run_ended_is_told(tmp_path: Path) -> None:
    run = Run(tmp_path)
    write_run(run.directory.files, run.record.ended(RunPhase.FAILED, 1, "no data"))
    assert str(Result.from_path(tmp_path).error) == "run r failed: no data"
    write_run(run.directory.files, run.record.ended(RunPhase.SUCCEEDED, 1))
    assert Result.from_path(tmp_path).error is None


def test_what_is_no_run_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"neither run.json"):
        Result.from_path(tmp_path)


def test_the_result_of_a_resumed_job_has_its_earlier_attempts_checkpoints(tmp_path: Path) -> None:
    run = Run(tmp_path)
    a0, a1 = run.commit("a0", "j1", 0), run.commit("a1", "j1", 1)
    b = run.commit("b", "j2", 0)
    spec = JobSpec(
        job_id=JobId("j2"), name="r", entry=SCRIPT, min_workers=1, max_workers=1,
        run_path=str(tmp_path),
    )  # fmt: skip
    job = JobRecord(spec, JobPhase.SUCCEEDED, checkpoints=(b,))
    assert kept_of(job) == (a0, a1, b)
