"""Other libraries' trainers under the engine, in this process, beside the stock ones without it.

tests/chaos/test_frameworks.py kills workers under the same scripts.
"""

from __future__ import annotations

import pickle
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.tracking import GeneralTracker
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel
from packaging.version import Version
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers.training_args import ParallelMode

from elastic import train
from elastic.core.policy.cursor import Cursor
from elastic.data import from_items
from elastic.errors import UsageError
from elastic.train.accelerate import prepare_accelerator
from elastic.train.datasets import offering
from elastic.train.huggingface import transformers as of_transformers
from elastic.train.lightning import (
    RayDDPStrategy,
    RayDeepSpeedStrategy,
    RayFSDPStrategy,
    RayLightningEnvironment,
    prepare_trainer,
)
from elastic.train.session import require_engine
from elastic.worker.engine import train_call
from elastic.worker.engine.group_sync import note_loop_begun
from elastic.worker.engine.step_engine import StepEngine
from elastic.worker.process.early_run import joining_on_demand
from elastic.worker.process.environment import PLACE
from elastic.worker.process.local import NoNextGroup
from tests.chaos import hf_job, lightning_job
from tests.unit.engine_under_test import Count, called, data, inside_a_run, inside_again, reported

pytestmark = pytest.mark.filterwarnings("ignore")  # Of these libraries: theirs.
_inside = pytest.fixture(autouse=True, name="_inside")(inside_a_run)
CONFIG: dict[str, Any] = {
    "epochs": 2, "trace": "", "orders": "", "finish": "", "pace": 0.0, "dropout": 0.0,
    "shuffle": False, "samples": 32,
}  # fmt: skip


def parameters(module: nn.Module) -> list[torch.Tensor]:
    return [one.detach().clone() for one in module.parameters()]


