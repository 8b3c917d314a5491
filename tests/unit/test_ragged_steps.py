"""Steps that are not full: what a model and a collate_fn of a newcomer's make of them."""

from __future__ import annotations

from collections import OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from elastic import train
from elastic.core.policy.cursor import Cursor
from elastic.train.torch import prepare_data_loader, prepare_model, prepare_optimizer
from elastic.worker.data.copying_samples import copied
from tests.unit.engine_under_test import inside_a_run, inside_again, square
from tests.unit.streams_under_test import loader_of

_inside = pytest.fixture(autouse=True, name="_inside")(inside_a_run)


MICRO, V = 4, 3


class Stream(IterableDataset[Any]):
    """Yields what it was given, new each time."""

    def __init__(self, make: Any, count: int) -> None:
        self.make, self.count = make, count

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.count):
            yield self.make(number)


def one_epoch(samples: Any) -> int:
    """Train a model with BatchNorm on single vectors; returns the steps that were done."""
    with inside_again():
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
        model = prepare_model(plain)
        optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        loader = prepare_data_loader(
            DataLoader(samples, batch_size=MICRO), global_batch_size=MICRO * V
        )
        for _ in train.epochs(1):
            for x, y in loader:
                square(model(x), y).backward()
                optimizer.step()
        assert all(torch.isfinite(value).all() for value in plain.state_dict().values())
        return train.get_context().get_step()


def test_batchnorm_trains_where_a_stream_has_ended_before_others() -> None:
    class Uneven(Stream):
        def shard(self, num_shards: int, index: int) -> Stream:
            return Stream(self.make, self.count * (2 if index == 0 else 1))

    one_epoch(Uneven(lambda n: (torch.full((5,), float(n)), torch.ones(1)), MICRO))


# ------------------------------------------------------------------- what a collate_fn changes


def emptied(samples: list[dict[str, Any]]) -> list[int]:
    """Be a collate_fn that takes out what it has dealt with, as some of Hugging Face's do."""
    return [int(sample.pop("id")) for sample in samples]


def test_a_collate_fn_may_empty_the_samples_of_a_step_that_is_done_again() -> None:
    loader = loader_of(Stream(lambda n: {"id": n}, 10), collate_fn=emptied)
    first = []
    for _ in range(2):
        loader.take_span(Cursor(), (0, 4))
        first.append([loader.next().value for _ in range(4)])
    assert first == [[[0, 4], [1, 5], [2, 6], [3, 7]]] * 2
    # Behind the end there is the last sample, which is whole as well.
    rest = [loader.next() for _ in range(4)]
    assert [(one.count, one.value) for one in rest] == [
        (1, [8]), (1, [9]), (0, [9, 9]), (0, [9, 9]),
    ]  # fmt: skip


Point = namedtuple("Point", "x y")


class Items(list[Any]):
    """A list of a user's own."""


class Store(MutableMapping[str, Any]):
    """Keeps its values in an attribute, as most mappings of users' own do."""

    def __init__(self, **values: Any) -> None:
        self._values = values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._values[key] = value

    def __delitem__(self, key: str) -> None:
        del self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Store({self._values})"


class SlottedStore(Store):
    __slots__ = ("__more",)

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        self.__more = [1]

    def __repr__(self) -> str:
        return f"{super().__repr__()} {self.__more}"

    def clear(self) -> None:
        self.__more.clear()
        super().clear()


class File(Store):
    """Refuses to be copied, as h5py's groups do."""

    def __getnewargs__(self) -> Any:
        raise TypeError("h5py objects cannot be pickled")


@pytest.mark.parametrize(
    "sample",
    [
        {"a": [1, {"b": 2}]}, [[1], [2]], ({"a": 1}, 3), Point([1], 2), UserDict(a=1), {1, 2},
        torch.ones(2), {"a": torch.ones(2)}, (np.ones(2),),
        OrderedDict(a=[1, [2]], b=torch.ones(2)), defaultdict(list, a=[torch.ones(2)]),
        UserDict(a=torch.ones(2), b=UserList([[1]])), Items([[1], torch.ones(2)]),
        deque([[1], 2]), Store(a=[1], b=Store(c=torch.ones(2))), SlottedStore(a=[1]),
        bytearray(b"ab"),
    ],
)  # fmt: skip
def test_what_is_copied_shares_nothing_that_a_collate_fn_would_change(sample: Any) -> None:
    def change(thing: Any) -> None:
        if isinstance(thing, (torch.Tensor, np.ndarray)):
            thing += 1
            return
        for inner in list(thing.values() if hasattr(thing, "values") else thing):
            if not isinstance(inner, int):
                change(inner)
        if not isinstance(thing, tuple):
            thing.clear()

    before = repr(sample)
    copy = copied(sample)
    assert type(copy) is type(sample)
    assert repr(copy) == before
    change(copy)
    assert repr(sample) == before


def test_what_is_no_container_is_shared() -> None:
    thing = object()
    assert copied(thing) is thing
    assert copied({"a": thing})["a"] is thing


def test_what_cannot_be_copied_is_shared() -> None:
    file = File(a=[1])
    copy = copied({"file": file, "a": [2]})
    copy["a"].clear()
    assert copy["file"] is file
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert copied({"a": deep, "b": 1})["b"] == 1
    while deep:  # Else the interpreter would recurse when it frees it.
        deep = deep.pop()


def test_a_sample_that_leads_back_to_itself_is_copied_once() -> None:
    root: dict[str, Any] = {"children": []}
    root["children"].append(({"parent": root}, root["children"]))
    root["users"] = UserDict(root=root)
    copy = copied(root)
    child, siblings = copy["children"][0]
    assert copy is not root
    assert child["parent"] is copy
    assert copy["users"]["root"] is copy
    assert siblings is copy["children"]
    siblings.clear()
    assert len(root["children"]) == 1


def test_no_more_is_copied_than_there_is(tmp_path: Path) -> None:
    file = np.memmap(tmp_path / "tokens", dtype=np.uint8, mode="w+", shape=(8,))
    broadcast = np.broadcast_to(np.zeros(1), (1000,))
    assert copied({"tokens": file})["tokens"] is file
    assert copied([broadcast])[0] is broadcast
    for tensor in (torch.zeros(1, 3).expand(1000, 3), torch.arange(100).unfold(0, 50, 1)):
        copy = copied(tensor)
        assert torch.equal(copy, tensor)
        assert copy.stride() == tensor.stride()
        assert copy.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()
        copy[0] += 1
        assert not torch.equal(copy, tensor)


def test_tensors_that_want_gradients_stay_leaves() -> None:
    for tensor in (nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True)):
        copy = copied(tensor)
        assert type(copy) is type(tensor)
        assert copy.is_leaf
        assert copy.requires_grad
        copy.detach().add_(1)
        assert float(tensor.detach().sum()) == 2
