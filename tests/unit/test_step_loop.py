"""A plain training loop over the step engine, in this process: context, evaluation, refusals."""

from __future__ import annotations

import copy
import json
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from elastic import train
from elastic.errors import UsageError
from elastic.train.torch import (
    TorchTrainer,
    prepare_data_loader,
    prepare_model,
    prepare_optimizer,
    prepare_scheduler,
)
from elastic.worker.engine.train_call import current, current_engine, set_current
from elastic.worker.process.local import LocalRun, local_context
from tests.patience import wait_for
from tests.unit.engine_under_test import (
    GLOBAL,
    SAMPLES,
    SIZE,
    STEPS,
    Loop,
    V,
    bits,
    data,
    each,
    inside_a_run,
    inside_again,
    near,
    network,
    square,
    whole_batches,
)

_inside = pytest.fixture(autouse=True, name="_inside")(inside_a_run)


def test_the_context_tells_how_a_step_is_cut() -> None:
    loop = Loop.make()
    context = train.get_context()
    with pytest.raises(UsageError, match="known once a prepared loader is read"):
        context.get_global_batch_size()
    for _, x, y in loop.batches(1):
        square(loop.model(x), y).backward()
        loop.optimizer.step()
        assert context.get_global_batch_size() == GLOBAL
        assert context.get_micro_batch_size() == SIZE
        assert context.get_num_micro_batches() == V
    assert (context.get_world_size(), context.get_world_rank()) == (1, 0)
    assert (context.get_epoch(), context.get_step()) == (1, 0)
    assert len(loop.loader) == STEPS


def test_epochs_begin_where_they_are_told() -> None:
    Loop.make()
    assert list(train.epochs(4, start=2)) == [2, 3]


def test_a_second_loop_is_refused() -> None:
    """As for the second fold of a cross-validation: all its epochs would be done."""
    Loop.make()
    assert list(train.epochs(2)) == [0, 1]
    Loop.make()
    with pytest.raises(UsageError, match=r"a loop over it came before.*train_loop_config=\{'fold'"):
        next(train.epochs(2))


def test_an_epoch_may_be_left_early_and_may_have_no_pass_at_all() -> None:
    loop = Loop.make()
    before, epochs = bits(loop.plain), []
    for epoch in train.epochs(3):
        epochs.append((epoch, train.get_context().get_step()))
        if epoch == 1:
            continue
        for _, x, y in loop.loader:
            square(loop.model(x), y).backward()
            loop.optimizer.step()
            if train.stepped():
                break
        assert train.stepped()
    assert epochs == [(0, 0), (1, 0), (2, 0)]
    assert bits(loop.plain) != before
    assert all(p.grad is None for p in loop.plain.parameters()) or train.stepped()


def test_an_epoch_may_be_left_at_the_beginning_of_a_step() -> None:
    loop = Loop.make()
    for _ in train.epochs(1):
        for _, x, y in loop.loader:
            if train.get_context().get_step() == 1:
                break
            square(loop.model(x), y).backward()
            loop.optimizer.step()


@pytest.mark.parametrize("takes", ["micro-batches", "steps"])
def test_an_epoch_whose_iterator_is_kept_ends_with_it(takes: str) -> None:
    """Who calls next() as often as len(loader) says reads a part of the epoch, or all steps."""
    loop, done = Loop.make(), []

    def one_pass(_: int) -> None:
        batches = iter(train.steps(loop.loader) if takes == "steps" else loop.loader)
        for _ in range(len(loop.loader)):
            for _, x, y in [next(batches)] if takes == "micro-batches" else next(batches):
                square(loop.model(x), y).backward()
            loop.optimizer.step()
        done.append(batches)

    if takes == "steps":
        each(train.epochs(2), one_pass)
        assert len(done) == 2
        return
    with pytest.raises(UsageError, match="left in the middle of step 0 of epoch 0"):
        each(train.epochs(2), one_pass)


