"""Real worker processes, and a test that plays their agent."""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from elastic import train
from elastic.core.facts import Entry, EntryKind, WorkerPhase
from elastic.core.messages import Assign, LeaveGroup, Ping, Pong, ReportAck, Stop
from elastic.core.policy.hang import FIRST_TIMES
from elastic.errors import StorageError
from elastic.worker.engine.context import WorkerContext
from elastic.worker.engine.train_call import current
from elastic.worker.process import entry as worker_entry
from tests.integration.played_agent import (
    HOST,
    Played,
    PlayedAgent,
    PlayedZygote,
    announce,
    spec_of,
)
from tests.patience import DEADLINE_S

# Workers get these functions as they are here; they cannot import a test module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

READY, FORMING, TRAINING = WorkerPhase.READY, WorkerPhase.FORMING, WorkerPhase.TRAINING
BROKEN, FINISHED = WorkerPhase.BROKEN, WorkerPhase.FINISHED
GRACE_NS = 5_000_000_000


@pytest.fixture(scope="module")
def zygote() -> Iterator[PlayedZygote]:
    played = PlayedZygote()
    yield played
    played.close()


@pytest.fixture
def agent(zygote: PlayedZygote, tmp_path: Path) -> Iterator[PlayedAgent]:
    with PlayedAgent(zygote, tmp_path / "logs") as played:
        yield played


def function(train: Callable[..., Any], **config: Any) -> Entry:
    """Make a train function that is called again in its process, once for each group."""
    payload = worker_entry.pack(train, config, {"recovery": "reenter"}).payload
    return Entry(EntryKind.FUNCTION, train.__name__, payload=payload)


# ---------------------------------------------------------------- train functions


def here() -> WorkerContext:
    context = current()
    assert context is not None
    return context


def one_step(end_file: str) -> bool:
    """Reduce over the group; return whether some member has seen the file that ends the run."""
    # One step takes a few milliseconds, so that the machine is not all ours.
    threading.Event().wait(0.003)
    both = torch.tensor([1.0, float(os.path.exists(end_file))])
    dist.all_reduce(both)
    assert int(both[0]) == here().world_size
    here().note_step()
    return bool(both[1])


def train_in_step(config: dict[str, Any]) -> dict[str, int]:
    while not one_step(config["end_file"]):
        pass
    return {"world_size": here().world_size, "generation": here().generation}


def train_swallowing(config: dict[str, Any]) -> str:
    """What tutorials do: log the error of a batch, and take the next one."""
    while True:
        try:
            if one_step(config["end_file"]):
                return "through"
        except Exception:
            continue


def train_and_raise(config: dict[str, Any]) -> None:
    here().report('{"step": 6}')
    raise ValueError("bad sample at step 7")


def train_and_exit(config: dict[str, Any]) -> None:
    """Ends a process of its own, as a pool or a loader does, before it ends itself."""
    child = multiprocessing.get_context("fork").Process(target=threading.Event().wait)
    child.start()
    child.terminate()
    child.join(DEADLINE_S)
    assert child.exitcode == -signal.SIGTERM
    sys.exit(config["codes"][here().generation - 1])


def train_with_a_killed_loader(config: dict[str, Any]) -> None:
    """Loses a process of its loader, as for want of memory, and hides all errors."""
    loader = iter(DataLoader(range(1000), num_workers=1))
    (child,) = multiprocessing.active_children()
    child.kill()
    while True:
        with contextlib.suppress(Exception):
            next(loader)


def train_with_checkpoints(config: dict[str, Any]) -> dict[str, Any]:
    """Each rank saves a part; the first time rank 1 has nothing to save from."""
    context = here()
    begun_with = context.the_reporter().newest_checkpoint
    if not begun_with:
        with contextlib.suppress(StorageError):
            where = Path(config["parts"]) / ("not-there" if context.world_rank == 1 else "empty")
            context.report('{"try": 1}', str(where))
            raise AssertionError("a checkpoint without rank 1's part was committed")
    index = 0
    while not os.path.exists(config["end_file"]):
        part = Path(config["parts"]) / f"{context.generation}-{index}-{context.world_rank}"
        part.mkdir(parents=True)
        (part / f"part{context.world_rank}").write_text("x")
        context.report(json.dumps({"index": index}), str(part))
        index += 1
    return {"begun_with": begun_with, "left_at": index}


def train_in_native_code(config: dict[str, Any]) -> None:
    with train.working("evaluation"):
        ctypes.PyDLL(None).usleep(1000)  # Holds the interpreter's lock.


# ---------------------------------------------------------------- what happens to groups


