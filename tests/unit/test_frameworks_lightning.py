"""Lightning's files, its callbacks' state, and what is refused, in this process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities import rank_zero
from lightning.pytorch import Callback, Trainer, callbacks, seed_everything
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric
from torchmetrics.utilities import prints

from elastic.errors import UsageError
from elastic.train import CheckpointUploadMode
from elastic.train.lightning import (
    RayDDPStrategy,
    RayLightningEnvironment,
    RayTrainReportCallback,
)
from elastic.train.lightning import strategy as of_strategy
from elastic.train.lightning.files import _Rows
from elastic.worker.engine.train_call import current
from elastic.worker.process.early_run import joining_on_demand, set_printing_rank
from elastic.worker.process.environment import PLACE
from tests.unit.engine_under_test import inside_a_run, inside_again

pytestmark = pytest.mark.filterwarnings("ignore")  # Of Lightning: its own.
_inside = pytest.fixture(autouse=True, name="_inside")(inside_a_run)
STEPS = 4
"""Of an epoch."""


class Numbers(Dataset):
    def __len__(self) -> int:
        return 2 * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((32,), index / 8)


class Module(BoringModel):
    """Logs what it does; `do` is called in each training step."""

    def __init__(self, do: Callable[[Any], Any] = lambda module: None) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.do, self.metric = do, MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.do(self)
        loss = self.step(batch)
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.step(batch))

    def train_dataloader(self) -> Any:
        return DataLoader(Numbers(), batch_size=2)

    def val_dataloader(self) -> Any:
        return DataLoader(Numbers(), batch_size=4)


def fitted(
    folder: Path, module: Any = None, *others: Callback, run_path: str = "", **named: Any
) -> Any:
    """Train with the logger and the checkpoints that a Trainer has by default."""
    options: dict[str, Any] = {"max_epochs": 2, "log_every_n_steps": 1, "max_steps": -1}
    with inside_again(run_path):
        trainer = Trainer(
            strategy=RayDDPStrategy(), plugins=[RayLightningEnvironment()],
            default_root_dir=folder, callbacks=list(others), enable_model_summary=False,
            enable_progress_bar=False, num_sanity_val_steps=0, **(options | named),
        )  # fmt: skip
        trainer.fit(module or Module())
        context = current()
        assert context is not None
        context.the_reporter().finish()  # As at the end of a train function.
    return trainer


def test_a_schedule_may_be_made_of_the_number_of_steps(tmp_path: Path) -> None:
    """The module asks for it while its optimizer is built, and counts batches as it is used to."""

    class Scheduled(Module):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            steps = int(self.trainer.estimated_stepping_batches)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    trainer = fitted(tmp_path, Scheduled(), accumulate_grad_batches=2, val_check_interval=2)
    (config,) = trainer.lr_scheduler_configs
    assert trainer.global_step == config.scheduler.total_steps == STEPS


def files(folder: Path) -> list[str]:
    return sorted(str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file())


class Copying(Callback):
    """Copies the folder of the first worker as it is if that dies after the first epoch's end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.copy(trainer, "nothing")

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.copy(trainer, "all")

    def copy(self, trainer: Any, written: str) -> None:
        if trainer.global_step == STEPS:
            shutil.copytree(self.folder, self.folder.with_name(written))


class Succeeding(Callback):
    """Becomes the first worker in the step after the epoch whose end the first one died in."""

    def __init__(self, folder: Path, written: str, ranks: list[int]) -> None:
        self.folder, self.written, self.ranks = folder, written, ranks

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == STEPS:
            assert not any("step" in one for one in files(self.folder))
            shutil.copytree(self.folder.with_name(self.written), self.folder, dirs_exist_ok=True)
            self.ranks[0] = 0


