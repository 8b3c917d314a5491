"""What we rely on in torch that is none of its interface is there, and its absence is told."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
import torch

from elastic.errors import UsageError
from elastic.worker.base import torch_names
from elastic.worker.base.torch_names import ANY_TORCH, NAMES, PrivateName, check_torch, missing


def test_every_private_name_is_there() -> None:
    for name in NAMES:
        importlib.import_module(name.module)
    assert [name for name in missing() if not name.without] == []


def test_a_torch_outside_of_the_range_is_refused_unless_told() -> None:
    for version in ("2.9.1", torch.__version__, "2.15.0+cu130", "2.15.0a0+gitabc"):
        check_torch({}, version)
    for version in ("2.8.0", "2.16.0", "3.0", "unknown"):
        with pytest.raises(UsageError, match=r"torch>=2\.9,<2\.16"):
            check_torch({}, version)
        check_torch({ANY_TORCH: "1"}, version)


def test_a_name_that_is_gone_is_told_with_what_does_not_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gone = PrivateName("torch", "_gone.for_good", "nothing", without="it is done slowly")
    monkeypatch.setattr(torch_names, "missing", lambda: (gone,))
    check_torch({})
    assert "torch_lacks name=torch._gone.for_good then='it is done slowly'" in caplog.text
    monkeypatch.setattr(torch_names, "missing", lambda: (gone._replace(without=""),))
    with pytest.raises(UsageError, match=r"has no torch\._gone\.for_good, without which"):
        check_torch({})


def test_gloo_is_as_we_rely_on() -> None:
    """In a process of its own, for the threads that it starts."""
    code = "from elastic.worker.process.gloo_trial import try_gloo; print(try_gloo())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
