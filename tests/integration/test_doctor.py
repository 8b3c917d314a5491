"""The doctor on this machine and before real coordinators, and what it makes of odd machines."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.agent.doctor import CheckLevel, judge_clock
from elastic.testing.local_cluster import LocalCluster
from tests.metadata_server import nobody
from tests.patience import DEADLINE_S


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
        [sys.executable, "-m", "elastic.agent.cli", "--run-dir", str(tmp_path / "run"), *args,
         "doctor", "-o", "json"],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
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


# ---------------------------------------------------------------- odd machines


@pytest.mark.parametrize(
    ("ahead_s", "took_s", "level"),
    [
        (0.2, 0.1, CheckLevel.OK),
        (-2, 0.1, CheckLevel.WARN),
        (2, 1.5, CheckLevel.OK),
        (90, 0.1, CheckLevel.FAIL),
    ],
)
def test_clocks_are_compared_no_better_than_the_question_took(
    ahead_s: float, took_s: float, level: CheckLevel
) -> None:
    assert judge_clock(ahead_s, took_s).level is level
