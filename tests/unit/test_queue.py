"""Why a job of several has to wait, in words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elastic.core.config import JobSpec
from elastic.core.facts import JobId, NodeId, Resources, Strategy, WorkerId
from elastic.core.policy.demands import Demand
from elastic.core.policy.packing import NodeCapacity
from elastic.core.policy.queue import decide
from tests.strategies import SCRIPT

GPU = Resources.of({"GPU": 1})


def demand(
    job: str, low: int, high: int | None = None, *, seats: str = "", **changes: Any
) -> Demand:
    """A job; `seats` are the nodes of its workers, and whoever has min of them trains."""
    here = tuple(
        (WorkerId(f"{node}/{job}{number}"), NodeId(node))
        for number, node in enumerate(seats.split())
    )
    facts = {name: changes.pop(name) for name in ("away", "keeps_state") if name in changes}
    spec = JobSpec(
        job_id=JobId(job), name=job, entry=SCRIPT, min_workers=low,
        max_workers=low if high is None else high, **changes,
    )  # fmt: skip
    trains = len(here) >= low
    return Demand(spec, ord(job[0]), held_slots=here, trains=trains, in_place=True, **facts)


def room(node: str, slots: int, free: int | None = None, **changes: Any) -> NodeCapacity:
    """A node; all its slots are free unless said otherwise."""
    gpus = Resources.of({"GPU": changes.pop("gpu", 0)})
    return NodeCapacity(NodeId(node), slots, gpus, slots if free is None else free, **changes)


def grants(*demands: Demand, nodes: list[NodeCapacity]) -> Any:
    return {str(g.job_id): g for g in decide(demands, nodes).value}


def test_in_vain_says_what_keeps_it_from_nodes_that_nobody_holds() -> None:
    strategy = Strategy.STRICT_PACK
    away = demand("b", 2, away=1, strategy=strategy, keeps_state=True)
    found = grants(away, demand("c", 1), nodes=[room("n1", 2)])
    assert found["b"].reason == (
        "needs 1 worker by STRICT_PACK, and no other job is in its way: workers of its own (1) "
        "are on nodes that do not answer; waits for that to change"
    )
    out = replace(demand("b", 2), out=frozenset({NodeId("n2")}))
    found = grants(out, demand("c", 1), nodes=[room("n1", 1), room("n2", 1)])
    assert found["b"].reason == (
        "needs 2 workers by PACK, and no other job is in its way: none may start on n2, cut off "
        "from its other nodes; waits for that to change"
    )


def crowded_out(**changes: Any) -> Any:
    """Grant job a a new worker on n2, because others need the slot of its worker on n1.

    That is free again once a job of lower priority was preempted for another one.
    """
    label = (("kind", "x"),)
    waits = demand("a", 1, 3, seats="n1", priority=3, keeps_state=True)
    strategy = changes.pop("strategy", Strategy.PACK)
    found = grants(
        replace(waits, spec=replace(waits.spec, strategy=strategy), trains=False, **changes),
        demand("e", 2, priority=5, label_selector=label),
        demand("d", 1, priority=2),
        replace(demand("v", 3, seats="n1 n1 n1"), stays=""),
        nodes=[room("n1", 5, free=1, labels=label), room("n2", 1)],
    )
    assert found["v"].yields_to
    return found["a"]


def test_a_node_where_no_more_may_start_is_not_used_for_a_worker_that_it_keeps() -> None:
    found = crowded_out(out=frozenset({NodeId("n1")}))
    assert found.yields == ()
    assert found.starts == (("n2", 1),)


def test_a_job_of_one_node_keeps_no_worker_on_another() -> None:
    found = crowded_out(strategy=Strategy.STRICT_PACK)
    assert found.yields == ("n1/a0",)
    assert found.starts == (("n2", 1),)


def test_a_job_of_one_node_does_not_grow_onto_another_while_its_own_is_cordoned() -> None:
    job = demand("a", 1, 3, seats="n1", strategy=Strategy.STRICT_PACK)
    found = grants(job, nodes=[room("n1", 3, free=2, cordoned=True), room("n2", 3)])
    assert found["a"].starts == ()
