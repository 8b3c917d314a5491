"""The scenarios of tests/chaos/net, on the simulated network instead of a real one; many seeds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.chaos.net.play import STORIES
from tests.simulation.draws import SHARED_SEED
from tests.simulation.faults import Mix
from tests.simulation.simulator import Simulation
from tests.simulation.world import S

SEEDS = 6
STRIKES_AT = 25 * S
LASTS = 6 * S

Story = Callable[[Simulation], Callable[[], None]]


def killed(simulation: Simulation) -> Callable[[], None]:
    leader = simulation.coordinator
    leader.crash()
    return leader.start


def frozen(simulation: Simulation) -> Callable[[], None]:
    leader = simulation.coordinator
    leader.freeze(True)
    simulation.network.cut_host(leader.name)

    def wake() -> None:
        simulation.network.heal_host(leader.name)
        leader.freeze(False)

    return wake


def cut_from_store(simulation: Simulation) -> Callable[[], None]:
    candidate = simulation.coordinator.candidate
    assert candidate is not None
    candidate.is_cut = True

    def mend() -> None:
        candidate.is_cut = False

    return mend


def without_quorum(simulation: Simulation) -> Callable[[], None]:
    simulation.lease.is_away = True

    def back() -> None:
        simulation.lease.is_away = False

    return back


def slow(simulation: Simulation) -> Callable[[], None]:
    before = simulation.network.conditions.delay_max_ns
    simulation.network.conditions.delay_max_ns = max(before, S // 20)

    def quick() -> None:
        simulation.network.conditions.delay_max_ns = before

    return quick


def cut_from_agents(simulation: Simulation) -> Callable[[], None]:
    for host in simulation.coordinators:
        simulation.network.cut_host(host.name)

    def mend() -> None:
        for host in simulation.coordinators:
            simulation.network.heal_host(host.name)

    return mend


def only_receives(simulation: Simulation) -> Callable[[], None]:
    node_id = simulation.agents[0].node_id
    simulation.network.cut(node_id, "up")
    return lambda: simulation.network.heal(node_id)


def parted(simulation: Simulation) -> Callable[[], None]:
    simulation.faults.part_nodes()
    return simulation.faults.join_nodes


def nothing(simulation: Simulation) -> Callable[[], None]:
    """Do nothing: the simulated store has no members that could fail one by one."""
    return lambda: None


SIMULATED: dict[str, Story] = {
    "a_leader_that_is_killed_is_replaced": killed,
    "a_frozen_leader_wakes_as_a_standby": frozen,
    "a_leader_that_is_cut_off_from_the_store_lets_its_agents_go": cut_from_store,
    "the_store_loses_its_quorum_and_it_returns": without_quorum,
    "a_member_of_the_store_is_lost": nothing,
    "slow_and_lossy_links_disturb_nothing": slow,
    "agents_that_lose_all_coordinators_go_on_training": cut_from_agents,
    "a_node_that_only_hears_is_left_behind_and_comes_back": only_receives,
    "a_link_between_two_workers_is_cut": parted,
}


def test_each_story_of_the_real_network_is_told_here_too() -> None:
    assert set(SIMULATED) == set(STORIES)


@pytest.mark.parametrize("name", SIMULATED)
def test_the_story_breaks_no_property_and_every_job_ends(name: str) -> None:
    for number in range(SEEDS):
        simulation = Simulation(5 * number + SHARED_SEED, keep_log=False)
        simulation.faults.mix = Mix((), S)
        simulation.checkers.is_gentle = False  # Of all seeds: no scenario here is announced.

        def strike(simulation: Simulation = simulation) -> None:
            heal = SIMULATED[name](simulation)
            simulation.timeline.after(LASTS, heal)

        simulation.timeline.after(STRIKES_AT, strike)
        simulation.run()
        leading = [host for host in simulation.coordinators if host.machine and host.may_act()]
        assert len(leading) == 1
