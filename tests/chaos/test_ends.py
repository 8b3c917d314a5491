"""Ranks end at different moments: some have left the others behind, some are only first."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.core.config import JobSpec
from elastic.core.facts import ENDED, Entry, EntryKind, JobId, JobPhase
from elastic.testing.local_cluster import LocalCluster
from tests.chaos.scripts import Script
from tests.patience import DEADLINE_S, wait_for

SCRIPT = Path(__file__).with_name("ends_script.py")


def job_of(way: str, directory: Path, *, own_steps: bool = True) -> JobSpec:
    return JobSpec(
        job_id=JobId(""),
        name=f"{directory.name}-{way}"[:100],
        entry=Entry(EntryKind.SCRIPT, str(SCRIPT), args=(way,), working_dir=str(directory)),
        min_workers=3,
        max_workers=3,
        run_path=str(directory / way),
        own_steps=own_steps,
    )


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("leaves", "rank 1 left at plain (ends_script.py:34) (exit 0); ranks 0 and 2 still train"),
        ("epochs", "rank 1 left in epoch 0, step 5 (returned); ranks 0 and 2 still train"),
    ],
)
def test_a_job_whose_member_has_left_ends_and_says_who_and_where(
    cluster: LocalCluster, tmp_path: Path, way: str, said: str
) -> None:
    job_id = cluster.submit(job_of(way, tmp_path, own_steps=way == "leaves"))
    view = cluster.wait(job_id, lambda v: v.record.phase in ENDED, "the end")
    assert view.record.phase is JobPhase.FAILED
    assert view.record.failures == 1
    assert view.record.failure is not None
    assert view.record.failure.message == said


@pytest.mark.parametrize(
    ("way", "phase", "why"),
    [("later", JobPhase.SUCCEEDED, ""), ("fails", JobPhase.FAILED, "ValueError: no such column")],
)
def test_a_rank_that_has_more_to_do_than_the_others_ends_in_its_own_time(
    cluster: LocalCluster, tmp_path: Path, way: str, phase: JobPhase, why: str
) -> None:
    job_id = cluster.submit(job_of(way, tmp_path))
    view = cluster.wait(job_id, lambda v: v.record.phase in ENDED, "the end")
    assert view.record.phase is phase, view.reason
    assert why in view.reason


def test_a_scripts_own_handlers_of_signals_are_called_as_under_torchrun(
    start: Callable[..., Script], tmp_path: Path
) -> None:
    storage = tmp_path / "storage"
    run = ("-m", "elastic.client.cli", "run", "--storage", str(tmp_path), "--nproc-per-node=2")
    script = start("told", *run, script=SCRIPT)

    def has_all(name: str) -> bool:
        return all((storage / f"{name}-{rank}").exists() for rank in range(2))

    wait_for(lambda: has_all("trains"), "both ranks to train")
    for rank in range(2):
        pid = wait_for((storage / f"trains-{rank}").read_text, "its process id")
        os.kill(int(pid), signal.SIGUSR1)
    wait_for(lambda: has_all("usr1"), "handlers of SIGUSR1")
    script.process.terminate()
    assert script.wait() == 128 + signal.SIGTERM, script.said()
    assert has_all("saved"), script.said()
    assert "Traceback" not in script.said()
    script.assert_nothing_is_left()


def test_a_script_saves_when_its_node_leaves_while_who_replaces_it_is_ready(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    (tmp_path / "gate").touch()
    spec = job_of("told", tmp_path)
    entry = replace(spec.entry, args=("told", str(tmp_path)))
    job_id = cluster.submit(replace(spec, entry=entry, min_workers=2, max_workers=2))
    files = [tmp_path / f"{name}-{rank}" for name in ("trains", "saved") for rank in range(2)]
    wait_for(lambda: all(file.exists() for file in files[:2]), "both ranks to train")
    (before,) = (job for job in cluster.view().jobs if job.record.spec.job_id == job_id)
    assert before.record.group is not None
    node = before.record.group.members[1].node_id
    cluster.client.drain(node, timeout_s=120)
    view = cluster.wait(
        job_id, lambda v: v.record.generation > 1 or "1 to join" in v.reason, "one to replace it"
    )
    assert view.record.generation == 1
    (tmp_path / "gate").unlink()
    view = cluster.wait(job_id, lambda v: v.record.generation > 1, "the next group")
    assert all(file.exists() for file in files)
    assert view.record.failures == 0
    cluster.stop_jobs()
    cluster.agents[node].wait(DEADLINE_S)
    cluster.start_node(node)
    cluster.wait_nodes(3)
