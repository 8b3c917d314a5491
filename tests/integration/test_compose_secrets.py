"""What docker/make-secrets.sh makes opens a cluster, started as the container files start it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest
import yaml

from elastic.runtime.access import find_access
from tests.etcd_server import Certificates, EtcdServer, find_etcd
from tests.integration.coordinator import ROOT, Coordinator
from tests.integration.locked import call

pytestmark = [pytest.mark.anyio, pytest.mark.etcd]
ATTACH, LIST, STOP = (f"/elastic.v1.{name}" for name in ("Agents/Attach", "Jobs/List", "Jobs/Stop"))


def make_secrets(root: Path) -> None:
    """Run the script, with an `elastic-coord` of this interpreter on its PATH."""
    program = root.parent / "bin" / "elastic-coord"
    if not program.exists():
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m elastic.coord.cli "$@"\n')
        program.chmod(0o700)
    path = f"{program.parent}:{os.environ['PATH']}"
    pythonpath = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        ["/bin/sh", str(ROOT / "docker" / "make-secrets.sh"), str(root)],
        env={**os.environ, "PATH": path, "PYTHONPATH": pythonpath},
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@dataclass(frozen=True)
class Started:
    """How a container file starts a coordinator and asks how it is; with paths of this machine."""

    args: list[str]
    env: dict[str, str]
    check: list[str]


def as_compose_does(root: Path) -> Started:
    """Return what compose.yaml says of its first coordinator, and its image of the check."""
    compose = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
    service = compose["services"]["coord-1"]
    assert "healthcheck" not in service, "the image's is not the one that is run"
    image = (ROOT / "docker" / "Dockerfile.coord").read_text()
    (check,) = re.findall(r"^HEALTHCHECK .* CMD (\[.*\])$", image, re.MULTILINE)
    return _here(service["command"], service["environment"], json.loads(check), root)


def as_kubernetes_does(root: Path) -> Started:
    """Return what the manifest says of a pod, the secret of the store laid out as it mounts it."""
    store = root / "pod-store"
    store.mkdir()
    for name in ("ca.crt", "tls.crt", "tls.key"):
        shutil.copy(root / "coord" / f"store-{name}", store / name)
    manifest = ROOT / "docker" / "kubernetes" / "coordinator.yaml"
    (pod,) = (
        one["spec"]["template"]["spec"]
        for one in yaml.safe_load_all(manifest.read_text())
        if one["kind"] == "StatefulSet"
    )
    (container,) = pod["containers"]
    env = {"POD_NAME": "elastic-coord-0"}
    for one in container["env"]:
        if "value" in one:
            env[one["name"]] = one["value"].replace("$(POD_NAME)", env["POD_NAME"])
    check = container["readinessProbe"]["exec"]["command"]
    return _here(container["args"], env, check, root)


def _here(args: list[str], env: dict[str, str], check: list[str], root: Path) -> Started:
    def moved(word: str) -> str:
        return word.replace("/run/elastic", str(root / "coord")).replace(
            "/run/store", str(root / "pod-store")
        )

    assert args[0] == "serve"
    assert check[:2] == ["elastic-coord", "health"]
    told = [moved(word) for word in args[1:] if not word.startswith(("--listen", "--store="))]
    return Started(
        told, {name: moved(value) for name, value in env.items()}, [moved(word) for word in check]
    )


def check_health(started: Started, address: str) -> None:
    """Ask as the container is asked, at the address that the coordinator has here."""
    done = subprocess.run(
        [sys.executable, "-m", "elastic.coord.cli", *started.check[1:], "--coord", address],
        env={**os.environ, **started.env}, cwd=ROOT,
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(find_etcd() is None, reason="no etcd server")
@pytest.mark.parametrize("how", [as_compose_does, as_kubernetes_does])
async def test_nodes_and_users_are_let_in_each_to_their_part(
    tmp_path: Path, how: Callable[[Path], Started]
) -> None:
    root = tmp_path / "secrets"
    for name in ("authority", "store", "coord", "node", "user"):
        (root / name).mkdir(parents=True)
    make_secrets(root)
    of = {
        name: find_access(str(root / name / "token"), tls_ca=str(root / name / "ca.crt"))
        for name in ("node", "user")
    }
    store = Certificates(*(root / "store" / name for name in ("ca.crt", "tls.crt", "tls.key")))
    with EtcdServer(store) as server:
        started = how(root)
        with Coordinator(
            tmp_path / "c", store=server.url(), args=started.args, env=started.env
        ) as running:
            await anyio.to_thread.run_sync(check_health, started, running.address)
            assert started.env["ELASTIC_ADVERTISE"] in running.log()
            for who, method, code in (
                ("node", ATTACH, "OK"),
                ("node", STOP, "PERMISSION_DENIED"),
                ("node", LIST, "PERMISSION_DENIED"),
                ("user", LIST, "OK"),
                ("user", ATTACH, "PERMISSION_DENIED"),
            ):
                outcome = await call(running.address, method, access=of[who])
                if code == "OK":
                    assert outcome.code not in ("PERMISSION_DENIED", "UNAUTHENTICATED"), outcome
                else:
                    assert outcome.code == code, (who, method, outcome)


@pytest.mark.slow
def test_a_second_start_keeps_tokens_and_authorities_and_renews_old_certificates(
    tmp_path: Path,
) -> None:
    root = tmp_path / "secrets"
    for name in ("authority", "store", "coord", "node", "user"):
        (root / name).mkdir(parents=True)
    make_secrets(root)
    kept = ("authority/elastic/ca.crt", "authority/etcd/ca.key", "node/token", "user/token")
    before = [(root / name).read_bytes() for name in kept]
    served = (root / "coord" / "tls.crt").read_bytes()
    # As if it had been killed in the middle of its first run.
    (root / "user" / "token").unlink()
    shutil.copytree(root / "authority" / "etcd", root / "authority" / "etcd.new")
    make_secrets(root)
    after = [(root / name).read_bytes() for name in kept]
    assert after[:3] == before[:3]
    assert after[3] != before[3]
    assert (root / "coord" / "tls.crt").read_bytes() == served, "it holds for months"
    month_ago = time.time() - 31 * 86_400
    os.utime(root / "authority" / "elastic" / "coordinator" / "tls.crt", (month_ago, month_ago))
    make_secrets(root)
    assert (root / "coord" / "tls.crt").read_bytes() != served
    assert (root / "coord" / "ca.crt").read_bytes() == (root / "node" / "ca.crt").read_bytes()
