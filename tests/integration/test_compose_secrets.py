"""What docker/make-secrets.sh makes opens a cluster that is started as compose.yaml starts it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

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


def flags_of_compose(root: Path) -> list[str]:
    """What a coordinator of compose.yaml is told of its secrets, where they are here."""
    compose = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
    words = compose["services"]["coord-1"]["command"][1:]
    told = [word for word in words if not word.startswith(("--listen", "--store="))]
    return [word.replace("/run/elastic", str(root / "coord")) for word in told]


@pytest.mark.skipif(find_etcd() is None, reason="no etcd server")
async def test_nodes_and_users_are_let_in_each_to_their_part(tmp_path: Path) -> None:
    root = tmp_path / "secrets"
    for name in ("authority", "store", "coord", "node", "user"):
        (root / name).mkdir(parents=True)
    make_secrets(root)
    of = {
        name: find_access(str(root / name / "token"), ca=str(root / name / "ca.crt"))
        for name in ("node", "user")
    }
    store = Certificates(*(root / "store" / name for name in ("ca.crt", "tls.crt", "tls.key")))
    with EtcdServer(store) as server:
        args = flags_of_compose(root)
        with Coordinator(tmp_path / "c", store=server.url(), args=args) as running:
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


def test_a_second_start_keeps_tokens_and_authorities_and_renews_certificates(
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
    assert (root / "coord" / "tls.crt").read_bytes() != served