@pytest.mark.parametrize("written", ["nothing", "all"])
def test_the_next_first_worker_writes_what_the_lost_one_has_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    folder, again = tmp_path / "whole", tmp_path / "again"
    best = {"monitor": "val_loss", "save_last": True, "save_top_k": 1}
    rates = partial(callbacks.LearningRateMonitor, "step")
    whole = fitted(folder, None, rates(), Copying(folder), callbacks.ModelCheckpoint(**best))
    ranks = [1]
    monkeypatch.setattr(of_strategy, "current_rank", lambda: ranks[0])
    succeeding = Succeeding(again, written, ranks)
    trainer = fitted(again, None, rates(), succeeding, callbacks.ModelCheckpoint(**best))
    assert ranks == [0]
    assert files(again) == files(folder)
    for name in files(folder):
        if name.endswith("csv"):
            assert (again / name).read_text() == (folder / name).read_text()
        elif name.endswith("ckpt"):
            right, mine = (torch.load(one / name, weights_only=False) for one in (folder, again))
            assert mine["loops"] == right["loops"]
            for weight, other in zip(
                right["state_dict"].items(), mine["state_dict"].items(), strict=True
            ):
                assert torch.equal(weight[1], other[1])
    relative = [Path(one.checkpoint_callback.best_model_path).name for one in (whole, trainer)]
    assert relative[0] == relative[1]


class Seen(Exception):
    """Ends a fit."""


