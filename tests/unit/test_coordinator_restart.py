"""Another life of the coordinator: it adopts what runs, and gives up what does not come back."""

from __future__ import annotations

from dataclasses import replace

from elastic.core.config import ns
from elastic.core.events.coordinator import Persist, Recovered
from elastic.core.machine.absence import AWAY_GRACE_S
from elastic.core.machine.coordinator import HOLD_AFTER_RESTART_S, CoordinatorMachine
from elastic.core.machine.nodes import RETURN_PART
from elastic.core.messages import Announce, LeaveGroup, StartWorker, StopWorker, Welcome
from elastic.core.projects import ProjectShare
from elastic.core.world import (
    JobId,
    JobPhase,
    NodePhase,
    WorkerId,
    WorkerPhase,
    WorkerReport,
)
from tests.unit.coordinator_under_test import CONFIG, STOPPED, Coordinator, running


def restarted(coordinator: Coordinator, *back: str) -> Coordinator:
    """Begin another life, to which these agents come back."""
    coordinator.restart()
    for name in back:
        coordinator.agent(name)
    return coordinator


def started(coordinator: Coordinator) -> list[str]:
    return [message.worker_id for message in coordinator.sent(StartWorker)]


def test_a_group_that_trains_is_adopted_and_nobody_hears_anything() -> None:
    coordinator = running()
    coordinator.restart()
    for name in ("n1", "n2", "n3"):
        coordinator.agent(name)
        for kind in (Announce, LeaveGroup, StartWorker, StopWorker):
            assert coordinator.sent(kind) == []
        assert coordinator.of(Persist) == []
    coordinator.advance(3600)
    assert coordinator.effects == ()
    assert coordinator.members("a") == "g1: n1/1 n2/1 n3/1"
    assert coordinator.job("a").reason == "3 workers"
    assert coordinator.machine.next_deadline_ns() is None


def test_an_awaited_group_is_not_said_to_train_before_its_members_say_so() -> None:
    coordinator = running(nodes=2)
    coordinator.notes.clear()
    restarted(coordinator, "n1")
    assert coordinator.noted("group_training") == []
    coordinator.agent("n2")
    assert [note["generation"] for note in coordinator.noted("group_training")] == ["1"]


def test_an_adopted_group_is_watched_over_as_any_other() -> None:
    coordinator = restarted(running(low=2), "n1", "n2", "n3")
    coordinator.exits("n2/1")
    assert coordinator.members("a") == "g2: n1/1 n3/1"


def test_members_that_have_not_come_back_are_shown_as_awaited() -> None:
    coordinator = restarted(running(nodes=2), "n1")
    node = coordinator.node("n2")
    assert node.phase is NodePhase.DISCONNECTED
    assert node.reason == "known from the journal, has not come back yet"
    assert coordinator.job("a").reason == "the node of n2/1 does not answer"


def test_a_generation_that_was_durable_and_not_yet_announced_is_announced() -> None:
    coordinator = running(low=2)
    coordinator.dies_after_persist = True
    coordinator.exits("n3/1")
    assert coordinator.sent(Announce) == []
    assert coordinator.store[JobId("a")].generation == 2
    coordinator.restart()
    coordinator.agent("n1")
    assert [m.assignment.generation for m in coordinator.sent(Announce)] == [2]
    coordinator.agent("n2")
    assert [m.assignment.generation for m in coordinator.sent(Announce)] == [2]
    coordinator.training("n1/1", "n2/1")
    assert coordinator.members("a") == "g2: n1/1 n2/1"


def test_a_first_group_that_was_durable_and_not_yet_announced_is_announced() -> None:
    coordinator = Coordinator()
    coordinator.agent("n1")
    coordinator.submit("a")
    coordinator.dies_after_persist = True
    coordinator.ready("n1/1")
    restarted(coordinator, "n1")
    (told,) = coordinator.sent(Announce)
    assert (told.assignment.generation, told.assignment.leader_address) == (1, "host-n1:5001")


