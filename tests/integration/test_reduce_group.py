"""The reducer between real processes: the same bits at every world size, and peers that die."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.patience import DEADLINE_S
from tests.workers.members import Crew, MemberProcess, all_ask

CREW = Crew()
STEPS = 7
"""Twice through full steps and a ragged one, and on."""
NEVER = -1


@pytest.fixture(autouse=True, scope="module")
def _crew_goes_home() -> Iterator[None]:
    yield
    CREW.end()


def group_of(members: list[MemberProcess]) -> None:
    answers = CREW.form(members)
    assert not any(one.error for one in answers), [one.error for one in answers]


def begun(size: int, consistency: str = "bitwise", over: str = "memory") -> list[MemberProcess]:
    """Return members of a group that have just begun a run."""
    members = CREW.take(size)
    group_of(members)
    all_ask(members, "begin_steps", consistency=consistency, over=over)
    return members


def trained(size: int, consistency: str = "bitwise", over: str = "memory") -> list[dict[str, Any]]:
    return all_ask(begun(size, consistency, over), "do_steps", until=STEPS, die_at=NEVER)


@pytest.fixture(scope="module")
def right() -> str:
    """Return the hash of a run of one process."""
    CREW.take(5)  # They start at the same time.
    (alone,) = trained(1)
    assert alone["sent"] == 0
    return str(alone["hash"])


@pytest.mark.parametrize(
    ("size", "over"), [(2, "memory"), (3, "sockets"), (3, "torch"), (5, "memory"), (5, "sockets")]
)
def test_every_world_size_ends_with_the_same_hash(size: int, over: str, right: str) -> None:
    said = trained(size, over=over)
    assert [one["hash"] for one in said] == [right] * size
    assert all(one["sent"] > 0 for one in said)


def test_groups_may_change_between_steps(right: str) -> None:
    members = begun(5)
    all_ask(members, "do_steps", until=2, die_at=NEVER)
    for size, until in ((3, 4), (2, 6), (1, STEPS)):
        stay = members[:size]
        group_of(stay)
        all_ask(stay, "attach_steps")
        last = all_ask(stay, "do_steps", until=until, die_at=NEVER)
    assert {one["hash"] for one in last} == {right}


@pytest.mark.parametrize(
    ("consistency", "step", "over"),
    [("bitwise", 0, "memory"), ("bitwise", 5, "sockets"), ("samples", 3, "memory")],
)
def test_a_killed_peer_breaks_the_step_and_it_is_done_again_without_it(
    right: str, consistency: str, step: int, over: str
) -> None:
    members = begun(3, consistency, over)
    survivors, lost = [members[0], members[2]], members[1]
    orders = [one.tell("do_steps", until=STEPS, die_at=NEVER) for one in survivors]
    lost.tell("do_steps", until=STEPS, die_at=step)
    assert lost.process.wait(DEADLINE_S) < 0
    # A worker's control thread does this when it is told that the group is over.
    all_ask(survivors, "abort")
    said = [one.answer(order) for one, order in zip(survivors, orders, strict=True)]
    assert [one.error for one in said] == ["", ""]
    for one in said:
        assert one.value["broken"] != "NoneType"
        # Nobody completes a step without everyone's gradients.
        assert one.value["step"] == step
    CREW.retire(lost)
    group_of(survivors)
    all_ask(survivors, "attach_steps")
    last = all_ask(survivors, "do_steps", until=STEPS, die_at=NEVER)
    assert len({one["hash"] for one in last}) == 1
    if consistency == "bitwise":
        assert last[0]["hash"] == right


def test_ranks_agree_where_the_order_of_addition_is_free() -> None:
    assert len({one["hash"] for one in trained(3, "samples")}) == 1
