"""When the coordinator looks for garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from elastic.coord.collector import ALL, ALL_S, YOUNG, YOUNG_S_MAX, generation_due


@pytest.fixture(autouse=True)
def python_does_not_collect() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_few_new_values_are_looked_at_after_a_while_and_all_values_much_later() -> None:
    assert generation_due(1000.0, 1000.0, 1000.0) is None
    assert generation_due(1000.0, 1000.0 - YOUNG_S_MAX, 1000.0) == YOUNG
    assert generation_due(1000.0, 1000.0, 1000.0 - ALL_S) == ALL
