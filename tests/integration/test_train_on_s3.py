"""A train function whose run directory is a bucket."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic import train
from elastic.storage.verify import checkpoints_at, verify
from elastic.train.result import read_history
from elastic.worker.process.local import LocalRun, run_local
from tests.integration.s3_server import BUCKET, Trouble, s3

__all__ = ["s3"]


@pytest.mark.usefixtures("s3")
def test_reports_and_checkpoints_of_a_run_are_in_its_bucket(s3: Trouble, tmp_path: Path) -> None:
    url = f"s3://{BUCKET}/digits"

    def train_func() -> None:
        for epoch in range(5):
            (tmp_path / "model").write_text(f"weights {epoch}")
            s3.plan("PUT", 503, "SlowDown")
            train.report({"epoch": epoch}, checkpoint=train.Checkpoint.from_directory(tmp_path))

    outcome = run_local(train_func, LocalRun(job_name="digits", run_path=url, num_to_keep=2))
    assert len(outcome.checkpoints) == 2
    assert [row["metrics"]["epoch"] for row in read_history(url)] == [0, 1, 2, 3, 4]
    assert checkpoints_at(url) == tuple(record.path for record in outcome.checkpoints)
    assert all(verify(path).is_whole for path in checkpoints_at(url))