class Joining(Callback):
    """Receives the state of another worker."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state, self.found = state, {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        state = trainer.strategy._fit.state
        state.load_state_dict(self.state)
        self.found = state.state_dict()
        raise Seen


class Asked(Callback):
    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == STEPS + 1:
            self.state = trainer.strategy._fit.state.state_dict()


def test_a_joiner_has_the_folders_and_the_averages_of_the_run(tmp_path: Path) -> None:
    def averages() -> Callback:
        return callbacks.EMAWeightAveraging(decay=0.5)

    asked = Asked()
    whole = fitted(tmp_path, None, asked, averages())
    joining = Joining(asked.state)
    with pytest.raises(Seen):
        fitted(tmp_path, None, joining, averages())
    assert joining.found["files"] == asked.state["files"]
    (logger,) = whole.loggers
    assert joining.found["files"]["versions"] == [logger.version] == [0]
    mine, right = joining.found["hooked"], asked.state["hooked"]
    assert mine["averaging_state"] == right["averaging_state"]
    for name, value in right["state_dict"].items():
        assert torch.equal(mine["state_dict"][name], value)
        assert not torch.equal(right["current_model_state"][name], value)


def test_a_name_that_an_earlier_run_has_used_gets_a_version_on_all_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in (0, 1):
        monkeypatch.setattr(of_strategy, "current_rank", lambda rank=rank: rank)
        if rank == 0:
            fitted(tmp_path, None, callbacks.ModelCheckpoint(tmp_path / "saved", "best"))
        saves = callbacks.ModelCheckpoint(tmp_path / "saved", "best")
        fitted(tmp_path, None, saves)
        assert Path(saves.best_model_path).name == f"best-v{1 + rank}.ckpt"


class Thing:
    def __init__(self, rows: list[torch.Tensor]) -> None:
        self.rows = torch.stack(rows)


class Things(Module):
    """Batches are of a class that Lightning knows nothing about; logs in other hooks, too."""

    def train_dataloader(self) -> Any:
        return DataLoader(Numbers(), batch_size=1, collate_fn=Thing)

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.mean = batch.rows.mean()
        return super().training_step(batch.rows, batch_idx)

    def on_after_backward(self) -> None:
        self.log("mean", self.mean, on_epoch=True)

    val_dataloader: Any = None


def test_epochs_are_reported_as_often_and_in_the_way_that_was_asked_for(tmp_path: Path) -> None:
    callback = RayTrainReportCallback(CheckpointUploadMode.ASYNC, checkpoint_frequency=2)
    fitted(tmp_path, None, callback, run_path=str(tmp_path / "run"), max_epochs=4)
    saved = sorted((tmp_path / "run").rglob(RayTrainReportCallback.CHECKPOINT_NAME))
    assert [torch.load(one, weights_only=False)["epoch"] for one in saved] == [1, 3]


def test_batches_of_any_class_and_logs_of_other_hooks_count_by_samples(tmp_path: Path) -> None:
    trainer = fitted(tmp_path, Things(), accumulate_grad_batches=2, limit_train_batches=6)
    assert trainer.global_step == 6
    assert trainer.callback_metrics["mean_epoch"] == sum(range(6)) / 6 / 8


def test_batches_have_the_precision_of_the_weights(tmp_path: Path) -> None:
    trainer = fitted(tmp_path, precision="64-true")
    assert trainer.callback_metrics["loss_epoch"].isfinite()
    assert trainer.lightning_module.layer.weight.dtype == torch.float64


def updates(module: Any) -> None:
    module.metric.update(1.0)


def logs_sometimes(module: Any) -> None:
    module.calls = getattr(module, "calls", 0) + 1
    if module.calls % 2:
        module.log("odd", 1.0)


class Several(Module):
    def train_dataloader(self) -> Any:
        return {"a": DataLoader(Numbers(), batch_size=2)}


class Skipping(Module):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 1 else None


class Reading(Module):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for _ in batch:
            pass


def twice(folder: Path) -> None:
    with inside_again():
        trainer = Trainer(
            strategy=RayDDPStrategy(), plugins=[RayLightningEnvironment()], max_epochs=1,
            default_root_dir=folder, logger=False, enable_checkpointing=False,
        )  # fmt: skip
        for _ in range(2):
            trainer.fit(Module())


SAVES = callbacks.ModelCheckpoint


@pytest.mark.parametrize(
    ("begin", "says"),
    [
        (lambda folder: fitted(folder, Module(updates)), "MeanMetric adds up"),
        (
            lambda folder: fitted(
                folder, Module(lambda module: module.log("n", 1.0, reduce_fx="sum"))
            ),
            "leave reduce_fx out",
        ),
        (
            lambda folder: fitted(folder, Module(logs_sometimes), accumulate_grad_batches=2),
            "1 of the 2 micro-batches",
        ),
        (lambda folder: fitted(folder, Several()), "the training loaders are a dict"),
        (lambda folder: fitted(folder, Skipping()), r"trainer\.should_stop = True"),
        (lambda folder: fitted(folder, Reading()), "read them there"),
        (twice, "for the second time"),
        (lambda folder: fitted(folder, max_time={"hours": 1}), "max_time or a Timer"),
        (lambda folder: fitted(folder, val_check_interval="00:10:00:00"), "as a time"),
        (
            lambda folder: fitted(
                folder, None, SAVES(folder, train_time_interval=timedelta(hours=1))
            ),
            "every_n_train_steps",
        ),
        (lambda folder: fitted(folder, None, SAVES(folder, save_last="link")), "save_last=True"),
        (
            lambda folder: fitted(folder, None, callbacks.StochasticWeightAveraging(0.1)),
            "use WeightAveraging",
        ),
        (
            lambda folder: fitted(folder, None, callbacks.GradientAccumulationScheduler({1: 2})),
            "steps have one size",
        ),
        (
            lambda folder: fitted(folder, None, callbacks.LearningRateFinder()),
            "in a run of its own",
        ),
        (
            lambda folder: fitted(folder, accumulate_grad_batches=4, limit_train_batches=6),
            "limit_train_batches=6",
        ),
    ],
)
def test_what_would_go_wrong_is_refused_by_name(tmp_path: Path, begin: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        begin(tmp_path)


def test_rows_of_steps_done_again_and_a_torn_row_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("epoch,loss,step\n0,1.5,0\n0,1.25,1\n,0.5,96\n0,1.0,2\n,0.5,1")
    rows = _Rows(str(tmp_path), before=2)
    rows.log_metrics({"loss": 1.0, "other": 2.0}, 2)
    rows.save()
    lines = path.read_text().splitlines()
    assert lines == ["epoch,loss,other,step", "0,1.5,,0", "0,1.25,,1", ",0.5,,96", ",1.0,2.0,2"]


def test_a_worker_that_joins_imports_and_seeds_lightning_while_the_others_train(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def join() -> None:
        raise AssertionError("it has asked for its place")

    for name in PLACE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")  # Put back what is set here.
    with joining_on_demand(join):
        for module in (rank_zero, prints):
            source = Path(module.__file__).read_text()
            imported: dict[str, Any] = {"__name__": module.__name__}
            exec(compile(source, module.__file__, "exec"), imported)
        assert imported["rank_zero_only"].rank == 1
        seed_everything(1)
        with pytest.raises(AssertionError, match="asked for its place"):
            os.environ.get("LOCAL_RANK")


def test_what_was_imported_without_a_place_prints_by_the_one_that_it_has_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks: tuple[Any, ...] = (rank_zero.rank_zero_only, prints.rank_zero_only)
    for one in ranks:
        monkeypatch.setattr(one, "rank", 0)
    set_printing_rank({})
    assert [one.rank for one in ranks] == [1, 1]
    set_printing_rank({"RANK": "3", "LOCAL_RANK": "0"})
    assert [one.rank for one in ranks] == [3, 0]
