"""Typical users' training loops, for tests; each runs as one rank of a formed group.

Each is a train function. Its return value goes to the test; `bits` are those of its weights.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from elastic import train
from elastic.core.events.worker import RequestLeave
from elastic.core.facts import Generation
from elastic.train.session import require_engine
from elastic.train.torch import (
    prepare_data_loader,
    prepare_model,
    prepare_optimizer,
    prepare_scheduler,
)
from elastic.worker.engine.group_sync import others_have_begun
from elastic.worker.process import local
from elastic.worker.process.local import LocalRun, local_context

SAMPLES, MICRO, GLOBAL, EPOCHS = 40, 2, 12, 2
"""A step has six micro-batches; in the incomplete last step, four are empty."""
LOOPS: dict[str, Callable[..., Any]] = {}


def run(name: str, arguments: dict[str, Any]) -> Any:
    """Run this rank of a loop."""
    # The count must start equal on all members, which may have been in different groups before.
    local._contexts_opened = 0
    with local_context(LocalRun(job_name=name, timeout_s=60.0)):
        return LOOPS[name](**arguments)


def loop(function: Callable[..., Any]) -> Callable[..., Any]:
    LOOPS[function.__name__] = function
    return function


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, 5, generator=generator)
    return TensorDataset(torch.arange(SAMPLES), x, x.sum(1, keepdim=True))


def network(*, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(6) if norm else nn.Tanh()
    return nn.Sequential(nn.Linear(5, 6), middle, nn.Linear(6, 1))


def loader(**options: Any) -> Any:
    made = DataLoader(data(), batch_size=MICRO, **({"shuffle": True} | options))
    return prepare_data_loader(made, global_batch_size=GLOBAL)


def square(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(out, y)


def bits(tensors: Iterable[torch.Tensor]) -> str:
    parts = b"".join(one.detach().numpy().tobytes() for one in tensors)
    return hashlib.sha256(parts).hexdigest()[:16]


# --------------------------------------------------------------------------- ranks that differ


@loop
def differing(what: str, ranks: list[int], at: int = 2, times: int = 1) -> dict[str, Any]:
    """Change something on some ranks after so many steps, differently on each."""
    net = network(norm=True)
    model = prepare_model(net)
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    average = torch.optim.swa_utils.AveragedModel(net, avg_fn=lambda old, new, _: (old + new) / 2)
    counter = Counter()
    train.register(average=average, counter=counter)
    batches, left, steps = loader(), times, 0
    rank, state = dist.get_rank(), net.state_dict()
    logged: list[str] = []

    def note() -> None:
        logged.append(", ".join(f"{value:.12f}" for value in train.get_logged().values()))

    def disturb() -> None:
        if what == "bit":
            state["2.weight"].view(torch.int32)[0, 0] ^= 1 << (3 + rank)
        elif what == "gradient":
            state["2.bias"].sub_(0.01 * (rank + 1))
        elif what == "buffer":
            state["1.running_mean"].add_(0.5 * rank + 0.1)
        elif what == "average":
            next(iter(average.parameters())).data.add_(rank + 1.0)
        elif what == "counter":
            counter.count += rank + 1

    for _ in train.epochs(EPOCHS):
        for _, x, y in batches:
            loss = square(model(x), y)
            loss.backward()
            train.log(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
            if train.stepped():
                note()
                average.update_parameters(net)
                counter.count += 1
                steps += 1
                if steps >= at and left and rank in ranks:
                    left -= 1
                    disturb()
    note()
    tensors = [*net.state_dict().values(), *average.state_dict().values()]
    return {"bits": bits(tensors), "count": counter.count, "steps": steps, "logged": logged}


class Counter:
    """A user's own stateful object."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


