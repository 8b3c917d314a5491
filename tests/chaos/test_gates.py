"""A group that breaks at the end of an epoch, when some members have passed its gate already."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.core.config import JobSpec
from elastic.core.facts import ENDED, Entry, EntryKind, JobId, JobPhase
from elastic.testing.local_cluster import LocalCluster

SCRIPT = Path(__file__).with_name("gate.py")


@pytest.mark.slow
@pytest.mark.parametrize("epoch", [0, 1])
def test_members_on_both_sides_of_a_gate_go_on_together(tmp_path: Path, epoch: int) -> None:
    """Also where the ones who passed it have finished, which they have after the last epoch."""
    with LocalCluster(nodes=2, directory=tmp_path / "cluster") as cluster:
        entry = Entry(
            EntryKind.SCRIPT, str(SCRIPT), ("--directory", str(tmp_path), "--epoch", str(epoch))
        )
        spec = JobSpec(
            job_id=JobId(""), name=f"gate-{epoch}", entry=entry,
            min_workers=2, max_workers=2, run_path=str(tmp_path / "run"),
        )  # fmt: skip
        job_id = cluster.submit(spec)
        view = cluster.wait(job_id, lambda v: v.record.phase in ENDED, "the end")
        assert view.record.phase is JobPhase.SUCCEEDED, view.reason
        assert (tmp_path / "broken").exists()
        lines = [line.split(" ", 2) for line in (tmp_path / "epochs").read_text().splitlines()]
        for number in ("0", "1"):
            seen = {what for at, _, what in lines if at == number}
            assert len(seen) == 1, f"ranks saw different values after epoch {number}: {seen}"
            assert {rank for at, rank, _ in lines if at == number} == {"0", "1"}
