"""The same bits on a GPU: ranks that share it over gloo are killed, and nothing changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from elastic.core.facts import Resources  # noqa: E402
from elastic.testing.local_cluster import LocalCluster  # noqa: E402
from tests.harness.chaos import Chaos, draw_kills  # noqa: E402
from tests.harness.chaos_jobs import chaos_job, with_arguments  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device"),
]


@pytest.mark.parametrize("model", ["mlp", "cnn", "gpt"])
def test_kills_change_nothing_where_ranks_share_a_gpu(tmp_path: Path, model: str) -> None:
    directory = tmp_path / "job"
    directory.mkdir()
    with LocalCluster(nodes=3, directory=tmp_path / "cluster") as cluster:
        job = chaos_job("steps", f"cuda-{model}", workers=3, directory=directory)
        job = with_arguments(job, "--gpu", "--model", model, "--width", "32")
        shares = Resources.of({"GPU": 0.3})
        job = replace(job, spec=replace(job.spec, backend="gloo", resources_per_worker=shares))
        outcome = Chaos(cluster, job).run(draw_kills(seed=1, kills=5, every_s=2.0))
    assert len(outcome.faults) >= 4
