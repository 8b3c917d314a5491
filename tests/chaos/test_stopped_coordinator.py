"""While the coordinator stands still training goes on, and no checkpoint counts."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from elastic.core.facts import ENDED
from elastic.storage.run_directory import RunDirectory
from elastic.testing.local_cluster import LocalCluster
from tests.harness.chaos_jobs import chaos_job
from tests.patience import wait_for


def test_no_marker_appears_while_nobody_can_record_it(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    job = chaos_job("epochs", "stopped", workers=2, directory=tmp_path)
    job_id = cluster.submit(job.spec)
    run = RunDirectory(job.spec.run_path)

    def found(sign: str) -> list[str]:
        return sorted(path.split("/")[1] for path in run.files.list(f"checkpoints/*/{sign}"))

    def goes_on() -> None:
        made = len(run.read_metrics())
        wait_for(lambda: len(run.read_metrics()) > made + 3, "training to go on")

    wait_for(lambda: len(found("_COMMITTED")) > 1, "checkpoints")
    assert cluster.coordinator is not None
    cluster.coordinator.send_signal(signal.SIGSTOP)
    try:
        goes_on()  # What was recorded before has come back by now.
        known = found("_COMMITTED")
        goes_on()
        assert found("_COMMITTED") == known
        (waiting,) = found("_PREPARED")
        assert waiting > max(known)
    finally:
        cluster.coordinator.send_signal(signal.SIGCONT)
    newest = max(row["checkpoint"] for row in run.read_metrics())
    wait_for(lambda: max(found("_COMMITTED")) >= newest, "the markers")
    job.finish.touch()
    view = cluster.wait(job_id, lambda v: v.record.phase in ENDED, "the end")
    assert job.check(view)
    assert json.loads(view.record.metrics)["epoch"] > 6
