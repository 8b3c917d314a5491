"""Stories on a network of our own, one after the other, while one job trains; run by the test.

    unshare --net python -m tests.chaos.net.play DIRECTORY [STORY...]

Prints a JSON line for each story, and one for how the job ended.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from elastic.core.facts import ENDED
from elastic.core.view import JobView
from tests.chaos.net.cluster import AGENTS, COORDINATORS, MEMBERS, NetCluster
from tests.chaos.net.switch import CUT, Link
from tests.harness.chaos_jobs import ChaosJob, chaos_job
from tests.patience import DEADLINE_S

KILLING_S = 300.0
KILL_EVERY_S = 10.0
FROZEN_S = 60.0
DEEDS = ("node_", "group_", "worker_", "job_", "drain_", "copy_", "checkpoint_")
"""How the notes of a coordinator that acts begin."""
HANG_S = 5.0
STEPS_ALONE = 20
LEASE_OVER_S = 3.0
"""Longer than a lease: whoever could not renew his would have lost it."""


class Play:
    """A cluster that trains, and the job's state for the stories."""

    def __init__(self, cluster: NetCluster, job: ChaosJob, times: Path) -> None:
        self.cluster = cluster
        self.times = times
        self.job = job
        self.job_id = cluster.client.submit(job.spec)
        self.seen: dict[str, float] = {}

    def view(self) -> JobView:
        return self.cluster.client.get(self.job_id)

    def wait_view(self, holds: Callable[[JobView], bool], what: str) -> JobView:
        found: list[JobView] = []

        def there() -> bool:
            found[:] = [self.view()]
            return holds(found[0])

        self.cluster.wait_until(there, what)
        return found[0]

    def wait_trains(self) -> JobView:
        """Wait until the full group trains, and has gone on since now."""

        def steps(view: JobView) -> int:
            return min((w.steps for w in view.workers if w.rank >= 0), default=0)

        def full(view: JobView) -> bool:
            group = view.record.group
            size = len(self.cluster.agents)
            return group is not None and len(group.members) == size and steps(view) > 0

        first = self.wait_view(full, "the full group to train")
        return self.wait_view(
            lambda v: (
                full(v)
                and (steps(v) > steps(first) or v.record.generation > first.record.generation)
            ),
            "steps",
        )

    def pids(self) -> list[int]:
        return sorted(worker.report.pid for worker in self.view().workers)

    def step_times(self, first_s: float, last_s: float) -> list[float]:
        """Seconds between two steps of a worker, of all workers, in order of size."""
        gaps: list[float] = []
        for path in self.times.parent.glob(f"{self.times.name}.*"):
            ends = [float(line) for line in path.read_text().splitlines()]
            ends = [end for end in ends if first_s <= end <= last_s]
            gaps += [after - before for before, after in pairwise(ends)]
        return sorted(gaps)

    def note_steps(self, name: str, first_s: float, last_s: float) -> None:
        """Keep how long steps took in this time, for the story's line."""
        gaps = self.step_times(first_s, last_s)
        self.seen[f"{name}_steps"] = len(gaps)
        for label, part in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999)):
            self.seen[f"{name}_{label}_ms"] = 1000 * gaps[int(part * len(gaps))]
        self.seen[f"{name}_max_ms"] = 1000 * gaps[-1]

    def undisturbed(self, fault: Callable[[], None]) -> None:
        """Do something that no worker may notice: same group, same processes, more steps."""
        before = self.wait_trains()
        pids = self.pids()
        fault()
        after = self.wait_trains()
        assert after.record.generation == before.record.generation, after.reason
        assert self.pids() == pids


# ---------------------------------------------------------------- stories


def a_leader_that_is_killed_is_replaced(play: Play) -> None:
    cluster = play.cluster

    def fault() -> None:
        leader = cluster.leader()
        cluster.kill(leader)
        play.seen["leads_after_s"] = cluster.wait_leader((other(leader),))
        play.seen["agents_after_s"] = cluster.wait_nodes(len(AGENTS))
        cluster.start_coordinator(leader)
        cluster.wait_logged(leader, "standby leader=")

    play.undisturbed(fault)


def a_frozen_leader_wakes_as_a_standby(play: Play) -> None:
    cluster = play.cluster

    def fault() -> None:
        leader = cluster.leader()
        before = cluster.log(leader).count("leads_no_more")
        cluster.freeze(leader)
        play.seen["leads_after_s"] = cluster.wait_leader((other(leader),))
        cluster.wait_nodes(len(AGENTS))
        cluster.freeze(leader, False)
        cluster.wait_logged(leader, "leads_no_more", before + 1)
        assert cluster.leader() == other(leader)

    play.undisturbed(fault)