def test_survivors_train_on_in_the_same_process_until_one_is_left(
    agent: PlayedAgent, tmp_path: Path
) -> None:
    """A leader is killed, a member is stopped, and at last nobody tells the survivor anything."""
    end_file = tmp_path / "end"
    workers = agent.workers(4, function(train_in_step, end_file=str(end_file)))
    announce(workers, 1)
    wait_all_step(workers, 1)
    for generation, how in ((2, signal.SIGKILL), (3, signal.SIGSTOP)):
        os.kill(workers.pop(0).pid, how)
        began = time.monotonic()
        announce(workers, generation)
        wait_all_step(workers, generation)
        print(f"{how.name}: {(time.monotonic() - began) * 1e3:.0f} ms to the next step of all")
    survivor, victim = workers
    victim.process.kill()
    broken = survivor.wait_phase(BROKEN, 3)
    assert broken.failure is None
    announce([survivor], 4)
    survivor.wait_step(4)
    survivor.tell(LeaveGroup(survivor.worker_id, 4, False, "suspended"))
    survivor.wait_phase(READY, 4)
    end_file.touch()
    announce([survivor], 5)
    report = survivor.wait_phase(FINISHED, 5)
    assert json.loads(report.result) == {"world_size": 1, "generation": 5}
    assert report.pid == survivor.pid
    assert survivor.process.poll() is None


def wait_all_step(members: list[Played], generation: int) -> None:
    for one in members:
        one.wait_step(generation)


def test_user_code_that_swallows_errors_leaves_all_the_same(
    agent: PlayedAgent, tmp_path: Path
) -> None:
    end_file = tmp_path / "end"
    workers = agent.workers(2, function(train_swallowing, end_file=str(end_file)))
    announce(workers, 1)
    wait_all_step(workers, 1)
    workers[0].process.kill()
    announce(workers[1:], 2)
    workers[1].wait_step(2)
    end_file.touch()
    assert workers[1].wait_phase(FINISHED, 2).result == '"through"'


def test_members_leave_together_at_a_report_and_one_failed_part_fails_a_checkpoint(
    agent: PlayedAgent, tmp_path: Path
) -> None:
    end_file, run = tmp_path / "end", tmp_path / "run"
    (tmp_path / "parts" / "empty").mkdir(parents=True)
    job = function(train_with_checkpoints, end_file=str(end_file), parts=str(tmp_path / "parts"))
    workers = agent.workers(2, job, run)
    announce(workers, 1)
    first = workers[0].wait_reported(with_checkpoint=True).report
    assert first.index == 1
    assert json.loads(first.metrics) == {"index": 0}
    for one in workers:
        one.tell(LeaveGroup(one.worker_id, 1, True, "node n9 joins"))
    # Whatever report it is that they agree on, they wait there for its answer.
    newest = first
    while (left := acknowledged(workers[0], newest.index)) is not None:
        newest = left
    for one in workers:
        one.wait_phase(READY, 1)
    names = sorted(path.parent.name for path in run.glob("checkpoints/*/_COMMITTED"))
    assert Path(newest.checkpoint).name == names[-1]
    end_file.touch()
    announce(workers, 2, newest.checkpoint)
    for one in workers:
        result = json.loads(one.wait_phase(FINISHED, 2).result)
        assert result == {"begun_with": newest.checkpoint, "left_at": 0}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines] == list(range(newest.index + 1))


def acknowledged(one: Any, index: int) -> Any:
    """Acknowledge rank 0's report; return the next one, None if it left instead."""
    one.tell(ReportAck(one.worker_id, 1, index, True))

    def wanted(message: Any) -> Any:
        report = getattr(message, "report", None)
        is_left = getattr(report, "phase", None) is READY
        return (None,) if is_left else (report,) if getattr(report, "checkpoint", "") else None

    before = one.received
    (report,) = one.wait_for(wanted, "a report, or that it left")
    if report is None:
        one.received = before
    return report


# ---------------------------------------------------------------- how user code ends


def test_an_exception_of_the_users_is_told_with_its_traceback(
    agent: PlayedAgent, tmp_path: Path
) -> None:
    (worker,) = agent.workers(1, function(train_and_raise), tmp_path / "run")
    announce([worker], 1)
    failure = worker.wait_failure().failure
    assert failure is not None
    assert (failure.error_type, failure.message) == ("ValueError", "bad sample at step 7")
    assert failure.position == "report 1"
    assert "in train_and_raise" in failure.traceback
    assert "elastic/worker" not in failure.traceback
    assert worker.wait_exit() == 1
    assert "bad sample at step 7" in worker.log.read_text()


def test_who_loses_a_process_of_a_loader_is_lost_with_it(
    agent: PlayedAgent, tmp_path: Path
) -> None:
    """It is no error of the script's, which would end the job."""
    (worker,) = agent.workers(1, function(train_with_a_killed_loader), tmp_path / "run")
    announce([worker], 1)
    assert worker.wait_exit() == -signal.SIGKILL
    assert "is killed by signal: Killed" in worker.log.read_text()