def test_a_member_is_late_only_for_a_group_that_it_was_told_of() -> None:
    coordinator = Coordinator()
    coordinator.agent("n1")
    coordinator.submit("a")
    coordinator.dies_after_persist = True
    coordinator.ready("n1/1")
    coordinator.restart()
    # The store is slow: what the agent said when it came back is taken only now.
    coordinator.now_ns += ns(CONFIG.form_timeout_s + 1)
    coordinator.agent("n1")
    coordinator.advance(CONFIG.form_timeout_s - 1)
    assert len(coordinator.announced) == 1
    assert stopped(coordinator) == []
    coordinator.disconnect("n1")
    coordinator.agent("n1")  # That it is told again makes it no younger.
    coordinator.advance(1)
    assert stopped(coordinator) == ["n1/1"]


def test_an_exit_that_no_life_has_heard_of_is_told_to_the_next() -> None:
    coordinator = running(low=2)
    coordinator.restart()
    coordinator.exits("n3/1")
    restarted(coordinator, "n1", "n2")
    assert coordinator.members("a").startswith("g1")
    coordinator.agent("n3")
    assert coordinator.members("a") == "g2: n1/1 n2/1"


def test_a_member_that_does_not_come_back_is_given_up_after_the_adoption_grace() -> None:
    coordinator = restarted(running(), "n1", "n3")
    coordinator.advance(CONFIG.adoption_grace_s - 0.1)
    assert coordinator.members("a").startswith("g1")
    coordinator.advance(0.1)
    assert coordinator.members("a") == "g2: n1/1 n3/1"
    assert coordinator.node("n2").phase is NodePhase.LOST


def test_nobody_is_given_up_while_others_still_come_back() -> None:
    """Thousands take their time; one that comes late has lost nothing."""
    coordinator = restarted(running(nodes=4, low=1))
    coordinator.advance(CONFIG.adoption_grace_s - 2)
    coordinator.agent("n1")
    coordinator.advance(1.9)
    coordinator.agent("n3")
    took_s = CONFIG.adoption_grace_s - 0.1
    coordinator.advance(took_s / RETURN_PART - 0.1)
    coordinator.agent("n2")
    assert coordinator.members("a") == "g1: n1/1 n2/1 n3/1 n4/1"
    took_s += took_s / RETURN_PART - 0.1
    coordinator.advance(took_s / RETURN_PART)
    assert coordinator.members("a") == "g2: n1/1 n2/1 n3/1"
    assert coordinator.node("n4").phase is NodePhase.LOST


def test_however_many_come_back_the_others_are_given_up_in_the_end() -> None:
    coordinator = restarted(running(nodes=9, low=1, config=replace(CONFIG, adoption_s_max=12)))
    for number in range(1, 9):
        assert coordinator.node("n9").phase is NodePhase.DISCONNECTED
        coordinator.agent(f"n{number}")
        coordinator.advance(1.5)
    assert coordinator.node("n9").phase is NodePhase.LOST


def test_when_no_agent_comes_back_the_job_is_suspended_and_waits() -> None:
    """However many they are: that agents are away for long is one loss, and no crash loop."""
    coordinator = restarted(running(nodes=CONFIG.crash_loop_limit + 2))
    coordinator.advance(CONFIG.adoption_grace_s)
    record = coordinator.job("a").record
    assert (record.phase, record.generation, record.losses) == (JobPhase.PENDING, 1, 0)
    assert coordinator.job("a").reason.startswith("waiting: needs 1 more workers")


def test_a_broken_group_shortens_the_wait_for_agents_that_are_about_to_come_back() -> None:
    coordinator = restarted(running(), "n1")
    coordinator.broken("n1/1")
    coordinator.agent("n3")
    assert coordinator.members("a").startswith("g1")
    coordinator.advance(AWAY_GRACE_S)
    assert coordinator.members("a") == "g2: n1/1 n3/1"