def a_leader_that_is_cut_off_from_the_store_lets_its_agents_go(play: Play) -> None:
    """It reaches its agents, and they it: but another one leads."""
    cluster = play.cluster

    def fault() -> None:
        leader = cluster.leader()
        cluster.cut_from_store(leader)
        play.seen["leads_after_s"] = cluster.wait_leader((other(leader),))
        cluster.wait_nodes(len(AGENTS))
        cluster.switch.heal()
        cluster.wait_logged(leader, "standby leader=")

    play.undisturbed(fault)


def the_store_loses_its_quorum_and_it_returns(play: Play) -> None:
    cluster = play.cluster

    def fault() -> None:
        leader = cluster.leader()
        before = cluster.log(leader).count("leads_no_more")
        for member in MEMBERS[1:]:
            cluster.freeze(member)
        cluster.wait_logged(leader, "leads_no_more", before + 1)
        assert cluster.client.get(play.job_id, stale_ok=True).reason.startswith("as of ")
        for member in MEMBERS[1:]:
            cluster.freeze(member, False)
        play.seen["leads_after_s"] = cluster.wait_leader()
        play.seen["agents_after_s"] = cluster.wait_nodes(len(AGENTS))

    play.undisturbed(fault)


def a_member_of_the_store_is_lost(play: Play) -> None:
    cluster = play.cluster

    def fault() -> None:
        cluster.freeze(MEMBERS[0])
        time.sleep(LEASE_OVER_S)
        play.seen["leads_after_s"] = cluster.wait_leader()
        cluster.wait_nodes(len(AGENTS))
        cluster.freeze(MEMBERS[0], False)

    play.undisturbed(fault)


def slow_and_lossy_links_disturb_nothing(play: Play) -> None:
    cluster = play.cluster

    def fault() -> None:
        for name in (*COORDINATORS, *MEMBERS):
            cluster.switch.set(name, "*", Link(loss=0.01, delay_s=0.03))
        cluster.wait_nodes(len(AGENTS))
        play.wait_trains()
        cluster.switch.heal()

    play.undisturbed(fault)


def agents_that_lose_all_coordinators_go_on_training(play: Play) -> None:
    cluster = play.cluster
    before = play.wait_trains()
    pids = play.pids()
    for coordinator in COORDINATORS:
        cluster.cut_from_agents(coordinator)
    play.wait_view(lambda v: not any(w.rank >= 0 for w in v.workers), "the nodes to be given up")
    cluster.switch.heal()
    after = play.wait_trains()
    assert play.pids() == pids, "the workers were replaced"
    assert after.record.generation > before.record.generation


def a_node_that_only_hears_is_left_behind_and_comes_back(play: Play) -> None:
    """One way: what it says to the coordinators is lost, what they say to it arrives."""
    cluster = play.cluster
    before = play.wait_trains()
    for coordinator in COORDINATORS:
        cluster.switch.set(AGENTS[0], coordinator, CUT, one_way=True)
    play.wait_view(
        lambda v: (
            v.record.generation > before.record.generation
            and v.record.group is not None
            and len(v.record.group.members) < len(AGENTS)
        ),
        "the others to go on without it",
    )
    cluster.switch.heal()
    play.wait_trains()


def a_link_between_two_workers_is_cut(play: Play) -> None:
    """Both reach the coordinator: one stays out while it is cut, and comes back as it was."""
    cluster = play.cluster
    before = play.wait_trains()
    pids = play.pids()
    leader = cluster.leader()
    cluster.switch.set(AGENTS[0], AGENTS[1], CUT)
    play.seen["found_after_s"] = cluster.wait_logged(leader, "link_cut")
    play.wait_view(
        lambda v: (
            v.record.generation > before.record.generation
            and v.record.group is not None
            and len(v.record.group.members) == len(AGENTS) - 1
            and min((w.steps for w in v.workers if w.rank >= 0), default=0) >= STEPS_ALONE
        ),
        "the others to train without one of the two",
    )
    cluster.switch.heal()
    play.seen["back_after_s"] = cluster.wait_logged(leader, "link_back")
    play.wait_trains()
    assert play.pids() == pids


def the_leader_is_killed_again_and_again(play: Play) -> None:
    """Half as long as it lasts nobody is killed, so that step times can be compared."""
    cluster = play.cluster
    play.wait_trains()
    quiet_s = time.time()
    time.sleep(KILLING_S / 2)
    killing_s = time.time()

    def fault() -> None:
        kills = 0
        while time.time() < killing_s + KILLING_S:
            leader = cluster.leader()
            due_s = time.time() + KILL_EVERY_S
            cluster.kill(leader)
            kills += 1
            took_s = cluster.wait_leader((other(leader),))
            play.seen["leads_after_s_max"] = max(took_s, play.seen.get("leads_after_s_max", 0))
            cluster.start_coordinator(leader)
            time.sleep(max(0.0, due_s - time.time()))
        play.seen["kills"] = kills

    play.undisturbed(fault)
    play.note_steps("quiet", quiet_s, killing_s)
    play.note_steps("killing", killing_s, killing_s + KILLING_S)