@pytest.mark.parametrize("setting", ["lr", "weight_decay"])
@pytest.mark.parametrize("follows", ["iterations", "steps"])
def test_a_learning_rate_may_follow_steps_and_not_iterations(follows: str, setting: str) -> None:
    loop, context = Loop.make(), train.get_context()

    def one(numbered: tuple[int, Any]) -> None:
        it, (_, x, y) = numbered
        at = it if follows == "iterations" else context.get_step()
        loop.optimizer.param_groups[0][setting] = 0.1 / (1 + at)
        square(loop.model(x), y).backward()
        loop.optimizer.step()

    if follows == "steps":
        each(enumerate(loop.batches()), one)
        return
    with pytest.raises(UsageError, match=r"different learning rates \(or .* in step 0 of epoch 0"):
        each(enumerate(loop.batches()), one)


def test_evaluation_within_an_epoch_reads_everything_and_changes_nothing() -> None:
    loop, twin = Loop.make(), network()
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    test_loader = prepare_data_loader(DataLoader(data(), batch_size=5))
    seen: list[list[int]] = []

    def evaluate() -> None:
        loop.model.eval()
        with torch.no_grad():
            seen.append([i for number, x, _ in test_loader for i in number.tolist()])
        loop.model.train()

    for _ in train.epochs(1):
        for _, x, y in loop.loader:
            evaluate()
            square(loop.model(x), y).backward()
            loop.optimizer.step()
            evaluate()
            loop.optimizer.zero_grad()
        evaluate()
    for _, x, y in whole_batches():
        plain.zero_grad()
        square(twin(x), y).backward()
        plain.step()
    assert len(seen) == 2 * STEPS * V + 1
    assert all(one == list(range(SAMPLES)) for one in seen)
    assert near(loop.plain, twin)