@loop
def leaving(asked: bool) -> list[tuple[int, dict[str, float]]]:
    """Be asked to leave by plan in the second step; return what is known of logs, by step."""
    model, batches = prepare_model(network()), loader()
    optimizer = sgd(model.parameters())
    engine: Any = require_engine("leaving")
    is_asked, known = [asked], []

    def leave_request(generation: Generation) -> RequestLeave | None:
        is_due = engine.cursor.step == 1 and is_asked[0]
        return RequestLeave(generation, "drain") if is_due else None

    def rejoin(*_: Any) -> None:
        is_asked[0] = False
        if dist.get_rank() == 1:  # Another process has its place now.
            engine.run.logbook.receive(engine.run.logbook.latest, ["loss"])

    engine.context.link.leave_request = leave_request
    engine.groups.rejoin = rejoin
    for _ in train.epochs(1):
        for _, x, y in batches:
            known.append((engine.cursor.step, train.get_logged()))
            loss = square(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            train.log(loss=loss)
    assert not is_asked[0]
    assert others_have_begun(is_inside=True) is others_have_begun(is_inside=False) is asked
    return known


# --------------------------------------------------------------------------- the usual loops


@loop
def usual(how: str) -> Any:
    """Run one of the usual loops; return the bits of the weights and the logged values."""
    net = network()
    model = prepare_model(net)
    return USUAL[how](model, net)


USUAL: dict[str, Callable[[nn.Module, nn.Sequential], Any]] = {}


def named(function: Callable[[nn.Module, nn.Sequential], Any]) -> Any:
    USUAL[function.__name__] = function
    return function


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> str:
    """Run the plain loop; return the bits of the weights and the logged loss."""
    for _ in train.epochs(EPOCHS):
        for _, x, y in batches:
            optimizer.zero_grad()
            loss = square(model(x), y)
            loss.backward()
            optimizer.step()
            train.log(loss=loss.item())
    return bits(model.parameters()) + f" {train.get_logged()['loss']:.12f}"


def sgd(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return prepare_optimizer(torch.optim.SGD(parameters, **({"lr": 0.05} | options)))


@named
def several_optimizers_and_schedulers(model: nn.Module, net: nn.Sequential) -> str:
    body, head = sgd(net[0].parameters(), momentum=0.9), sgd(net[2].parameters())
    by_step = prepare_scheduler(torch.optim.lr_scheduler.StepLR(body, 1, gamma=0.9))
    by_epoch = prepare_scheduler(torch.optim.lr_scheduler.ExponentialLR(head, 0.5))
    batches = loader()
    for _ in train.epochs(EPOCHS):
        for _, x, y in batches:
            square(model(x), y).backward()
            for optimizer in (head, body):
                optimizer.step()
                optimizer.zero_grad()
            by_step.step()
        by_epoch.step()
    return f"{bits(net.parameters())} {by_step.get_last_lr()} {by_epoch.get_last_lr()}"


@named
def scaler_and_clipping(model: nn.Module, net: nn.Sequential) -> str:
    optimizer, batches = sgd(net.parameters()), loader()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    for _ in train.epochs(EPOCHS):
        for _, x, y in batches:
            scaler.scale(square(model(x), y)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return f"{bits(net.parameters())} {scaler.get_scale()}"


@named
def noise_on_gradients(model: nn.Module, net: nn.Sequential) -> str:
    optimizer, batches = sgd(net.parameters()), loader()
    for _ in train.epochs(EPOCHS):
        for step in train.steps(batches):
            for _, x, y in step:
                square(model(x), y).backward()
            for parameter in net.parameters():
                parameter.grad += 0.1 * torch.randn_like(parameter)  # type: ignore[operator]
            optimizer.step()
            optimizer.zero_grad()
    return bits(net.parameters())


@named
def early_exits(model: nn.Module, net: nn.Sequential) -> str:
    optimizer, batches, context = sgd(net.parameters()), loader(), train.get_context()
    for epoch in train.epochs(EPOCHS + 1):
        if epoch == 1:
            continue
        for _, x, y in batches:
            loss = square(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if train.stepped() and context.get_step() == 2:
                break
    return bits(net.parameters())


@named
def distributed_sampler(model: nn.Module, net: nn.Sequential) -> str:
    sampler = DistributedSampler(data(), dist.get_world_size(), dist.get_rank(), seed=7)
    batches, optimizer = loader(shuffle=False, sampler=sampler), sgd(net.parameters())
    for epoch in train.epochs(EPOCHS):
        sampler.set_epoch(epoch)
        batches.sampler.set_epoch(epoch)
        for _, x, y in batches:
            square(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return bits(net.parameters())


@named
def weighted_sampler(model: nn.Module, net: nn.Sequential) -> str:
    sampler = WeightedRandomSampler([1.0 + number for number in range(SAMPLES)], SAMPLES - 3)
    return trained(model, sgd(net.parameters()), loader(shuffle=False, sampler=sampler))


@named
def torchs_batch_sampler(model: nn.Module, net: nn.Sequential) -> str:
    batches = BatchSampler(RandomSampler(data()), MICRO, drop_last=True)
    made = prepare_data_loader(DataLoader(data(), batch_sampler=batches), global_batch_size=GLOBAL)
    return trained(model, sgd(net.parameters()), made)


@named
def no_sync(model: nn.Module, net: nn.Sequential) -> str:
    optimizer, batches = sgd(net.parameters()), loader()
    with model.no_sync():  # type: ignore[operator]
        pass
    for _ in train.epochs(EPOCHS):
        for _, x, y in batches:
            with model.no_sync():  # type: ignore[operator]
                square(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return bits(net.parameters())


@named
def accumulation_by_hand(model: nn.Module, net: nn.Sequential) -> None:
    optimizer = sgd(net.parameters())
    for _ in train.epochs(EPOCHS):
        for number, (_, x, y) in enumerate(loader()):
            (square(model(x), y) / 2).backward()
            if (number + 1) % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()


@named
def collective_in_each_micro_batch(model: nn.Module, net: nn.Sequential) -> str:
    optimizer, number = sgd(net.parameters()), 3
    batches = prepare_data_loader(DataLoader(data(), MICRO), global_batch_size=number * MICRO)
    for _ in train.epochs(EPOCHS):
        for _, x, y in batches:
            loss = square(model(x), y)
            dist.all_reduce(loss.detach().clone())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return bits(net.parameters())


@named
def closure(model: nn.Module, net: nn.Sequential) -> None:
    optimizer = prepare_optimizer(torch.optim.LBFGS(net.parameters()))
    for _ in train.epochs(EPOCHS):
        for _, x, y in loader():
            optimizer.step(lambda x=x, y=y: square(model(x), y))


@named
def batches_left_out(model: nn.Module, net: nn.Sequential) -> None:
    optimizer = sgd(net.parameters())
    for _ in train.epochs(EPOCHS):
        for number, (_, x, y) in enumerate(loader()):
            if number == 1:
                continue
            square(model(x), y).backward()
            optimizer.step()


class Buckets(BatchSampler):
    """Batches of unlike size, in an order of torch's generator, as of texts of like length."""

    def __init__(self) -> None:
        ends = [*range(0, SAMPLES, 9), SAMPLES]
        self.batches = [list(range(*pair)) for pair in itertools.pairwise(ends)]
        self.batches += [batch[::2] for batch in self.batches]
        for batch in self.batches[: len(ends) - 1]:
            del batch[::2]

    def __iter__(self) -> Iterator[list[int]]:
        return iter([self.batches[i] for i in torch.randperm(len(self.batches)).tolist()])

    def __len__(self) -> int:
        return len(self.batches)


def train_alone(
    net: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[list[int] | slice]
) -> None:
    """Train as a loop of torch's own does, a step with each of these parts of the data."""
    for part in steps:
        _, x, y = data()[part]  # type: ignore[index]
        optimizer.zero_grad()
        square(net(x), y).backward()
        optimizer.step()


@named
def own_batch_sampler(model: nn.Module, net: nn.Sequential) -> str:
    """Each sample once an epoch; a step's gradient is that of the mean over all its samples."""
    plain, steps = deepcopy(net), list[list[int]]()
    loader = DataLoader(data(), batch_sampler=Buckets())
    batches, optimizer = prepare_data_loader(loader, batches_per_step=4), sgd(net.parameters())
    assert batches.dataset is loader.dataset
    for epoch in train.epochs(EPOCHS):
        left = set(range(SAMPLES))
        for ids, x, y in batches:
            step = epoch * len(batches) + train.get_context().get_step()
            steps += [[] for _ in range(step + 1 - len(steps))]
            # The last step has fewer batches: others compute with one of them again.
            steps[step] += left & set(ids.tolist())
            left -= set(ids.tolist())
            square(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert dist.get_world_size() > 1 or not left
    if dist.get_world_size() == 1:
        train_alone(plain, torch.optim.SGD(plain.parameters(), **optimizer.defaults), steps)
        torch.testing.assert_close(plain.state_dict(), net.state_dict())
    return bits(net.parameters())


@named
def gradual_unfreezing(model: nn.Module, net: nn.Sequential) -> str:
    """The body is frozen in the first epoch, the head in the last; as in a loop of torch's own.

    One bias is frozen wherever a pass begins, as loops of GANs leave their networks.
    """
    plain, optimizer = deepcopy(net), sgd(net.parameters())
    alone = torch.optim.SGD(plain.parameters(), **optimizer.defaults)
    batches = loader(shuffle=False)

    def freeze(layers: nn.Sequential, epoch: int) -> None:
        for number, layer in enumerate(layers):
            for parameter in layer.parameters():
                parameter.requires_grad = not (
                    (epoch == 0 and number == 0) or (epoch == 2 and number)
                )

    freeze(net, 0)
    for epoch in train.epochs(3):
        freeze(net, epoch)
        net[2].bias.requires_grad = epoch == 0
        for _, x, y in batches:
            net[2].bias.requires_grad = epoch < 2
            square(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            net[2].bias.requires_grad = False
    if dist.get_world_size() == 1:
        for epoch in range(3):
            freeze(plain, epoch)
            train_alone(plain, alone, [slice(at, at + GLOBAL) for at in range(0, SAMPLES, GLOBAL)])
        torch.testing.assert_close(plain.state_dict(), net.state_dict())
    return bits(net.parameters())


@named
def unfrozen_within_an_epoch(model: nn.Module, net: nn.Sequential) -> None:
    net[0].weight.requires_grad = False
    optimizer, batches = sgd(net.parameters()), loader()
    for _ in train.epochs(EPOCHS):
        for _, x, y in batches:
            square(model(x), y).backward()
            optimizer.step()
            if train.stepped():
                net[0].weight.requires_grad = True


@named
def forgotten_optimizer(model: nn.Module, net: nn.Sequential) -> None:
    body, head = sgd(net[0].parameters()), torch.optim.SGD(net[2].parameters(), lr=0.1)
    for _ in train.epochs(EPOCHS):
        for _, x, y in loader():
            square(model(x), y).backward()
            body.step()
            head.step()


@named
def steps_by_hand(model: nn.Module, net: nn.Sequential) -> None:
    optimizer = sgd(net[0].parameters())
    for _ in train.epochs(EPOCHS):
        for _, x, y in loader():
            square(model(x), y).backward()
            optimizer.step()
            with torch.no_grad():
                for parameter in net[2].parameters():
                    parameter -= 0.1 * parameter.grad  # type: ignore[operator]
            model.zero_grad()


@named
def sampler_of_each_rank(model: nn.Module, net: nn.Sequential) -> None:
    class Mine(RandomSampler):
        def __iter__(self) -> Iterator[int]:
            order = list(super().__iter__())
            place = dist.get_rank()
            return iter(order[place:] + order[:place])

    batches = loader(shuffle=False, sampler=Mine(data()))
    trained(model, sgd(net.parameters()), batches)


# --------------------------------------------------------------------------- evaluation


@loop
def evaluating(where: str) -> Any:
    """Evaluate by prepared loaders, inside the loop over epochs and after it."""
    net = network(norm=True)
    model = prepare_model(net)
    optimizer, batches = sgd(net.parameters()), loader()
    held_out = prepare_data_loader(DataLoader(data(), batch_size=7))
    single = prepare_data_loader(DataLoader(data(), batch_size=None, shuffle=True))
    few = prepare_data_loader(DataLoader(torch.arange(2), batch_size=2))
    found: list[Any] = []

    def evaluate() -> None:
        model.eval()
        seen, ids, losses, texts = [], [], [], []
        with torch.no_grad():
            for number, x, y in held_out:
                out = model(x) + torch.rand_like(y)  # As a model that samples.
                seen.append({"out": out, "y": y.numpy()})
                ids.append(number)
                losses.append(square(model(x), y))
                texts.append([f"sample {one}" for one in number.tolist()])
        model.train()
        assert len(held_out) == len(seen)  # As in `total_loss / len(loader)`.
        if where == "inside the pass":
            with torch.no_grad():
                for _ in held_out:
                    train.gather_for_metrics(seen)
        merged = train.gather_for_metrics(seen)
        numbers, means, names = train.gather_for_metrics((ids, losses, texts))
        assert numbers.tolist() == list(range(SAMPLES))
        assert names == [f"sample {number}" for number in range(SAMPLES)]
        assert len(means) == -(-SAMPLES // 7)
        drawn = torch.rand(1)
        found.append(bits([merged["out"], torch.from_numpy(merged["y"]), means, drawn]))

    for _ in train.epochs(EPOCHS):
        for _, x, y in batches:
            square(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        if where == "loop":
            evaluate()
    if where != "loop":
        evaluate()
    with torch.inference_mode():
        whole = [int(number) for number, *_ in single]
        halves = list(few)
    order = train.gather_for_metrics(whole, loader=single)
    assert sorted(order) == list(range(SAMPLES))
    assert train.gather_for_metrics(halves).tolist() == [0, 1]
    return [*found, order]


@loop
def by_rank() -> Any:
    """Read data as scripts for Ray Train do, without `train.epochs`; torch reduces gradients."""
    net = network()
    model = prepare_model(net)
    batches = prepare_data_loader(DataLoader(data(), batch_size=4, shuffle=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    order = []
    for epoch in range(2):
        batches.sampler.set_epoch(epoch)
        for place, (number, x, y) in enumerate(batches):
            order += number.tolist()
            with model.no_sync() if place % 2 == 0 else nullcontext():  # type: ignore[operator]
                (square(model(x), y) / 2).backward()
            if place % 2:
                optimizer.step()
                optimizer.zero_grad()
    with torch.no_grad():
        numbers = train.gather_for_metrics([number for number, *_ in batches])
    return [bits(net.parameters()), sorted(order), sorted(numbers.tolist())]
