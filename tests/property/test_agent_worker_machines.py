"""What must hold for the agent's and the worker's machine under any order of events.

Two models drive them (`agent_world`, `worker_world`); both also say what is stale, repeated or
plainly wrong, and check every effect against what they themselves know. Noise and replay are
below.
"""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic.core.config import AgentConfig
from elastic.core.events import agent as ae
from elastic.core.events import worker as we
from elastic.core.events.shared import Tick
from elastic.core.facts import (
    SessionId,
    WorkerPhase,
)
from elastic.core.machine.agent import AgentMachine
from elastic.core.machine.worker import WorkerMachine
from elastic.core.messages import (
    Assign,
    ForgetWorker,
    LeaveGroup,
    Ping,
    Pong,
    Refusal,
    ReportAck,
    SaveState,
    StartWorker,
    Stop,
    StopWorker,
    Warm,
    Welcome,
)
from tests.effort import examples
from tests.patience import DEADLINE_S
from tests.property.agent_world import AgentWorld
from tests.property.machine_facts import (
    BOOM,
    CAUSES,
    NODE,
    WORKERS,
    S,
    announce,
    reported,
    spec,
    update,
)
from tests.property.worker_world import WorkerWorld

LIMITS = settings(
    max_examples=examples(75),
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestAgentWorld = AgentWorld.TestCase
TestAgentWorld.settings = LIMITS
TestWorkerWorld = WorkerWorld.TestCase
TestWorkerWorld.settings = LIMITS


# ---------------------------------------------------------------- noise, and replay


def agent_noise(rng: random.Random) -> Any:
    """Return an event that need not make any sense."""
    session = SessionId(f"n/1/{rng.randint(1, 3)}")
    process_id = rng.randint(1, 6)
    worker_id = rng.choice(WORKERS)
    generation = rng.randint(1, 4)
    makers: list[Any] = [
        lambda: ae.Connected(session),
        lambda: ae.ConnectionLost(session, "x", rng.random()),
        lambda: ae.CoordinatorMessageReceived(session, Welcome("c")),
        lambda: ae.CoordinatorMessageReceived(session, Refusal("x", rng.random() < 0.01)),
        lambda: ae.CoordinatorMessageReceived(
            session, StartWorker(worker_id, spec(rng.randint(0, 2)))
        ),
        lambda: ae.CoordinatorMessageReceived(
            session, StopWorker(worker_id, rng.choice([0, S]), "x")
        ),
        lambda: ae.CoordinatorMessageReceived(session, ForgetWorker(worker_id)),
        lambda: ae.CoordinatorMessageReceived(session, announce(worker_id, generation)),
        lambda: ae.CoordinatorMessageReceived(session, ReportAck(worker_id, generation, 0, True)),
        lambda: ae.ProcessStarted(process_id, 5),
        lambda: ae.ProcessMessageReceived(process_id, Warm(5)),
        lambda: ae.ProcessMessageReceived(process_id, Pong(rng.randint(0, 3))),
        lambda: ae.ProcessMessageReceived(
            process_id, update(worker_id, rng.choice(list(WorkerPhase)), generation)
        ),
        lambda: ae.ProcessMessageReceived(
            process_id, reported(worker_id, generation, rng.randint(0, 2))
        ),
        lambda: ae.SpawnFailed(process_id, "x"),
        lambda: ae.ProcessExited(process_id, rng.choice(CAUSES)),
        lambda: ae.ProcessStopped(process_id, rng.random() < 0.5),
        Tick,
    ]
    if rng.random() < 0.005:
        return ae.DrainSignalled("x", rng.choice([0, S]))
    return rng.choice(makers)()


def worker_noise(rng: random.Random) -> Any:
    """Return an event that need not make any sense."""
    generation = rng.randint(1, 5)
    worker_id = rng.choice(WORKERS[:2])
    told: list[Any] = [
        Assign(worker_id, spec(0), "h"),
        announce(worker_id, generation),
        LeaveGroup(worker_id, generation, rng.random() < 0.5, "x"),
        ReportAck(worker_id, generation, rng.randint(0, 2), True),
        SaveState(worker_id, generation, rng.randint(1, 3)),
        Ping(1),
    ]
    makers: list[Any] = [
        we.Started(5),
        we.StoreOpened("h:1"),
        we.GroupFormed(generation),
        we.GroupFailed(generation, "x"),
        we.TrainReturned(generation, "1"),
        we.TrainRaised(generation, BOOM, rng.random() < 0.9, rng.choice([None, 0, 3])),
        we.TrainLeft(generation, rng.random() < 0.5),
        we.UserReported(generation, 0, "{}", "/c"),
        Tick(),
    ]
    if rng.random() < 0.005:
        return rng.choice([we.PipeClosed(), we.SetupFailed(BOOM), we.OrderReceived(Stop("x", S))])
    return we.OrderReceived(rng.choice(told)) if rng.random() < 0.5 else rng.choice(makers)


def replay(seed: int, num_events: int) -> str:
    """Return a digest of all that both machines answer to the noise of this seed."""
    rng = random.Random(seed)
    digest = hashlib.sha256()
    config = AgentConfig(num_spares=2, control_timeout_s=2.0)
    agent, worker = AgentMachine(NODE, config, ("0", "1")), WorkerMachine()
    now_ns = 0
    for _ in range(num_events):
        now_ns += rng.choice([0, 1_000_000, S // 2])
        digest.update(repr(agent.step(agent_noise(rng), now_ns)).encode())
        digest.update(repr(agent.next_deadline_ns()).encode())
        digest.update(repr(worker.step(worker_noise(rng), now_ns)).encode())
    return digest.hexdigest()


@given(seed=st.integers(0, 2**32))
@settings(max_examples=examples(75), deadline=None)
def test_no_order_of_events_breaks_an_invariant(seed: int) -> None:
    replay(seed, 200)


def test_what_the_machines_do_does_not_depend_on_the_hash_seed() -> None:
    code = "from tests.property.test_agent_worker_machines import replay\n" + (
        "print([replay(seed, 300) for seed in range(20)])"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=True,
        ).stdout
        for seed in (1, 2, 3)
    }
    assert len(answers) == 1