def test_a_script_ends_its_process_with_its_code_but_with_0_it_has_finished(
    agent: PlayedAgent,
) -> None:
    (worker,) = agent.workers(1, function(train_and_exit, codes=[0, 3]))
    announce([worker], 1)
    assert worker.wait_phase(FINISHED, 1).result == "null"
    announce([worker], 2)
    failure = worker.wait_failure().failure
    assert failure is not None
    assert failure.error_type == "SystemExit"
    assert worker.wait_exit() == 3


FIT_SCRIPT = """
import sys
from elastic import train
from elastic.train.torch import TorchTrainer

def train_func(config):
    train.report({"lr": config["lr"], "size": train.get_context().get_world_size()})

TorchTrainer(train_func, train_loop_config={"lr": 0.5}).fit()
"""


def test_a_script_with_a_trainer_trains_in_place(agent: PlayedAgent, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FIT_SCRIPT)
    (worker,) = agent.workers(1, Entry(EntryKind.SCRIPT, str(script)), tmp_path / "run")
    announce([worker], 1)
    report = worker.wait_reported().report
    assert json.loads(report.metrics) == {"lr": 0.5, "size": 1}
    worker.wait_phase(FINISHED, 1)


def test_what_native_code_has_printed_is_kept(agent: PlayedAgent, tmp_path: Path) -> None:
    script = tmp_path / "prints.py"
    script.write_text("import ctypes\nctypes.CDLL(None).puts(b'from C')\n")
    (worker,) = agent.workers(1, Entry(EntryKind.SCRIPT, str(script)), tmp_path / "run")
    announce([worker], 1)
    worker.wait_phase(FINISHED, 1)
    assert "from C" in worker.log.read_text()


DRAWING_SCRIPT = """
import random, numpy, torch
print(random.random(), numpy.random.rand(), float(torch.rand(1)))
"""


def test_ranks_of_a_script_that_does_not_seed_draw_as_under_torchrun(
    agent: PlayedAgent, tmp_path: Path
) -> None:
    script = tmp_path / "draws.py"
    script.write_text(DRAWING_SCRIPT)
    workers = agent.workers(2, Entry(EntryKind.SCRIPT, str(script)))
    announce(workers, 1)
    for one in workers:
        one.wait_phase(FINISHED, 1)
    drawn = [one.log.read_text().split() for one in workers]
    assert [mine != others for mine, others in zip(*drawn, strict=True)] == [True, True, False]


REQUESTING_SCRIPT = """
from elastic import train
from elastic.train.torch import TorchTrainer

class Callback:
    def after_report(self, metrics):
        pass

TorchTrainer(
    lambda: train.report({}),
    scaling_config=train.ScalingConfig(num_workers=2),
    run_config=train.RunConfig(callbacks=[Callback()], worker_env={"KEY": "secret"}),
).fit()
"""


def test_what_cannot_be_set_up_is_told_before_a_group_forms(
    agent: PlayedAgent, tmp_path: Path
) -> None:
    (spare,) = agent.spares(1)
    missing = Entry(EntryKind.SCRIPT, str(tmp_path / "nowhere.py"))
    spare.tell(Assign(spare.worker_id, spec_of(missing), HOST))
    failure = spare.wait_failure().failure
    assert failure is not None
    assert "nowhere.py is not on this node" in failure.message
    assert spare.wait_exit() == 1


# ---------------------------------------------------------------- the end of a process


def test_a_worker_stops_on_order_and_by_the_loss_of_its_agent_but_not_by_ctrl_c(
    agent: PlayedAgent, tmp_path: Path
) -> None:
    workers = agent.workers(2, function(train_in_step, end_file=str(tmp_path / "end")))
    announce(workers, 1)
    wait_all_step(workers, 1)
    for one in workers:
        one.process.send_signal(signal.SIGINT)
        one.process.send_signal(signal.SIGTERM)
    for one in workers:
        one.tell(Ping(7))
        one.wait_for(lambda m: m if isinstance(m, Pong) and m.number == 7 else None, "Pong")
    # It waits in a collective for a member that cannot come.
    os.kill(workers[1].pid, signal.SIGSTOP)
    workers[0].tell(Stop("job stopped", GRACE_NS))
    assert workers[0].wait_exit() == 0
    os.kill(workers[1].pid, signal.SIGCONT)
    workers[1].sock.close()
    assert workers[1].wait_exit() == 70


def test_an_agent_hears_of_work_before_native_code_can_keep_a_worker_silent(
    agent: PlayedAgent,
) -> None:
    (one,) = agent.workers(1, function(train_in_native_code))
    announce([one], 1)
    for times in (0, FIRST_TIMES):
        said = one.wait_for(lambda m: m if isinstance(m, Pong) else None, "Pong")
        assert said == Pong(0, times)
    one.wait_phase(FINISHED, 1)


def test_a_spare_ends_with_its_agent(agent: PlayedAgent) -> None:
    (spare,) = agent.spares(1)
    assert not psutil.Process(spare.pid).children()
    spare.sock.close()
    assert spare.wait_exit() == 70
