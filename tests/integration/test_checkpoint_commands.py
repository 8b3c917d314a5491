"""elastic checkpoint, checkpoints and verify, against a cluster whose workers really train."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.from_thread
import pytest
from click.testing import CliRunner, Result

from elastic.client.cli import main
from elastic.client.jobs import Client
from elastic.core.config import JobSpec
from elastic.core.facts import Entry, EntryKind, JobId, JobPhase, ReportKind
from elastic.core.messages import Report, Reported, SaveState
from elastic.testing.local_cluster import LocalCluster
from tests.integration.coordinator import Coordinator, ScriptedAgent, node, spec
from tests.integration.played_jobs import elastic, wait_phase
from tests.patience import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]
LOOP = """
import time, torch
from torch.utils.data import DataLoader, TensorDataset
from elastic import train
from elastic.train.torch import prepare_data_loader, prepare_model, prepare_optimizer

model = prepare_model(torch.nn.Linear(4, 1))
optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
data = TensorDataset(torch.randn(64, 4))
loader = prepare_data_loader(DataLoader(data, batch_size=4), global_batch_size=8)
for epoch in train.epochs(100_000):
    for (x,) in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.005)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    directory = tmp_path_factory.mktemp("cluster")
    with LocalCluster(nodes=2, directory=directory) as running:
        yield running


def command(cluster: LocalCluster, *args: object) -> Result:
    return CliRunner().invoke(main, ["-c", cluster.address, *map(str, args)])


def training(cluster: LocalCluster, tmp_path: Path, script: str, **changes: object) -> str:
    """Submit a script for two workers, and wait until both train."""
    path = tmp_path / "train.py"
    path.write_text(script)
    fields = {
        "job_id": JobId(""), "name": tmp_path.name.replace("_", "-")[:40], "min_workers": 2,
        "max_workers": 2, "run_path": str(tmp_path / "run"),
        "entry": Entry(EntryKind.SCRIPT, str(path), python_path=(str(ROOT),), working_dir="/"),
        **changes,
    }  # fmt: skip
    job_id = cluster.submit(JobSpec(**fields))  # type: ignore[arg-type]
    cluster.wait_note("group_training", job_id)
    return job_id


def test_a_checkpoint_is_taken_now_listed_and_verified(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    job_id = training(cluster, tmp_path, LOOP)
    try:
        assert "has no recorded checkpoint" in command(cluster, "checkpoints", job_id).stdout
        done = command(cluster, "checkpoint", job_id, "--timeout", 40)
        assert done.exit_code == 0, done.output
        first = done.stdout.strip()
        assert first.startswith(f"{tmp_path}/run/checkpoints/auto-")
        assert "after " in done.stderr
        second = json.loads(command(cluster, "checkpoint", job_id, "-o", "json").stdout)["path"]
        assert second != first
        rows = json.loads(command(cluster, "checkpoints", job_id, "-o", "json").stdout)
        assert [row["path"] for row in rows] == [first, second]
        assert {row["kind"] for row in rows} == {"automatic"}
        for row in rows:
            assert row["epoch"] >= 0
            assert row["step"] >= 0
            assert 0 <= row["age_s"] < DEADLINE_S
        table = command(cluster, "checkpoints", job_id).stdout
        assert first in table
        assert "automatic" in table
        # Its own reports are the script's, and it made none.
        assert json.loads(command(cluster, "status", job_id, "-o", "json").stdout)["metrics"] == {}
    finally:
        cluster.stop_jobs()
    done = command(cluster, "verify", tmp_path / "run")
    assert done.exit_code == 0, done.output
    victim = next(path for path in Path(first).iterdir() if path.suffix == ".distcp")
    victim.write_bytes(victim.read_bytes()[:-1])
    done = command(cluster, "verify", tmp_path / "run")
    assert done.exit_code == 1
    assert f"{victim.name}: truncated" in done.stdout


def test_a_script_without_epochs_takes_none_and_the_reason_is_told(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    job_id = training(cluster, tmp_path, "import time\nwhile True:\n    time.sleep(0.1)\n")
    try:
        done = command(cluster, "checkpoint", job_id, "--timeout", 0.5)
        assert done.exit_code == 124
        assert "train.epochs()" in done.stderr
    finally:
        cluster.stop_jobs()
    done = command(cluster, "checkpoint", job_id)
    assert done.exit_code == 2
    assert "has ended already" in done.stderr


# ------------------------------------------------------------------ an agent that a test plays


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    with Coordinator(tmp_path / "coordinator") as started:
        yield started


def test_a_job_without_a_run_directory_is_refused(coordinator: Coordinator) -> None:
    with Client(coordinator.address) as client:
        client.submit(spec("homeless"))
    done = elastic(coordinator, "checkpoint", "homeless")
    assert done.exit_code == 2
    assert "no run directory" in done.stderr


def test_a_job_that_waits_is_refused_with_what_it_waits_for(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    with Client(coordinator.address) as client:
        client.submit(replace(spec("waits"), run_path=str(tmp_path)))
    done = elastic(coordinator, "checkpoint", "waits")
    assert done.exit_code == 2
    assert "does not train now (waiting:" in done.stderr
    assert elastic(coordinator, "checkpoint", "nosuch").exit_code == 2


def test_the_wish_reaches_the_agent_and_a_job_that_ends_meanwhile_is_told(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    received = threading.Event()

    async def take_one_and_ignore_one() -> None:
        async with ScriptedAgent(coordinator.address, node("n1", slots=1)) as agent:
            await agent.join()
            report = await agent.train()
            wish = await agent.hear(SaveState)
            assert (wish.worker_id, wish.generation) == (report.worker_id, report.generation)
            path = f"{tmp_path}/elsewhere/auto-1"
            saved = Report(
                report.worker_id,
                report.job_id,
                1,
                1,
                0,
                '{"epoch": 3}',
                path,
                request=wish.request,
                kind=ReportKind.AUTOMATIC,
            )
            await agent.say(Reported(saved))
            assert (await agent.hear(SaveState)).request > wish.request
            received.set()
            with Client(coordinator.address) as client:
                await anyio.to_thread.run_sync(client.stop, "a")

    with Client(coordinator.address) as client:
        client.submit(replace(spec("a"), run_path=str(tmp_path)))
        with anyio.from_thread.start_blocking_portal() as portal:
            played = portal.start_task_soon(take_one_and_ignore_one)
            wait_phase(client, "a", JobPhase.RUNNING)
            done = elastic(coordinator, "checkpoint", "a")
            assert done.exit_code == 0, done.output
            # It cannot be seen from here: the coordinator's word must do.
            assert done.stdout.strip() == f"{tmp_path}/elsewhere/auto-1"
            (row,) = json.loads(elastic(coordinator, "checkpoints", "a", "-o", "json").stdout)
            assert (row["epoch"], row["age_s"], row["bytes"]) == (3, None, None)
            done = elastic(coordinator, "checkpoint", "a")
            assert received.is_set()
            assert done.exit_code == 2
            assert "no checkpoint was taken before the end: job a stopped" in done.stderr
            played.result(DEADLINE_S)
