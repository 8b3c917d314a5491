"""A train function whose run directory is a bucket."""

from __future__ import annotations

import os
from pathlib import Path

import fsspec
import pytest

import elastic
from elastic import train
from elastic.errors import ConfigError
from elastic.storage.verify import checkpoints_at, verify
from elastic.testing.local_cluster import LocalCluster
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


def test_workers_and_results_have_the_keys_of_the_runs_file_system(
    s3: Trouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = os.environ["AWS_ENDPOINT_URL"]
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    theirs = fsspec.filesystem("s3", key="k", secret="s", endpoint_url=address)

    def train_func() -> None:
        before = train.get_checkpoint()
        start = before.to_dict()["epoch"] + 1 if before is not None else 0
        for epoch in range(start, start + 2):
            train.report({"epoch": epoch}, checkpoint=train.Checkpoint.from_dict({"epoch": epoch}))

    run = train.RunConfig(name="keys", storage_path=f"{BUCKET}/runs", storage_filesystem=theirs)
    trainer = train.DataParallelTrainer(train_func, run_config=run)
    with LocalCluster(nodes=1, directory=tmp_path) as cluster, elastic.init(cluster.address):
        trainer.fit()
        result = trainer.fit()
    assert result.path == f"s3://{BUCKET}/runs/keys"
    assert result.checkpoint is not None
    assert result.checkpoint.to_dict() == {"epoch": 3}
    asked = f"s3://{BUCKET}/runs/keys/?endpoint_override={address}"
    with pytest.raises(ConfigError, match=r"color.*expected no settings"):
        train.Result.from_path(f"{asked}&color=red")
    assert train.Result.from_path(result.path).checkpoint == result.checkpoint
