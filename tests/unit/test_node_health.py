"""Nodes that are not fit: what their agents see, whose fault is whose, and who gets no workers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from elastic.agent.device_health import DeviceWatch
from elastic.agent.health import DISK_BYTES_MIN, HealthWatch
from elastic.core.config import CoordinatorConfig, ns
from elastic.core.events.agent import HealthChanged, SendCoordinator
from elastic.core.facts import ExitCause, ExitKind
from elastic.core.messages import NodeHealth
from elastic.core.policy.health import judge_faults
from tests.unit.agent_under_test import of, reconnect, registered
from tests.unit.coordinator_under_test import CONFIG, Coordinator, running

LIMITS = CoordinatorConfig(node_faults_max=2, fault_window_s=60, quarantine_s=30)
SEGV = ExitCause(ExitKind.SIGNAL, 11)

# ---------------------------------------------------------------- whose fault


@pytest.mark.parametrize(
    ("here", "elsewhere", "until_s"),
    [
        ([1, 2], [0], 0),
        ([1, 2, 3], [0], 33),
        ([1, 2, 3], [1], 33),
        ([1, 2, 3], [0, 2], 0),
        ([1, 2, 3], [], 0),
        ([-58, 2, 3], [0], 0),
        ([1, 2, 3, 4, 5], [2, 1], 35),
    ],
)
def test_a_node_is_blamed_for_what_others_do_not_have(
    here: list[int], elsewhere: list[int], until_s: int
) -> None:
    decision = judge_faults([ns(s) for s in here], elsewhere, ns(5), LIMITS)
    assert decision.value == ns(until_s)


def test_a_quarantine_is_over_when_its_time_is() -> None:
    assert judge_faults([ns(s) for s in (1, 2, 3)], [0], ns(33), LIMITS).value == 0


# ---------------------------------------------------------------- the coordinator


def test_a_node_whose_workers_crash_again_and_again_is_left_alone_for_a_while() -> None:
    coordinator = with_a_faulty_node()
    assert "3 workers hung, crashed or did not start here" in coordinator.node("n2").reason
    assert all(w.node_id == "n1" for w in coordinator.job("a").workers)
    coordinator.advance(61)
    assert coordinator.node("n2").reason == ""
    assert {w.node_id for w in coordinator.job("a").workers} == {"n1", "n2"}
    assert len(coordinator.noted("node_healthy")) == 1


def test_an_operator_may_say_that_a_node_is_well_again() -> None:
    coordinator = with_a_faulty_node()
    assert coordinator.cordon("n2", cordoned=False).error == ""
    assert coordinator.node("n2").reason == ""
    assert {w.node_id for w in coordinator.job("a").workers} == {"n1", "n2"}


def with_a_faulty_node() -> Coordinator:
    """Return a job on n1 and n2, of which n2 has had a crash too many."""
    config = dataclasses.replace(CONFIG, node_faults_max=2, quarantine_s=60.0, crash_loop_limit=99)
    coordinator = running(nodes=2, low=1, max_failures=-1, config=config)
    for serial in (1, 2, 3):
        worker = f"n2/{serial}"
        coordinator.exits(worker, SEGV)
        coordinator.advance(3)
        if serial < 3:
            coordinator.ready(f"n2/{serial + 1}")
    return coordinator


# ---------------------------------------------------------------- the agent's machine


def test_an_agent_tells_what_is_wrong_once_and_in_its_hellos() -> None:
    agent = registered()
    told = agent.do(HealthChanged(("memory",)))
    assert [e.message for e in of(told, SendCoordinator)] == [NodeHealth(("memory",))]
    assert of(agent.do(HealthChanged(("memory",))), SendCoordinator) == []
    assert reconnect(agent).problems == ("memory",)


# ---------------------------------------------------------------- looking


def test_a_disk_is_full_below_its_limit_and_well_again_only_above_twice_that(
    tmp_path: Path,
) -> None:
    free = [10 * DISK_BYTES_MIN]
    watch = HealthWatch(
        [tmp_path / "not" / "there"],
        free_bytes=lambda path: free[0],
        meminfo=tmp_path / "none",
        cgroups=tmp_path / "none",
    )
    seen = []
    for amount in (10, 0.9, 1.5, 1.9, 2.1, 1.5):
        free[0] = int(amount * DISK_BYTES_MIN)
        seen.append(bool(watch.check()))
    assert seen == [False, True, True, True, False, False]


def test_memory_that_is_almost_gone_is_a_problem(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 1000000 kB\nMemAvailable: 100000 kB\n")
    watch = HealthWatch([], meminfo=meminfo, cgroups=tmp_path / "none")
    assert watch.check() == ("almost no memory is free",)
    meminfo.write_text("MemTotal: 1000000 kB\nMemAvailable: 900000 kB\n")
    assert watch.check() == ()


def test_a_disk_that_cannot_be_asked_is_a_problem(tmp_path: Path) -> None:
    def fails(path: Path) -> int:
        raise OSError(5, "Input/output error")

    watch = HealthWatch([tmp_path], free_bytes=fails, meminfo=tmp_path / "none", cgroups=tmp_path)
    assert watch.check() == (f"the disk of {tmp_path} cannot be read (Input/output error)",)


class PlayedDriver:
    """NVML with one GPU, as far as the watch asks it."""

    class NVMLError(Exception):
        """What NVML raises."""

    nvmlEventTypeXidCriticalError = 8

    def __init__(self) -> None:
        self.xids: list[int] = []
        self.is_lost = False
        self.rows = (0, 0, 0, 0)

    def nvmlInit(self) -> None:
        pass

    def nvmlEventSetCreate(self) -> str:
        return "set"

    def nvmlDeviceRegisterEvents(self, handle: str, kind: int, events: str) -> None:
        assert (handle, kind, events) == ("handle", 8, "set")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if self.is_lost:
            raise self.NVMLError("GPU is lost")
        return "handle"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> None:
        pass

    def nvmlDeviceGetRemappedRows(self, handle: str) -> tuple[int, ...]:
        return self.rows

    def nvmlDeviceGetUUID(self, device: str) -> str:
        return "GPU-1234567890"

    def nvmlEventSetWait_v2(self, events: str, timeout_ms: int) -> Any:
        if not self.xids:
            raise self.NVMLError("Timeout")
        number = self.xids.pop(0)
        return type("Event", (), {"eventData": number, "device": "handle"})()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, ""),
        ({"xids": [31, 13]}, ""),
        ({"xids": [31, 79]}, "GPU 0 (GPU-12345678) reported XID 79"),
        ({"is_lost": True}, "GPU 0 (GPU-12345678) is lost: GPU is lost"),
        ({"rows": (0, 1, 1, 0)}, "GPU 0 (GPU-12345678) waits for a reset to replace broken rows"),
        ({"rows": (0, 1, 0, 1)}, "GPU 0 (GPU-12345678) could not replace broken rows"),
    ],
)
def test_a_device_is_broken_when_the_driver_says_so(changes: dict[str, Any], text: str) -> None:
    driver = PlayedDriver()
    watch = DeviceWatch(driver, ["GPU-1234567890"])
    for name, value in changes.items():
        setattr(driver, name, value)
    assert "; ".join(watch.check()).startswith(text)
    assert bool(text) == bool(watch.check()), "what an XID said stays said"
