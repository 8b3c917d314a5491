"""The three programs over mutual TLS, as people start them: certificates, an agent, a job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.integration.coordinator import ROOT, Coordinator, elastic_coord
from tests.patience import DEADLINE_S


def run(module: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with nothing of ours in its environment but `env`."""
    bare = {key: value for key, value in os.environ.items() if not key.startswith("ELASTIC_")}
    return subprocess.run(
        [sys.executable, "-m", module, *args],
        cwd=ROOT, env={**bare, **env}, check=False, capture_output=True, text=True,
        timeout=DEADLINE_S,
    )  # fmt: skip


def test_a_job_runs_on_a_cluster_whose_control_plane_is_mutual_tls(tmp_path: Path) -> None:
    pki = tmp_path / "pki"
    for command in (
        ("certs", "init", str(pki)),
        ("certs", "issue", str(pki), "--name", "gpu-1", "--role", "node"),
        ("certs", "issue", str(pki), "--name", "bob", "--role", "submit"),
        ("certs", "issue", str(pki), "--name", "eve", "--role", "read"),
    ):
        done = elastic_coord(*command)
        assert done.returncode == 0, done.stderr
    assert (pki / "ca.key").stat().st_mode & 0o077 == 0
    assert (pki / "bob" / "tls.key").stat().st_mode & 0o077 == 0
    script = tmp_path / "say.py"
    script.write_text("print('said over TLS')\n")
    args = ("--tls-dir", str(pki / "coordinator"))
    with Coordinator(tmp_path / "c", args=args) as running:
        bob = {"ELASTIC_COORD": running.address, "ELASTIC_TLS_DIR": str(pki / "bob")}
        with (tmp_path / "agent.log").open("wb") as log:
            agent = subprocess.Popen(
                [
                    *(sys.executable, "-m", "elastic.agent.cli", "--coord", running.address),
                    *("--tls-dir", str(pki / "gpu-1"), "--node-id", "gpu-1", "--workers", "1"),
                    *("--run-dir", str(tmp_path / "run")),
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT,
            )  # fmt: skip
        try:
            submit = ("submit", str(script), "--num-workers", "1", "--storage-path", str(tmp_path))
            refused = run(
                "elastic.client.cli", *submit, **{**bob, "ELASTIC_TLS_DIR": str(pki / "eve")}
            )
            assert refused.returncode == 78
            assert "may not call Submit" in refused.stderr
            done = run("elastic.client.cli", *submit, **bob)
            assert done.returncode == 0, done.stderr + (tmp_path / "agent.log").read_text()
            assert "said over TLS" in done.stdout
            without = run("elastic.client.cli", "ps", ELASTIC_COORD=running.address)
            assert without.returncode == 69
            assert "--tls-dir" in without.stderr
            script_of_a_user = (
                "import elastic; elastic.init(); print('in', elastic.is_initialized())"
            )
            bare = {k: v for k, v in os.environ.items() if not k.startswith("ELASTIC_")}
            trained = subprocess.run(
                [sys.executable, "-c", script_of_a_user], env={**bare, **bob}, cwd=ROOT,
                check=False, capture_output=True, text=True, timeout=DEADLINE_S,
            )  # fmt: skip
            assert "in True" in trained.stdout, trained.stderr
        finally:
            agent.send_signal(signal.SIGTERM)
            agent.wait(DEADLINE_S)
