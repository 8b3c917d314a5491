"""The doctor on this machine and before real coordinators, and what it makes of odd machines."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.agent import doctor as checks_of
from elastic.agent.cli import check_host
from elastic.agent.devices import Devices
from elastic.agent.doctor import CheckLevel, judge_clock
from elastic.errors import UsageError
from elastic.runtime.worker_ports import ports_needed
from elastic.testing.local_cluster import LocalCluster
from elastic.worker.group.gloo_sockets import DROP_ALL, SO_ATTACH_FILTER
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


def test_an_ipv6_address_of_this_machine_is_one_to_listen_on() -> None:
    (found,) = checks_of.check_address("::1", ())
    # Not each machine has IPv6, and an agent refuses the address exactly where it has not.
    try:
        check_host("::1")
    except UsageError:
        assert found.level is CheckLevel.FAIL
    else:
        assert found.level is CheckLevel.OK


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


def test_worker_ports_are_counted_bound_and_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """At an address of this test's own, whose ports nothing else uses."""
    host, low = "127.0.97.3", 29400
    high = low + ports_needed(1) - 1

    def own(ports: str) -> checks_of.Check:
        flags = {"worker_ports": ports, "host": host, "workers": "1"}
        [check] = checks_of.check_ports(flags, Devices())
        return check

    def reached() -> checks_of.Check:
        [check] = checks_of.check_peer(host, f"{low}-{high}")
        return check

    assert own("").level is CheckLevel.OK
    assert own(f"{low}-{high}").level is reached().level is CheckLevel.OK
    assert "9" in own(f"{low}-{low}").found
    assert own(f"{low}-{low}").level is own("1-2").level is CheckLevel.FAIL
    with socket.create_server((host, low)) as taken:
        assert own(f"{low}-{high}").level is CheckLevel.WARN
        assert str(low) in own(f"{low}-{high}").fix
        assert reached().level is CheckLevel.OK
        # What a firewall drops, nobody refuses.
        taken.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, DROP_ALL)
        monkeypatch.setattr(checks_of, "CONNECT_S", 0.1)
        check = reached()
        assert check.level is CheckLevel.FAIL
        assert check.found.startswith(f"1 of its {ports_needed(1)} ports"), check.found


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


@pytest.mark.parametrize(
    ("works", "fails", "says"),
    [
        ('"lo"', '"nope0"', "Unable to find address for: nope0"),
        ("gloo_trial", "gone", "No module named 'elastic.worker.process.gone'"),
        ("try_gloo()", "[os.abort()]", "exit code -6"),
    ],
)
def test_a_trial_of_gloo_that_fails_is_no_fault_of_torchs_installation(
    works: str, fails: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks_of, "SCRIPT", checks_of.SCRIPT.replace(works, fails))
    torch, gloo = checks_of.check_torch(0)
    assert torch.level is CheckLevel.OK
    assert gloo.level is CheckLevel.FAIL
    assert says in gloo.found
