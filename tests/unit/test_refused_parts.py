"""What Ray has and this has not is refused by its name, in every way in which it is imported."""

from __future__ import annotations

import importlib
import json

import pytest

import elastic
import elastic.errors
import elastic.train
from elastic.train import remote


@pytest.mark.parametrize(
    ("statement", "kind", "says"),
    [
        ("from elastic.train.tensorflow import TensorflowTrainer", ImportError, "TorchTrainer"),
        ("from elastic.train import jax", ImportError, "TorchTrainer"),
        ("import elastic.train.xgboost", ImportError, "DataParallelTrainer"),
        ("import elastic; elastic.train.lightgbm", ImportError, "DataParallelTrainer"),
        ("from elastic.train import NCCLHangError", ImportError, "hang_timeout_s"),
        ("from elastic.train.torch import TorchCheckpoint", ImportError, "Checkpoint.from_dict"),
        ("from elastic import train; train.torch.accelerate()", ImportError, "torch.autocast"),
        ("from elastic.train.torch import backwards", ImportError, "backwards"),
        (
            "from elastic import train\nclass Own(train.DataConfig):\n"
            "    def configure(self, datasets, **others): ...",
            elastic.errors.ConfigError,
            r"Own\.configure would not be called",
        ),
        ("from elastic import serve", ImportError, "not served here"),
        ("from elastic.tune import CLIReporter", ImportError, "verbose=0"),
        (
            "from elastic.tune.integration.pytorch_lightning import TuneReportCallback",
            ImportError,
            "RayTrainReportCallback",
        ),
        (
            "from elastic.tune.integration.ray_train import TuneReportCallback as c; c()",
            elastic.errors.UsageError,
            "outside a train function",
        ),
        ("from elastic.data import Datasource", ImportError, "from_items"),
        ("import elastic; elastic.put(1)", AttributeError, "paths in storage"),
        ("import elastic; elastic.no_such_name", AttributeError, "no_such_name"),
    ],
)
def test_it_says_what_to_use(statement: str, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        exec(statement, {})


def test_every_public_name_is_there() -> None:
    for module in (
        "elastic",
        "elastic.data",
        "elastic.train",
        "elastic.train.torch",
        "elastic.tune",
    ):
        there = importlib.import_module(module)
        for name in there.__all__:
            assert getattr(there, name) is not None
    with pytest.raises(elastic.train.TrainingFailedError):
        raise elastic.train.ControllerError("stopped")


def test_a_remote_function_refuses_what_it_cannot_be() -> None:
    @elastic.remote(num_cpus=2)
    def half(x: float) -> float:
        return x / 2

    with pytest.raises(elastic.errors.UsageError, match=r"call half.remote\(\.\.\.\)"):
        half(1)
    with pytest.raises(elastic.errors.UsageError, match="no actors"):
        elastic.remote(type("Actor", (), {}))
    with pytest.raises(elastic.errors.ConfigError, match="gpus: expected some of num_cpus"):
        half.options(gpus=1)
    with pytest.raises(elastic.errors.UsageError, match="got a int, expected what"):
        elastic.get([1])  # type: ignore[list-item]


def test_what_a_call_returns_is_unpickled_only_for_whom_it_was_sent() -> None:
    said = json.dumps(remote.call(lambda x: {x}, (1,), {}, b"key"))
    assert remote.value_of(remote.ObjectRef("j-1", "f", b"key"), said) == {1}
    for key in (b"other", b""):
        with pytest.raises(elastic.errors.UsageError, match="does not carry this call's code"):
            remote.value_of(remote.ObjectRef("j-1", "f", key), said)
    with pytest.raises(elastic.errors.UsageError, match=r"bytes of \d+ bytes, at most 262144"):
        remote.call(bytes, (300_000,), {}, b"key")
