"""Everything is killed, again and again: the same script goes on, and ends with the same bits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.s3_server import BUCKET, Trouble, s3
from tests.patience import DEADLINE_S

__all__ = ["s3"]


def cut(cuts: int, storage: str, seed: int, life_s: float = 0.9) -> str:
    """Cut the power so often; returns what was found."""
    call = [sys.executable, "-m", "tests.harness.power_cuts", "--cuts", str(cuts)]
    done = subprocess.run(
        [*call, "--storage", storage, "--seed", str(seed), "--life", str(life_s)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_on_a_local_disk(tmp_path: Path) -> None:
    assert "2 power cuts" in cut(2, str(tmp_path), seed=1)


@pytest.mark.slow
def test_on_s3(s3: Trouble, fresh_seed: int) -> None:
    said = cut(4, f"s3://{BUCKET}/cuts", seed=fresh_seed, life_s=5.0)
    assert "4 power cuts" in said
    assert "4 attempts began anew" not in said
    assert s3.requests
