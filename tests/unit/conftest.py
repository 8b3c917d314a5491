"""What ends with each unit test: threads that its objects have started."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.saving_under_test import WRITERS


@pytest.fixture(autouse=True)
def _writers_end() -> Iterator[None]:
    yield
    while WRITERS:
        WRITERS.pop().close()
