"""Releases of NCCL that cannot be relied on to abort are refused by name."""

from __future__ import annotations

import pytest

from elastic.errors import UsageError
from elastic.worker.group.c10d import check_nccl


@pytest.mark.parametrize("version", [(2, 26, 2), (2, 28, 2), (2, 28, 9), (2, 29, 1), (3, 0)])
def test_others_pass(version: tuple[int, ...]) -> None:
    check_nccl(version)


@pytest.mark.parametrize("version", [(2, 21, 5), (2, 26, 1), (2, 28, 3), (2, 28, 5), (2, 28, 8)])
def test_they_are_refused(version: tuple[int, ...]) -> None:
    found = ".".join(map(str, version))
    with pytest.raises(UsageError, match=f"NCCL {found}: .*expected 2.26.2 or newer"):
        check_nccl(version)
