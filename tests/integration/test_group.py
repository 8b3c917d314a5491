"""Groups of real processes: broken in every way that we know of, freed, and formed again."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import wait_for
from tests.workers.members import Crew, MemberProcess, abort_all, all_ask, stop

# gloo itself would hold them for its own timeout; ours takes about 1 ms.
CREW = Crew()


@pytest.fixture(autouse=True, scope="module")
def _crew_goes_home() -> Iterator[None]:
    yield
    CREW.end()


@pytest.fixture(autouse=True)
def _who_failed_takes_nobody_along(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start anew after a failure: it may have left members that are stopped, or wait for ever."""
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        CREW.end()


def formed(members: list[MemberProcess], **fields: object) -> None:
    """Form a group, and see that it sums rightly."""
    answers = CREW.form(members, **fields)
    assert not any(one.error for one in answers), [one.error for one in answers]
    right = len(members) * (len(members) + 1) / 2
    assert all_ask(members, "all_reduce") == [right] * len(members)


def blocked_in(members: list[MemberProcess], call: str, **arguments: object) -> list[int]:
    """Send members into a call that only a peer can end; the last of the crew stays out."""
    orders = [one.tell(call, **arguments) for one in members]
    # They answer on their control threads, so the main threads had their turn.
    all_ask(members, "hung_up")
    return orders


def leave(members: list[MemberProcess]) -> None:
    """Let members drop an aborted group; those that gloo has forgotten say so, and are retired."""
    for one in members:
        dropped = one.answer(one.tell("drop"))
        if dropped.error:
            assert dropped.error.endswith("it must be replaced")
            place = {"generation": CREW.next_generation(), "rank": 0, "world_size": 1}
            again = one.answer(one.tell("form", leader_address=one.ask("address"), **place))
            assert again.error == dropped.error
            CREW.retire(one)


@pytest.mark.parametrize("call", ["all_reduce"])
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_members_blocked_beside_a_lost_one_are_freed_and_go_on_in_the_same_processes(
    call: str, how: str
) -> None:
    members = CREW.take(4)
    formed(members)
    survivors, lost = members[:3], members[3]
    pids = [one["pid"] for one in all_ask(survivors, "state")]
    orders = blocked_in(survivors, call)
    if how == "killed":
        lost.signal(signal.SIGKILL)
        # gloo itself tells the ring neighbours only; the others would wait for their timeout.
        wait_for(lambda: all(all_ask(survivors, "hung_up")))
    else:
        stop(lost)
        assert all_ask(survivors, "hung_up") == [False] * 3
    abort_all(survivors, orders)
    formed(survivors)
    assert [one["pid"] for one in all_ask(survivors, "state")] == pids
    CREW.retire(lost)


@pytest.mark.parametrize("how", ["all_to_all"])
def test_members_whose_message_was_cut_in_the_middle_are_freed_or_replaced(how: str) -> None:
    """gloo forgets who has got a part of a message, and whom the kernel refuses the rest."""
    members = CREW.take(3)
    formed(members)
    survivors, lost = members[1:], members[0]
    before = survivors[0].ask("received")
    orders = blocked_in(members, "pass_on", how=how, size=8_000_000)
    wait_for(lambda: survivors[0].ask("received") - before > 50_000_000)
    lost.signal(signal.SIGKILL)
    wait_for(lambda: all(all_ask(survivors, "hung_up")))
    abort_all(survivors, orders[1:])
    leave(survivors)
    CREW.retire(lost)


def test_a_member_that_waits_in_ddp_backward_is_freed_and_trains_on_in_the_next_group() -> None:
    members = CREW.take(3)
    formed(members)
    before = all_ask(members, "backward", steps=2)
    assert len(set(before)) == 1
    orders = blocked_in(members[:2], "backward", steps=10**6)
    stop(members[2])
    abort_all(members[:2], orders)
    formed(members[:2])
    after = all_ask(members[:2], "backward", steps=2)
    assert len(set(after)) == 1
    CREW.retire(members[2])


@pytest.mark.parametrize("size", [1_000_000])
def test_members_that_reduce_all_the_time_are_freed_whatever_they_just_do(size: int) -> None:
    """gloo forgets a sender that begins to send while its connection ends both ways."""
    for _ in range(15):
        members = CREW.take(4)
        formed(members)
        orders = blocked_in(members, "all_reduce", size=size, repeat=10**7)
        abort_all(members, orders)
        leave(members)


def test_what_comes_from_the_others_is_counted_and_a_wait_brings_nothing() -> None:
    members = CREW.take(2)
    formed(members)
    before = all_ask(members, "received")
    all_ask(members, "all_reduce", size=1_000_000)
    after = all_ask(members, "received")
    # Each gets half of the sum's parts, and half of the sum: 4 MB.
    assert all(4e6 <= b - a < 5e6 for a, b in zip(before, after, strict=True)), (before, after)
    order = blocked_in(members[:1], "all_reduce", size=1_000_000)
    wait_for(lambda: members[0].ask("received") == members[0].ask("received"))
    stood = members[0].ask("received")
    all_ask(members[:1], "hung_up")
    assert members[0].ask("received") == stood
    abort_all(members[:1], order)
    CREW.retire(members[1])