def test_what_no_optimizer_steps_is_clipped_with_the_gradient_of_the_step() -> None:
    whole, twin = network(), network()
    model = prepare_model(whole)
    ours = prepare_optimizer(torch.optim.SGD(whole[2].parameters(), lr=0.1))
    plain = torch.optim.SGD(twin[2].parameters(), lr=0.1)
    loader = DataLoader(data(), batch_size=SIZE)
    for _ in train.epochs(1):
        for _, x, y in prepare_data_loader(loader, global_batch_size=GLOBAL):
            square(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            ours.step()
            model.zero_grad()
    for _, x, y in whole_batches():
        square(twin(x), y).backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        plain.step()
        twin.zero_grad()
    assert near(whole, twin)


def test_what_an_evaluation_draws_follows_from_the_place_in_the_run() -> None:
    """Not from the passes before it, of which a worker that joins has none."""
    found = []
    for start in (0, 1):
        with inside_again():
            loop = Loop.make()
            test_loader = prepare_data_loader(DataLoader(data(), batch_size=5, shuffle=True))
            for _ in train.epochs(2, start=start):
                for _, x, y in loop.loader:
                    square(loop.model(x), y).backward()
                    loop.optimizer.step()
                with torch.no_grad():
                    before = torch.get_rng_state()
                    for _ in range(2):
                        drawn = [(n.tolist(), torch.rand(1).item()) for n, *_ in test_loader]
                        found.append(drawn)
                    assert torch.equal(torch.get_rng_state(), before)
    assert found[2:4] == found[4:]
    assert found[0] != found[1] != found[2] != found[3]


def test_an_evaluation_that_is_read_beside_training_leaves_its_draws_alone() -> None:
    found = []
    for evaluates in (False, True):
        with inside_again():
            loop, drawn = Loop.make(), list[float]()
            with torch.no_grad():
                held = iter(prepare_data_loader(DataLoader(data(), batch_size=1, shuffle=True)))
            for _ in train.epochs(2):
                for _, x, y in loop.loader:
                    if evaluates:
                        with torch.no_grad():
                            next(held, None)
                    drawn.append(torch.rand(1).item())
                    square(loop.model(x), y).backward()
                    loop.optimizer.step()
            del held
            found.append(drawn)
    assert found[0] == found[1]


def test_a_hook_of_an_optimizer_may_ask_whether_the_step_is_done() -> None:
    loop, asked = Loop.make(), []
    loop.optimizer.register_step_post_hook(lambda *_: asked.append(train.stepped()))
    for _ in train.epochs(1):
        for _, x, y in loop.loader:
            square(loop.model(x), y).backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            train.stepped()
    assert len(asked) == STEPS


def test_what_is_drawn_around_the_pass_of_an_epoch_follows_from_its_number() -> None:
    """A worker that joins there has drawn nothing before, or something else."""
    found = []
    for start in (0, 1):
        with inside_again():
            loop = Loop.make()
            for _ in train.epochs(2, start=start):
                found.append(torch.rand(1).item())
                for _, x, y in loop.loader:
                    square(loop.model(x), y).backward()
                    loop.optimizer.step()
                    torch.rand(1 + start)
                found.append(torch.rand(1).item())
    assert len({*found[:4]}) == 4
    assert found[4:] == found[2:4]


def test_a_model_without_samples_left_in_a_step_still_steps() -> None:
    model = prepare_model(nn.Linear(5, 1))
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    few = torch.utils.data.Subset(data(), [0, 1])
    loader = prepare_data_loader(DataLoader(few, batch_size=SIZE), global_batch_size=GLOBAL)
    for _ in train.epochs(1):
        for _, x, y in loader:
            square(model(x), y).backward()
            optimizer.step()
            train.log(count=1.0)
        assert train.get_logged() == {"count": 1.0}
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert train.get_context().get_epoch() == 1


def test_whole_objects_may_be_saved_and_copied_within_the_loop(tmp_path: Path) -> None:
    loop = Loop.make()
    scheduler = prepare_scheduler(torch.optim.lr_scheduler.StepLR(loop.optimizer, 1))
    average = torch.optim.swa_utils.AveragedModel(loop.model)
    train.register(average=average)
    for _, x, y in loop.batches():
        square(loop.model(x), y).backward()
        loop.optimizer.step()
        scheduler.step()
        if train.stepped():
            average.update_parameters(loop.model)
        twin = copy.deepcopy(loop.model)
        square(twin(x), y).backward()
        for thing in (loop.model, loop.optimizer, scheduler, average):
            torch.save(thing, tmp_path / "whole.pt")
            found = torch.load(tmp_path / "whole.pt", weights_only=False)
            if isinstance(thing, nn.Module):
                assert torch.equal(found(x), thing(x))
            else:
                assert found.state_dict() == thing.state_dict()
            assert type(copy.deepcopy(thing)) is type(found)


def test_after_the_loop_optimizers_and_losses_are_ordinary_again() -> None:
    loop = Loop.make()
    for _, x, y in loop.batches(1):
        square(loop.model(x), y).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    before = bits(loop.plain)
    loop.plain(torch.ones(2, 5)).sum().backward()
    assert all(p.grad is not None for p in loop.plain.parameters())
    loop.optimizer.step()
    assert bits(loop.plain) != before


def test_a_loop_that_never_steps_is_refused_by_the_step() -> None:
    loop = Loop.make()
    with pytest.raises(UsageError, match=r"step\(\) was not called in step 0 of epoch 0"):
        each(loop.batches(), lambda batch: square(loop.model(batch[1]), batch[2]).backward())


@pytest.mark.parametrize("left_out", range(V))
def test_an_iteration_that_does_not_step_is_refused_wherever_it_is(left_out: int) -> None:
    """As in loops that `continue` when a loss is not finite: at every world size, or at none."""
    loop = Loop.make()

    def one(numbered: tuple[int, Any]) -> None:
        number, (_, x, y) = numbered
        if number != V + left_out:
            square(loop.model(x), y).backward()
            loop.optimizer.step()

    with pytest.raises(UsageError, match=r"leave a batch out, call zero_grad\(\) and step\(\)"):
        each(enumerate(loop.batches(1)), one)


@pytest.mark.parametrize("left_out", [*range(V), None])
def test_a_batch_that_is_left_out_adds_nothing(left_out: int | None) -> None:
    loop, twin = Loop.make(momentum=0.9, weight_decay=0.01), network()
    plain = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for number, (_, x, y) in enumerate(loop.batches(1)):
        loss = square(loop.model(x), y)
        if number // V != 1 or left_out not in (number % V, None):
            loss.backward()
        else:
            loop.optimizer.zero_grad()
        loop.optimizer.step()
    for number, (_, x, y) in enumerate(whole_batches()):
        plain.zero_grad()
        parts = [part for part in range(V) if number != 1 or left_out not in (part, None)]
        for part in parts:
            some = slice(SIZE * part, SIZE * part + SIZE)
            if len(x[some]):
                (square(twin(x[some]), y[some]) * len(x[some]) / len(x)).backward()
        plain.step()
    assert near(loop.plain, twin)


def test_a_closure_is_refused() -> None:
    loop = Loop.make(torch.optim.LBFGS)
    with pytest.raises(UsageError, match=r"LBFGS\.step\(closure\).*takes no closure"):
        each(loop.batches(), lambda _: loop.optimizer.step(lambda: 0.0))


@pytest.mark.parametrize(
    ("prepare", "what"),
    [
        (lambda loop: prepare_model(nn.Linear(1, 1)), "prepare_model"),
        (
            lambda loop: prepare_optimizer(torch.optim.SGD(nn.Linear(1, 1).parameters())),
            "prepare_optimizer",
        ),
        (
            lambda loop: prepare_scheduler(torch.optim.lr_scheduler.StepLR(loop.optimizer, 1)),
            "prepare_scheduler",
        ),
        (lambda loop: train.register(thing=loop.optimizer), "train.register"),
    ],
)
def test_nothing_is_prepared_inside_the_loop(prepare: Callable[[Loop], Any], what: str) -> None:
    loop = Loop.make()
    with pytest.raises(UsageError, match=f"{what} was called inside the loop"):
        each(train.epochs(1), lambda _: prepare(loop))


def test_what_is_no_optimizer_is_refused() -> None:
    class Noam:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        def step(self) -> None:
            self.optimizer.step()

    with pytest.raises(UsageError, match=r"a Noam is no torch\.optim\.Optimizer: prepare the one"):
        prepare_optimizer(Noam(Loop.make().optimizer))  # type: ignore[arg-type]


def test_nothing_is_prepared_twice() -> None:
    loop = Loop.make()
    scheduler = prepare_scheduler(torch.optim.lr_scheduler.StepLR(loop.optimizer, 1))
    with pytest.raises(UsageError, match="optimizer is prepared already"):
        prepare_optimizer(loop.optimizer)
    with pytest.raises(UsageError, match="scheduler is prepared already"):
        prepare_scheduler(scheduler)
    with pytest.raises(UsageError, match="object has no step, state_dict"):
        prepare_scheduler(object())


@pytest.mark.parametrize(
    ("thing", "says"), [(object(), "object has no state_dict"), (nn.Linear(1, 1), "this name")]
)
def test_an_object_that_cannot_be_registered_is_refused(thing: Any, says: str) -> None:
    train.register(mine=nn.Linear(1, 1))
    with pytest.raises(UsageError, match=says):
        train.register(mine=thing)


def test_a_metric_that_does_not_save_what_it_counts_is_refused() -> None:
    metric = pytest.importorskip("torchmetrics").MeanMetric()
    with pytest.raises(UsageError, match=r"call mean\.persistent\(True\) before"):
        train.register(mean=metric)
    metric.persistent(True)
    train.register(mean=metric)
    metric.update(3.0)
    engine = current_engine()
    assert engine is not None
    assert float(engine.state.take()["registered"]["mean"]["mean_value"]) == 3.0


def test_a_metric_within_another_is_named_and_one_within_a_model_is_let_be() -> None:
    library = pytest.importorskip("torchmetrics")
    metric = library.MinMaxMetric(library.MeanMetric())
    metric.persistent(True)
    with pytest.raises(UsageError, match=r"call best\._base_metric\.persistent\(True\) before"):
        train.register(best=metric)
    metric._base_metric.persistent(True)
    train.register(best=metric, average=nn.Sequential(nn.Linear(1, 1), library.MeanMetric()))


def test_a_loop_without_an_optimizer_is_refused() -> None:
    prepare_model(nn.Linear(1, 1))
    with pytest.raises(UsageError, match="no optimizer was prepared"):
        list(train.epochs(1))


@pytest.mark.parametrize("total", [-1, 1.5, True, "3", None])
def test_numbers_of_epochs_that_are_none_are_refused(total: Any) -> None:
    Loop.make()
    with pytest.raises(UsageError, match=r"train\.epochs: total=.*expected an int"):
        train.epochs(total)
    with pytest.raises(UsageError, match=r"train\.epochs: start=.*expected an int"):
        train.epochs(1, start=total)


def test_a_loop_in_a_loop_is_refused() -> None:
    Loop.make()
    with pytest.raises(UsageError, match="running already"):
        each(train.epochs(1), lambda _: next(train.epochs(1)))


def test_two_loaders_at_once_are_refused() -> None:
    loop = Loop.make()
    other = prepare_data_loader(DataLoader(data(), batch_size=SIZE), global_batch_size=GLOBAL)
    with pytest.raises(UsageError, match="two prepared loaders are read at the same time"):
        each(loop.batches(), lambda _: next(iter(other)))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_loader_that_is_made_in_each_epoch_ends_with_it() -> None:
    loop = Loop.make()
    for _ in train.epochs(3):
        made = DataLoader(data(), batch_size=SIZE, num_workers=1)
        loader = prepare_data_loader(made, global_batch_size=GLOBAL)
        for _, x, y in loader:
            square(loop.model(x), y).backward()
            loop.optimizer.step()
        wait_for(lambda: len(multiprocessing.active_children()) == 1, "the last loader's process")


@pytest.mark.parametrize("number", [1, 2])
def test_a_length_that_is_no_number_of_steps_is_refused_in_the_loop(number: int) -> None:
    model = prepare_model(nn.Linear(5, 1))
    made = DataLoader(data(), batch_size=SIZE)
    loader = prepare_data_loader(made, global_batch_size=number * SIZE)
    length = len(loader)
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in train.epochs(1):
        if number == 1:
            assert sum(1 for _ in loader if optimizer.step() is None) == length
            continue
        with pytest.raises(UsageError, match=r"len\(loader\) was 11.*an epoch has 6 steps: call"):
            iter(loader)


def test_a_loader_that_deals_by_itself_is_refused_in_the_loop() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

    Loop.make()
    loader = prepare_data_loader(DataLoader(Stream(), batch_size=2), add_dist_sampler=False)
    with pytest.raises(UsageError, match=r"cannot be read in a loop over train\.epochs"):
        each(train.epochs(1), lambda _: next(iter(loader)))


@pytest.mark.parametrize("size", [3, 7, 1, 0, -2])
def test_a_global_batch_that_is_no_multiple_is_refused(size: int) -> None:
    with pytest.raises(UsageError, match=rf"global_batch_size={size}\): expected a multiple.*=2"):
        prepare_data_loader(DataLoader(data(), batch_size=2), global_batch_size=size)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"batches_per_step": 0}, r"batches_per_step=0\): expected at least 1, one batch for each"),
        ({"batches_per_step": 2.0}, r"batches_per_step=2.0\): expected an int"),
        ({"batches_per_step": 2, "global_batch_size": 4}, "no global_batch_size beside it"),
        ({"global_batch_size": 4}, "no batch_size.*leave global_batch_size out"),
    ],
)
def test_batches_of_a_step_are_said_once_and_for_each_worker(sizes: Any, says: str) -> None:
    loader = DataLoader(data(), batch_sampler=[[0, 1], [2]])
    with pytest.raises(UsageError, match=says):
        prepare_data_loader(loader, **sizes)