def furthest(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def test_the_trainer_of_transformers_computes_what_it_does_by_itself(tmp_path: Path) -> None:
    """Padded text, five steps an epoch, the last one of half the samples."""
    options: dict[str, Any] = {
        "gradient_accumulation_steps": 4,
        "train_sampling_strategy": "sequential",
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "steps",
        "save_steps": 5,
        "eval_strategy": "steps",
        "eval_steps": 5,
        "load_best_model_at_end": True,
        "max_steps": 8,
    }
    found = []
    for ours in (False, True):
        config = CONFIG | {"output": str(tmp_path / str(ours))}
        trainer = hf_job.build(config, **options)
        if ours:
            trainer.add_callback(of_transformers.RayTrainReportCallback())
            of_transformers.prepare_trainer(trainer)
        else:
            trainer.remove_callback(hf_job.Watch)
            trainer.model.watch = None  # type: ignore[union-attr]
        trainer.train()
        predicted = trainer.predict(trainer.eval_dataset).predictions  # type: ignore[arg-type]
        saved = sorted(path.name for path in Path(config["output"]).glob("checkpoint-*"))
        found.append(
            (trainer, hf_job.history(trainer), parameters(trainer.model), saved, predicted)
        )  # type: ignore[arg-type]
    (stock, right, weights, saved, predicted), (trainer, logs, mine, written, seen) = found
    assert trainer.state.global_step == stock.state.global_step == 8
    assert furthest(weights, mine) < 1e-6
    assert len(predicted) == len(seen) == hf_job.EVALUATED
    assert written == saved == ["checkpoint-5", "checkpoint-8"]
    assert len(reported) == 2
    assert [sorted(log) for log in logs] == [sorted(log) for log in right]
    for log, other in zip(logs, right, strict=True):
        assert log == pytest.approx(other, rel=1e-5)


class Beside(torch.optim.SGD):
    """Trains at other weights than it is evaluated at, as those do that need no schedule."""

    is_beside = False

    def train(self) -> None:
        self._be(is_beside=True)

    def eval(self) -> None:
        self._be(is_beside=False)

    @torch.no_grad()
    def _be(self, *, is_beside: bool) -> None:
        if is_beside != self.is_beside:
            for weight in self.param_groups[0]["params"]:
                weight += 0.01 if is_beside else -0.01
        self.is_beside = is_beside

    def step(self, closure: Any = None) -> None:
        assert self.is_beside
        super().step(closure)


def test_an_optimizer_moves_weights_between_training_and_evaluation(tmp_path: Path) -> None:
    config = CONFIG | {"output": str(tmp_path)}
    options = {"use_cpu": True, "disable_tqdm": True, "max_steps": 4, "save_strategy": "no"}
    trainer = hf_job.build(config, **options, eval_strategy="steps", eval_steps=2)
    optimizer = Beside(trainer.model.parameters(), lr=0.01)  # type: ignore[union-attr]
    trainer.optimizer = optimizer
    of_transformers.prepare_trainer(trainer).train()
    assert trainer.state.global_step == 4
    assert not optimizer.is_beside


class Codes(Dataset):
    """Lines of the same length, whose letters are to be predicted."""

    def __init__(self, count: int) -> None:
        lines = hf_job.Lines(4 * count)
        long = [ids for ids in lines.ids if len(ids) >= 12][:count]
        self.rows = [{"input_ids": ids[:12], "labels": ids[:12]} for ids in long]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


def test_the_trainer_of_transformers_trains_with_the_datasets_of_the_run(tmp_path: Path) -> None:
    """Steps of all rows: their order within a step is not the stock sampler's.

    So sums are rounded differently; Adam divides gradients near 0 by no less than its epsilon.
    """
    options: dict[str, Any] = {
        "use_cpu": True, "disable_tqdm": True, "eval_strategy": "steps", "eval_steps": 2,
        "max_steps": 4, "train_sampling_strategy": "sequential", "adam_epsilon": 1e-4,
    }  # fmt: skip
    learnt, judged = Codes(12), Codes(8)
    sets = {"train": from_items(learnt.rows), "evaluation": from_items(judged.rows)}
    found = []
    for ours in (False, True):
        with inside_again(), offering(sets, train.DataConfig()):
            accumulation = {} if ours else {"gradient_accumulation_steps": 6}
            config = CONFIG | {"output": str(tmp_path / str(ours))}
            trainer = hf_job.build(config, **options, **accumulation)
            trainer.train_dataset, trainer.eval_dataset = learnt, judged
            if ours:
                for name, wanted in (("train", "train_dataset"), ("evaluation", "eval_dataset")):
                    shard = train.get_dataset_shard(name)
                    setattr(trainer, wanted, shard.iter_torch_batches(batch_size=2))
                of_transformers.prepare_trainer(trainer, global_batch_size=12)
            else:
                trainer.remove_callback(hf_job.Watch)
                trainer.model.watch = None  # type: ignore[union-attr]
            trainer.train()
            predicted = trainer.predict(trainer.eval_dataset).predictions  # type: ignore[arg-type]
            found.append((trainer, hf_job.history(trainer), parameters(trainer.model), predicted))  # type: ignore[arg-type]
    (stock, right, weights, predicted), (trainer, logs, mine, seen) = found
    assert trainer.state.global_step == stock.state.global_step == 4
    assert furthest(weights, mine) < 1e-6
    assert seen == pytest.approx(predicted, abs=1e-5)
    for log, other in zip(logs, right, strict=True):
        assert log == pytest.approx(other, rel=1e-5)


def be_rank(rank: int) -> None:
    """Have another rank of a group from here on, as far as libraries see."""
    here = train_call.current()
    assert here is not None
    train_call.set_current(replace(here, world_rank=rank), train_call.current_engine())


class Replaced(hf_job.TrainerCallback):
    """Lets the first worker die in its save, and shows where the next one opens its trackers."""

    def __init__(self) -> None:
        self._initialized = False
        self.opened: list[int] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._initialized and state.is_world_process_zero:
            self.opened.append(state.global_step)
        self._initialized = True

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        be_rank(0)


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(hf_job.Lines(hf_job.SAMPLES))


def test_the_trainer_of_transformers_goes_on_from_its_own_checkpoint(tmp_path: Path) -> None:
    """Within the first epoch, within the second, and where `max_steps` has ended it.

    The first of these was left to the worker that became the first one then.
    """
    replaced = Replaced()

    def trained(name: str, data: Any = None, callbacks: tuple[Any, ...] = (), **named: Any) -> Any:
        config = CONFIG | {"output": str(tmp_path / name), "dropout": 0.1}
        options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "max_steps": 8}
        with inside_again():
            trainer = hf_job.build(config, use_cpu=True, disable_tqdm=True, **options)
            trainer.train_dataset = data or trainer.train_dataset
            trainer.compute_metrics = lambda _: {"drawn": float(torch.rand(()))}
            for one in callbacks:
                trainer.add_callback(one)
                be_rank(1)
            of_transformers.prepare_trainer(trainer, global_batch_size=hf_job.GLOBAL_BATCH)
            trainer.train(**named)
        return trainer

    def drawn(trainer: Any) -> list[float]:
        return [log["eval_drawn"] for log in trainer.state.log_history if "eval_drawn" in log]

    whole = trained("whole", callbacks=(replaced,))
    assert replaced.opened == [3]
    assert not list((tmp_path / "whole").glob(f"{of_transformers.DRAFT}*"))
    for step in (3, 6, 8):
        path = str(tmp_path / "whole" / f"checkpoint-{step}")
        resumed = trained(f"from-{step}", resume_from_checkpoint=path)
        assert resumed.state.global_step == whole.state.global_step == 8
        assert resumed.state.epoch == whole.state.epoch
        assert furthest(parameters(resumed.model), parameters(whole.model)) == 0
        if step < 8:
            assert drawn(resumed) == drawn(whole)
    with pytest.raises(UsageError, match="checkpoint is of step 8 of an iterable dataset"):
        trained("stream", Stream(), resume_from_checkpoint=path)