def test_an_agent_that_comes_back_in_a_new_life_has_none_of_the_members() -> None:
    coordinator = running(low=2)
    coordinator.restart()
    coordinator.agent("n1")
    coordinator.agent("n3")
    coordinator.agent("n2", incarnation=2)
    assert coordinator.members("a") == "g2: n1/1 n3/1"
    assert "does not know it any more" in coordinator.noted("worker_gone")[-1]["cause"]


def test_members_that_left_at_a_boundary_meanwhile_form_the_next_group() -> None:
    coordinator = running(nodes=2, high=3)
    coordinator.agent("n3")
    coordinator.ready("n3/1")
    coordinator.restart()
    coordinator.ready("n1/1", "n2/1")
    for name in ("n3", "n1"):
        coordinator.agent(name)
        assert coordinator.sent(Announce) == []
    coordinator.agent("n2")
    assert coordinator.members("a") == "g2: n1/1 n2/1 n3/1"


def test_a_wish_to_change_is_made_anew() -> None:
    """Whether members were asked is not durable: being asked twice does no harm."""
    coordinator = running(nodes=2, high=3)
    coordinator.agent("n3")
    coordinator.ready("n3/1")
    restarted(coordinator, "n1", "n2", "n3")
    asked = [m.worker_id for m in coordinator.sent(LeaveGroup) if m.at_boundary]
    assert asked == ["n1/1", "n2/1"]


def test_workers_that_were_starting_are_adopted_and_none_is_started_twice() -> None:
    coordinator = Coordinator()
    coordinator.submit("a", 2)
    for name in ("n1", "n2", "n3"):
        coordinator.agent(name)
    restarted(coordinator, "n3", "n2", "n1")
    assert started(coordinator) == []
    assert [note["worker"] for note in coordinator.noted("worker_adopted")] == ["n2/1", "n1/1"]
    coordinator.advance(HOLD_AFTER_RESTART_S)
    assert started(coordinator) == []
    coordinator.ready("n1/1", "n2/1")
    assert coordinator.members("a") == "g1: n1/1 n2/1"


def test_workers_start_once_agents_had_time_to_say_what_runs() -> None:
    coordinator = Coordinator()
    coordinator.submit("a")
    coordinator.restart()
    coordinator.agent("n1")
    assert started(coordinator) == []
    coordinator.advance(HOLD_AFTER_RESTART_S)
    assert started(coordinator) == ["n1/1001"]


def test_a_later_life_gives_no_worker_id_that_an_earlier_one_may_have_given() -> None:
    coordinator = running(nodes=1)
    coordinator.exits("n1/1")
    restarted(coordinator, "n1")
    coordinator.advance(CONFIG.adoption_grace_s)
    ids = [w.report.worker_id for w in coordinator.job("a").workers]
    assert ids == ["n1/2"]
    coordinator.exits("n1/2")
    assert started(coordinator) == ["n1/1001"]


def test_workers_above_max_are_stopped_newest_first() -> None:
    coordinator = running(nodes=2)
    for name in ("n3", "n4"):
        coordinator.agent(name)
        report = WorkerReport(WorkerId(f"{name}/7"), JobId("a"), WorkerPhase.READY, 0)
        coordinator.agents[name].workers[report.worker_id] = report
    restarted(coordinator, "n1", "n2")
    stops = []
    for name in ("n3", "n4"):
        coordinator.agent(name)
        stops += [f"{m.worker_id}: {m.reason}" for m in coordinator.sent(StopWorker)]
    assert stops == ["n3/7: max_workers=2 is reached", "n4/7: max_workers=2 is reached"]
    assert coordinator.members("a") == "g1: n1/1 n2/1"


def test_an_ended_job_stays_ended_and_its_workers_are_told_to_end() -> None:
    coordinator = running(nodes=1)
    coordinator.stop("a")
    coordinator.exits("n1/1", STOPPED)
    coordinator.submit("b")
    coordinator.stop("b")
    restarted(coordinator, "n1")
    stops = [f"{m.worker_id}: {m.reason}" for m in coordinator.sent(StopWorker)]
    assert stops == ["n1/2: job stopped"]
    assert coordinator.job("a").record.phase is JobPhase.STOPPED
    assert coordinator.stop("a").error == "failed_precondition"


