"""Two nodes whose run directory has one name and is two places: the job fails at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.core.config import JobSpec
from elastic.core.facts import Entry, EntryKind, JobId, JobPhase
from elastic.testing.local_cluster import LocalCluster

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_storage_that_is_not_shared_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('trains')\n")
    with LocalCluster(nodes=0, directory=tmp_path / "cluster") as cluster:
        # The same words mean another place on each: every node has a home of its own.
        for name in ("n1", "n2"):
            (tmp_path / name).mkdir()
            monkeypatch.setenv("HOME", str(tmp_path / name))
            cluster.start_node(name)
        cluster.wait_nodes(2)
        spec = JobSpec(
            job_id=JobId(""),
            name="torn",
            entry=Entry(EntryKind.SCRIPT, str(script), python_path=(str(ROOT),), working_dir="/"),
            min_workers=2,
            max_workers=2,
            run_path="~/run",
            max_failures=5,
        )
        job_id = cluster.submit(spec)
        view = cluster.wait(job_id, lambda job: job.record.phase is JobPhase.FAILED, "the failure")
    record = view.record
    assert record.failure is not None
    assert record.failure.error_type == "elastic.errors.StorageNotShared"
    assert "node n2 (rank 1) does not see what rank 0 wrote" in record.failure.message
    assert "run directory ~/run" in record.failure.message
    assert (record.failures, record.generation) == (1, 1), "trying again would not help"
