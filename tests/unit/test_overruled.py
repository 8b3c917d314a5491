"""What a script is told that a command has submitted: which of its wishes do not count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from elastic import train
from elastic.core.facts import EntryKind
from elastic.errors import UsageError
from elastic.train import overruled
from elastic.train.config import TorchConfig
from elastic.train.torch import TorchTrainer
from elastic.worker.engine import train_call
from elastic.worker.engine.context import WorkerContext

ENVIRON = {"ELASTIC_MIN": "1", "TORCHELASTIC_MAX_RESTARTS": "3"}


class Callback:
    """A proper one."""

    def after_report(self, metrics: dict[str, Any]) -> None:
        """Take it."""


def context(**changes: Any) -> WorkerContext:
    known = {"world_rank": 0, "max_workers": 4, "devices": (), "job_name": "job", "join": None}
    return cast("WorkerContext", SimpleNamespace(**{**known, "run_path": "/runs/job", **changes}))


def line(
    scaling: train.ScalingConfig | None = None,
    run: train.RunConfig | None = None,
    torch_config: TorchConfig | None = None,
    **changes: Any,
) -> str:
    return overruled.overruled(
        context(**changes),
        scaling or train.ScalingConfig(),
        run or train.RunConfig(),
        torch_config or TorchConfig(),
        ENVIRON,
    )


def test_nothing_is_said_of_defaults_nor_of_what_the_job_has() -> None:
    assert line() == ""
    assert line(train.ScalingConfig(num_workers=0)) == ""
    kept = train.CheckpointConfig(every_n_steps=5, async_save=False)
    run = train.RunConfig(
        name="job",
        storage_path="/runs",
        failure_config=train.FailureConfig(max_failures=3, recovery="reenter"),
        checkpoint_config=kept,
    )
    scaling = train.ScalingConfig(num_workers=(1, 4), use_gpu=True)
    assert line(scaling, run, TorchConfig(consistency="samples"), devices=("cuda:0",)) == ""


def test_what_differs_is_named_with_its_option() -> None:
    run = train.RunConfig(
        name="mine",
        storage_path="/elsewhere",
        failure_config=train.FailureConfig(max_failures=1, hang_timeout_s=60),
        checkpoint_config=train.CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="loss"),
        callbacks=[Callback()],
        worker_env={"KEY": "secret"},
        preemptible=False,
    )
    scaling = train.ScalingConfig(num_workers=(2, 8), use_gpu=True, label_selector={"zone": "a"})
    assert line(scaling, run, TorchConfig(backend="gloo")) == (
        "elastic: of this script's configuration the command line's counts instead: "
        "num_workers=(2, 8) (--num-workers 1:4), use_gpu=True (--use-gpu), "
        "name='mine' (--name job), storage_path='/elsewhere' (--storage-path /runs), "
        "max_failures=1 (--max-failures 3), label_selector={'zone': 'a'} (--label), "
        "hang_timeout_s=60 (--hang-timeout), num_to_keep=2 (--num-to-keep), "
        "preemptible=False (--non-preemptible), backend='gloo' (--backend), worker_env (--env); "
        "not used: checkpoint_score_attribute, callbacks"
    )
    assert line(run=train.RunConfig(callbacks=[Callback()])) == (
        "elastic: of this script's configuration not used: callbacks"
    )


@pytest.mark.parametrize(
    ("scaling", "run_path", "expected"),
    [
        (train.ScalingConfig(num_workers=(2, 8)), "/r", r"num_workers=\(2, 8\), and it has 1\."),
        (train.ScalingConfig(use_gpu=True), "/r", "use_gpu=True, and it has no GPU"),
        (train.ScalingConfig(), "", "a run directory for its reports, and it has none"),
    ],
)
def test_a_trainer_in_a_trial_or_a_remote_call_is_refused_what_that_lacks(
    monkeypatch: pytest.MonkeyPatch, scaling: train.ScalingConfig, run_path: str, expected: str
) -> None:
    trainer = TorchTrainer(lambda: None, scaling_config=scaling)
    function = EntryKind.FUNCTION
    inside = context(max_workers=1, entry_kind=function, is_local=False, run_path=run_path)
    monkeypatch.setattr(train_call, "current", lambda: inside)
    with pytest.raises(UsageError, match=rf"{expected}.*leave out tune\.with_resources"):
        trainer.fit()
    overruled.check_size(context(max_workers=2, entry_kind=EntryKind.SCRIPT), scaling)
    fits = train.ScalingConfig(num_workers=(1, 8))
    overruled.check_size(context(max_workers=1, entry_kind=EntryKind.FUNCTION), fits)


def test_rank_0_says_it_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(overruled, "_is_reported", False)
    rest = (train.ScalingConfig(), train.RunConfig(callbacks=[Callback()]), TorchConfig())
    overruled.warn_overruled(context(join=context), *rest)
    overruled.warn_overruled(context(world_rank=1), *rest)
    assert not capfd.readouterr().err
    for _ in range(2):
        overruled.warn_overruled(context(), *rest)
    assert capfd.readouterr().err.count("callbacks") == 1
