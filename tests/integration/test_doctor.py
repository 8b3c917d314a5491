"""The doctor on this machine and before real coordinators, and what it makes of odd machines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.agent.doctor import machine, network
from elastic.agent.doctor.check import Level
from elastic.agent.doctor.torch_check import judge_torch
from elastic.testing.local_cluster import LocalCluster
from tests.metadata_server import nobody

PATIENCE_S = 100.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Give a coordinator that wants a token, without nodes."""
    directory = tmp_path_factory.mktemp("cluster")
    token = directory / "token"
    token.write_text("s3cret-s3cret-s3cret-s3cret-s3cret-s3cret\n")
    token.chmod(0o600)
    with LocalCluster(nodes=0, directory=directory, token_file=token) as running:
        yield running


def doctor(tmp_path: Path, *args: str) -> tuple[int, dict[str, dict[str, Any]], str]:
    """Run the command; return its code, its checks by name, and what it wrote to stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "elastic.agent.cli", *args[:-1], "doctor", "-o", "json",
         "--run-dir", str(tmp_path / "run"), *args[-1:]],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    checks = json.loads(done.stdout) if done.stdout.startswith("[") else []
    return done.returncode, {check["check"]: check for check in checks}, done.stderr


def test_a_machine_that_trains_is_fit_and_the_coordinator_lets_it_in(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    code, checks, said = doctor(
        tmp_path, "--coord", cluster.address, "--token-file", cluster.token_file,
        f"--host={'127.0.0.1'}",
    )  # fmt: skip
    failed = {name: check for name, check in checks.items() if check["level"] == "fail"}
    assert (code, failed) == (0, {}), said
    assert checks["gloo"]["level"] == "ok"
    assert "lets this agent in" in checks[f"coordinator {cluster.address}"]["found"]
    assert checks["clocks"]["found"] == "agree"
    assert cluster.view().nodes == (), "asking registers nothing"


def test_the_agents_own_tls_flags_are_the_doctors(cluster: LocalCluster, tmp_path: Path) -> None:
    _, checks, _ = doctor(
        tmp_path, "--coord", cluster.address, "--tls-ca", str(tmp_path / "none.crt"),
        f"--token-file={cluster.token_file}",
    )  # fmt: skip
    assert "none.crt" in checks["credentials"]["found"]


def test_wrong_credentials_and_silence_are_failures_with_what_to_do(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("w" * 40)
    wrong.chmod(0o600)
    away = nobody()
    endpoints = f"{cluster.address},{away.host}:{away.port}"
    code, checks, _ = doctor(tmp_path, "--coord", endpoints, f"--token-file={wrong}")
    assert code == 1
    failed = [check for check in checks.values() if check["level"] == "fail"]
    assert [check["check"] for check in failed] == [
        f"coordinator {cluster.address}", f"coordinator {away.host}:{away.port}",
    ]  # fmt: skip
    assert all(check["fix"] for check in failed)
    assert "w" * 40 not in json.dumps(checks), "a secret is never shown"


def test_a_wrong_address_is_a_usage_error(tmp_path: Path) -> None:
    code, _, said = doctor(tmp_path, "--coord=nonsense")
    assert code == 2
    assert "expected host:port" in said


# ---------------------------------------------------------------- odd machines


def test_a_folder_that_cannot_be_written_is_a_failure(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    check = machine.check_folder("run directory", file / "run")
    assert check.level is Level.FAIL
    assert check.fix


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("MemTotal: 8000000 kB\nMemAvailable: 7000000 kB\n", Level.OK),
        ("MemTotal: 8000000 kB\nMemAvailable: 70000 kB\n", Level.WARN),
        ("", Level.WARN),
    ],
)
def test_memory_is_judged_by_what_is_available(tmp_path: Path, text: str, level: Level) -> None:
    (tmp_path / "meminfo").write_text(text)
    assert machine.check_memory(tmp_path / "meminfo", tmp_path / "none").level is level


def test_few_processes_and_few_ports_are_warned_of(tmp_path: Path) -> None:
    (tmp_path / "pids").write_text("512\n")
    (tmp_path / "range").write_text("60000\t60999\n")
    check = machine.check_tasks(tmp_path / "pids", tmp_path / "none")
    assert (check.level, "pid_max" in check.fix) == (Level.WARN, True)
    assert network.check_ports(tmp_path / "range").level is Level.WARN


def test_a_name_that_leads_to_this_machine_alone_is_warned_of() -> None:
    check = network.check_host_name("localhost")
    assert check.level is Level.WARN
    assert "/etc/hosts" in check.fix


def test_an_address_that_others_cannot_reach_is_a_failure() -> None:
    assert network.check_address("127.0.0.1", ("10.1.2.3:7070",)).level is Level.FAIL
    assert network.check_address("127.0.0.1", ("127.0.0.1:7070",)).level is Level.OK
    assert network.check_address("192.0.2.1", ()).level is Level.FAIL, "it is not ours"


@pytest.mark.parametrize(
    ("ahead_s", "took_s", "level"),
    [(0.2, 0.1, Level.OK), (-2, 0.1, Level.WARN), (2, 1.5, Level.OK), (90, 0.1, Level.FAIL)],
)
def test_clocks_are_compared_no_better_than_the_question_took(
    ahead_s: float, took_s: float, level: Level
) -> None:
    assert network.judge_clock(ahead_s, took_s).level is level


@pytest.mark.parametrize(
    ("said", "num_gpus", "levels"),
    [
        ({"torch": "2", "cuda": None, "devices": 0, "nccl": None, "gloo": ""}, 0, ["ok", "ok"]),
        ({"torch": "2", "cuda": None, "devices": 0, "nccl": None, "gloo": ""}, 8, ["fail", "ok"]),
        ({"torch": "2", "cuda": "12", "devices": 4, "nccl": "2.2", "gloo": "no lo"}, 8,
         ["warn", "fail"]),
    ],
)  # fmt: skip
def test_torch_must_see_the_gpus_that_the_driver_shows(
    said: dict[str, Any], num_gpus: int, levels: list[str]
) -> None:
    assert [check.level.value for check in judge_torch(said, num_gpus)] == levels


def test_a_variable_that_means_another_programs_version_is_not_ours(tmp_path: Path) -> None:
    """Machines with Elastic's stack have it."""
    done = subprocess.run(
        [sys.executable, "-m", "elastic.agent.cli", "--run-dir", str(tmp_path)],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        env={**os.environ, "ELASTIC_VERSION": "8.15.0"},
    )  # fmt: skip
    assert done.returncode == 2
    assert "Missing option '--coord'" in done.stderr