@pytest.mark.parametrize("is_ahead", [True, False])
def test_a_worker_that_joins_builds_its_trainer_while_the_others_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_ahead: bool
) -> None:
    """In the order of scripts: arguments first, then data behind the first worker, then a model.

    The others are in their loop, whether or not it has its place.
    """
    for name in PLACE:  # They are set as it joins.
        monkeypatch.delenv(name, raising=False)
    here, engine = train_call.current(), train_call.current_engine()
    assert here is not None

    def join() -> Any:
        raise AssertionError("it has asked for its place")

    with joining_on_demand(join):
        joined = {"join": join} if is_ahead else {"cause": "join", "world_rank": 1, "world_size": 2}
        if not is_ahead:
            note_loop_begun(is_inside=True)
        train_call.set_current(replace(here, **joined), engine)  # type: ignore[arg-type]
        trainer = hf_job.build(CONFIG | {"output": str(tmp_path)}, use_cpu=True)
        assert trainer.args.parallel_mode is ParallelMode.DISTRIBUTED  # As where the others began.
        with trainer.args.main_process_first(), PartialState().main_process_first():
            of_transformers.prepare_trainer(trainer)
        assert (trainer.args.world_size, trainer.is_world_process_zero()) == (1, False)
        assert torch.distributed.is_initialized()
    train_call.set_current(here, engine)
    trainer.train()
    assert trainer.is_world_process_zero()


@pytest.mark.parametrize("is_ahead", [True, False])
def test_a_worker_that_joins_prepares_lightnings_data_alone(
    monkeypatch: pytest.MonkeyPatch, *, is_ahead: bool
) -> None:
    """The others are in their loop, whether or not it has its place."""
    for name in PLACE:
        monkeypatch.delenv(name, raising=False)
    here, engine = train_call.current(), train_call.current_engine()
    assert here is not None
    prepared: list[str] = []

    class Data(LightningDataModule):
        def prepare_data(self) -> None:
            prepared.append("data")

    class Model(BoringModel):
        def prepare_data(self) -> None:
            prepared.append("model")

    def join() -> Any:
        raise AssertionError("it has asked for its place")

    with joining_on_demand(join):
        joined = {"join": join} if is_ahead else {"cause": "join", "world_size": 2}
        if not is_ahead:
            note_loop_begun(is_inside=True)
        train_call.set_current(replace(here, **joined), engine)  # type: ignore[arg-type]
        trainer = Trainer(strategy=RayDDPStrategy(), plugins=[RayLightningEnvironment()])
        model = Model()
        trainer._data_connector.attach_data(model, datamodule=Data())
        trainer.strategy.connect(model)
        trainer._data_connector.prepare_data()
    train_call.set_current(here, engine)
    assert prepared == ["data", "model"]


class Leaves(hf_job.TrainerCallback):
    """Leaves the Trainer behind its last step."""

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == state.max_steps:
            raise Left


class Left(Exception):
    pass