def test_a_suspended_job_waits_again_for_the_workers_that_it_has() -> None:
    coordinator = running(nodes=2, low=2)
    coordinator.exits("n2/1")
    coordinator.ready("n1/1")
    restarted(coordinator, "n1", "n2")
    assert coordinator.job("a").record.phase is JobPhase.PENDING
    coordinator.ready("n2/2")
    assert coordinator.members("a") == "g2: n1/1 n2/2"


def test_failures_checkpoints_and_the_order_of_jobs_survive() -> None:
    coordinator = running(nodes=1, max_failures=1)
    coordinator.submit("b", 5)
    coordinator.reports("n1/1", 0, checkpoint="/c/0", metrics='{"loss": 1}')
    coordinator.raises("n1/1")
    before = [coordinator.job(job).record for job in "ab"]
    coordinator.restart()
    assert [v.record.spec.name for v in coordinator.machine.view(0).jobs] == ["a", "b"]
    for job, record in zip("ab", before, strict=True):
        now = coordinator.job(job).record
        assert replace(now, reason=record.reason) == record
    assert coordinator.submit("c").error == ""
    assert coordinator.job("c").record.sequence == 3


def test_a_coordinator_that_recovers_nothing_starts_workers_at_once() -> None:
    coordinator = Coordinator()
    coordinator.agent("n1")
    assert coordinator.sent(Welcome)
    coordinator.submit("a")
    assert started(coordinator) == ["n1/1"]


def test_the_same_journal_and_events_give_the_same_effects() -> None:
    def life() -> list[object]:
        coordinator = running(low=2)
        seen: list[object] = []
        coordinator.exits("n2/1")
        seen.extend(coordinator.effects)
        coordinator.advance(30)
        seen.extend(coordinator.effects)
        return seen

    assert life() == life()
    records = tuple(running().store.values())
    first = CoordinatorMachine(CONFIG).step(Recovered(records), ns(5))
    assert CoordinatorMachine(CONFIG).step(Recovered(records[::-1]), ns(5)) == first


def test_workers_that_were_replaced_and_come_back_do_not_break_their_projects_limit() -> None:
    shares = (ProjectShare(project="vision", max_workers=1),)
    coordinator = Coordinator(replace(CONFIG, projects=shares))
    coordinator.agent("a")
    coordinator.agent("b")
    coordinator.submit("j", 1, 2, project="vision")
    coordinator.disconnect("a")
    coordinator.advance(1)
    assert list(coordinator.agents["b"].workers) == ["b/1"]
    coordinator.restart()
    coordinator.agent("a")
    coordinator.agent("b")
    coordinator.ready("a/1", "b/1")
    coordinator.advance(0.5)
    assert [told.assignment.world_size for told in coordinator.announced.values()] == [1]
    coordinator.advance(10)
    assert [told.assignment.world_size for told in coordinator.announced.values()] == [1]


def test_a_worker_that_never_leaves_its_old_group_is_ended_though_new_groups_form() -> None:
    coordinator = Coordinator()
    for name in ("n1", "n2"):
        coordinator.agent(name)
    coordinator.submit("a", 1, 4)
    coordinator.ready("n1/1", "n2/1")
    coordinator.advance(3)
    coordinator.training("n1/1", "n2/1")
    coordinator.disconnect("n2")
    coordinator.advance(1)
    coordinator.training("n1/1")
    coordinator.agent("n2")  # Its worker is adopted, and stays where it is.
    coordinator.advance(CONFIG.form_timeout_s - 5)
    coordinator.agent("n3")
    coordinator.ready("n3/1")
    coordinator.ready("n1/1")
    assert coordinator.members("a") == "g3: n1/1 n3/1"
    coordinator.training("n1/1", "n3/1")
    assert stopped(coordinator) == []
    coordinator.advance(6)
    assert stopped(coordinator) == ["n2/1"]


def stopped(coordinator: Coordinator) -> list[str]:
    return [message.worker_id for message in coordinator.sent(StopWorker)]


