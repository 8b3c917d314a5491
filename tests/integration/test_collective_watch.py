"""What a control thread sees of ranks that wait for each other inside a sharded model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from typing import Any

import pytest

from elastic.worker.group.collective_watch import BytecodeProbe
from tests.patience import DEADLINE_S

CASES = ("forward", "backward", "optimizer", "operator", "barrier", "layers")
IN_COLLECTIVES = ("forward", "backward", "optimizer", "operator")


@pytest.fixture(scope="module")
def seen() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Give what was seen of rank 0 and of rank 1, by case."""
    ranks = [begin("0", "0")]
    try:
        assert ranks[0].stdout is not None
        ranks.append(begin("1", ranks[0].stdout.readline().strip()))
        said = [rank.communicate(timeout=DEADLINE_S) for rank in ranks]
    finally:
        for rank in ranks:
            with rank:
                rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    told = [[json.loads(line) for line in out.splitlines()] for out, _ in said]
    return dict(zip(CASES, zip(*told, strict=True), strict=True))


def begin(rank: str, port: str) -> subprocess.Popen[str]:
    """Start a rank."""
    command = [sys.executable, "-m", "tests.workers.watched_shards", rank, port, *CASES]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )


@pytest.mark.parametrize("case", IN_COLLECTIVES)
def test_a_rank_waits_in_a_collective_of_its_sharded_model(seen: Any, case: str) -> None:
    waiting, _ = seen[case]
    assert (waiting["waits"], waiting["moved"], waiting["stance"]) == (True, False, "sharding")


@pytest.mark.parametrize("case", IN_COLLECTIVES)
def test_the_rank_that_it_waits_for_does_not_wait_and_does_not_move(seen: Any, case: str) -> None:
    _, late = seen[case]
    assert (late["waits"], late["moved"], late["stance"]) == (False, False, "elsewhere")


def test_a_rank_in_a_collective_of_the_scripts_own_neither_waits_nor_stands(seen: Any) -> None:
    waiting, late = seen["barrier"]
    assert (waiting["waits"], waiting["moved"], waiting["stance"]) == (False, True, "called")
    assert (late["waits"], late["moved"]) == (False, False)


def test_ranks_that_pass_layer_after_layer_move(seen: Any) -> None:
    passing, _ = seen["layers"]
    assert (passing["waits"], passing["moved"]) == (False, True)


def test_a_call_that_is_pending_outlives_its_probe() -> None:
    """It runs once this thread, which waits for the other one, goes on: it has crashed here."""

    def probe() -> None:
        for _ in range(20):
            assert BytecodeProbe().has_run()

    for _ in range(50):
        other = threading.Thread(target=probe)
        other.start()
        other.join()