@pytest.mark.parametrize("size", ["16", 8.0, True])
def test_a_global_batch_that_is_no_number_of_samples_is_refused(size: Any) -> None:
    with pytest.raises(UsageError, match=rf"global_batch_size={size!r}\): expected an int"):
        prepare_data_loader(DataLoader(data(), batch_size=2), global_batch_size=size)


def test_a_global_batch_without_a_batch_size_or_for_too_many_workers_is_refused() -> None:
    with pytest.raises(UsageError, match="the loader has no batch_size"):
        prepare_data_loader(DataLoader(data(), batch_size=None), global_batch_size=8)
    context = current()
    assert context is not None
    set_current(replace(context, max_workers=5), current_engine())
    with pytest.raises(UsageError, match="at least 10, one micro-batch for each of at most 5"):
        prepare_data_loader(DataLoader(data(), batch_size=2), global_batch_size=8)
    set_current(context, current_engine())


def test_what_user_code_raises_in_the_loop_comes_out_and_leaves_a_working_process() -> None:
    loop = Loop.make()

    def fail(_: Any) -> None:
        raise LookupError("the user's own")

    with pytest.raises(LookupError, match="the user's own"):
        each(loop.batches(), fail)
    loop.plain(torch.ones(2, 5)).sum().backward()
    assert all(p.grad is not None for p in loop.plain.parameters())


