"""Who may have how many workers: priority, share and age, whole mins, limits, and the reasons."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic.core.config import JobSpec
from elastic.core.policy.claims import Claim, Grant
from elastic.core.policy.packing import Room
from elastic.core.policy.queue import decide
from elastic.core.projects import ProjectShare, check_projects, parse_project
from elastic.core.world import JobId, NodeId, Resources, Strategy, WorkerId
from elastic.errors import ConfigError
from tests.strategies import SCRIPT

GPU = Resources.of({"GPU": 1})


def claim(job: str, low: int, high: int | None = None, *, seats: str = "", **changes: Any) -> Claim:
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
    return Claim(spec, ord(job[0]), seats=here, trains=trains, in_place=True, **facts)


def room(node: str, slots: int, free: int | None = None, **changes: Any) -> Room:
    """A node; all its slots are free unless said otherwise."""
    gpus = Resources.of({"GPU": changes.pop("gpu", 0)})
    return Room(NodeId(node), slots, gpus, slots if free is None else free, **changes)


def grants(*claims: Claim, rooms: list[Room], shares: list[ProjectShare] | None = None) -> Any:
    return {str(g.job_id): g for g in decide(claims, rooms, shares or []).value}


def sizes(*claims: Claim, slots: int, shares: list[ProjectShare] | None = None) -> str:
    found = grants(*claims, rooms=[room("n1", slots)], shares=shares)
    return " ".join(f"{job}={grant.size}" for job, grant in sorted(found.items()))


@pytest.mark.parametrize(
    ("slots", "claims", "expected"),
    [
        (4, [claim("a", 2), claim("b", 2)], "a=2 b=2"),
        (3, [claim("a", 2), claim("b", 2)], "a=2 b=0"),
        (3, [claim("a", 2), claim("b", 2, priority=1)], "a=0 b=2"),
        # Elastic jobs share what the mins leave, evenly, the older one first.
        (4, [claim("a", 1, 4), claim("b", 1, 4)], "a=2 b=2"),
        (5, [claim("a", 1, 4), claim("b", 1, 4)], "a=3 b=2"),
        (5, [claim("a", 1, 2), claim("b", 1, 4)], "a=2 b=3"),
        (4, [claim("a", 1, 4), claim("b", 1, 4, priority=5)], "a=1 b=3"),
        # The first in vain keeps the free slots from those behind it, but not for ever growing.
        (3, [claim("a", 2), claim("b", 3), claim("c", 1)], "a=2 b=0 c=0"),
        (4, [claim("a", 2, 4), claim("b", 3), claim("c", 1)], "a=4 b=0 c=0"),
        # What would not fit if it were alone keeps nothing from anybody.
        (3, [claim("a", 2), claim("b", 4), claim("c", 1)], "a=2 b=0 c=1"),
        # Whole replicas only.
        (5, [claim("a", 2, 4, workers_per_replica=2), claim("b", 1)], "a=4 b=1"),
        (4, [claim("a", 2, 4, workers_per_replica=2), claim("b", 1)], "a=2 b=1"),
    ],
)
def test_equal_slots_are_divided_by_priority_and_age(
    slots: int, claims: list[Claim], expected: str
) -> None:
    assert sizes(*claims, slots=slots) == expected


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ([], "a=2 b=2 c=4"),
        ([ProjectShare(project="red", weight=3.0)], "a=3 b=3 c=2"),
        ([ProjectShare(project="red", max_workers=3)], "a=2 b=1 c=5"),
        ([ProjectShare(project="red", max_workers=1)], "a=1 b=0 c=7"),
    ],
)
def test_projects_share_by_weight_and_stay_within_their_limits(
    shares: list[ProjectShare], expected: str
) -> None:
    claims = [
        claim("a", 1, 8, project="red"),
        claim("b", 1, 8, project="red"),
        claim("c", 1, 8, project="blue"),
    ]
    assert sizes(*claims, slots=8, shares=shares) == expected


def test_who_trains_keeps_its_min_whatever_comes() -> None:
    running, first = claim("a", 2, 4, seats="n1 n1 n1 n1"), claim("b", 3, priority=9)
    found = grants(running, first, rooms=[room("n1", 4, free=0)])
    assert (found["a"].size, found["a"].yields) == (4, ())
    assert found["b"] == Grant(
        JobId("b"), 0,
        reason="needs 3 workers by PACK, 2 can be had: a (priority 0) keeps 2, which is its min; "
        "waits for an end, or for more slots (1); a (priority 0) does not give way",
    )  # fmt: skip


def test_an_elastic_job_gives_back_its_last_ranks_for_one_that_can_start() -> None:
    running, later = claim("a", 1, 4, seats="n1 n1 n2 n2"), claim("b", 2)
    found = grants(running, later, rooms=[room("n1", 2, free=0), room("n2", 2, free=0)])
    assert found["a"].yields == ("n2/a2", "n2/a3")
    assert found["b"].starts == (("n2", 2),)
    assert found["b"].reason == (
        "needs 2 workers, 0 free; a (priority 0) gives 2 back at its next step boundary"
    )


def test_free_slots_go_before_any_that_somebody_sits_on() -> None:
    running, later = claim("a", 1, 4, seats="n1 n1"), claim("b", 1)
    found = grants(running, later, rooms=[room("n1", 2, free=0), room("n2", 1)])
    assert found["a"].yields == ()
    assert found["b"].starts == (("n2", 1),)


def test_nothing_is_given_back_in_vain() -> None:
    running = claim("a", 1, 2, seats="n1 n1")
    on_gpu = claim("b", 1, resources_per_worker=GPU)
    found = grants(running, on_gpu, rooms=[room("n1", 2, free=0), room("n2", 2, gpu=0)])
    assert found["a"].yields == ()
    assert (found["b"].size, found["b"].reason) == (0, "")


def test_what_the_first_in_vain_cannot_use_is_not_kept_for_it() -> None:
    rooms = [room("n1", 2, gpu=2, free=1), room("n2", 1)]
    running = claim("a", 1, seats="n1", resources_per_worker=GPU)
    first = claim("b", 2, resources_per_worker=GPU)
    found = grants(running, first, claim("c", 1), claim("d", 1), rooms=rooms)
    assert found["b"].size == 0
    assert found["c"].starts == (("n2", 1),), "b needs GPUs, of which n2 has none"
    assert found["d"].size == 0, "n1 has a free slot, which is kept for b"


def test_who_waits_below_min_holds_nothing_that_another_one_can_start_on() -> None:
    survivor = claim("b", 3, seats="n1", keeps_state=True)
    running = claim("c", 2, seats="n2 n2")
    rooms = [room("n1", 1, free=0), room("n2", 2, free=0)]
    assert grants(survivor, running, rooms=rooms)["b"].yields == ()
    assert grants(survivor, running, claim("a", 1), rooms=rooms)["b"].yields == ("n1/b0",)
    newcomer = claim("b", 3, seats="n1")
    assert grants(newcomer, running, rooms=rooms)["b"].yields == ("n1/b0",)


def test_who_waits_in_vain_does_not_use_up_the_limit_of_its_project() -> None:
    shares = [ProjectShare(project="red", max_workers=2)]
    survivor = claim("a", 4, seats="n1", project="red", keeps_state=True)
    other = claim("b", 2, project="red")
    rooms = [room("n1", 3, free=2)]
    assert grants(survivor, rooms=rooms, shares=shares)["a"].yields == ()
    found = grants(survivor, other, rooms=rooms, shares=shares)
    assert (found["a"].yields, found["b"].size) == (("n1/a0",), 2)


def test_a_job_whose_nodes_are_silent_for_a_moment_keeps_min_where_it_is_seen() -> None:
    running = claim("a", 1, 3, seats="n1", away=2)
    found = grants(running, claim("b", 1), rooms=[room("n1", 1, free=0)])
    assert found["a"].yields == ()


def test_a_cordoned_node_keeps_its_workers_and_gets_no_others() -> None:
    running = claim("a", 2, 4, seats="n1 n1")
    rooms = [room("n1", 4, free=2, cordoned=True), room("n2", 1)]
    found = grants(running, claim("b", 1), rooms=rooms)
    assert (found["a"].size, found["a"].yields, found["a"].starts) == (2, (), ())
    assert found["b"].starts == (("n2", 1),)


@pytest.mark.parametrize(
    ("strategy", "starts"),
    [
        (Strategy.PACK, (("n1", 3),)),
        (Strategy.STRICT_PACK, (("n1", 3),)),
        (Strategy.SPREAD, (("n1", 2), ("n2", 1))),
        (Strategy.STRICT_SPREAD, ()),
    ],
)
def test_a_plan_keeps_the_strategy(strategy: Strategy, starts: tuple[tuple[str, int], ...]) -> None:
    found = grants(claim("a", 3, strategy=strategy), rooms=[room("n1", 3), room("n2", 2)])
    assert found["a"].starts == starts


def test_a_plan_spreads_over_zones_first() -> None:
    zones = {"n1": "a", "n2": "a", "n3": "a", "n4": "b"}
    rooms = [room(name, 2, labels=(("zone", zone),)) for name, zone in zones.items()]
    found = grants(claim("a", 4, strategy=Strategy.SPREAD), rooms=rooms)
    assert found["a"].starts == (("n1", 1), ("n2", 1), ("n4", 2))
    running = claim("a", 1, 3, seats="n4", strategy=Strategy.SPREAD)
    rooms[3] = replace(rooms[3], free_slots=1)
    assert grants(running, rooms=rooms)["a"].starts == (("n1", 1), ("n2", 1))


def test_a_limit_is_named_with_what_the_project_has() -> None:
    shares = [ProjectShare(project="red", max_resources=Resources.of({"GPU": 2}))]
    running = claim("a", 2, seats="n1 n1", project="red", resources_per_worker=GPU)
    waits = claim("b", 1, project="red", resources_per_worker=GPU)
    found = grants(running, waits, rooms=[room("n1", 4, gpu=4, free=2)], shares=shares)
    assert found["b"].reason == (
        "needs 1 worker of GPU=1; project red may have GPU=2, and jobs of it that come first need "
        "2: waits for one of them to end"
    )


@pytest.mark.parametrize(
    ("limit", "changes", "says"),
    [
        (
            "max_workers=1", {},
            "needs 2 workers, and project red may have max_workers=1: its own min is above that; "
            "it can start after elastic scale b --min 1, or once elastic-coord serve runs with at "
            "least max_workers=2 in --project red:...",
        ),
        (
            "GPU=3,max_workers=3", {"resources_per_worker": GPU, "workers_per_replica": 2},
            "needs 4 workers of GPU=1, and project red may have max_workers=3,GPU=3: its own min "
            "is above that; it can start after elastic scale b --min 2, or once elastic-coord "
            "serve runs with at least max_workers=4,GPU=4 in --project red:...",
        ),
        (
            "GPU=0.5", {"resources_per_worker": GPU},
            "needs 2 workers of GPU=1, and project red may have GPU=0.5: its own min is above "
            "that; it can start once elastic-coord serve runs with at least GPU=2 in "
            "--project red:...",
        ),
    ],
)  # fmt: skip
def test_a_job_that_is_above_the_limit_by_itself_waits_for_no_other(
    limit: str, changes: dict[str, Any], says: str
) -> None:
    low = 2 * changes.get("workers_per_replica", 1)
    waits = claim("b", low, project="red", **changes)
    fellow = claim("a", 1, seats="n1", project="red")
    for others in ([], [fellow]):
        shares = [parse_project(f"red:{limit}")]
        found = grants(*others, waits, rooms=[room("n1", 8, gpu=8, free=7)], shares=shares)
        assert (found["b"].size, found["b"].reason) == (0, says)


def test_in_vain_names_who_keeps_slots_although_it_lacks_others() -> None:
    drains = replace(claim("a", 4, seats="n1"), trains=True)
    found = grants(drains, claim("b", 1), rooms=[room("n1", 1, free=0)])
    assert found["b"].reason == (
        "needs 1 worker by PACK, 0 can be had: a (priority 0) keeps 1, and lacks workers itself; "
        "waits for an end, or for more slots (1)"
    )
    others = claim("c", 1, seats="n2"), replace(claim("e", 1, seats="n3"), is_ending=True)
    rooms = [room(name, 1, free=0) for name in ("n1", "n2", "n3")]
    assert grants(drains, *others, claim("f", 1), rooms=rooms)["f"].reason.startswith(
        "needs 1 worker by PACK, 0 can be had: c (priority 0) keeps 1, which is its min; "
        "a (priority 0) keeps 1, and lacks workers itself; e (priority 0) keeps 1, and is about to "
        "end; waits for an end, or for more slots (1)"
    )


def test_in_vain_says_what_keeps_it_from_nodes_that_nobody_holds() -> None:
    strategy = Strategy.STRICT_PACK
    away = claim("b", 2, away=1, strategy=strategy, keeps_state=True)
    found = grants(away, claim("c", 1), rooms=[room("n1", 2)])
    assert found["b"].reason == (
        "needs 1 worker by STRICT_PACK, and no other job is in its way: workers of its own (1) "
        "are on nodes that do not answer; waits for that to change"
    )
    out = replace(claim("b", 2), out=frozenset({NodeId("n2")}))
    found = grants(out, claim("c", 1), rooms=[room("n1", 1), room("n2", 1)])
    assert found["b"].reason == (
        "needs 2 workers by PACK, and no other job is in its way: none may start on n2, cut off "
        "from its other nodes; waits for that to change"
    )


# ---------------------------------------------------------------- what a project may have


def test_a_project_is_read_from_one_word() -> None:
    assert parse_project("red:weight=2.5,max_workers=8,GPU=4") == ProjectShare(
        project="red", weight=2.5, max_workers=8, max_resources=Resources.of({"GPU": 4})
    )


@pytest.mark.parametrize(
    "text",
    [
        "", "red", "red:", "red:weight", "red:weight=", "red:weight=x", "red:weight=0",
        "red:weight=-1", "red:weight=inf", "red:weight=nan", "red:max_workers=1.5", "red:=3",
        "red:weight=1,weight=2", "red:GPU=0", "red:weight=1,,GPU=1",
    ],
)  # fmt: skip
def test_what_is_no_project_is_refused_with_what_one_looks_like(text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected NAME:weight=2,max_workers=8,GPU=8"):
        parse_project(text)


def test_a_project_is_described_once() -> None:
    with pytest.raises(ConfigError, match="'red' is described twice"):
        check_projects([ProjectShare(project="red"), ProjectShare(project="red")])
