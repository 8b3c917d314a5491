"""States that cannot be saved, or only look as if they could: training goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elastic import train
from elastic.core.policy.cursor import Cursor
from elastic.errors import UsageError
from elastic.storage.run_directory import RunDirectory
from elastic.worker import keeping
from elastic.worker.local import LocalRun, local_context
from elastic.worker.transfer import pack
from tests.unit.engine_under_test import Loop, square
from tests.unit.saving_under_test import Run

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Thing:
    """Something that a user has registered."""

    def __init__(self, state: Callable[[], Any]) -> None:
        self.state_dict = state

    def load_state_dict(self, state: Any) -> None:
        del state


def missing() -> Any:
    return {}["key"]


@pytest.mark.parametrize(
    "state",
    [
        missing,
        lambda: {"big-endian": np.arange(3, dtype=">f4")},
        lambda: {"date": np.datetime64("2020-01-01")},
        lambda: {"long double": np.longdouble(1.5)},
        lambda: {"lazy": torch.nn.UninitializedParameter()},
        lambda: {"huge": 2**3000},
        lambda: {"thing": object()},
        lambda: {"sparse": torch.eye(2).to_sparse()},
    ],
)
def test_training_goes_on_without_what_cannot_be_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, state: Callable[[], Any]
) -> None:
    options = {"every_n_steps": 1}
    with local_context(LocalRun(job_name="r", run_path=str(tmp_path), options=options)) as context:
        train.register(thing=Thing(state))
        loop, steps = Loop.make(), 0
        for _, x, y in loop.batches():
            square(loop.model(x), y).backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            steps += train.stepped()
        assert context.saver is not None
        context.saver.finish()
    assert steps == 3
    assert "failed" in caplog.text
    assert RunDirectory(str(tmp_path)).markers() == []


@pytest.mark.parametrize("value", [np.datetime64("2020-01-01"), np.longdouble(1.5)])
def test_a_scalar_that_is_no_number_is_refused_before_it_is_sent(value: Any) -> None:
    with pytest.raises(UsageError, match="cannot be sent"):
        pack({"value": value})


def test_an_array_of_another_byte_order_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"state\['big'\]: a NumPy array of >f4"):
        pack({"big": np.arange(3, dtype=">f4")})


def test_a_snapshot_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    """And does not end the workers that look for one."""
    run = Run(tmp_path)
    saver = run.savers[0]
    state = {"huge": 2**3000}
    saver.take(lambda: state, Cursor(0, 1), 1)
    problems: list[str] = []
    assert keeping._attempt(lambda: saver.read_held(1), "this node's memory", problems) is None
    assert "this node's memory" in problems[0]


class Own:
    """The state of one member, which is not that of the others."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def state(self) -> dict[str, Any]:
        return {"objects": self.tensors, "steps": 1}


@pytest.mark.parametrize(
    "other",
    [
        {"b": torch.full((8,), 2.0), "a": torch.full((8,), 1.0)},  # In another order.
        {"a": torch.full((4, 2), 1.0), "b": torch.full((8,), 2.0)},
        {"a": torch.full((8,), 1.0), "b": torch.full((4,), 2, dtype=torch.int64)},
    ],
)
def test_members_whose_states_differ_save_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, other: dict[str, torch.Tensor]
) -> None:
    """Parts of both would make a checkpoint of neither, with every checksum right."""
    run = Run(tmp_path, workers=2)
    states = [Own({"a": torch.full((8,), 1.0), "b": torch.full((8,), 2.0)}), Own(other)]
    for saver, own in zip(run.savers, states, strict=True):
        saver.take(own.state, Cursor(0, 1), 1)
    for saver in run.savers:
        saver.finish()
    assert run.committed() == []
    assert "rank 1 has saved other tensors than rank 0" in caplog.text
