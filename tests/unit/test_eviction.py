"""Which jobs give way as a whole: of the lowest priority, as few as it takes, none too soon."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.core.config import PREEMPT_SHRINK, PREEMPT_WHOLE, CoordinatorConfig, JobSpec
from elastic.core.policy.claims import Claim, Grant
from elastic.core.policy.eviction import (
    Saving,
    fewest,
    judge_saving,
    spared_until,
    why_it_stays,
)
from elastic.core.policy.packing import Room
from elastic.core.policy.queue import decide
from elastic.core.projects import ProjectShare
from elastic.core.world import JobId, NodeId, Resources, Strategy, WorkerId
from elastic.errors import ConfigError
from tests.strategies import SCRIPT

NOW_NS = 1000


def job(name: str, low: int, seats: str = "", high: int = 0, **changes: Any) -> Claim:
    """A job that may give way; `seats` are the nodes of its workers."""
    here = tuple((WorkerId(f"{n}/{name}{i}"), NodeId(n)) for i, n in enumerate(seats.split()))
    names = ("stays", "spared_until_ns", "spared_because", "is_ending")
    facts: dict[str, Any] = {n: changes.pop(n) for n in names if n in changes}
    spec = JobSpec(
        job_id=JobId(name), name=name, entry=SCRIPT, min_workers=low, max_workers=high or low,
        **changes,
    )  # fmt: skip
    facts = {"stays": "", **facts}
    return Claim(spec, ord(name[0]), seats=here, trains=bool(here), in_place=True, **facts)


def room(name: str, slots: int, free: int = 0, **changes: Any) -> Room:
    return Room(NodeId(name), slots, Resources(), free, **changes)


def grants(
    *claims: Claim, rooms: list[Room], shares: tuple[ProjectShare, ...] = ()
) -> dict[str, Grant]:
    decision = decide(claims, rooms, shares, now_ns=NOW_NS)
    return {str(grant.job_id): grant for grant in decision.value}


def victims(found: dict[str, Grant]) -> str:
    return " ".join(sorted(name for name, grant in found.items() if grant.gives_way_to))


def test_the_lowest_priority_gives_way_as_a_whole_and_is_told_to_whom() -> None:
    low, middle = job("a", 2, "n1 n1"), job("b", 2, "n2 n2", priority=1)
    high = job("c", 2, priority=5)
    found = grants(low, middle, high, rooms=[room("n1", 2), room("n2", 2)])
    assert found["a"].gives_way_to == "c (priority 5 over 0)"
    assert (found["a"].size, set(found["a"].yields)) == (0, {"n1/a0", "n1/a1"})
    assert found["b"].gives_way_to == ""
    assert found["c"].starts == (("n1", 2),)
    assert found["c"].reason == (
        "needs 2 workers, 0 free; a (priority 0) gives way with all 2 as soon as a checkpoint is "
        "written"
    )


def test_nobody_gives_way_to_its_equals() -> None:
    found = grants(job("a", 2, "n1 n1"), job("b", 1), rooms=[room("n1", 2)])
    assert victims(found) == ""


def test_what_is_above_a_min_goes_first() -> None:
    elastic, high = job("a", 1, "n1 n1 n1", high=3), job("b", 2, priority=5)
    found = grants(elastic, high, rooms=[room("n1", 3)])
    assert victims(found) == ""
    assert found["a"].yields == ("n1/a1", "n1/a2")


def test_the_youngest_of_equals_goes_and_those_that_do_not_help_are_spared() -> None:
    rooms = [room("n1", 1), room("n2", 1), room("n3", 4)]
    claims = [job("a", 1, "n1"), job("b", 1, "n2"), job("c", 4, "n3 n3 n3 n3", priority=2)]
    assert victims(grants(*claims, job("d", 1, priority=3), rooms=rooms)) == "b"
    assert victims(grants(*claims, job("d", 4, priority=3), rooms=rooms)) == "c", "it is enough"
    packed = job("d", 4, priority=3, strategy=Strategy.STRICT_PACK)
    assert victims(grants(*claims, packed, rooms=rooms)) == "c", "the others hold too little"


def test_nobody_gives_way_in_vain() -> None:
    rooms = [room("n1", 2), room("n2", 2)]
    stays = job("b", 2, "n2 n2", stays="was submitted as not preemptible")
    found = grants(job("a", 2, "n1 n1"), stays, job("c", 3, priority=5), rooms=rooms)
    assert victims(found) == ""
    assert found["c"].reason.endswith("; b (priority 0) was submitted as not preemptible")


def test_who_has_just_begun_is_left_alone_until_its_time_is_over() -> None:
    low = job("a", 1, "n1", spared_until_ns=NOW_NS + 5, spared_because="has just begun")
    claims, rooms = [low, job("b", 1, priority=5)], [room("n1", 1)]
    decision = decide(claims, rooms, (), now_ns=NOW_NS)
    assert decision.wake_ns == NOW_NS + 5
    assert decision.value[1].reason.endswith("; a (priority 0) has just begun")
    later = decide(claims, rooms, (), now_ns=NOW_NS + 5)
    assert later.wake_ns is None
    assert later.value[0].gives_way_to == "b (priority 5 over 0)"


def test_a_job_that_has_too_few_nodes_gives_way_as_well() -> None:
    low = job("a", 3, "n1 n1")  # Its third worker is on a node that drains.
    found = grants(
        low, job("b", 1, priority=5), rooms=[room("n1", 2), room("n2", 1, cordoned=True)]
    )
    assert victims(found) == "a"
    assert found["b"].starts == (("n1", 1),)


def test_who_is_about_to_finish_is_left_alone() -> None:
    low = job("a", 1, "n1", is_ending=True)
    assert victims(grants(low, job("b", 1, priority=5), rooms=[room("n1", 1)])) == ""


def test_a_job_that_fits_elsewhere_moves_instead() -> None:
    rooms = [room("n1", 1, labels=(("zone", "a"),)), room("n2", 1, free=1)]
    high = job("b", 1, priority=5, label_selector=(("zone", "a"),))
    found = grants(job("a", 1, "n1"), high, rooms=rooms)
    assert victims(found) == ""
    assert (found["a"].yields, found["a"].starts) == (("n1/a0",), (("n2", 1),))
    assert found["b"].starts == (("n1", 1),)


def test_the_slots_that_are_left_are_kept_for_who_gave_way() -> None:
    later = job("c", 1)
    found = grants(job("a", 3, "n1 n1 n1"), job("b", 1, priority=5), later, rooms=[room("n1", 3)])
    assert victims(found) == "a"
    assert found["c"].size == 0, "a is older, and waits for three"


def test_a_limit_of_the_project_is_made_room_in_as_well() -> None:
    shares = (ProjectShare(project="red", max_workers=2),)
    low, other = job("a", 2, "n1 n1", project="red"), job("b", 1, "n2", project="blue")
    high = job("c", 1, priority=5, project="red")
    rooms = [room("n1", 2), room("n2", 1), room("n3", 1, free=1)]
    assert victims(grants(low, other, high, rooms=rooms, shares=shares)) == "a"


@pytest.mark.parametrize(
    ("changes", "mode", "in_place", "checkpoints", "said"),
    [
        ({}, PREEMPT_WHOLE, True, 0, ""),
        ({}, PREEMPT_WHOLE, False, 1, ""),
        ({}, PREEMPT_WHOLE, False, 0, "has no checkpoint to go on from yet"),
        ({"run_path": ""}, PREEMPT_WHOLE, True, 1, "has no run directory to go on from"),
        ({"non_preemptible": True}, PREEMPT_WHOLE, True, 1, "was submitted as not preemptible"),
        ({}, PREEMPT_SHRINK, True, 1, "no job is taken down for another one here"),
    ],
)
def test_who_could_not_go_on_stays(
    changes: dict[str, Any], mode: str, *, in_place: bool, checkpoints: int, said: str
) -> None:
    spec = job("a", 1, **{"run_path": "/runs/a", **changes}).spec
    why = why_it_stays(spec, mode, in_place=in_place, num_checkpoints=checkpoints)
    assert why.startswith(said)
    assert bool(why) is bool(said)


def test_a_job_is_spared_while_it_is_young_and_while_it_could_not_be_saved() -> None:
    config = CoordinatorConfig(preemption_deadline_s=5, preemption_retry_s=70)

    def spared(**facts: int) -> Any:
        facts = {"protected_ns": 7, "passed_over_ns": 0, "num_checkpoints": 0, **facts}
        return spared_until(config, **facts)

    assert spared().value == 7
    assert spared().reason == "has just begun, and is left alone for a while"
    assert spared(passed_over_ns=9).value == 9
    assert spared(passed_over_ns=9).reason == (
        "wrote no checkpoint within 5 s and has none to go on from: it is asked again after 70 s, "
        "or once it has one"
    )
    assert spared(passed_over_ns=9, num_checkpoints=1).value == 7, "it has one"


@pytest.mark.parametrize(
    ("facts", "saving", "wake_ns"),
    [
        ({}, Saving.AWAITED, None),
        ({"save_by_ns": NOW_NS + 1}, Saving.AWAITED, NOW_NS + 1),
        ({"save_by_ns": NOW_NS}, Saving.IN_VAIN, None),
        ({"save_by_ns": NOW_NS, "num_checkpoints": 1}, Saving.OVER, None),
        ({"save_by_ns": NOW_NS, "is_saved": True, "num_checkpoints": 1}, Saving.OVER, None),
        ({"save_by_ns": NOW_NS + 1, "is_saved": True}, Saving.OVER, None),
        ({"in_place": False}, Saving.OVER, None),
    ],
)
def test_a_job_is_saved_first_but_not_waited_for_without_end(
    facts: dict[str, Any], saving: Saving, wake_ns: int | None
) -> None:
    all_facts = {"in_place": True, "is_saved": False, "num_checkpoints": 0, "save_by_ns": None}
    decision = judge_saving(**{**all_facts, **facts}, now_ns=NOW_NS)
    assert (decision.value, decision.wake_ns) == (saving, wake_ns)


def test_nobody_is_asked_when_there_is_nobody() -> None:
    assert fewest(0, lambda chosen: True) == ()


def test_an_unknown_way_of_preemption_is_refused() -> None:
    with pytest.raises(ConfigError, match="preemption='none': expected shrink or whole"):
        CoordinatorConfig(preemption="none")
