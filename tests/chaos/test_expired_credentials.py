"""A run on S3 whose credentials expire while it trains, and are renewed in their file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.core.facts import ENDED
from elastic.core.view import JobView
from elastic.storage.verify import verify
from elastic.testing.local_cluster import LocalCluster
from tests.harness.chaos_jobs import chaos_job
from tests.integration.s3_server import BUCKET, Trouble, s3
from tests.patience import wait_for

__all__ = ["s3"]

PROFILE = """[default]
aws_access_key_id = {key}
aws_secret_access_key = secret
"""


@pytest.fixture
def credentials(s3: Trouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the file that all processes read their credentials from."""
    path = tmp_path / "credentials"
    path.write_text(PROFILE.format(key="first-key"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    return path


@pytest.fixture
def cluster(credentials: Path, tmp_path: Path) -> Iterator[LocalCluster]:
    """Start one whose processes know where the credentials are."""
    with LocalCluster(nodes=2, directory=tmp_path / "cluster") as running:
        yield running


def automatic(view: JobView) -> list[str]:
    return [record.path for record in view.record.checkpoints if record.automatic]


@pytest.mark.slow
def test_training_goes_on_and_so_do_checkpoints_once_the_credentials_are_renewed(
    cluster: LocalCluster, s3: Trouble, credentials: Path, tmp_path: Path
) -> None:
    (tmp_path / "job").mkdir()
    job = chaos_job("steps", "expiring", workers=2, directory=tmp_path / "job", save_every=5)
    url = f"s3://{BUCKET}/expiring"
    job_id = cluster.submit(replace(job.spec, run_path=url))
    cluster.wait(job_id, lambda view: bool(automatic(view)), "a checkpoint")
    pids = cluster.worker_pids(job_id)

    def output() -> str:
        logs = (cluster.directory / "logs").rglob("*")
        return "".join(path.read_text(errors="replace") for path in logs if path.is_file())

    s3.refuse_key("first-key")
    wait_for(
        lambda: any(
            "checkpoint_failed" in line and "ExpiredToken" in line and "training goes on" in line
            for line in output().splitlines()
        ),
        "a checkpoint to fail for its credentials",
    )
    steps = cluster.job(job_id).record.metrics
    cluster.wait(job_id, lambda view: view.record.metrics != steps, "training to go on")
    known = set(automatic(cluster.job(job_id)))
    credentials.write_text(PROFILE.format(key="second-key"))
    cluster.wait(
        job_id, lambda view: len(set(automatic(view)) - known) > 1, "two later checkpoints"
    )
    assert cluster.worker_pids(job_id) == pids, "nobody was restarted for it"
    job.finish.touch()
    view = cluster.wait(job_id, lambda view: view.record.phase in ENDED, "the end")
    assert job.check(view)
    newest = automatic(view)[-1]
    assert newest not in known
    # This process had the first key, too.
    assert verify(newest).is_whole