def test_a_worker_that_joins_behind_the_last_step_passes_the_end_with_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait there for it, evaluate, and have stopped; it has the epoch before to leave out."""
    passed: list[Cursor] = []
    real = StepEngine._pass_gate

    def pass_gate(engine: StepEngine) -> bool:
        passed.append(engine.cursor)
        return real(engine)

    monkeypatch.setattr(StepEngine, "_pass_gate", pass_gate)
    resume = None
    for generation in (1, 2):
        with called(NoNextGroup(), resume, generation) as engine:
            config = CONFIG | {"output": str(tmp_path)}
            trainer = hf_job.build(config, use_cpu=True, disable_tqdm=True, eval_strategy="no")
            of_transformers.prepare_trainer(trainer, global_batch_size=hf_job.GLOBAL_BATCH)
            if generation == 1:
                trainer.add_callback(Leaves())
            with suppress(Left):
                trainer.train()
            resume = engine.resume_state()
        assert trainer.state.global_step == 10
    assert passed == [Cursor(0, 5), Cursor(1, 5)]


def test_what_a_micro_batch_logs_is_logged_once_in_a_step(tmp_path: Path) -> None:
    """Averaged over the step as its loss is; here by samples, whatever the first tensor is."""
    of_micro_batches: list[float] = []

    class Logging(hf_job.Trainer):
        def compute_loss(self, model: Any, inputs: Any, **named: Any) -> Any:
            inputs.pop("patches")
            loss = super().compute_loss(model, inputs, **named)
            of_micro_batches.append(float(loss))
            self.log({"aux": loss})
            return loss

    config = CONFIG | {"output": str(tmp_path)}
    options: dict[str, Any] = {
        "use_cpu": True, "disable_tqdm": True, "max_steps": 2, "logging_steps": 1,
        "eval_strategy": "no", "max_grad_norm": 0.0, "remove_unused_columns": False,
    }  # fmt: skip
    with inside_again():
        trainer = hf_job.build(config, cls=Logging, **options)
        collate = trainer.data_collator
        trainer.data_collator = lambda rows: {
            "patches": torch.zeros(len(rows[0]["input_ids"]), 3), **collate(rows)
        }  # fmt: skip
        trainer.model_accepts_loss_kwargs = False
        # Accelerate's optimizer keeps methods of the one inside where there is a scaler.
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        of_transformers.prepare_trainer(trainer, global_batch_size=hf_job.GLOBAL_BATCH)
        trainer.train()
        steps = [of_micro_batches[:4], of_micro_batches[4:]]
        logged = [log["aux"] for log in trainer.state.log_history if "aux" in log]
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        right = pytest.approx([sum(one) / 4 for one in steps])
        assert (logged, losses) == (right, right)
        optimizer: Any = trainer.optimizer
        assert optimizer._optimizer_original_step_method == optimizer.optimizer.step
        assert optimizer.optimizer.step.__func__.__module__ != "torch.optim.adamw"
        with pytest.raises(UsageError, match="is called a second time"):
            trainer.train()


def test_a_checkpoint_that_cannot_be_read_matters_where_no_worker_has_a_state(
    tmp_path: Path,
) -> None:
    config = CONFIG | {"output": str(tmp_path)}
    trainer = hf_job.build(config, use_cpu=True, disable_tqdm=True)
    collator: Any = trainer.data_collator
    collator.seed = 42
    with pytest.raises(UsageError, match=r"DataCollatorForLanguageModeling\(seed=42\) draws"):
        of_transformers.prepare_trainer(trainer)
    collator.seed = None
    trainer._buffered_inputs = None  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="Trainer generates samples for several steps at once"):
        of_transformers.prepare_trainer(trainer)
    del trainer._buffered_inputs  # type: ignore[attr-defined]
    of_transformers.prepare_trainer(trainer, global_batch_size=hf_job.GLOBAL_BATCH)
    with pytest.raises(ValueError, match="No valid checkpoint found in output directory"):
        trainer.train(resume_from_checkpoint=True)


def test_the_trainer_of_lightning_goes_on_from_its_own_checkpoint(tmp_path: Path) -> None:
    """Within an epoch, at its last step, and behind it; steps of an epoch: four."""

    def trained(name: str, path: str | None = None) -> Any:
        with inside_again():
            saves = ModelCheckpoint(
                tmp_path / name, "{step}", save_top_k=-1, every_n_train_steps=1, save_last=False
            )
            behind = ModelCheckpoint(
                tmp_path / name, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True
            )
            options = {"callbacks": [saves, behind], "enable_checkpointing": True}
            plugins = [RayLightningEnvironment()]
            options |= {
                "strategy": RayDDPStrategy(global_batch_size=lightning_job.GLOBAL_BATCH),
                "plugins": plugins,
            }
            config = CONFIG | {"dropout": 0.1}
            trainer, module, loaders = lightning_job.build(config, **options)
            trainer.fit(module, *loaders, ckpt_path=path)
            return trainer, parameters(module)

    whole, weights = trained("whole")
    assert whole.global_step == 8
    for place in ("step=1", "step=3", "step=4", "epoch=0", "step=6", "step=8"):
        (path,) = (tmp_path / "whole").glob(f"{place}.ckpt")
        resumed, mine = trained(f"from-{place}", str(path))
        assert (resumed.global_step, resumed.current_epoch) == (8, 2)
        assert furthest(weights, mine) == 0
        if place != "step=8":
            assert resumed.callback_metrics["val_loss"] == whole.callback_metrics["val_loss"]


def test_the_trainer_of_lightning_trains_with_the_datasets_of_the_run() -> None:
    def tensor(batch: dict[str, Any]) -> torch.Tensor:
        return torch.from_numpy(batch["x"]).float().reshape(-1, 1).repeat(1, 32)

    judged: list[float] = []

    class Model(BoringModel):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            judged.extend(batch[:, 0].tolist())
            return super().validation_step(batch, batch_idx)

        def val_dataloader(self) -> Any:
            return train.get_dataset_shard("judged").iter_torch_batches(
                batch_size=2, collate_fn=tensor
            )

        def train_dataloader(self) -> Any:
            shard = train.get_dataset_shard("train")
            return shard.iter_torch_batches(batch_size=4, collate_fn=tensor)

    sets = {name: from_items([{"x": n} for n in range(8)]) for name in ("train", "judged")}
    with inside_again(), offering(sets, train.DataConfig()):
        trainer = prepare_trainer(
            Trainer(
                strategy=RayDDPStrategy(), plugins=[RayLightningEnvironment()], max_epochs=2,
                logger=False, enable_checkpointing=False, enable_progress_bar=False,
                enable_model_summary=False, num_sanity_val_steps=0,
            )
        )  # fmt: skip
        trainer.fit(Model())
    assert trainer.global_step == 4
    assert judged == 2 * [float(n) for n in range(8)]


def test_the_trainer_of_lightning_computes_what_it_does_by_itself() -> None:
    found = []
    for ours in (False, True):
        with inside_again():
            options: dict[str, Any] = {"callbacks": [], "accumulate_grad_batches": 4}
            if ours:
                plugins = [RayLightningEnvironment()]
                options |= {"strategy": RayDDPStrategy(), "plugins": plugins}
            trainer, module, loaders = lightning_job.build(CONFIG, **options)
            for part in module.modules():  # Torch's transformer has its own rate.
                if isinstance(part, nn.Dropout):
                    part.p = 0.0
                elif isinstance(part, nn.MultiheadAttention):
                    part.dropout = 0.0
            trainer.fit(module, *loaders)
            found.append((trainer, parameters(module)))
    (stock, weights), (trainer, mine) = found
    assert trainer.global_step == stock.global_step == 8
    assert trainer.current_epoch == stock.current_epoch == 2
    assert furthest(weights, mine) < 1e-6
    for name in ("loss_epoch", "val_loss"):
        assert float(trainer.callback_metrics[name]) == pytest.approx(
            float(stock.callback_metrics[name]), rel=1e-5
        )


class Numbers(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(5))


class Opened(GeneralTracker):
    """Has a file open, once it is begun."""

    name, requires_logging_directory = "opened", False
    main_process_only = False

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    @property
    def tracker(self) -> Any:
        return self

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.steps.append(values["step"])


def test_a_schedule_of_accelerate_goes_on_once_in_a_step(tmp_path: Path) -> None:
    """On the second of two workers, until the first one dies."""
    tracker, numbered = Opened(), ProjectConfiguration(str(tmp_path))
    numbered.automatic_checkpoint_naming = True
    be_rank(1)
    accelerator = prepare_accelerator(
        Accelerator(cpu=True, log_with=[tracker], project_config=numbered), global_batch_size=8
    )
    accelerator.init_trackers("here")
    alone = [
        one(lambda: "called")
        for one in (
            accelerator.on_main_process,
            accelerator.on_last_process,
            accelerator.on_process(process_index=0),
        )
    ]
    model: Any = nn.Linear(5, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, DataLoader(data(), batch_size=2), scheduler
    )
    kept = torch.optim.swa_utils.AveragedModel(nn.Linear(5, 1))
    accelerator.register_for_checkpointing(kept)
    engine = require_engine("this test")
    assert any(one is kept for one in engine.state.registered.values())
    for refused in (accelerator.set_trigger, accelerator.check_trigger):
        with pytest.raises(UsageError, match=r"write train\.log\(stop=float\(condition\)\)"):
            refused()
    with torch.no_grad():
        judged = list(accelerator.prepare(DataLoader(Numbers(), batch_size=2)))
    assert torch.cat(judged).tolist() == list(range(5))
    assert len(loader) == 3
    with pytest.raises(UsageError, match="outside the loop over"):
        next(iter(loader))
    count = Count()
    accelerator.register_for_checkpointing(count)
    for _ in train.epochs(1):
        with pytest.raises(UsageError, match=r"train\.epochs\(n, start=epoch \+ 1\)"):
            accelerator.skip_first_batches(loader, 2)
        for number, (_, x, y) in enumerate(loader):
            accelerator.log({"step": number})
            assert {one() for one in alone} == {None if number < 5 else "called"}
            be_rank(0 if number >= 4 else 1)
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                count.steps += 1
                kept.update_parameters(model)
                accelerator.save_state()
    assert scheduler.get_last_lr() == [0.5**3]
    assert tracker.steps == list(range(5, 12))
    assert count.steps == int(kept.n_averaged) == accelerator.save_iteration == 3
    folders = tmp_path / "checkpoints"
    assert sorted(one.name for one in folders.iterdir()) == ["checkpoint_1", "checkpoint_2"]
    numbered.iteration = 2
    with pytest.raises(ValueError, match="already exists"):
        accelerator.save_state()
    engine.state.registered["accelerate.Accelerator"].load_state_dict({"saved": 2})
    accelerator.save_state()


def test_a_count_behind_no_question_for_the_step_is_refused() -> None:
    """To ask where gradients are clipped does not mean to count once in a step."""
    accelerator = prepare_accelerator(Accelerator(cpu=True), global_batch_size=8)
    plain, count = nn.Linear(5, 1), Count()
    model, optimizer, loader = accelerator.prepare(
        plain, torch.optim.SGD(plain.parameters(), lr=0.1), DataLoader(data(), batch_size=2)
    )
    accelerator.register_for_checkpointing(count)

    def train_through() -> None:
        for _ in train.epochs(1):
            for _, x, y in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(nn.functional.mse_loss(model(x), y))
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                count.steps += 1

    with pytest.raises(UsageError, match="changed before the step was done"):
        train_through()


def fit(module: Any) -> None:
    strategy, plugins = RayDDPStrategy(), [RayLightningEnvironment()]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", strategy=strategy, plugins=plugins, max_epochs=1, **quiet)  # type: ignore[arg-type]
    prepare_trainer(trainer).fit(module)


def test_a_release_whose_trainer_has_another_loop_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(of_transformers, "OLDEST", Version("99.0"))
    with pytest.raises(UsageError, match=r"transformers 5\..*: expected 99\.0 or newer"):
        of_transformers.prepare_trainer(object.__new__(of_transformers.Trainer))


@pytest.mark.parametrize(
    ("begin", "says"),
    [
        (lambda: fit(ManualOptimBoringModel()), "automatic_optimization=False"),
        (lambda: prepare_trainer(Trainer(accelerator="cpu")), "has the strategy SingleDevice"),
        (
            lambda: prepare_accelerator(Accelerator(cpu=True, gradient_accumulation_steps=2)),
            "gradient_accumulation_steps=2: leave it out",
        ),
        (
            lambda: prepare_accelerator(
                Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
            ),
            "split_batches=True",
        ),
        (lambda: Trainer(strategy=RayFSDPStrategy("FULL_SHARD")), "parallel_strategy='fsdp'"),
        (lambda: Trainer(strategy=RayDeepSpeedStrategy(stage=3)), "DeepSpeed holds groups"),
        (lambda: of_transformers.prepare_trainer(3), "expected a transformers.Trainer"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_train_so_is_told_what_to_write(begin: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        begin()
    assert not reported


def test_a_strategy_may_be_created_in_the_driver_and_be_pickled_with_the_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as driver:
        driver.setattr(train_call, "current", lambda: None)
        pickled = pickle.dumps(RayDDPStrategy(find_unused_parameters=True))
    trainer = Trainer(accelerator="cpu", strategy=pickle.loads(pickled))
    assert prepare_trainer(trainer).strategy.root_device == torch.device("cpu")
    assert trainer.is_global_zero
