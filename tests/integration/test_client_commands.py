"""The command `elastic` against a real coordinator; agents say what a test tells them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import pytest
from click.testing import CliRunner

from elastic.client import run
from elastic.client.cli import main
from elastic.client.job_follower import follow
from elastic.client.jobs import Client
from elastic.core.facts import Failure, JobPhase, NodePhase
from elastic.core.messages import FollowLogs, LogLines, Release
from elastic.core.view import JobView
from elastic.errors import NotAuthorized
from elastic.storage.marker import CheckpointMarker
from elastic.storage.run_directory import RunDirectory
from tests.integration.coordinator import ROOT, Coordinator, ScriptedAgent, node, spec
from tests.integration.played_jobs import elastic, playing, wait_phase
from tests.patience import DEADLINE_S, wait_for

STORY = 'Traceback (most recent call last):\n  File "train.py", line 7\nValueError: step seven\n'


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("")
    return path


def test_submit_prints_the_workers_output_and_exits_0(
    coordinator: Coordinator, script: Path, tmp_path: Path
) -> None:
    with playing(coordinator.address, "success"):
        done = elastic(coordinator, "submit", script, "--name", "good", "--storage-path", tmp_path)
    assert done.exit_code == 0, done.output
    assert done.stdout == "hello from the worker\ngoodbye\n"
    assert "job good submitted as j-" in done.stderr
    assert f"elastic -c {coordinator.address}" not in done.stderr
    assert f"elastic --coord {coordinator.address} stop j-" in done.stderr
    assert "generation 1: 1 worker" in done.stderr
    assert "report: loss=0.5" in done.stderr
    assert done.stderr.rstrip().endswith("job good succeeded: all workers finished")
    again = elastic(coordinator, "submit", script, "--name", "good", "--storage-path", tmp_path,
                    "--no-wait")  # fmt: skip
    assert again.exit_code == 78
    assert "run good has succeeded" in again.stderr


def test_submitting_a_name_again_goes_on_with_a_run_that_failed(
    coordinator: Coordinator, client: Client, script: Path, tmp_path: Path
) -> None:
    failure = Failure("ValueError", "step seven", STORY, "report 7")
    line = ("submit", script, "--name", "again", "--storage-path", tmp_path)
    run = RunDirectory(str(tmp_path / "again"))
    path = run.checkpoint_path("c1")
    with playing(coordinator.address, "failing-once", failure=failure, checkpoint=path):
        assert elastic(coordinator, *line).exit_code == 1
    (job_id,) = run.jobs()
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "model").write_text("weights")
    files = run.upload(tmp_path / "files", "c1", claim=lambda path: True)
    run.prepare(
        "c1", CheckpointMarker(job_id, 1, 0, 1, 1, '{"epoch": 4}', files)
    )  # And was killed.
    done = elastic(coordinator, *line, "--no-wait")
    assert done.exit_code == 0, done.stderr
    assert "resumes run again from c1 (epoch 4); use another name to begin anew" in done.stderr
    spec = client.get("again").record.spec
    assert spec.resume_from == path
    assert run.jobs() == (job_id, spec.job_id)
    active = elastic(coordinator, *line, "--no-wait")
    assert active.exit_code == 78
    assert f"is pending as job {spec.job_id}" in active.stderr
    assert run.jobs() == (job_id, spec.job_id)


def test_a_failed_job_exits_1_with_its_traceback_once_and_last(
    coordinator: Coordinator, script: Path, tmp_path: Path
) -> None:
    failure = Failure("ValueError", "step seven", STORY, "report 7")
    with playing(coordinator.address, "failing", failure=failure):
        done = elastic(coordinator, "submit", script, "--name", "bad", "--storage-path", tmp_path)
    assert done.exit_code == 1
    assert done.stdout == "hello from the worker\ngoodbye\n"
    assert "job bad failed: ValueError: step seven" in done.stderr
    assert "first failure in worker failing/" in done.stderr
    assert done.output.count("Traceback") == 1
    assert done.stderr.endswith(STORY)
    shown = elastic(coordinator, "status", "bad").stdout
    assert shown.endswith(STORY)
    assert shown.count("Traceback") == 1


def test_a_stopped_job_exits_75(coordinator: Coordinator, script: Path, tmp_path: Path) -> None:
    with Client(coordinator.address) as client, ThreadPoolExecutor(1) as pool:
        stopped = pool.submit(stop_once_there, client, "halted", "out of budget")
        done = elastic(
            coordinator, "submit", script, "--name", "halted", "--storage-path", tmp_path
        )
        stopped.result(DEADLINE_S)
    assert done.exit_code == 75, done.output
    assert "job halted stopped: out of budget" in done.stderr


def stop_once_there(client: Client, name: str, reason: str) -> None:
    wait_for(lambda: any(j.record.spec.name == name for j in client.list()), f"job {name}")
    client.stop(name, reason)


def test_a_time_limit_exits_124_says_what_is_missing_and_leaves_the_job(
    coordinator: Coordinator, script: Path, tmp_path: Path
) -> None:
    args = ("submit", script, "--name", "late", "--storage-path", tmp_path, "--timeout", "0.5")
    done = elastic(coordinator, *args)
    assert done.exit_code == 124, done.output
    assert "job late has not ended within 0.5 s and continues; it waits since 0." in done.stderr
    assert "no node is connected" in done.stderr.splitlines()[-1]
    assert elastic(coordinator, "stop", "late").exit_code == 0
    assert elastic(coordinator, "stop", "late").exit_code == 2


def test_interrupting_the_wait_leaves_the_job(
    coordinator: Coordinator, script: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "elastic.client.cli", "-c", coordinator.address, "submit"]
    command += [str(script), "--name", "detached", "--storage-path", str(tmp_path)]
    errors = tmp_path / "stderr"
    with errors.open("wb") as stderr:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr)
    try:
        wait_for(lambda: "waits since" in errors.read_text(), "the wait to begin")
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=DEADLINE_S)[0] == b""
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "detached: job j-" in errors.read_text()
    assert "Traceback" not in errors.read_text()
    with Client(coordinator.address) as client:
        assert client.get("detached").record.phase is JobPhase.PENDING


def test_who_interrupts_a_run_again_reads_from_where_it_goes_on(
    coordinator: Coordinator, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupts = [KeyboardInterrupt()]

    def follow_late(*args: Any, **options: Any) -> JobView:
        if interrupts:
            raise interrupts.pop()
        return follow(*args, **options)

    monkeypatch.setattr(run, "follow", follow_late)
    args = ("run", "--nproc-per-node", "1", "--name", "twice", "--storage-path", tmp_path, script)
    done = elastic(coordinator, *args)
    assert done.exit_code == 130, done.output
    says = "it resumes from what its script has saved: the same command again"
    assert done.stderr.splitlines()[-1] == f"elastic run: {says}"


# ------------------------------------------------------------------------------------- the commands


def test_submitting_without_waiting_prints_the_id_only(
    coordinator: Coordinator, script: Path, tmp_path: Path
) -> None:
    args = ("submit", script, "--storage-path", tmp_path / "runs", "--no-wait", "--name")
    done = elastic(coordinator, *args, "quick", "--", "--epochs", "3")
    assert done.exit_code == 0
    job_id = done.stdout.strip()
    with Client(coordinator.address) as client:
        view = client.get(job_id)
    assert view.record.spec.entry.args == ("--epochs", "3")
    twice = elastic(coordinator, *args, "quick")
    assert twice.exit_code == 78
    assert f"as job {job_id} in" in twice.stderr
    facts = json.loads(elastic(coordinator, *args, "quicker", "-o", "json").stdout)
    assert set(facts) == {"job_id", "name", "run_path"}
    assert elastic(coordinator, "stop", "quicker", "--no-wait").exit_code == 0


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--working-dir", "/nowhere"), "/nowhere is not a directory"),
        (("--accelerator-type", "Z80"), "accelerator_type='Z80' is unknown"),
        (("--name", "no/path"), "'no/path'"),
    ],
)
def test_what_can_never_run_exits_78_and_leaves_nothing(
    coordinator: Coordinator, script: Path, tmp_path: Path, args: tuple[str, ...], says: str
) -> None:
    runs = tmp_path / "runs"
    done = elastic(coordinator, "submit", script, "--storage-path", runs, *args)
    assert done.exit_code == 78
    assert says in done.stderr
    assert not list(runs.glob("*"))


def test_a_run_directory_that_is_taken_exits_78_and_names_the_remedy(
    coordinator: Coordinator, script: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "metrics.jsonl").touch()
    done = elastic(coordinator, "submit", script, "--name", "mine", "--storage-path", tmp_path)
    assert done.exit_code == 78
    assert str(tmp_path / "mine") in done.stderr
    assert "--name" in done.stderr


def test_the_token_opens_every_command_and_a_wrong_one_none(tmp_path: Path, script: Path) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    for path, token in ((right, "open-sesame"), (wrong, "open-barley")):
        path.write_text(token)
        path.chmod(0o600)
    with Coordinator(tmp_path / "coord", args=("--token-file", str(right))) as guarded:
        submit = ("submit", script, "--storage-path", tmp_path / "runs", "--no-wait")
        for command in (("ps",), ("status",), ("nodes",), ("logs", "j"), ("stop", "j"), submit):
            for flags in ((), ("--token-file", wrong)):
                done = CliRunner().invoke(
                    main, ["-c", guarded.address, *map(str, (*flags, *command))]
                )
                assert done.exit_code == 78, done.output
                assert "token" in done.stderr
                assert "open-" not in done.output
        assert elastic(guarded, "ps", ELASTIC_TOKEN_FILE=str(right)).exit_code == 0
        with Client(guarded.address, "open-barley") as client, pytest.raises(NotAuthorized):
            next(client.watch("j"))


JOB_KEYS = {
    "job_id", "name", "phase", "since_s", "reason", "generation", "world_size",
    "min_workers", "max_workers", "priority", "failures", "losses", "preemptions",
    "preemptible", "preempted_by", "submitter",
    "checkpoints", "latest_checkpoint", "run_path", "entry", "metrics", "failed_worker", "failure",
    "workers", "copies", "feeds",
    "goodput",
    "telemetry",
}  # fmt: skip
WORKER_KEYS = {
    "worker_id",
    "node",
    "rank",
    "phase",
    "generation",
    "pid",
    "steps",
    "since_s",
    "telemetry",
}
NODE_KEYS = {
    "node", "phase", "since_s", "reason", "host", "slots", "free_slots", "cordoned", "resources",
    "labels", "accelerator_type", "version",
}  # fmt: skip
STATUS_KEYS = {
    "coordinator",
    "version",
    "protocol",
    "store",
    "uptime_s",
    "nodes",
    "jobs",
    "standby",
    "coordinators",
    "cordons",
}
LOG_KEYS = {"worker_id", "rank", "generation", "node", "unix_ns", "text"}


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """A coordinator of one node, on which job "busy" trains and has printed a line."""
    with (
        Coordinator(tmp_path_factory.mktemp("busy")) as running,
        Client(running.address) as client,
        anyio.from_thread.start_blocking_portal() as portal,
    ):
        client.submit(spec("busy"))
        training = portal.start_task_soon(train_for_ever, running.address)
        wait_phase(client, "busy", JobPhase.RUNNING)
        yield running
        training.cancel()


async def train_for_ever(address: str) -> None:
    async with ScriptedAgent(address, node("n1", slots=1)) as agent:
        await agent.join()
        await agent.train()
        while True:
            with anyio.move_on_after(DEADLINE_S):
                wish = await agent.hear(FollowLogs)
                if not wish.stop:
                    await agent.say(
                        LogLines(wish.follow_id, wish.worker_id, "one line\n", end=True)
                    )


@pytest.mark.parametrize(
    ("args", "keys", "inner"),
    [
        (("status",), STATUS_KEYS, {"nodes": NODE_KEYS, "jobs": JOB_KEYS}),
        (("status", "busy"), JOB_KEYS, {"workers": WORKER_KEYS}),
        (("ps",), JOB_KEYS, {"workers": WORKER_KEYS}),
        (("nodes",), NODE_KEYS, {}),
        (("logs", "busy"), LOG_KEYS, {}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_json_has_these_keys(
    busy: Coordinator, args: tuple[str, ...], keys: set[str], inner: dict[str, set[str]]
) -> None:
    done = elastic(busy, *args, "-o", "json")
    assert done.exit_code == 0
    answer = json.loads(done.stdout)
    one = answer[0] if isinstance(answer, list) else answer
    assert set(one) == keys
    for name, wanted in inner.items():
        assert [set(part) for part in one[name]] == [wanted]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("ps",), ["busy", "running", "1 of 1"]),
        (("status",), ["coordinator", "memory:", "n1", "busy"]),
        (("status", "busy"), ["running since", "training", "n1"]),
        (("nodes",), ["n1", "ready", "0/1"]),
        (("logs", "busy"), ["[gen1 r0 n1] one line\n"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_tables_in_a_pipe_are_plain(
    busy: Coordinator, args: tuple[str, ...], words: list[str]
) -> None:
    done = elastic(busy, *args)
    assert done.exit_code == 0
    assert all(word in done.stdout for word in words), done.stdout
    assert "\x1b" not in done.output


def test_one_rank_is_printed_as_it_is(busy: Coordinator) -> None:
    assert elastic(busy, "logs", "busy", "--rank", "0").stdout == "one line\n"
    assert elastic(busy, "logs", "busy", "--rank", "0", "--tail", "0").exit_code == 0
    for command in ("logs", "stack"):
        done = elastic(busy, command, "busy", "--rank", "7")
        assert (done.exit_code, done.stdout) == (2, "")
        assert done.stderr.startswith(f"elastic: {command} busy: no worker ")


def test_a_job_without_workers_has_no_stacks(
    coordinator: Coordinator, script: Path, tmp_path: Path
) -> None:
    elastic(coordinator, "submit", script, "--name", "w", "--storage-path", tmp_path, "--no-wait")
    assert elastic(coordinator, "stop", "w").exit_code == 0
    done = elastic(coordinator, "stack", "w")
    assert done.exit_code == 2
    assert "elastic: stack w: no worker now; the job is stopped" in done.stderr


def test_nothing_to_list_is_said(coordinator: Coordinator) -> None:
    done = elastic(coordinator, "ps")
    assert "no job runs or waits" in done.stdout
    assert "ps --all" in done.stdout
    assert json.loads(elastic(coordinator, "ps", "-o", "json").stdout) == []


def test_a_node_is_drained_and_waited_for(coordinator: Coordinator, client: Client) -> None:
    with anyio.from_thread.start_blocking_portal() as portal:
        joined, may_leave = threading.Event(), threading.Event()

        async def leave_when_released() -> None:
            async with ScriptedAgent(coordinator.address, node("leaver")) as agent:
                await agent.join()
                joined.set()
                await anyio.to_thread.run_sync(may_leave.wait)
                await agent.hear(Release)

        leaving = portal.start_task_soon(leave_when_released)
        assert joined.wait(DEADLINE_S)
        first = elastic(coordinator, "drain", "leaver", "--deadline", "20m")
        again = elastic(coordinator, "uncordon", "leaver")
        later = elastic(coordinator, "drain", "leaver", "--deadline", "30m")
        may_leave.set()
        done = elastic(coordinator, "drain", "leaver", "nosuch", "--wait", "--timeout", "10")
        leaving.result(DEADLINE_S)
    assert "node leaver drains, within 20m 0s" in first.stderr
    assert "drains: it takes no new workers" in again.stderr
    assert "node leaver drains already, within 19m 5" in later.stderr
    assert done.exit_code == 2
    assert "no node nosuch" in done.stderr
    phases = {str(n.node.node_id): n.phase for n in client.status().view.nodes}
    assert phases["leaver"] in (NodePhase.LEFT, NodePhase.LOST)