def test_before_there_is_a_plan_no_group_grows_into_what_another_job_has_begun_with() -> None:
    shares = (ProjectShare(project="vision", max_workers=3),)
    coordinator = Coordinator(replace(CONFIG, projects=shares))
    coordinator.agent("a")
    coordinator.agent("b")
    coordinator.submit("j", 1, 2, project="vision")
    coordinator.ready("a/1", "b/1")
    coordinator.training("a/1", "b/1")
    coordinator.agent("c")
    coordinator.submit("k", 1, 1, project="vision")
    coordinator.ready("c/1")
    coordinator.training("c/1")
    coordinator.disconnect("b")
    coordinator.advance(1)
    coordinator.update("a/1", WorkerPhase.READY)
    coordinator.training("a/1")
    assert coordinator.members("j") == "g2: a/1"
    coordinator.submit("m", 1, 1, project="vision", priority=1)
    coordinator.agent("d")
    coordinator.restart()
    for name in ("a", "b", "c", "d"):
        coordinator.agent(name)
    coordinator.ready("b/1")
    coordinator.ready("d/1")
    coordinator.advance(1)
    groups = [coordinator.members(job) for job in ("j", "k", "m")]
    assert groups == ["g2: a/1", "g1: c/1", "g1: d/1"]


def test_before_there_is_a_plan_no_group_forms_that_its_project_has_no_room_for() -> None:
    shares = (ProjectShare(project="vision", max_workers=1),)
    coordinator = Coordinator(replace(CONFIG, projects=shares))
    coordinator.agent("a")
    coordinator.submit("j", 1, 1, project="vision")
    coordinator.ready("a/1")
    coordinator.training("a/1")
    coordinator.submit("k", 1, 1, project="vision", priority=1)
    coordinator.disconnect("a")
    coordinator.advance(1)
    coordinator.agent("b")
    coordinator.ready("b/1")
    coordinator.training("b/1")
    assert coordinator.members("k") == "g1: b/1"
    coordinator.restart()
    coordinator.agent("b")
    coordinator.agent("a")
    coordinator.ready("a/1")
    coordinator.advance(HOLD_AFTER_RESTART_S / 2)
    assert "may be at its limit" in coordinator.job("j").reason
    assert not coordinator.members("j").startswith("g2")
    coordinator.advance(10)
    assert not coordinator.members("j").startswith("g2")


# ---------------------------------------------------------------- since when


def waited_s(coordinator: Coordinator, job: str = "a") -> float:
    return (coordinator.now_ns - coordinator.job(job).since_ns) / 1e9


def test_a_job_waits_since_it_began_to_whoever_leads() -> None:
    coordinator = Coordinator()
    coordinator.submit("a", 2)
    coordinator.advance(30)
    coordinator.restart()
    coordinator.advance(4)
    assert waited_s(coordinator) == 34
    # The machine's clock is another one after the host has started anew.
    coordinator.unix_ns += coordinator.now_ns + ns(60)
    coordinator.now_ns = 0
    coordinator.restart()
    assert waited_s(coordinator) == 94


def test_a_paused_job_rests_since_it_began_to_whoever_leads() -> None:
    coordinator = Coordinator()
    coordinator.submit("a", 2)
    coordinator.advance(5)
    coordinator.pause("a")
    assert coordinator.job("a").record.phase is JobPhase.PAUSED
    coordinator.advance(30)
    coordinator.restart()
    coordinator.advance(4)
    assert waited_s(coordinator) == 34


def test_a_wall_clock_that_was_set_back_or_is_not_known_makes_a_phase_begin_anew() -> None:
    coordinator = Coordinator()
    coordinator.submit("a", 2)
    coordinator.advance(30)
    before = coordinator.store[JobId("a")]
    coordinator.unix_ns -= ns(3600)
    coordinator.restart()
    assert waited_s(coordinator) == 0
    coordinator.store[JobId("a")] = replace(before, since_unix_ns=0)  # Of an older version.
    coordinator.restart()
    coordinator.advance(4)
    assert waited_s(coordinator) == 4
