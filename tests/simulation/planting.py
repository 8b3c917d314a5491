"""Bugs to plant into the machines, each the kind that a tired engineer writes.

A checker that never failed proves nothing; these prove that the checkers see. The machines' own
invariants are switched off meanwhile, so that it is the independent checkers that find them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from elastic.core.machine import invariants

Patch = pytest.MonkeyPatch
BUGS: dict[str, Callable[[Patch], None]] = {}


def bug(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
    """Enter a bug into the list under its function's name."""
    BUGS[plant.__name__] = plant
    return plant


RARE = {
    "blames_others_for_its_own_slowness": 209,
    "ends_who_forms_with_the_one_that_it_waits_for": 166,
    "leaves_alone_who_does_not_leave": 1500,
    "lets_drained_nodes_go_with_what_they_hold": 110,
    "obeys_leaders_that_were_replaced": 1352,
    "says_nothing_again_after_a_reconnect": 534,
    "takes_a_job_down_before_the_others_can_go_too": 287,
    "takes_the_neighbour_of_a_hung_worker_for_ill": 1529,
    "tells_metrics_to_one_coordinator_only": 464,
    "waits_for_ever_where_all_wait": 1090,
}
"""Bugs that few seeds show, and the first one that does; others are looked for from 0 on."""


def plant(name: str, patch: Patch) -> None:
    """Plant one bug, with the machines' own invariants switched off."""
    patch.setattr(invariants, "check_cluster", lambda cluster: None)
    patch.setattr(invariants, "check_job", lambda cluster, job: None)
    patch.setattr(invariants, "check_bounds", lambda job: None)
    BUGS[name](patch)
