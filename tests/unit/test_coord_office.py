"""The office: who answers, what the others say, and who is told when that changes."""

from __future__ import annotations

from typing import Any, cast

import anyio
import pytest

from elastic.coord.leader_state import LeaderState, Term
from elastic.coord.leadership import LeaderKey
from elastic.coord.standby_view import StandbyView
from elastic.core.facts import NodeId
from elastic.core.records import Cordon, NodesRecord
from elastic.core.view import ClusterView, JobView
from elastic.errors import NotLeading
from elastic.store.memory import MemoryStore
from tests.patience import DEADLINE_S
from tests.unit.journal_under_test import PREFIX, checkpoints, record
from tests.unit.journal_under_test import leading_journal as journal_in_leader_state

pytestmark = pytest.mark.anyio
LEADER = LeaderKey("b/2", "10.0.0.2:7070", 2, "life", term=7)


class StoppedClock:
    """Time passes when a test says so."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000

    def monotonic_ns(self) -> int:
        return self.now_ns

    def unix_ns(self) -> int:
        return self.now_ns

    def advance(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


def tenure() -> Term:
    return Term(cast("Any", object()), cast("Any", object()), 0)


def test_a_coordinator_that_has_not_asked_its_store_says_that_it_starts() -> None:
    leader_state = LeaderState("a/1", StoppedClock())
    assert leader_state.tenure is None
    assert not leader_state.is_standby()
    assert str(leader_state.refusal()) == "coordinator a/1 is starting; try again"


def test_a_term_holds_only_as_long_as_its_lease() -> None:
    leader_state = LeaderState("a/1", StoppedClock())
    valid = True
    mine = tenure()
    leader_state.saw(None)
    leader_state.enter(mine, lambda: valid)
    assert leader_state.require() is mine
    valid = False
    assert leader_state.tenure is None
    with pytest.raises(NotLeading):
        leader_state.require()
    valid = True
    leader_state.end("it is ending")
    with pytest.raises(NotLeading, match="it is ending"):
        leader_state.require()


async def test_an_agent_at_the_door_is_told_of_the_next_leader_not_of_the_one_it_knows() -> None:
    leader_state = LeaderState("a/1", StoppedClock())
    leader_state.saw(LEADER)
    told: list[str] = []

    async def wait(term: int) -> None:
        await leader_state.wait_news(term, DEADLINE_S)
        told.append(leader_state.refusal().leader)

    with anyio.fail_after(DEADLINE_S):
        await wait(6)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait, 7)
            await anyio.lowlevel.checkpoint()
            leader_state.saw(None)
            await anyio.lowlevel.checkpoint()
            assert told == ["10.0.0.2:7070"]
            leader_state.saw(LeaderKey("c/3", "10.0.0.3:7070", 3, "other", term=8))
    assert told == ["10.0.0.2:7070", "10.0.0.3:7070"]


async def test_an_agent_at_the_door_is_let_in_when_this_coordinator_leads() -> None:
    leader_state = LeaderState("a/1", StoppedClock())
    leader_state.saw(LEADER)
    with anyio.fail_after(DEADLINE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(leader_state.wait_news, 7, DEADLINE_S)
            await anyio.lowlevel.checkpoint()
            leader_state.enter(tenure(), lambda: True)
    assert leader_state.tenure is not None


async def test_a_standby_shows_the_records_of_the_store_with_their_age_large_ones_too() -> None:
    store, clock = MemoryStore(), StoppedClock()
    journal = await journal_in_leader_state(store)
    await journal.write([record("j-1", payload=b"x" * 100, sequence=1, reason="why")])
    await journal.write([record("j-2", sequence=2, checkpoints=checkpoints(2000))])
    await journal.write_nodes(NodesRecord((Cordon(NodeId("n7"), "a fan"),)))
    leader_state = LeaderState("b/2", clock)
    follower = StandbyView(store, PREFIX, leader_state, clock)
    with pytest.raises(NotLeading):
        await follower.read_view()
    leader_state.saw(LEADER)
    view, said = await follower.read_view()
    assert [job.record.spec.job_id for job in view.jobs] == ["j-1", "j-2"]
    assert len(view.jobs[1].record.checkpoints) == 2000
    assert view.jobs[0].reason.endswith("; then: why")
    assert view.cordons == (Cordon(NodeId("n7"), "a fan"),)
    assert said.startswith("as of 0.0 s ago, from the store; coordinator b/2 does not lead: b/2 at")


async def test_a_coordinator_that_led_shows_what_it_knew_while_its_store_does_not_answer() -> None:
    store, clock = MemoryStore(), StoppedClock()
    leader_state = LeaderState("a/1", clock)
    follower = StandbyView(store, PREFIX, leader_state, clock)
    leader_state.saw(None)
    job = JobView(record("j-1", payload=b"x"), "", 0, ())
    follower.remember(ClusterView(clock.now_ns, (), (job,)))
    await store.close()
    clock.advance(3.0)
    view, said = await follower.read_view()
    assert [j.record.spec.job_id for j in view.jobs] == ["j-1"]
    assert said.startswith("as of 3.0 s ago")


def test_a_coordinator_that_has_claimed_says_that_it_leads_and_reads_its_journal() -> None:
    clock = StoppedClock()
    leader_state = LeaderState("a/1", clock)
    leader_state.saw(None)
    leader_state.claim(7)
    clock.advance(3.2)
    assert leader_state.tenure is None
    assert str(leader_state.refusal()) == (
        "coordinator a/1 leads (term 7), and has been reading its journal for 3.2 s; try again"
    )
    mine = tenure()
    leader_state.enter(mine, lambda: True)
    assert leader_state.require() is mine
    leader_state.leave()
    assert "no coordinator leads" in str(leader_state.refusal())
