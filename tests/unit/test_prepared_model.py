"""A prepared model as scripts handle it that know DistributedDataParallel."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from elastic import train
from elastic.errors import TrainingFailed
from elastic.train.torch import (
    TorchTrainer,
    clip_grad_norm_,
    prepare_model,
    prepare_optimizer,
)


def run(function: Any, storage: Path) -> train.Result:
    return TorchTrainer(
        function,
        scaling_config=train.ScalingConfig(num_workers=0),
        run_config=train.RunConfig(storage_path=storage),
    ).fit()


def test_it_is_one_in_a_plain_loop_and_says_what_it_is_not_in_steps(tmp_path: Path) -> None:
    def plain() -> None:
        wrapped = DistributedDataParallel(torch.nn.Linear(2, 1))
        model = prepare_model(wrapped, parallel_strategy_kwargs={"find_unused_parameters": True})
        assert isinstance(model, DistributedDataParallel)
        assert type(model.module) is torch.nn.Linear
        assert set(model.state_dict()) == {"module.weight", "module.bias"}
        assert model.find_unused_parameters is True
        hooked: list[int] = []

        def hook(state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
            hooked.append(1)
            done = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        model.register_comm_hook(None, hook)
        model(torch.ones(1, 2)).sum().backward()
        assert hooked == [1]
        clip_grad_norm_(model, 0.1)
        assert float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])) < 0.11
        twin = copy.deepcopy(model.eval())
        assert torch.equal(twin(torch.ones(1, 2)), model(torch.ones(1, 2)))
        assert not twin.training
        assert not twin.module.training

    def in_steps() -> None:
        model = prepare_model(torch.nn.Linear(2, 1))
        prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        # DistributedDataParallel refuses one without gradients: as average nothing is reduced.
        train.register(average=copy.deepcopy(model).requires_grad_(False))
        for _ in train.epochs(1):
            assert isinstance(model, DistributedDataParallel)
            assert not hasattr(model, "reducer")
            model.register_comm_hook(None, print)

    run(plain, tmp_path)
    with pytest.raises(TrainingFailed, match=r"register_comm_hook: in a loop over train.epochs"):
        run(in_steps, tmp_path)
    with pytest.raises(TrainingFailed, match="parallel_strategy_kwargs has bucket_cap: expected"):
        run(
            lambda: prepare_model(
                torch.nn.Linear(2, 1), parallel_strategy_kwargs={"bucket_cap": 3}
            ),
            tmp_path,
        )


@pytest.mark.parametrize("model", [{"a": 1}, "resnet50", torch.nn.Linear])
def test_what_is_no_model_is_refused(model: Any, tmp_path: Path) -> None:
    with pytest.raises(TrainingFailed, match=r"prepare_model: expected a torch.nn.Module, got "):
        run(lambda: prepare_model(model), tmp_path)
