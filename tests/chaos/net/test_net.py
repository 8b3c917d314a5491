"""Partitions for real: coordinators, etcd members and agents on hosts of their own, under faults.

Needs root, network namespaces and TUN devices (Linux), and an etcd server. Not deterministic.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.net.play import LONG, STORIES
from tests.etcd_server import find_etcd

ROOT = Path(__file__).resolve().parents[3]
PLAY_S_MAX = 1200
SHORT = (
    "a_leader_that_is_killed_is_replaced",
    "a_frozen_leader_wakes_as_a_standby",
    "a_leader_that_is_cut_off_from_the_store_lets_its_agents_go",
    "the_store_loses_its_quorum_and_it_returns",
    "a_node_that_only_hears_is_left_behind_and_comes_back",
    "a_link_between_two_workers_is_cut",
)
"""The others are slow: together they would take a minute."""


@functools.cache
def missing(*, with_etcd: bool = True) -> str:
    """Why no network of our own can be made here, "" if one can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "unshare"):
        if shutil.which(program) is None:
            return f"no {program} here"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "no /dev/net/tun here"
    done = subprocess.run(["unshare", "--net", "ip", "netns", "list"], check=False)
    if done.returncode:
        return "no network namespace can be made here"
    return "" if not with_etcd or find_etcd() is not None else "no etcd server here"


pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), pytest.mark.etcd]


def told(directory: Path, stories: tuple[str, ...], module: str = "play") -> dict[str, str]:
    """Play these stories on one cluster, while one job trains; returns what went wrong in each."""
    play = [sys.executable, "-m", f"tests.chaos.net.{module}", str(directory), *stories]
    done = subprocess.run(
        ["unshare", "--net", *play],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PLAY_S_MAX,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    print(done.stdout, done.stderr[-4000:], sep="\n")
    return {line["story"]: line["error"] for line in lines if "story" in line}


@pytest.fixture(scope="module")
def short_play(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return told(tmp_path_factory.mktemp("net"), SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("story", [*SHORT, "finish"])
def test_a_short_story_ends_well_and_so_does_the_job(
    short_play: dict[str, str], story: str
) -> None:
    assert short_play.get(story, "it was not reached") == ""


@pytest.mark.slow
def test_strikes_of_all_kinds_end_no_job_and_change_no_bit(fresh_seed: int, tmp_path: Path) -> None:
    said = told(tmp_path, ("--seed", str(fresh_seed), "--strikes", "100"), module="strikes")
    assert said.pop("finish", "it was not reached") == ""
    assert set(said.values()) == {""}


@pytest.mark.slow
def test_all_stories_twice_in_a_row_end_well_and_so_does_the_job(tmp_path: Path) -> None:
    said = told(tmp_path, (*STORIES, *reversed(STORIES)))
    assert {story: said.get(story, "it was not reached") for story in (*STORIES, "finish")} == (
        dict.fromkeys((*STORIES, "finish"), "")
    )


@pytest.mark.slow
@pytest.mark.parametrize("story", LONG)
def test_no_worker_notices_what_befalls_the_leader_for_minutes(story: str, tmp_path: Path) -> None:
    assert told(tmp_path, (story,)) == {story: "", "finish": ""}
