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
    "accuses_all_who_seem_to_stand": 120,
    "asks_nodes_with_members_alone_for_rows": 6,
    "blames_others_for_its_own_slowness": 251,
    "chooses_a_holder_and_tells_nobody_who_trains": 6,
    "counts_kills_as_losses": 10,
    "counts_on_a_pause_without_end": 19,
    "cuts_leavers_off_at_once": 7,
    "deals_addresses_to_workers_of_older_agents": 22,
    "does_not_say_again_where_to_bring_what_was_lost": 14,
    "ends_who_forms_with_the_one_that_it_waits_for": 251,
    "forgets_drains_with_the_coordinator": 4,
    "forgets_the_limits_of_projects": 7,
    "forgets_what_is_paused_after_a_restart": 23,
    "frees_a_copy_when_another_node_is_chosen": 6,
    "frees_rows_once_one_node_has_newer_ones": 46,
    "groups_workers_that_do_not_understand_each_other": 70,
    "keeps_a_preempted_job_out_for_ever": 7,
    "keeps_copies_of_jobs_that_have_ended": 14,
    "keeps_free_slots_for_a_job_that_can_never_run": 15,
    "leads_on_while_its_lease_is_not_renewed": 102,
    "leaves_alone_who_does_not_leave": 1500,
    "lets_a_job_that_goes_on_wait_for_storage": 11,
    "lets_drained_nodes_go_with_what_they_hold": 110,
    "obeys_leaders_that_were_replaced": 1352,
    "records_checkpoints_of_old_generations": 18,
    "replaces_a_group_that_waits_for_a_slow_member": 18,
    "replaces_all_members_and_saves_nothing": 59,
    "says_nothing_again_after_a_reconnect": 749,
    "starts_workers_on_cordoned_nodes": 7,
    "takes_a_job_down_before_the_others_can_go_too": 287,
    "takes_a_job_down_whose_checkpoint_did_not_come": 31,
    "takes_no_job_down": 7,
    "takes_rows_of_the_group_before_for_newer_ones": 86,
    "takes_the_neighbour_of_a_hung_worker_for_ill": 1833,
    "takes_the_next_snapshot_before_all_rows_have_arrived": 6,
    "tells_metrics_to_one_coordinator_only": 464,
    "tells_older_agents_of_doors_that_they_do_not_know": 22,
    "waits_for_ever_where_all_wait": 1279,
    "waits_without_end_for_a_checkpoint_that_does_not_come": 47,
    "writes_without_comparing_the_leader": 243,
}
"""Bugs that the first seeds do not show, and one that does; others are looked for from 0 on."""


def plant(name: str, patch: Patch) -> None:
    """Plant one bug, with the machines' own invariants switched off."""
    patch.setattr(invariants, "check_cluster", lambda cluster: None)
    patch.setattr(invariants, "check_job", lambda cluster, job: None)
    patch.setattr(invariants, "check_bounds", lambda job: None)
    BUGS[name](patch)
