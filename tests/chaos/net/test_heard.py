"""Copies between hosts of their own, whose nodes show tokens: nobody on the way can read them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.net.test_net import ROOT, missing

PLAY_S_MAX = 300

pytestmark = [
    pytest.mark.skipif(bool(missing(with_etcd=False)), reason=missing(with_etcd=False)),
    pytest.mark.timeout(PLAY_S_MAX),
]


def test_who_listens_on_the_network_hears_no_copy_in_the_clear(tmp_path: Path) -> None:
    """The coordinator is reached in the clear, which does not matter for this."""
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-m", "tests.chaos.net.heard", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=PLAY_S_MAX, check=False,
    )  # fmt: skip
    assert not done.returncode, done.stdout + done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert found["sent"] > 0
    assert found["greetings"] == found["in_the_clear"] == 0
