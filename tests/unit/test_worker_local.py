"""A train function in this very process: the same reports, without agent and coordinator."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic.errors import UsageError
from elastic.worker.engine.context import WorkerContext
from elastic.worker.engine.train_call import current
from elastic.worker.process.local import LocalRun, local_context, run_local
from tests.patience import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]


def here() -> WorkerContext:
    context = current()
    assert context is not None
    return context


def train(config: dict[str, Any]) -> dict[str, Any]:
    context = here()
    begun_with = context.the_reporter().newest_checkpoint
    ones = torch.ones(1)
    dist.all_reduce(ones)
    context.report('{"loss": 0.5}')
    part = Path(config["parts"]) / f"{len(begun_with)}-{context.world_rank}"
    part.mkdir(parents=True)
    (part / f"part{context.world_rank}").write_text("x")
    context.report('{"loss": 0.25}', str(part))
    assert not context.at_boundary()
    context.note_step()
    return {"begun_with": begun_with, "total": float(ones), "local": context.is_local}


def test_processes_that_torchrun_starts_again_for_another_node_write_checkpoints_of_their_own(
    tmp_path: Path,
) -> None:
    """It does not count such restarts."""
    run = LocalRun(job_name="here", run_path=str(tmp_path / "run"), job_id="j1")
    for count in (1, 2, 3):
        config = {"parts": str(tmp_path / f"parts{count}")}
        assert len(run_local(train, replace(run, config=config)).checkpoints) == count


def test_without_a_run_directory_metrics_are_taken_and_checkpoints_refused(tmp_path: Path) -> None:
    with local_context(LocalRun(job_name="here")) as context:
        context.report('{"loss": 1}')
        with pytest.raises(UsageError, match="no run directory"):
            context.report("{}", str(tmp_path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is an accelerator")
def test_an_accelerator_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="no accelerator"):
        run_local(train, LocalRun(job_name="here", use_gpu=True))


TORCHRUN_SCRIPT = """
import sys
from tests.unit.test_worker_local import train
from elastic.worker.process.local import LocalRun, run_local

config = {"parts": sys.argv[1]}
outcome = run_local(train, LocalRun(job_name="here", run_path=sys.argv[2], config=config))
print(outcome.result, len(outcome.checkpoints))
"""


def test_under_torchrun_every_process_is_a_member_of_its_group(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TORCHRUN_SCRIPT)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launch, str(script), str(tmp_path / "parts"), str(tmp_path / "run")],
        cwd=ROOT,
        env={"PATH": "", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (name,) = [path.parent for path in (tmp_path / "run").glob("checkpoints/*/_COMMITTED")]
    assert sorted(path.name for path in name.glob("part*")) == ["part0", "part1"]
    assert (tmp_path / "run" / "metrics-rank1.jsonl").exists()
    assert '"total": 2.0' in done.stdout