def test_a_wait_in_the_groups_store_is_freed() -> None:
    members = CREW.take(2)
    formed(members)
    orders = blocked_in(members, "wait_store")
    abort_all(members, orders)
    formed(members)


def test_a_main_thread_that_computes_does_not_slow_the_abort_of_its_group() -> None:
    members = CREW.take(4)
    formed(members)
    computing = members[0].tell("compute")
    wait_for(lambda: members[0].ask("is_computing"))
    orders = blocked_in(members[1:], "wait_work")
    members[0].answer(members[0].tell("abort"))
    assert not members[0].is_done(computing)
    abort_all(members[1:], orders)
    members[0].ask("stop_computing")
    assert not members[0].answer(computing).error
    formed(members)


@pytest.mark.parametrize("leader", ["absent", "silent"])
def test_forming_is_freed_by_abort_when_the_leader_never_answers(leader: str) -> None:
    (member,) = CREW.take(1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        if leader == "absent":
            listener.close()
        order = member.tell(
            "form",
            generation=CREW.next_generation(),
            rank=1,
            world_size=2,
            leader_address=address,
        )
        wait_for(lambda: bool(member.ask("is_forming")))
        assert not member.is_done(order)
        member.answer(member.tell("abort"))
        out = member.answer(order)
    assert out.error.startswith("GroupError: rank 1 of 2, generation")
    assert "aborted by order" in out.error
    assert address in out.error
    formed([member])


@pytest.mark.parametrize("how", ["killed", "missing"])
def test_forming_is_freed_by_abort_when_a_member_never_comes(how: str) -> None:
    members = CREW.take(4)
    formed(members)
    lost = members[3]
    if how == "killed":
        CREW.retire(lost)
    elif how == "stopped":
        stop(lost)
    generation = CREW.next_generation()
    leader = members[0].ask("address")
    place = {"generation": generation, "world_size": 4, "leader_address": leader}
    orders = [one.tell("form", rank=rank, **place) for rank, one in enumerate(members[:3])]
    wait_for(lambda: all(all_ask(members[:3], "is_forming")))
    assert not any(one.is_done(order) for one, order in zip(members, orders, strict=False))
    abort_all(members[:3], orders)
    formed(members[:3])
    if how == "stopped":
        CREW.retire(lost)


def test_a_group_that_does_not_form_in_time_says_who_which_and_with_whom() -> None:
    (member,) = CREW.take(1)
    address = member.ask("address")
    order = member.tell(
        "form",
        generation=CREW.next_generation(),
        rank=0,
        world_size=2,
        leader_address=address,
        form_timeout_s=0.3,
    )
    out = member.answer(order)
    assert out.error.startswith("GroupError: rank 0 of 2, generation")
    assert address in out.error
    assert member.ask("state")["initialized"] is False
    formed([member])


def test_a_generation_that_was_aborted_before_it_formed_does_not_form() -> None:
    members = CREW.take(2)
    generation = CREW.next_generation()
    all_ask(members, "abort", generation=generation)
    place = {"generation": generation, "leader_address": members[0].ask("address")}
    out = members[0].answer(members[0].tell("form", rank=0, world_size=1, **place))
    assert "aborted before it began" in out.error
    formed(members)


def test_an_abort_of_an_older_generation_leaves_the_present_one_alone() -> None:
    members = CREW.take(2)
    old = CREW.next_generation()
    formed(members)
    all_ask(members, "abort", generation=old)
    assert all_ask(members, "all_reduce") == [3.0, 3.0]


def test_abort_again_and_abort_of_nothing_do_no_harm() -> None:
    members = CREW.take(2)
    all_ask(members, "abort")
    formed(members)
    for _ in range(3):
        all_ask(members, "abort")
    assert all_ask(members, "hung_up") == [True, True]
    formed(members)


def test_newcomers_and_survivors_make_subgroups_together() -> None:
    members = CREW.take(4)
    survivors = members[:2]
    for _ in range(3):
        formed(survivors)
        assert all_ask(survivors, "new_group", ranks=[0, 1]) == [1.0, 1.0]
        assert all_ask(survivors, "mesh") == [2, 2]
    # The other two are in their first group, or in their first for long.
    formed(members)
    counts = {one["group_count"] for one in all_ask(members, "state")}
    assert len(counts) == 1
    assert all_ask(members, "new_group", ranks=[1, 3]) == [0.0, 4.0, 2.0, 4.0]
    assert all_ask(members, "mesh") == [4] * 4


def test_a_member_may_come_to_a_subgroup_later_than_any_group_may_form() -> None:
    early, late = members = CREW.take(2)
    formed(members)
    all_ask(members, "forget_form_timeout")
    order = early.tell("new_group", ranks=[0, 1])
    wait_for(lambda: bool(early.ask("is_forming")) or early.is_done(order))
    assert late.ask("new_group", ranks=[0, 1]) == 1.0
    assert early.answer(order).value == 1.0


def test_members_that_change_their_ranks_find_each_other_in_a_mesh_of_the_same_shape() -> None:
    members = CREW.take(4)
    for turn in range(4):
        formed(members[turn:] + members[:turn])
        assert all_ask(members, "norm_in_parts") == [pytest.approx(14**0.5)] * 4


def test_subgroups_are_aborted_with_their_group() -> None:
    members = CREW.take(3)
    formed(members)
    all_ask(members, "new_group", ranks=[0, 1, 2])
    orders = blocked_in(members[:2], "subgroup_reduce")
    stop(members[2])
    abort_all(members[:2], orders)
    CREW.retire(members[2])


def test_a_subgroup_that_user_code_destroys_is_not_taken_for_a_lost_member() -> None:
    members = CREW.take(2)
    formed(members)
    all_ask(members, "new_group", ranks=[0, 1])
    all_ask(members, "destroy_subgroup")
    all_ask(members, "state")
    assert all_ask(members, "hung_up") == [False, False]
    assert all_ask(members, "all_reduce") == [3.0, 3.0]


def test_a_script_written_for_torchrun_gets_the_group_that_stands() -> None:
    members = CREW.take(2)
    formed(members)
    assert all_ask(members, "script", backend="gloo") == [[2.0, 2.0, False]] * 2
    assert all_ask(members, "script", backend="nccl") == [[2.0, 2.0, False]] * 2
    wrong = members[0].answer(members[0].tell("wrong_script"))
    assert wrong.error.startswith("UsageError: init_process_group(world_size=99)")


def test_saves_in_the_background_neither_meet_each_other_nor_the_scripts_collectives(
    tmp_path: Path,
) -> None:
    members = CREW.take(2)
    formed(members)
    assert all_ask(members, "saves", folder=str(tmp_path / "first")) == [5, 5]
    formed(members)
    assert all_ask(members, "saves", folder=str(tmp_path / "second")) == [5, 5]


def test_the_timeout_that_a_script_asks_for_holds_in_the_group_that_stands() -> None:
    members = CREW.take(2)
    formed(members)
    alone = members[0].answer(members[0].tell("impatient_script", timeout_s=0.5))
    assert "Timed out waiting 500ms" in alone.error


def test_an_interrupted_member_leaves_its_collective_for_the_reason_given() -> None:
    members = CREW.take(2)
    formed(members)
    generation = CREW.next_generation() - 1
    order = members[0].tell("train_until_changed", generation=generation)
    wait_for(lambda: members[0].ask("trains", generation=generation))
    members[0].ask("interrupt", generation=generation)
    members[0].ask("abort")
    assert members[0].answer(order).value == "told to"


def killed_amid_buffers() -> int:
    """Kill one who broadcasts from C++; return how many of the others ended their processes."""
    members = CREW.take(3)
    formed(members)
    survivors, lost = members[1:], members[0]
    before = survivors[0].ask("received")
    generation = CREW.next_generation() - 1
    orders = [
        one.tell("train_until_changed", generation=generation, how="buffers", size=20_000_000)
        for one in members
    ]
    wait_for(lambda: survivors[0].ask("received") - before > 50_000_000)
    lost.signal(signal.SIGKILL)
    wait_for(lambda: all(all_ask(survivors, "hung_up")))
    for one in survivors:
        one.ask("interrupt", generation=generation)
        one.ask("abort")
    waiting = list(zip(survivors, orders[1:], strict=True))
    wait_for(lambda: all(m.process.poll() is not None or m.is_done(o) for m, o in waiting))
    ended = [one for one in survivors if one.process.poll() is not None]
    assert all(one.process.poll() == -signal.SIGKILL for one in ended)
    for one in [lost, *ended]:
        CREW.retire(one)
    return len(ended)


@pytest.mark.slow
def test_members_that_gloo_forgets_in_torchs_own_code_end_by_themselves() -> None:
    wait_for(lambda: killed_amid_buffers() > 0)


@pytest.mark.slow
def test_a_hundred_groups_leave_nothing_behind() -> None:
    members = CREW.take(3)
    formed(members)
    before: list[dict[str, int]] = []
    for number in range(100):
        answers = CREW.form(members)
        assert not any(one.error for one in answers), [one.error for one in answers]
        all_ask(members, "new_group", ranks=[0, 2])
        if number % 2:
            all_ask(members, "abort")
        if number == 10:
            before = all_ask(members, "state")

    def is_bounded() -> bool:
        now = all_ask(members, "state")
        return all(
            after[what] <= earlier[what] + 10
            for earlier, after in zip(before, now, strict=True)
            for what in ("descriptors", "threads")
        )

    # The old groups are taken apart behind our back.
    wait_for(is_bounded)
    assert all(one["hook"] for one in all_ask(members, "state"))


@pytest.mark.slow
def test_leaders_that_never_answer_leave_nothing_behind() -> None:
    (member,) = CREW.take(1)
    before = member.ask("state")
    member.ask("fail_to_connect", count=30)

    def is_bounded() -> bool:
        now = member.ask("state")
        return bool(
            now["descriptors"] <= before["descriptors"] + 5
            and now["threads"] <= before["threads"] + 5
        )

    wait_for(is_bounded)
