"""An evaluation that several ranks share: each batch once, the same for all, and nobody waits."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from elastic.train.huggingface.dealing import DealtBatches
from tests.patience import DEADLINE_S
from tests.unit.engine_under_test import inside_a_run

_inside = pytest.fixture(autouse=True, name="_inside")(inside_a_run)
WORLD, SAMPLES, BATCH = 3, 14, 2


class Exchange:
    """Gives every rank what all have said, up to a round in which the group breaks."""

    def __init__(self, breaks: int) -> None:
        self._barrier, self._breaks = threading.Barrier(WORLD), breaks
        self._said: dict[int, bytes] = {}
        self._rounds = [0] * WORLD

    def of(self, rank: int) -> Any:
        def share(mine: bytes) -> Any:
            self._said[rank] = mine
            self._barrier.wait(DEADLINE_S)
            self._rounds[rank] += 1
            parts = [self._said[one] for one in range(WORLD)]
            self._barrier.wait(DEADLINE_S)
            return None if self._rounds[rank] > self._breaks else parts

        return share


@pytest.mark.parametrize("breaks", [9, 1, 0])
def test_every_rank_has_the_results_of_all_batches(breaks: int) -> None:
    loader = DataLoader(torch.arange(SAMPLES), batch_size=BATCH)  # type: ignore[arg-type]
    exchange = Exchange(breaks)

    def evaluate(rank: int) -> tuple[list[Any], list[Any]]:
        computed: list[Any] = []

        def compute(batch: Any) -> Any:
            computed.append(batch.tolist())
            return batch.sum(), None

        dealt = DealtBatches(loader, (rank, WORLD), exchange.of(rank), seed=0, keeps_inputs=False)
        assert len(dealt) == SAMPLES // BATCH
        return [int(turn.result(compute)[0]) for turn in dealt], computed

    with ThreadPoolExecutor(WORLD) as pool:
        found = list(pool.map(evaluate, range(WORLD)))
    right = [sum(batch.tolist()) for batch in loader]
    assert [results for results, _ in found] == [right] * WORLD
    for rank, (_, computed) in enumerate(found):
        mine = [batch.tolist() for batch in loader][rank::WORLD]
        assert computed[: min(breaks + 1, len(mine))] == mine[: breaks + 1]
        assert (computed == mine) is (breaks == 9)
