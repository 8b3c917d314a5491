"""The container files name flags, requirements and paths that are really there."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.tidy.tree import ROOT

DOCKER = ROOT / "docker"
COMPOSE = (DOCKER / "compose.yaml").read_text()
# Service -> the module behind its image, and the subcommand that it runs.
PROGRAMS = {"coord": ("elastic.coord.cli", ["serve"]), "agent": ("elastic.agent.cli", [])}


def service(name: str) -> str:
    """The lines of one service of compose.yaml."""
    match = re.search(rf"^  {name}:\n((?:^    .*\n|^\n)+)", COMPOSE, re.MULTILINE)
    assert match, f"compose.yaml has no service {name}"
    return match.group(1)


@pytest.mark.parametrize("name", PROGRAMS)
def test_flags_of_a_service_exist(name: str) -> None:
    module, subcommand = PROGRAMS[name]
    if find_spec(module) is None:
        pytest.skip(f"{module} is not written yet")
    flags = set(re.findall(r"^ +- (--[a-z-]+)", service(name), re.MULTILINE))
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