@pytest.mark.parametrize(
    "call", [train.log, train.get_logged, train.register, train.stepped, lambda: train.epochs(1)]
)
def test_outside_of_a_train_function_the_loop_has_no_words(call: Callable[[], Any]) -> None:
    context, engine = current(), current_engine()
    set_current(None)
    try:
        with pytest.raises(UsageError, match="outside a train function"):
            call()
    finally:
        set_current(context, engine)


def test_the_trainer_takes_a_whole_loop(tmp_path: Path) -> None:
    def function(config: dict[str, int]) -> float:
        loop = Loop.make(torch.optim.AdamW)
        for epoch in train.epochs(config["epochs"]):
            for _, x, y in loop.loader:
                loss = square(loop.model(x), y)
                loss.backward()
                loop.optimizer.step()
                loop.optimizer.zero_grad()
                train.log(loss=loss)
            train.report({"epoch": epoch})
        return train.get_logged()["loss"]

    outer, engine = current(), current_engine()
    set_current(None)
    try:
        result = TorchTrainer(
            function,
            train_loop_config={"epochs": 5},
            scaling_config=train.ScalingConfig(num_workers=0),
            run_config=train.RunConfig(name="whole", storage_path=tmp_path),
        ).fit()
    finally:
        set_current(outer, engine)
    losses = [row["metrics"]["loss"] for row in result.history]
    assert [row["metrics"]["epoch"] for row in result.history] == list(range(5))
    assert losses[-1] < losses[0] / 2
    assert json.dumps(result.return_value)


def test_a_profiler_shows_the_parts_of_a_step(tmp_path: Path) -> None:
    run = LocalRun(job_name="seen", run_path=str(tmp_path), options={"every_n_steps": 1})
    with local_context(run):
        loop = Loop.make()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            for _, x, y in loop.batches(1):
                square(loop.model(x), y).backward()
                loop.optimizer.step()
    shown = {event.key for event in profiler.key_averages()}
    assert shown >= {"elastic::exchange", "elastic::commit", "elastic::snapshot"}
