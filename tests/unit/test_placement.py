"""On which nodes workers start: nothing below min, strategies hold, and a shortage is explained."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.core.config import JobSpec
from elastic.core.policy.placement import Offer, explain_misfit, place, refuse_accelerator
from elastic.core.world import JobId, Node, NodeId, Resources, Strategy
from tests.strategies import SCRIPT


def spec(low: int, high: int, strategy: str = "PACK", **changes: Any) -> JobSpec:
    return JobSpec(
        job_id=JobId("j1"), name="digits", entry=SCRIPT, min_workers=low, max_workers=high,
        strategy=Strategy(strategy), **changes,
    )  # fmt: skip


def offer(node: str, slots: int, hosting: int = 0, **changes: Any) -> Offer:
    """A node with free slots, of `all_slots`; `gpu` gives free GPUs, `gpus` all that it has."""
    gpu, gpus = changes.pop("gpu", 0), changes.pop("gpus", changes.get("gpu", 0))
    return Offer(
        NodeId(node), slots, Resources.of({"GPU": gpu}), Resources.of({"GPU": gpus or gpu}),
        slots=changes.pop("all_slots", slots + hosting), hosting=hosting, **changes,
    )  # fmt: skip


def chosen(job: JobSpec, *offers: Offer, have: int = 0) -> str:
    return " ".join(sorted(place(job, offers, have).value))


def reason(job: JobSpec, *offers: Offer, have: int = 0) -> str:
    decision = place(job, offers, have)
    assert decision.value == ()
    return decision.reason


Z1, Z2 = (("zone", "1"),), (("topology.kubernetes.io/zone", "2"),)
Z2_ROOM, B9_IN_Z1 = offer("c", 4, labels=Z2), offer("b", 9, labels=Z1)
A4, B2, C1 = offer("a", 4), offer("b", 2), offer("c", 1)


@pytest.mark.parametrize(
    ("low", "high", "strategy", "offers", "nodes"),
    [
        # PACK fills the roomiest node before it begins another.
        (1, 3, "PACK", (B2, A4, C1), "a a a"),
        (1, 5, "PACK", (B2, A4, C1), "a a a a b"),
        (7, 7, "PACK", (B2, A4, C1), "a a a a b b c"),
        # PACK goes where the job is already, also if another node has more room.
        (1, 3, "PACK", (offer("a", 8), offer("b", 1, hosting=2)), "b"),
        # SPREAD deals to the node with the fewest workers of the job.
        (1, 3, "SPREAD", (A4, B2, C1), "a b c"),
        (1, 5, "SPREAD", (A4, B2, C1), "a a b b c"),
        (1, 4, "SPREAD", (offer("a", 8, hosting=2), offer("b", 8)), "b b"),
        # Over zones first, where nodes say which they are in, and over nodes within a zone.
        (1, 3, "SPREAD", (offer("a", 4, labels=Z1), offer("b", 4, labels=Z1), Z2_ROOM), "a b c"),
        (1, 4, "SPREAD", (offer("a", 4, labels=Z1), offer("b", 4, labels=Z1), Z2_ROOM), "a b c c"),
        (1, 3, "SPREAD", (offer("a", 4, 1, labels=Z1), offer("b", 4, labels=Z1), Z2_ROOM), "b c"),
        (2, 2, "STRICT_SPREAD", (offer("a", 4, labels=Z1), B9_IN_Z1, Z2_ROOM), "a c"),
        (2, 2, "PACK", (offer("a", 1, labels=Z1), offer("b", 2, labels=Z1), Z2_ROOM), "c c"),
        # SPREAD still fits two on a node if there are too few nodes.
        (2, 2, "SPREAD", (A4,), "a a"),
        # STRICT_SPREAD does not.
        (2, 3, "STRICT_SPREAD", (A4, B2, C1), "a b c"),
        (2, 9, "STRICT_SPREAD", (A4, B2), "a b"),
        (1, 4, "STRICT_SPREAD", (offer("a", 8, hosting=1), B2, C1), "b c"),
        # STRICT_PACK takes one node, the roomiest that there is.
        (2, 9, "STRICT_PACK", (B2, A4, C1), "a a a a"),
        (1, 2, "STRICT_PACK", (B2, A4, C1), "a a"),
        (1, 9, "STRICT_PACK", (offer("a", 8), offer("b", 1, hosting=2)), "b"),
        # Also if that one has nothing to give any more.
        (1, 9, "STRICT_PACK", (offer("a", 0, hosting=2), B2), ""),
        # As many as fit, once min does.
        (1, 9, "PACK", (C1,), "c"),
    ],
)
def test_workers_go_where_the_strategy_says(
    low: int, high: int, strategy: str, offers: tuple[Offer, ...], nodes: str
) -> None:
    have = sum(o.hosting for o in offers)
    assert chosen(spec(low, high, strategy), *offers, have=have) == nodes


@pytest.mark.parametrize("strategy", ["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"])
def test_nothing_is_started_before_min_fits(strategy: str) -> None:
    assert chosen(spec(3, 4, strategy), offer("a", 1), offer("b", 1)) == ""


@pytest.mark.parametrize(
    ("have", "nodes"), [(0, ""), (1, ""), (2, "a"), (3, "a"), (4, ""), (5, "")]
)
def test_workers_that_exist_count_towards_min_and_max(have: int, nodes: str) -> None:
    assert chosen(spec(3, 4), offer("a", 1), have=have) == nodes


def test_a_job_on_a_node_that_is_away_is_not_packed_strictly_onto_another() -> None:
    """Its node may come back in a moment; then its workers would be on two nodes."""
    assert chosen(spec(1, 4, "STRICT_PACK"), A4, have=2) == ""
    assert "STRICT_PACK" in place(spec(1, 4, "STRICT_PACK"), (A4,), 2).reason


@pytest.mark.parametrize(
    ("gpu", "need", "count"), [(1, 1, 1), (1, 0.5, 2), (1, 0.3, 3), (0.9, 1, 0), (0, 1, 0)]
)
def test_a_node_takes_as_many_workers_as_its_free_resources_serve(
    gpu: float, need: float, count: int
) -> None:
    job = spec(1, 9, resources_per_worker=Resources.of({"GPU": need}))
    assert len(place(job, [offer("a", 8, gpu=gpu, gpus=8)], 0).value) == count


def test_only_nodes_with_the_accelerator_and_all_labels_are_used() -> None:
    zone, rack = ("zone", "x"), ("rack", "7")
    job = spec(1, 9, accelerator_type="H100", label_selector=(zone, rack))
    offers = (
        offer("a", 1, accelerator_type="A100", labels=(rack, zone)),
        offer("b", 1, accelerator_type="H100", labels=(zone,)),
        offer("c", 1, accelerator_type="H100", labels=(("rack", "8"), zone)),
        offer("d", 1, accelerator_type="H100", labels=(("gen", "2"), rack, zone)),
    )
    assert chosen(job, *offers) == "d"


def test_strictly_packed_workers_do_not_go_elsewhere_when_their_node_has_changed_its_labels() -> (
    None
):
    job = spec(1, 9, "STRICT_PACK", label_selector=(("zone", "x"),))
    offers = offer("a", 4, hosting=1), offer("b", 4, labels=(("zone", "x"),))
    assert chosen(job, *offers, have=1) == ""


def test_the_order_of_offers_does_not_matter_between_equals() -> None:
    same = [offer(name, 2) for name in "cab"]
    assert place(spec(1, 3), same, 0) == place(spec(1, 3), same[::-1], 0)
    assert chosen(spec(1, 3), *same) == "a a b"


GPU_JOB = spec(2, 4, resources_per_worker=Resources.of({"GPU": 2}))


@pytest.mark.parametrize(
    ("job", "offers", "have", "says"),
    [
        (spec(2, 4), (), 0, "needs 2 more workers, no node is connected: start an elastic-agent"),
        (spec(2, 4), (), 1, "needs 1 more workers, no node is connected"),
        (
            spec(3, 4), (offer("a", 1, all_slots=4),), 0,
            "needs 3 more workers by PACK, 1 fit now (1 free slots on 1 nodes)",
        ),
        (
            spec(3, 4, "STRICT_PACK"), (offer("b", 2, all_slots=3), C1), 0,
            "needs 3 more workers by STRICT_PACK, 2 fit now (3 free slots on 2 nodes)",
        ),
        (
            spec(3, 4, "STRICT_SPREAD"), (A4, B2, offer("c", 0, all_slots=1)), 0,
            "needs 3 more workers by STRICT_SPREAD, 2 fit now (6 free slots on 3 nodes)",
        ),
        (
            spec(1, 1, accelerator_type="H100"), (offer("a", 1, accelerator_type="T4"), C1), 0,
            "no connected node has accelerator H100; there are: T4",
        ),
        (
            spec(1, 1, accelerator_type="H100"), (C1,), 0,
            "no connected node has accelerator H100; there are: none",
        ),
        (
            spec(1, 1, label_selector=(("rack", "7"), ("zone", "x"))), (C1,), 0,
            "no connected node carries the labels rack=7, zone=x",
        ),
        (
            GPU_JOB, (offer("a", 4, gpu=1), offer("b", 4, gpu=1)), 0,
            "each worker needs GPU=2, the largest node has 1",
        ),
        (
            GPU_JOB, (offer("a", 4, gpu=2, gpus=8),), 0,
            "needs 2 more workers by PACK, 1 fit now (4 free slots, GPU=2 free on 1 nodes)",
        ),
        (spec(1, 2), (A4,), 2, "all 2 workers exist"),
    ],
)  # fmt: skip
def test_when_nothing_is_started_the_reason_says_what_is_missing(
    job: JobSpec, offers: tuple[Offer, ...], have: int, says: str
) -> None:
    assert reason(job, *offers, have=have).startswith(says)


@pytest.mark.parametrize(
    ("job", "offers", "have", "says"),
    [
        (
            spec(9, 9), (offer("a", 0, all_slots=2), offer("b", 0, all_slots=1)), 0,
            "needs 9 workers by PACK, but the 2 nodes that it may use hold only 3 even when they "
            "are empty; what lacks: slots (enough for 3); add nodes for 6 more, or elastic scale "
            "j1 --min 3",
        ),
        (
            # Without those that live on nodes where no more may start.
            spec(4, 4, workers_per_replica=2), (offer("a", 1, hosting=1),), 2,
            "needs 3 workers beside 1 on others by PACK, but the 1 node that it may use holds only "
            "2 even when it is empty; what lacks: slots (enough for 2); add nodes for 1 more, or "
            "elastic scale j1 --min 2",
        ),
        (
            spec(3, 3, "STRICT_SPREAD"), (A4, B2), 0,
            "needs 3 workers by STRICT_SPREAD, but the 2 nodes that it may use hold only 2 even "
            "when they are empty; what lacks: nodes (each takes one worker); add nodes for 1 more, "
            "or elastic scale j1 --min 2, or submit it again with --placement-strategy "
            "SPREAD",
        ),
        (
            spec(2, 2, "STRICT_SPREAD", resources_per_worker=Resources.of({"GPU": 2})),
            (offer("a", 4, gpu=2), offer("b", 4, gpu=1)), 0,
            "needs 2 workers of GPU=2 by STRICT_SPREAD, but the 2 nodes that it may use hold only "
            "1 even when they are empty; what lacks: GPU (enough on 1 node); add nodes for 1 "
            "more, or elastic scale j1 --min 1",
        ),
        (
            spec(2, 2, "STRICT_PACK", resources_per_worker=Resources.of({"GPU": 2})),
            (offer("a", 2, gpu=3), C1), 0,
            "needs 2 workers of GPU=2 by STRICT_PACK, but the 2 nodes that it may use hold only 1 "
            "on one node even when they are empty; what lacks: GPU (enough for 1 on one node); "
            "add a node for 2, or elastic scale j1 --min 1",
        ),
        (
            spec(5, 5, "STRICT_PACK", workers_per_replica=5), (A4, B2), 0,
            "needs 5 workers by STRICT_PACK, but the 2 nodes that it may use hold only 4 on one "
            "node even when they are empty; what lacks: slots (enough for 4 on one node); add a "
            "node for 5, or submit it again with --placement-strategy PACK",
        ),
        (
            # There is enough of either, and not in one place.
            GPU_JOB, (offer("a", 1, gpu=8), offer("b", 8, gpu=1)), 0,
            "needs 2 workers of GPU=2 by PACK, but the 2 nodes that it may use hold only 1 even "
            "when they are empty; what lacks: slots and GPU on the same nodes; add nodes for 1 "
            "more, or elastic scale j1 --min 1",
        ),
    ],
)  # fmt: skip
def test_what_would_not_fit_onto_empty_nodes_is_not_told_to_wait_for_slots(
    job: JobSpec, offers: tuple[Offer, ...], have: int, says: str
) -> None:
    assert reason(job, *offers, have=have) == says


def test_a_misfit_is_explained_without_what_only_a_cluster_can_do() -> None:
    node = Node(NodeId("n1"), 1, "h", 3)
    assert explain_misfit(spec(3, 4), [node]) == explain_misfit(spec(9, 9), []) == ""
    assert explain_misfit(spec(9, 9), [node]) == (
        "needs 9 workers by PACK, but the 1 node that it may use holds only 3 even when it is "
        "empty; what lacks: slots (enough for 3)"
    )
    labelled = spec(1, 1, label_selector=(("zone", "x"),))
    assert explain_misfit(labelled, [node]) == "no connected node carries the labels zone=x"


def test_the_reason_says_how_many_more_would_need_free_slots() -> None:
    assert place(spec(1, 4), [A4], 0).reason == "4 workers placed by PACK"
    none = place(spec(1, 4), [offer("a", 0, hosting=2)], 2)
    assert (
        none.reason == "has 2 workers, no fewer than its min; 2 more by PACK would need free slots"
    )
    more = place(spec(1, 4, "SPREAD"), [C1], 0)
    assert more.reason == "1 workers placed by SPREAD, 3 more would need free slots"


@pytest.mark.parametrize(
    ("wanted", "present"), [("", []), ("", ["T4"]), ("H100", []), ("H100", ["T4"]), ("X1", ["X1"])]
)
def test_an_accelerator_that_is_here_or_known_is_no_mistake(
    wanted: str, present: list[str]
) -> None:
    assert refuse_accelerator(spec(1, 1, accelerator_type=wanted), present) == ""


@pytest.mark.parametrize(
    ("wanted", "present", "says"),
    [
        ("H1OO", [], "accelerator_type='H1OO' is unknown; nodes of this cluster have: none"),
        ("h100", ["T4", "A10", "T4"], "nodes of this cluster have: A10, T4; known types: A10, "),
    ],
)
def test_a_misspelt_accelerator_is_refused_with_what_there_is(
    wanted: str, present: list[str], says: str
) -> None:
    assert says in refuse_accelerator(spec(1, 1, accelerator_type=wanted), present)