def a_leader_that_is_frozen_for_a_minute_wakes_as_a_standby(play: Play) -> None:
    """Meanwhile the next one writes, so that a late write of the old one would be seen."""
    cluster = play.cluster
    play.wait_trains()
    quiet_s = time.time()
    time.sleep(FROZEN_S / 2)
    frozen_s = time.time()

    def fault() -> None:
        leader = cluster.leader()
        ends = cluster.log(leader).count("leads_no_more")
        cluster.freeze(leader)
        play.seen["leads_after_s"] = cluster.wait_leader((other(leader),))
        play.seen["agents_after_s"] = cluster.wait_nodes(len(AGENTS))
        cluster.client.cordon(AGENTS[0], reason="written while the old leader was frozen")
        time.sleep(max(0.0, frozen_s + FROZEN_S - time.time()))
        before = len(cluster.log(leader))
        cluster.freeze(leader, False)
        play.seen["stands_down_after_s"] = cluster.wait_logged(leader, "leads_no_more", ends + 1)
        cluster.wait_logged(leader, "standby leader=")
        # Until it knew, it did nothing that it would have noted.
        woken = cluster.log(leader)[before:].partition("leads_no_more")[0]
        deeds = [line for line in woken.splitlines() if any(deed in line for deed in DEEDS)]
        assert not deeds, deeds
        assert cluster.leader() == other(leader)
        shown = [cordon.node_id for cordon in cluster.client.status().view.cordons]
        assert shown == [AGENTS[0]], shown
        cluster.client.cordon(AGENTS[0], cordoned=False)

    play.undisturbed(fault)
    play.note_steps("quiet", quiet_s, frozen_s)
    play.note_steps("frozen", frozen_s, frozen_s + FROZEN_S)


STORIES: dict[str, Callable[[Play], None]] = {
    story.__name__: story
    for story in (
        a_leader_that_is_killed_is_replaced,
        a_frozen_leader_wakes_as_a_standby,
        a_leader_that_is_cut_off_from_the_store_lets_its_agents_go,
        the_store_loses_its_quorum_and_it_returns,
        a_member_of_the_store_is_lost,
        slow_and_lossy_links_disturb_nothing,
        agents_that_lose_all_coordinators_go_on_training,
        a_node_that_only_hears_is_left_behind_and_comes_back,
        a_link_between_two_workers_is_cut,
    )
}


LONG = {
    story.__name__: story
    for story in (
        the_leader_is_killed_again_and_again,
        a_leader_that_is_frozen_for_a_minute_wakes_as_a_standby,
    )
}


def other(coordinator: str) -> str:
    return next(name for name in COORDINATORS if name != coordinator)


def finish(play: Play) -> None:
    """Let the job end, and compare its weights with an undisturbed run's."""
    play.job.finish.touch()
    view = play.wait_view(lambda v: v.record.phase in ENDED, f"the end within {DEADLINE_S:g} s")
    print(play.job.check(view).text, file=sys.stderr)


def tell(story: str, play: Play, action: Callable[[Play], None]) -> bool:
    began, error = time.monotonic(), ""
    play.seen = {}
    try:
        action(play)
    except Exception:
        error = traceback.format_exc()
        play.cluster.switch.heal()
    took = round(time.monotonic() - began, 2)
    seen = {name: round(value, 2) for name, value in play.seen.items()}
    print(json.dumps({"story": story, "took_s": took, "error": error, **seen}), flush=True)
    return not error


def main() -> None:
    directory, *wanted = sys.argv[1:]
    with NetCluster(Path(directory)) as cluster:
        job = chaos_job("steps", "net", workers=len(AGENTS), directory=Path(directory))
        times = Path(directory) / "times"
        entry = replace(job.spec.entry, args=(*job.spec.entry.args, "--times", str(times)))
        job = replace(job, spec=replace(job.spec, entry=entry, hang_timeout_s=HANG_S))
        play = Play(cluster, job, times)
        play.wait_trains()
        known = {**STORIES, **LONG}
        outcomes = [tell(story, play, known[story]) for story in wanted or STORIES]
        outcomes.append(tell("finish", play, finish))
        sys.exit(0 if all(outcomes) else 1)


if __name__ == "__main__":
    main()
