"""Ranks in threads exchange buckets over real connections and shared memory, step after step."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Iterator, Sequence

import pytest
import torch

from elastic.core.policy.microbatch import additions_in
from elastic.worker.engine.outcome import is_group_broken
from elastic.worker.group import member_links as links_module
from elastic.worker.group.member_links import MemberLinks
from elastic.worker.group.peer_sockets import PeerAddress
from elastic.worker.group.shared_memory import OwnMemory
from elastic.worker.reduce.step_metadata import MetadataExchange
from elastic.worker.reduce.tree_exchange import Exchange, MicroBatchPartition, make_exchange
from tests.patience import DEADLINE_S
from tests.unit.groups_under_test import Group, at_once

SMALL, LARGE = 700, 100_000
"""Elements: the one goes whole to everyone, the other in slices."""


@contextlib.contextmanager
def groups(nodes: Sequence[str]) -> Iterator[list[Group]]:
    """Members on these nodes, connected."""
    made = [Group(rank, len(nodes)) for rank in range(len(nodes))]
    links = [
        MemberLinks(rank, len(nodes), PeerAddress("127.0.0.1", DEADLINE_S, node))
        for rank, node in enumerate(nodes)
    ]
    entries = [one.entry for one in links]
    try:
        assert all(at_once([functools.partial(one.join, entries) for one in links]))
        for group, one in zip(made, links, strict=True):
            one.share()
            links_module._links[group] = one
        yield made
    finally:
        for one in links:
            one.sockets.cut()
            one.sockets.close()


def leaf(step: int, bucket: int, number: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 100 * bucket + number)
    return torch.randn(size, generator=generator)


def summed(step: int, bucket: int, tree: tuple[int, int], size: int) -> torch.Tensor:
    sums = {(n, n + 1): leaf(step, bucket, n, size) for n in range(*tree)}
    for one in additions_in(tree):
        sums[one.total] = sums[one.left] + sums[one.right]
    return sums[tree]


class Member:
    """One rank, and what it has for the steps of its group."""

    def __init__(self, group: Group, num_micro_batches: int, sizes: Sequence[int]) -> None:
        self.deal = MicroBatchPartition(group.rank(), group.size(), num_micro_batches)
        self.memory = OwnMemory() if links_module.links_of(group).memory else None
        self.exchanges: list[Exchange] = []
        self.flats: list[dict[tuple[int, int], torch.Tensor]] = []
        self.sizes = sizes
        for size in sizes:
            like = torch.empty(size)
            self.exchanges.append(make_exchange(self.deal, like, group, memory=self.memory))
            self.flats.append(
                {
                    part: self.memory.empty(size, like.dtype) if self.memory else like.clone()
                    for part in self.deal.mine
                }
            )
        self.rows = MetadataExchange(group.rank(), group.size(), group)

    def steps(self, number: int) -> None:
        for step in range(number):
            self.rows.start([float(self.deal.rank), float(step)])
            order = range(len(self.sizes))
            for bucket in order:
                for part, flat in self.flats[bucket].items():
                    flat.copy_(summed(step, bucket, part, self.sizes[bucket]))
                divisor = 4.0 if bucket % 2 else None
                exchange, sums = self.exchanges[bucket], self.flats[bucket]
                exchange.start(sums, [float(step), float(self.deal.rank)], divisor)
            rows = [row[:2] for row in self.rows.finish()]
            assert rows == [(float(r), float(step)) for r in range(self.deal.world_size)]
            for bucket in reversed(order):
                exchange = self.exchanges[bucket]
                if exchange.carries_rows:
                    told = [row[:2] for row in exchange.wait_rows()]
                    assert told == [(float(step), float(r)) for r in range(self.deal.world_size)]
                exchange.finish(4.0)
                right = summed(step, bucket, (0, self.deal.num_micro_batches), self.sizes[bucket])
                assert exchange.total.numpy().tobytes() == (right / 4.0).numpy().tobytes()
                for flat in self.flats[bucket].values():
                    flat.fill_(float("nan"))  # Nobody reads it any more.
                exchange.total.fill_(float("nan"))  # As clipping does, in place.


@pytest.mark.parametrize(
    ("nodes", "num_micro_batches"),
    [
        ("aa", 2),
        ("aaa", 7),
        ("ab", 3),
        ("aaab", 5),
        ("aabbb", 5),
        ("abbbcddde", 11),
        ("abcdefghijklmmmnnooo", 21),
    ],
)
def test_every_rank_has_the_bits_of_the_plain_tree(nodes: str, num_micro_batches: int) -> None:
    sizes = [LARGE, SMALL, LARGE + 13, 5] if len(nodes) < 10 else [LARGE, 5, 9_001]
    with groups(nodes) as made:
        members = [Member(group, num_micro_batches, sizes) for group in made]
        at_once([functools.partial(one.steps, 4) for one in members])
        local = [one.exchanges[0].bytes_sent for one in members]
        assert (max(local) == 0) == (len(set(nodes)) == 1), "memory of a node is read in place"


@pytest.mark.parametrize("nodes", ["aa", "ab"])
def test_the_memory_of_a_group_is_free_once_its_connections_are_closed(nodes: str) -> None:
    gc.disable()
    try:
        with groups(nodes) as made:
            members = [Member(group, 3, [LARGE, SMALL]) for group in made]
            at_once([functools.partial(one.steps, 2) for one in members])
            left = [weakref.ref(one) for member in members for one in member.exchanges]
            members.clear()
        assert [one() for one in left] == [None] * len(left)
    finally:
        gc.enable()


@pytest.mark.parametrize("nodes", ["aa", "ab", "aab"])
def test_a_cut_ends_an_exchange_wherever_it_is(nodes: str) -> None:
    with groups(nodes) as made:
        members = [Member(group, 3, [LARGE]) for group in made]
        links_module.links_of(made[-1]).sockets.cut()

        def fails(member: Member) -> BaseException:
            with pytest.raises(RuntimeError) as raised:
                member.steps(1)
            return raised.value

        calls = [functools.partial(fails, one) for one in members]
        assert all(map(is_group_broken, at_once(calls)))
